"""The matrix: every row explored within a budget, and what was found of every invariant.

All rows are looked at before any is explored: a little of their small searches, then a little more (see ``circles``).
So every pit that is not deep is found before the time goes to what is wide, also on a slow machine. Then each row is
explored for its share of what is left: no fault, one, two; mild ones before worse ones; two clients, then as many as
were asked for; and random walks. Rows are shared out to as many processes as there are cores.

A verdict of ``holds`` takes that all that two clients can do without a fault was explored, and with one of the mildest
kinds; and that nothing that was explored beyond that breaks it. The number of states says how much that was, and
``so_far`` that time did not even suffice for every single fault. It is ``unknown`` if that was not reached, or if no
history had anything to say about it (``silent``), as a lock without fences has nothing to say about fences.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig
from holdfast.lab.check import INVARIANTS, MEANING
from holdfast.lab.circles import LOOKS, Look, RowSearch
from holdfast.lab.explorer import Broken
from holdfast.lab.faults import FAULTS
from holdfast.lab.primitives import PRIMITIVES
from holdfast.lab.rows import ROWS, config_of
from holdfast.lab.story import tell
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN, Cell, Findings, Trace, Verdict

__all__ = [
    "FAULTS",
    "INVARIANTS",
    "MEANING",
    "PRIMITIVES",
    "ROWS",
    "Progress",
    "find",
    "survey",
    "trace_of",
]

MOST_CLIENTS: Final = 4
LOOKS_SHARE: Final = 0.85  # of the budget, at most, for looking at all rows; what is left of it is for exploring them
WEIGHTS: Final = {"holdfast": 5, "watch": 3, "setnx_repair": 2, "setnx_repair:as_written": 2}  # rows with more states


class Progress(NamedTuple):
    row: str
    states: int  # of this row so far
    broken: int  # invariants of it that are broken so far
    done: int  # rows
    of: int


def survey(
    rows: Sequence[str] = ROWS,
    *,
    clients: int = 3,
    faults: Sequence[str] = tuple(FAULTS),
    most_faults: int = 2,
    seed: int = 0,
    budget: float = 30.0,
    spares_holders: bool = False,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Findings]:
    """Explore these rows, for ``budget`` seconds in all."""
    bounds = _checked(rows, clients, faults, most_faults, spares_holders)
    rows = tuple(dict.fromkeys(rows))
    jobs = min(jobs or _count_cores(), len(rows))
    tell_of = progress or (lambda _: None)
    agenda = Agenda(rows, jobs, budget)
    if len(rows) == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return _search_here(agenda, bounds, seed, tell_of)
    return _share_out(agenda, bounds, seed, tell_of)


def _count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Report(NamedTuple):
    """Tells of the progress of one row."""

    row: str
    done: int
    of: int
    tell_of: Callable[[Progress], None]

    def say(self, states: int, broken: int) -> None:
        self.tell_of(Progress(self.row, states, broken, self.done, self.of))


def _checked(
    rows: Sequence[str], clients: int, faults: Sequence[str], most_faults: int, spares_holders: bool
) -> dict[str, Any]:
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


@contextmanager
def unheard() -> Iterator[None]:
    """Let clients of a search keep to themselves what they would say of each lost message, a million times."""
    log = logging.getLogger("holdfast.recipes")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _findings_of(search: RowSearch) -> Findings:
    broken, known, states = search.broken, search.known, search.states
    enough = all(map(search.has_ended, search.least))
    every_single_fault = all(search.has_ended(circle) for circle in search.circles if circle.is_needed)
    cells = []
    for name in search.invariants:
        trace = trace_of(search.row, broken[name]) if name in broken else None
        verdict: Verdict = BROKEN if name in broken else HOLDS if name in known and enough else UNKNOWN
        so_far = verdict == HOLDS and not every_single_fault
        silent = verdict == UNKNOWN and enough and name not in known
        cells.append(Cell(search.row, name, verdict, states, trace, so_far, silent))
    exhausted = all(map(search.has_ended, search.circles))
    return Findings(search.row, states, search.transitions, exhausted, tuple(cells))


def trace_of(row: str, broken: Broken) -> Trace:
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


def find(
    row: str,
    invariant: str,
    *,
    seed: int = 0,
    budget: float = 30.0,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Cell:
    """What is known of one cell, searched no further than needed."""
    bounds = _checked(
        [row],
        options.get("clients", 3),
        options.get("faults", tuple(FAULTS)),
        options.get("most_faults", 2),
        options.get("spares_holders", False),
    )
    if invariant not in INVARIANTS:
        raise InvalidConfig(f"invariant {invariant!r:.60}", f"there are {', '.join(INVARIANTS)}")
    agenda = Agenda([row], 1, budget)
    (found,) = _search_here(agenda, bounds, seed, progress or (lambda _: None), stop_at=(invariant,))
    return next(cell for cell in found.cells if cell.invariant == invariant)


# Many rows.


class Task(NamedTuple):
    row: str
    look: Look | None  # None if it is to be explored
    budget: float


class Agenda:
    """What is to be done next, and for how long: all looks at all rows, and then each row to its end."""

    def __init__(self, rows: Sequence[str], jobs: int, budget: float) -> None:
        now = time.monotonic()
        self.rows = rows
        self.jobs = jobs
        self._looks_end_at = now + LOOKS_SHARE * budget
        self._ends_at = now + budget
        self._looks = [(row, look) for look in LOOKS for row in rows]
        self._waiting = list(rows)

    def next(self, busy: Sequence[str] = ()) -> Task | None:
        """A task for a row that is not one of these, which are at work; None if there is none now."""
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


def _perform(search: RowSearch, task: Task, seed: int) -> Findings | None:
    """What was found, if that was all that is to be done with it."""
    if task.look is not None:
        search.look(task.look, task.budget)
        return None
    search.explore(seed, task.budget)
    return _findings_of(search)


@unheard()
def _search_here(
    agenda: Agenda,
    bounds: dict[str, Any],
    seed: int,
    progress: Callable[[Progress], None],
    stop_at: tuple[str, ...] = (),
) -> list[Findings]:
    searches: dict[str, RowSearch] = {}
    found: dict[str, Findings] = {}

    def tell_of(row: str) -> Callable[[int, int], None]:
        return lambda *said: _Report(row, len(found), len(agenda.rows), progress).say(*said)

    while task := agenda.next():
        row = task.row
        if row not in searches:
            searches[row] = RowSearch(row, bounds, tell_of(row), stop_at=stop_at)
        findings = _perform(searches[row], task, seed)
        if findings is not None:
            found[row] = findings
            del searches[row]  # it takes room
            tell_of(row)(findings.states, _count_broken(findings))
    return [found[row] for row in agenda.rows]


def _share_out(
    agenda: Agenda, bounds: dict[str, Any], seed: int, progress: Callable[[Progress], None]
) -> list[Findings]:
    """A process for each row, which lives until all is done with it; as many are at work as there are jobs.

    That is so for one job, too: what a row leaves behind is then gone at once, and need not be looked for as garbage.
    """
    context: Any = multiprocessing.get_context("fork")
    workers: dict[str, tuple[Any, Any]] = {}  # by row: the process, and the pipe to it
    busy: dict[Any, str] = {}  # by pipe
    found: dict[str, Findings] = {}
    try:
        while len(found) < len(agenda.rows):
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
                    _Report(row, len(found), len(agenda.rows), progress).say(*message)
                    continue
                del busy[pipe]
                if message is not None:
                    found[row] = message
                    workers.pop(row)[0].join()
                    _Report(row, len(found), len(agenda.rows), progress).say(message.states, _count_broken(message))
    finally:
        for worker, _ in workers.values():
            worker.kill()
            worker.join()
    return [found[row] for row in agenda.rows]


def _hire(context: Any, row: str, bounds: dict[str, Any], seed: int, pipes: list[Any]) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, row, bounds, seed, [*pipes, ours]), daemon=True)
    worker.start()
    theirs.close()
    return worker, ours


@contextmanager
def _from_whom(row: str) -> Iterator[None]:
    """Say whose process it was that is not there any more."""
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError(f"the search of {row} ended without a word") from None


def _count_broken(findings: Findings) -> int:
    return sum(cell.verdict == BROKEN for cell in findings.cells)


@unheard()
def _work(pipe: Any, row: str, bounds: dict[str, Any], seed: int, not_ours: list[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    for other in not_ours:
        other.close()  # the parent's ends, by which all of us learn that it is gone
    said_at = 0.0

    def tell_of(states: int, broken: int) -> None:
        nonlocal said_at
        if time.monotonic() > said_at + 0.1:
            said_at = time.monotonic()
            pipe.send((states, broken))

    search = RowSearch(row, bounds, tell_of)
    findings = None
    try:
        while findings is None:
            findings = _perform(search, pipe.recv(), seed)
            pipe.send(findings)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent was killed, and nobody wants to know any more
    pipe.close()
