"""The agenda of the matrix: what is searched when, within one budget.

The row of Holdfast comes first, with a server that keeps its data: all runs that its verdicts need. Meanwhile the other
processes look at all rows, a little of their small circles, then a little more (see ``circles``). So mistakes that show
early are found before time goes to large searches, also on a slow machine. Then come the runs that the verdicts of the
other rows need, those of Holdfast with a server that loses its data, a last look, and the same server for the others.
The rest of the time goes to all rows, in shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from holdfast.lab.search.faults import KEEPS, LOSES
from holdfast.lab.surveys.circles import LOOKS, Explored
from holdfast.protocol.recipes import FENCED

LOOK: Final = "look"
FIRST: Final = "first"  # to finish, before anything else
FINISH: Final = "finish"
EXPLORE: Final = "explore"
LOOKS_SHARE: Final = 0.85  # of the budget: when looks end, at the latest
FINISH_SHARE: Final = 0.8  # of the remaining budget, at most, for what the verdicts of one row need
WEIGHTS: Final = {FENCED: 5, "watch": 3, "setnx_repair": 2, "setnx_repair:as_written": 2}  # rows with more states


class Unit(NamedTuple):
    """What one process searches."""

    row: str
    server: str  # whether it keeps or loses its data: see ``faults``


class Task(NamedTuple):
    unit: Unit
    what: str
    transitions: int  # up to which a look goes
    budget: float


class Progress(NamedTuple):
    row: str
    states: int  # of this row so far
    broken: int  # invariants of this row that are broken so far, with a server that keeps its data
    done: int  # rows
    of: int


class Agenda:
    """The tasks, with their budgets; and what was found."""

    def __init__(
        self, units: Sequence[Unit], jobs: int, budget: float, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.units = units
        self.jobs = jobs
        self.explored: dict[Unit, Explored] = {}
        self._progress = progress
        self._seen: dict[Unit, tuple[int, int]] = {}  # states, and how many invariants are broken
        now = time.monotonic()
        self._looks_end_at = now + LOOKS_SHARE * budget
        self._ends_at = now + budget
        self._first_until = now + min(LOOKS_SHARE, jobs / 2) * budget  # with one process, half of its time
        # Holdfast first, the server that keeps its data first; else in the order that was asked for.
        by_need = sorted(units, key=lambda unit: (unit.server == LOSES, unit.row != FENCED))
        first = [(unit, FIRST, 0) for unit in by_need[:1] if unit == Unit(FENCED, KEEPS)]
        looks = [(unit, LOOK, transitions) for transitions in LOOKS for unit in units]
        finish = [(unit, FINISH, 0) for unit in by_need]
        soon = [task for task in looks if task[2] < LOOKS[-1] or task[0].row == FENCED]
        soon += [task for task in finish if task[0].server == KEEPS or task[0].row == FENCED]
        later = [task for task in (*looks, *finish) if task not in soon]
        self._tasks = [*first, *soon, *later, *((unit, EXPLORE, 0) for unit in by_need)]

    @property
    def is_done(self) -> bool:
        return len(self.explored) == len(self.units)

    def next(self, busy: Sequence[Unit] = ()) -> Task | None:
        """The next task of a unit that is not busy; None if there is none now."""
        now = time.monotonic()
        if now >= self._looks_end_at:
            self._tasks = [task for task in self._tasks if task[1] != LOOK]
        task = next((task for task in self._tasks if task[0] not in busy), None)
        if task is None:
            return None
        weights = {unit: WEIGHTS.get(unit.row, 1) for unit in [*(task[0] for task in self._tasks), *busy]}
        self._tasks.remove(task)
        unit, what, transitions = task
        left = self._ends_at - now
        budgets = {
            FIRST: self._first_until - now,
            LOOK: self._looks_end_at - now,
            FINISH: left * FINISH_SHARE,
            EXPLORE: min(left, left * self.jobs * weights[unit] / sum(weights.values())),
        }
        return Task(unit, what, transitions, budgets[what])

    def tell_of(self, unit: Unit, states: int, broken: int) -> None:
        self._seen[unit] = states, broken
        if self._progress is not None:
            seen = {other: self._seen[other] for other in self._seen if other.row == unit.row}
            kept = [broken for other, (_, broken) in seen.items() if other.server == KEEPS]
            rows = dict.fromkeys(unit.row for unit in self.units)
            open_rows = {other.row for other in self.units if other not in self.explored}
            done = len(rows) - len(open_rows)
            states = sum(states for states, _ in seen.values())
            self._progress(Progress(unit.row, states, sum(kept), done, len(rows)))

    def end(self, unit: Unit, explored: Explored) -> None:
        self.explored[unit] = explored
        self.tell_of(unit, explored.states, len(explored.broken))
