"""The results of a search, as values: cells of the matrix, and traces that can be drawn, saved and performed again.

A trace is a schedule (``choices``, enough to reproduce the run) and its story (``moments``, enough to draw it). Both
are plain data and survive JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.lab.invariants.history import Verdict
from holdfast.lab.search.faults import KEEPS


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a trace, and the state after it."""

    at_us: int  # since the beginning of the run
    actor: str  # "A", "B", ..., "server", "network" or "time"
    does: str  # what happens, in words that a beginner understands
    fault: str = ""  # the kind of fault that this is, if it is one: "crash", "pause", "lost_reply", ...
    command: str = ""  # the command to the server, as a user would type it
    reply: str = ""  # the reply of the server
    value: str | None = None  # of the lock's key afterwards; None if there is no such key
    ttl_us: int | None = None  # the rest of its ttl on the server; None without key or ttl
    holders: tuple[str, ...] = ()  # clients that believe that they hold the lock
    dead: tuple[str, ...] = ()  # clients that have crashed
    paused: tuple[str, ...] = ()  # clients that do not run
    violation: str = ""  # what is broken by this step, in a sentence


@dataclass(frozen=True, slots=True)
class Trace:
    recipe: str  # a row of the matrix, such as "getset" or "getset:same_value"
    invariant: str
    clients: int
    faults: tuple[str, ...]  # the kinds of fault that occur in it, in order
    choices: tuple[tuple[Any, ...], ...]  # the schedule
    moments: tuple[Moment, ...]
    seed: int | None = None  # of the random walk that found it; None if a search did

    @property
    def steps(self) -> int:
        """The number of its choices, without those that only let time pass."""
        return sum(choice[0] != "time" for choice in self.choices)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        data = json.loads(text)
        moments = tuple(
            Moment(**{**moment, **{key: tuple(moment[key]) for key in ("holders", "dead", "paused")}})
            for moment in data.pop("moments")
        )
        choices = tuple(_tupled(choice) for choice in data.pop("choices"))
        return cls(**{**data, "faults": tuple(data["faults"]), "choices": choices, "moments": moments})


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Cell:
    """The result for one invariant of one recipe."""

    recipe: str
    invariant: str
    verdict: Verdict
    states: int  # the number of states that were explored for it
    trace: Trace | None = None  # the simplest one that breaks it
    so_far: bool = False  # there is a verdict, but not every single fault was explored
    silent: bool = False  # it does not apply to the recipe, so it stays unknown however long the search is
    server: str = KEEPS  # whether the server keeps or loses its data: see ``faults``


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of one row."""

    recipe: str
    states: int  # distinct for each of the two servers
    transitions: int
    exhausted: bool  # nothing within the bounds is left unexplored
    cells: tuple[Cell, ...]

    def of(self, server: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.server == server)

    @property
    def pitfalls(self) -> tuple[Cell, ...]:
        """The cells with a trace of their own: a server that loses its data may break an invariant in the same way."""
        return tuple(
            cell
            for number, cell in enumerate(self.cells)
            if cell.trace is not None and all(cell.trace != before.trace for before in self.cells[:number])
        )
