"""Common parts of the surveys: processes, quiet logs, verdicts and traces."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Verdict
from holdfast.lab.report.story import tell
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Broken

CAN_FORK: Final = "fork" in multiprocessing.get_all_start_methods()


def count_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers


@contextmanager
def quietly() -> Iterator[None]:
    """Disable the logs of simulated clients, which would report each lost message, a million times."""
    logs = [logging.getLogger(name) for name in ("holdfast", "holdfast.recipes")]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def verdict_of(invariant: str, broken: Container[str], known: Container[str]) -> Verdict:
    return BROKEN if invariant in broken else HOLDS if invariant in known else UNKNOWN


def trace_of(row: str, broken: Broken) -> Trace:
    """The trace that breaks the invariant, with its story."""
    moments = tell(broken.config, broken.choices, broken.invariant)
    choices = broken.choices[: len(moments)]
    return Trace(
        recipe=row,
        invariant=broken.invariant,
        clients=broken.config.clients,
        faults=tuple(choice[1] for choice in choices if choice[0] == "fault"),
        choices=choices,
        moments=moments,
        seed=broken.seed,
    )
