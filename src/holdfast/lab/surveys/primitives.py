"""The survey of the primitives: each searched with three clients and ever more faults, as far as time allows; and the
survey of late requests, with two clients.

First without a fault, then with one of the kinds that must break nothing, then with two; each completely, or for its
share of the time. The rest of the time goes to random walks with two faults. A verdict is ``holds`` if all runs without
a fault were explored, and nothing explored beyond that breaks the invariant; else it is ``unknown``. ``explored`` says
up to how many faults the search is complete. In a row of late requests the first fault is a late request: the search
must be complete up to that one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from holdfast.errors import InvalidConfig
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Verdict
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.subjects.late import LATE_REQUESTS, SUBJECTS
from holdfast.lab.subjects.primitives import PRIMITIVES, late_replies
from holdfast.lab.surveys.common import CAN_FORK, count_cores, ignore_interrupts, quietly, trace_of, verdict_of

__all__ = ["LATE_REQUESTS", "MOST_FAULTS", "PRIMITIVES", "SUBJECTS", "Tried", "try_all", "try_primitive"]

MOST_FAULTS: Final = 2
SHARES: Final = (0.9, 0.5, 0.9)  # of the remaining time, for no fault, one and two; the rest is for random walks
SHARES_WITH_LATE_REQUEST: Final = (0.9, 0.9, 0.9)
_COMPLETE: Final = ("not complete", "complete without faults", "complete with 1 fault", "complete with 2 faults")
_COMPLETE_WITH_LATE_REQUEST: Final = (
    *_COMPLETE[:2],
    "complete with a late request",
    "complete with a late request and one more fault",
)
WALKS: Final = range(1_000)


class Tried(NamedTuple):
    """The results of one primitive."""

    row: str
    clients: int
    states: int  # distinct
    explored: int  # the search is complete up to this number of faults; -1: not even without a fault
    verdicts: dict[str, Verdict]  # by invariant
    traces: tuple[Trace, ...]  # one for each that is broken
    late: bool = False  # notifications could overtake replies
    delayed: Mapping[str, int] = {}  # how often each step was late, by name

    @property
    def is_passed(self) -> bool:
        """Whether all invariants hold, except the limits of this row, which the search must find broken.

        With late replies or requests, an invariant that needs more than two clients may be unknown.
        """
        limits = SUBJECTS[self.row].limits
        if self.late or self.row in LATE_REQUESTS:
            least = 1 if self.row in LATE_REQUESTS else 0
            broken = [name for name, verdict in self.verdicts.items() if verdict == BROKEN]
            return self.explored >= least and all(name in limits for name in broken)
        return all(verdict == (BROKEN if name in limits else HOLDS) for name, verdict in self.verdicts.items())

    @property
    def heading(self) -> str:
        """A line that says how far the search came."""
        if self.row in LATE_REQUESTS:
            depth, rest = _COMPLETE_WITH_LATE_REQUEST[self.explored + 1], "one more fault in part"
        else:
            depth, rest = _COMPLETE[self.explored + 1], f"{MOST_FAULTS} faults in part"
        if self.explored < MOST_FAULTS:
            depth += f", {rest}"
        late = " with late replies" if self.late else ""
        return f"{self.row}, {self.clients} clients{late}: {self.states:,} states; {depth}"

    @property
    def details(self) -> Iterator[str]:
        """Lines with the verdict on each invariant."""
        for verdict in (HOLDS, BROKEN, UNKNOWN):
            names = [name for name, found in self.verdicts.items() if found == verdict]
            if names:
                yield f"  {verdict}: {', '.join(names)}"
        if self.delayed and self.row in LATE_REQUESTS:
            yield f"  late: {', '.join(f'{name} {count}' for name, count in sorted(self.delayed.items()))}"
        if self.explored < 0:
            yield "  the budget ended before all runs without a fault were explored: a larger --budget explores more"
        for trace in self.traces:
            why = next((moment.violation for moment in reversed(trace.moments) if moment.violation), "")
            yield f"  {trace.invariant}: {why} ({trace.steps} steps; {', '.join(trace.faults) or 'no fault'})"


@quietly()
def try_primitive(row: str, budget: float, seed: int = 0, late: bool = False) -> Tried:
    """The results of one primitive after ``budget`` seconds; ``late``: notifications may overtake replies to its first
    two clients."""
    primitive = SUBJECTS[row]
    ends_at = time.monotonic() + budget
    config = late_replies(primitive) if late else primitive.config(kinds=primitive.kinds)
    explorer = Explorer(config, invariants=primitive.invariants)
    shares = SHARES_WITH_LATE_REQUEST if config.first else SHARES
    explored = -1
    for faults in range(MOST_FAULTS + 1):
        left = ends_at - time.monotonic()
        ended = explorer.search(faults, primitive.kinds, budget=left * shares[faults])
        if ended and explored == faults - 1:
            explored = faults
    for number in WALKS:
        if time.monotonic() >= ends_at:
            break
        explorer.walk(seed * len(WALKS) + number, most_faults=MOST_FAULTS)
    known = explorer.known if explored >= 0 else set()
    verdicts = {name: verdict_of(name, explorer.broken, known) for name in primitive.invariants}
    traces = tuple(trace_of(row, broken) for broken in explorer.broken.values())
    return Tried(row, config.clients, explorer.states, explored, verdicts, traces, late, explorer.model.delayed)


def try_all(
    rows: Sequence[str] = tuple(PRIMITIVES), *, budget: float, seed: int = 0, late: bool = False
) -> Iterator[Tried]:
    """The results of these primitives, in this order, after ``budget`` seconds in all, on all cores."""
    for row in rows:
        if row not in SUBJECTS:
            raise InvalidConfig(f"primitive {row!r:.60}", f"there are {', '.join(SUBJECTS)}")
    jobs = min(count_cores(), len(rows))
    if jobs <= 1 or not CAN_FORK:
        yield from (try_primitive(row, budget / len(rows), seed, late) for row in rows)
        return
    each = budget / -(-len(rows) // jobs)
    # One search for each process, so that its memory is freed.
    with multiprocessing.get_context("fork").Pool(jobs, ignore_interrupts, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(try_primitive, budget=each, seed=seed, late=late), rows)
