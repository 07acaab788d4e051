"""The matrix: every row explored within a budget, with a verdict on every invariant.

All rows are looked at before any is explored: a little of their small circles, then a little more (see ``circles``). So
mistakes that show early are found before time goes to large searches, also on a slow machine. Then each row is explored
for its share of the rest: no fault, one, two; mild faults before worse ones; two clients, then the number that was
asked for; and random walks. There is one process per core.

A verdict is ``holds`` if all runs of two clients without a fault, and with one fault of the mildest kinds, were
explored, and nothing explored beyond that breaks the invariant. The number of states says how much was explored, and
``so_far`` says that not every run with one fault was. The verdict is ``unknown`` if the search did not get that far, or
if no history gave a verdict (``silent``), as for invariants about fences if a lock has no fences.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.invariants.locks import INVARIANTS, MEANING
from holdfast.lab.report.trace import Cell, Findings
from holdfast.lab.search.faults import DEFAULT_FAULTS, FAULTS
from holdfast.lab.subjects.late import LATE_REQUESTS, SUBJECTS
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.lab.subjects.rows import ROWS, config_of
from holdfast.lab.surveys.circles import LOOKS, Look, RowSearch
from holdfast.lab.surveys.common import CAN_FORK, count_cores, ignore_interrupts, quietly, trace_of, verdict_of

__all__ = [
    "DEFAULT_FAULTS",
    "FAULTS",
    "INVARIANTS",
    "LATE_REQUESTS",
    "MEANING",
    "PRIMITIVES",
    "ROWS",
    "SUBJECTS",
    "Progress",
    "find",
    "survey",
]

MOST_CLIENTS: Final = 4
LOOKS_SHARE: Final = 0.85  # of the budget, at most, for looking at all rows; the rest is for exploring them
WEIGHTS: Final = {"holdfast": 5, "watch": 3, "setnx_repair": 2, "setnx_repair:as_written": 2}  # rows with more states


class Progress(NamedTuple):
    row: str
    states: int  # of this row so far
    broken: int  # invariants of this row that are broken so far
    done: int  # rows
    of: int


def survey(
    rows: Sequence[str] = ROWS,
    *,
    seed: int = 0,
    budget: float = 30.0,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    **bounds: Any,
) -> list[Findings]:
    """The findings of these rows, explored for ``budget`` seconds in all. ``bounds`` are those of ``bounds_of``."""
    checked = bounds_of(rows, **bounds)
    rows = tuple(dict.fromkeys(rows))
    agenda = Agenda(rows, min(jobs or count_cores(), len(rows)), budget, progress)
    if len(rows) == 1 or not CAN_FORK:
        return _search_here(agenda, checked, seed)
    return _share_out(agenda, checked, seed)


def bounds_of(
    rows: Sequence[str],
    *,
    clients: int = 3,
    faults: Sequence[str] = DEFAULT_FAULTS,
    most_faults: int = 2,
    spares_holders: bool = False,
) -> dict[str, Any]:
    """The checked bounds of a search, as fields of Config."""
    if not 2 <= clients <= MOST_CLIENTS:
        raise InvalidConfig(f"clients={clients}", f"give 2 to {MOST_CLIENTS}")
    for kind in faults:
        if kind not in FAULTS:
            raise InvalidConfig(f"fault {kind!r:.60}", f"there are {', '.join(FAULTS)}")
    for row in rows:
        config_of(row)
    kinds = tuple(kind for kind in FAULTS if kind in faults)
    return {
        "clients": clients,
        "kinds": kinds,
        "most_faults": most_faults if kinds else 0,
        "spares_holders": spares_holders,
    }


def _findings_of(search: RowSearch) -> Findings:
    broken, known, states = search.broken, search.known, search.states
    enough = all(map(search.has_ended, search.least))
    every_single_fault = all(search.has_ended(circle) for circle in search.circles if circle.is_needed)
    cells = []
    for name in search.invariants:
        trace = trace_of(search.row, broken[name]) if name in broken else None
        verdict = verdict_of(name, broken, known if enough else ())
        so_far = verdict == HOLDS and not every_single_fault
        silent = verdict == UNKNOWN and enough and name not in known
        cells.append(Cell(search.row, name, verdict, states, trace, so_far, silent))
    exhausted = all(map(search.has_ended, search.circles))
    return Findings(search.row, states, search.transitions, exhausted, tuple(cells))


def find(
    row: str,
    invariant: str,
    *,
    seed: int = 0,
    budget: float = 30.0,
    progress: Callable[[Progress], None] | None = None,
    **bounds: Any,
) -> Cell:
    """One cell of the matrix; the search stops as soon as the invariant is broken."""
    checked = bounds_of([row], **bounds)
    if invariant not in INVARIANTS:
        raise InvalidConfig(f"invariant {invariant!r:.60}", f"there are {', '.join(INVARIANTS)}")
    (found,) = _search_here(Agenda([row], 1, budget, progress), checked, seed, stop_at=(invariant,))
    return next(cell for cell in found.cells if cell.invariant == invariant)


# Many rows.


class Task(NamedTuple):
    row: str
    look: Look | None  # None if it is to be explored
    budget: float


class Agenda:
    """The tasks, and their budgets: all looks at all rows, and then the exploration of each row; and what was found."""

    def __init__(
        self, rows: Sequence[str], jobs: int, budget: float, progress: Callable[[Progress], None] | None = None
    ) -> None:
        now = time.monotonic()
        self.rows = rows
        self.jobs = jobs
        self.found: dict[str, Findings] = {}
        self._progress = progress
        self._looks_end_at = now + LOOKS_SHARE * budget
        self._ends_at = now + budget
        self._looks = [(row, look) for look in LOOKS for row in rows]
        self._waiting = list(rows)

    def next(self, busy: Sequence[str] = ()) -> Task | None:
        """The next task for a row that is not busy; None if there is none now."""
        now = time.monotonic()
        if now >= self._looks_end_at:
            self._looks = []
        for row, look in self._looks:
            if row not in busy:
                self._looks.remove((row, look))
                return Task(row, look, self._looks_end_at - now)
        for row in self._waiting:
            if row not in busy and all(row != other for other, _ in self._looks):
                weights = {other: WEIGHTS.get(other, 1) for other in [*self._waiting, *busy]}
                self._waiting.remove(row)
                left = self._ends_at - now
                return Task(row, None, min(left, left * self.jobs * weights[row] / sum(weights.values())))
        return None

    def tell_of(self, row: str, states: int, broken: int) -> None:
        if self._progress is not None:
            self._progress(Progress(row, states, broken, len(self.found), len(self.rows)))

    def end(self, row: str, findings: Findings) -> None:
        self.found[row] = findings
        self.tell_of(row, findings.states, sum(cell.verdict == BROKEN for cell in findings.cells))

    def in_order(self) -> list[Findings]:
        return [self.found[row] for row in self.rows]


def _perform(search: RowSearch, task: Task, seed: int) -> Findings | None:
    """The findings, if this was the last task of the row; else None."""
    if task.look is not None:
        search.look(task.look, task.budget)
        return None
    search.explore(seed, task.budget)
    return _findings_of(search)


@quietly()
def _search_here(agenda: Agenda, bounds: dict[str, Any], seed: int, stop_at: tuple[str, ...] = ()) -> list[Findings]:
    searches: dict[str, RowSearch] = {}
    while task := agenda.next():
        row = task.row
        if row not in searches:
            searches[row] = RowSearch(row, bounds, partial(agenda.tell_of, row), stop_at=stop_at)
        findings = _perform(searches[row], task, seed)
        if findings is not None:
            del searches[row]  # it takes memory
            agenda.end(row, findings)
    return agenda.in_order()


def _share_out(agenda: Agenda, bounds: dict[str, Any], seed: int) -> list[Findings]:
    """Search each row in its own process, which ends with the row; ``jobs`` of them work at the same time.

    This is so even with one job, because the end of the process frees the memory at once, without garbage collection.
    """
    context: Any = multiprocessing.get_context("fork")
    workers: dict[str, tuple[Any, Any]] = {}  # by row: the process, and the pipe to it
    busy: dict[Any, str] = {}  # by pipe
    try:
        while len(agenda.found) < len(agenda.rows):
            while len(busy) < agenda.jobs and (task := agenda.next(tuple(busy.values()))):
                if task.row not in workers:
                    workers[task.row] = _hire(context, task.row, bounds, seed, [pipe for _, pipe in workers.values()])
                pipe = workers[task.row][1]
                with _from_whom(task.row):
                    pipe.send(task)
                busy[pipe] = task.row
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                row = busy[pipe]
                with _from_whom(row):
                    message = pipe.recv()
                if isinstance(message, tuple):
                    agenda.tell_of(row, *message)
                    continue
                del busy[pipe]
                if message is not None:
                    workers.pop(row)[0].join()
                    agenda.end(row, message)
    finally:
        for worker, _ in workers.values():
            worker.kill()
            worker.join()
    return agenda.in_order()


def _hire(context: Any, row: str, bounds: dict[str, Any], seed: int, pipes: list[Any]) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, row, bounds, seed, [*pipes, ours]), daemon=True)
    worker.start()
    theirs.close()
    return worker, ours


@contextmanager
def _from_whom(row: str) -> Iterator[None]:
    """If the process of the row dies, raise an error that names the row."""
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError(f"the process that searched {row} died") from None


@quietly()
def _work(pipe: Any, row: str, bounds: dict[str, Any], seed: int, not_ours: list[Any]) -> None:
    ignore_interrupts()
    for other in not_ours:
        other.close()  # the parent's ends: they must close when the parent dies, because its workers wait for that
    sent_at = 0.0

    def tell_of(states: int, broken: int) -> None:
        nonlocal sent_at
        if time.monotonic() > sent_at + 0.1:
            sent_at = time.monotonic()
            pipe.send((states, broken))

    search = RowSearch(row, bounds, tell_of)
    findings = None
    try:
        while findings is None:
            findings = _perform(search, pipe.recv(), seed)
            pipe.send(findings)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent was killed
    pipe.close()
