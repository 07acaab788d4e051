"""The primitives on trial: each searched with three clients and ever more faults, as far as time allows.

First without a fault, then with one of the kinds by which nothing may be broken, then with two; each to its end, or
for its share of the time. What is left of the time goes to random walks with two faults. A verdict of ``holds`` takes
that all that happens without a fault was explored, and that nothing beyond that breaks it: ``explored`` says how far
the search came to its end. Before that nothing is known.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig
from holdfast.lab.explorer import Explorer
from holdfast.lab.primitives import PRIMITIVES, late_replies
from holdfast.lab.survey import trace_of
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN, Trace, Verdict

__all__ = ["MOST_FAULTS", "PRIMITIVES", "Tried", "try_all", "try_primitive"]

MOST_FAULTS: Final = 2
SHARES: Final = (0.9, 0.5, 0.9)  # of what is left of the time, for no fault, one and two; the rest is for walks
WALKS: Final = range(1_000)


class Tried(NamedTuple):
    """What one trial has found."""

    row: str
    clients: int
    states: int  # distinct
    explored: int  # with so many faults all there is was explored; -1: not even what happens without any
    verdicts: dict[str, Verdict]  # by invariant
    traces: tuple[Trace, ...]  # one for each that is broken
    late: bool = False  # replies could be overtaken by notifications

    @property
    def is_passed(self) -> bool:
        """Nothing that was asked is broken, and something is known of all of it; or, with late replies, of what its
        first two clients have to say something about."""
        if self.late:
            return self.explored >= 0 and BROKEN not in self.verdicts.values()
        return all(verdict == HOLDS for verdict in self.verdicts.values())

    @property
    def heading(self) -> str:
        """How far it came."""
        to_the_end = {-1: "nothing to the end", 0: "no fault to the end", 1: "1 fault to the end"}
        said = to_the_end.get(self.explored, f"{self.explored} faults to the end")
        if self.explored < MOST_FAULTS:
            said += f", {MOST_FAULTS} faults so far"
        late = " with late replies" if self.late else ""
        return f"{self.row}, {self.clients} clients{late}: {self.states:,} states; {said}"

    @property
    def details(self) -> Iterator[str]:
        """What was found of everything that was asked."""
        for verdict in (HOLDS, BROKEN, UNKNOWN):
            names = [name for name, found in self.verdicts.items() if found == verdict]
            if names:
                yield f"  {verdict}: {', '.join(names)}"
        if self.explored < 0:
            yield "  its time ended before all that happens without a fault was explored: give it more"
        for trace in self.traces:
            why = next((moment.violation for moment in reversed(trace.moments) if moment.violation), "")
            yield f"  {trace.invariant}: {why} ({trace.steps} steps; {', '.join(trace.faults) or 'no fault'})"


def try_primitive(row: str, budget: float, seed: int = 0, late: bool = False) -> Tried:
    """One of them, for so many seconds; ``late``: two clients, whose replies may be overtaken by notifications."""
    log = logging.getLogger("holdfast")
    before, log.disabled = log.disabled, True  # what clients say of lost messages, a million times
    try:
        return _try_primitive(row, budget, seed, late)
    finally:
        log.disabled = before


def _try_primitive(row: str, budget: float, seed: int, late: bool) -> Tried:
    primitive = PRIMITIVES[row]
    ends_at = time.monotonic() + budget
    config = late_replies(primitive) if late else primitive.config(kinds=primitive.kinds)
    explorer = Explorer(config, invariants=primitive.invariants)
    explored = -1
    for faults in range(MOST_FAULTS + 1):
        left = ends_at - time.monotonic()
        ended = explorer.search(faults, primitive.kinds, budget=left * SHARES[faults])
        if ended and explored == faults - 1:
            explored = faults
    for number in WALKS:
        if time.monotonic() >= ends_at:
            break
        explorer.walk(seed * len(WALKS) + number, most_faults=MOST_FAULTS)
    known = explorer.known if explored >= 0 else set()
    verdicts: dict[str, Verdict] = {
        name: BROKEN if name in explorer.broken else HOLDS if name in known else UNKNOWN
        for name in primitive.invariants
    }
    traces = tuple(trace_of(row, broken) for broken in explorer.broken.values())
    return Tried(row, config.clients, explorer.states, explored, verdicts, traces, late)


def try_all(
    rows: Sequence[str] = tuple(PRIMITIVES), *, budget: float, seed: int = 0, late: bool = False
) -> Iterator[Tried]:
    """These, in this order, for so many seconds in all; on as many cores as there are."""
    for row in rows:
        if row not in PRIMITIVES:
            raise InvalidConfig(f"primitive {row!r:.60}", f"there are {', '.join(PRIMITIVES)}")
    jobs = min(os.cpu_count() or 1, len(rows))
    if jobs <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from (try_primitive(row, budget / len(rows), seed, late) for row in rows)
        return
    each = budget / -(-len(rows) // jobs)
    # One search for each process, so that memory is given back.
    with multiprocessing.get_context("fork").Pool(jobs, _ignore_interrupts, maxtasksperchild=1) as pool:
        yield from pool.imap(_try, [(row, each, seed, late) for row in rows])


def _try(asked: tuple[str, float, int, bool]) -> Tried:
    return try_primitive(*asked)


def _ignore_interrupts(*_: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
