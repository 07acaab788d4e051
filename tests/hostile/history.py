"""The history of one run: what each worker saw, and what was done to it.

An event is one line of JSON in an append-only file of its process, written by one system call, so a process that is
killed loses no event that it wrote. All processes of a machine share CLOCK_MONOTONIC, so their events can be merged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["Event", "Recorder", "read_history"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, by CLOCK_MONOTONIC."""

    at: float
    actor: str  # "b0.1/2" is lane 2 of the second process in place b0; "harness" is the harness
    what: str
    data: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Writes the events of one process."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._file = os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, *, lane: object = None, at: float | None = None, **data: Any) -> None:
        actor = self.process if lane is None else f"{self.process}/{lane}"
        line = json.dumps([monotonic() if at is None else at, actor, what, data])
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_history(folder: Path) -> list[Event]:
    """All events of all processes, in the order in which they happened. A line that was cut short is left out."""
    return sorted((event for path in folder.glob("*.jsonl") for event in _read(path)), key=lambda event: event.at)


def _read(path: Path) -> Iterable[Event]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Event(*json.loads(line))
