"""The matrix: every row explored within a budget, with a verdict on every invariant.

``agenda`` says what is searched when. There is one process per core.

A verdict is about one of two servers: one that ``keeps`` its data, as docs/guarantees.md assumes, and one that may lose
it (``loses``). The second also has all runs of the first.

A verdict is ``holds`` if all runs of two clients without a fault, and with one fault of the mildest kinds, were
explored, and nothing explored beyond that breaks the invariant. The number of states says how much was explored, and
``so_far`` says that not every run with one fault was. The verdict is ``unknown`` if the search did not get that far, or
if no history gave a verdict (``silent``), as for invariants about fences if a lock has no fences.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Final

from holdfast.errors import InvalidConfig
from holdfast.lab.invariants.history import BROKEN, UNKNOWN
from holdfast.lab.invariants.locks import INVARIANTS, MEANING
from holdfast.lab.report.trace import Cell, Findings
from holdfast.lab.search.faults import DEFAULT_FAULTS, FAULTS, KEEPS, LOSES
from holdfast.lab.subjects.late import LATE_REQUESTS, SUBJECTS
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.lab.subjects.rows import ROWS, config_of
from holdfast.lab.surveys.agenda import EXPLORE, FINISH_SHARE, LOOK, Agenda, Progress, Task, Unit
from holdfast.lab.surveys.circles import LOOKS, Explored, RowSearch, circles
from holdfast.lab.surveys.common import CAN_FORK, count_cores, ignore_interrupts, quietly, verdict_of

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
SIMPLIFY_SHARE: Final = 0.2  # of the budget, at most, for a simpler trace than the one that was found


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
    checked, servers = bounds_of(rows, **bounds)
    units = [Unit(row, server) for row in dict.fromkeys(rows) for server in servers]
    agenda = Agenda(units, min(jobs or count_cores(), len(units)), budget, progress)
    if len(units) == 1 or not CAN_FORK:
        _search_here(agenda, checked, seed)
    else:
        _share_out(agenda, checked, seed)
    return [
        _findings_of(row, {server: agenda.explored[Unit(row, server)] for server in servers})
        for row in dict.fromkeys(rows)
    ]


def bounds_of(
    rows: Sequence[str],
    *,
    clients: int = 3,
    faults: Sequence[str] = DEFAULT_FAULTS,
    most_faults: int = 2,
    spares_holders: bool = False,
    spares_server: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """The checked bounds of a search, as fields of Config; and the servers (``keeps``, ``loses``) that it is about."""
    if not 2 <= clients <= MOST_CLIENTS:
        raise InvalidConfig(f"clients={clients}", f"give 2 to {MOST_CLIENTS}")
    for kind in faults:
        if kind not in FAULTS:
            raise InvalidConfig(f"fault {kind!r:.60}", f"there are {', '.join(FAULTS)}")
    for row in rows:
        config_of(row)
    kinds = tuple(kind for kind in FAULTS if kind in faults)
    most_faults = most_faults if kinds else 0
    loses = not spares_server and any(circle.server == LOSES for circle in circles(clients, most_faults, kinds))
    checked = {"clients": clients, "kinds": kinds, "most_faults": most_faults, "spares_holders": spares_holders}
    return checked, [KEEPS, LOSES] if loses else [KEEPS]


@quietly()
def find(
    row: str,
    invariant: str,
    *,
    seed: int = 0,
    budget: float = 30.0,
    progress: Callable[[Progress], None] | None = None,
    **bounds: Any,
) -> list[Cell]:
    """The cells of one invariant, one for each server. The search stops when the invariant is broken, so a cell may be
    unknown then. It begins with the server that keeps its data."""
    checked, servers = bounds_of([row], **bounds)
    if invariant not in INVARIANTS:
        raise InvalidConfig(f"invariant {invariant!r:.60}", f"there are {', '.join(INVARIANTS)}")
    ends_at = time.monotonic() + budget
    agenda = Agenda([Unit(row, server) for server in servers], 1, budget, progress)
    searches = {
        unit.server: RowSearch(
            row, checked, partial(agenda.tell_of, unit), server=unit.server, invariants=[invariant], stop_at=[invariant]
        )
        for unit in agenda.units
    }
    tasks: list[tuple[float, Callable[[float], None]]] = [  # each with its share of the remaining time
        *((1.0, partial(search.look, limit)) for search in searches.values() for limit in LOOKS),
        *((FINISH_SHARE, search.finish) for search in searches.values()),
        *((1 / (len(servers) - n), partial(search.explore, seed)) for n, search in enumerate(searches.values())),
    ]
    for share, task in tasks:
        task((ends_at - time.monotonic()) * share)
        found = [search for search in searches.values() if search.is_found]
        for search in found:
            search.simplify(min(ends_at - time.monotonic(), SIMPLIFY_SHARE * budget))
        if found:
            break
    explored = {server: search.explored for server, search in searches.items()}
    return [_cell_of(row, invariant, server, explored) for server in servers]


def _findings_of(row: str, explored: Mapping[str, Explored]) -> Findings:
    searches = explored.values()
    return Findings(
        row,
        sum(each.states for each in searches),
        sum(each.transitions for each in searches),
        all(each.is_exhausted for each in searches),
        tuple(_cell_of(row, name, server, explored) for server in explored for name in INVARIANTS),
    )


def _cell_of(row: str, name: str, server: str, explored: Mapping[str, Explored]) -> Cell:
    """One cell. A server that loses its data can also do all that the other one does."""
    searches = [explored[KEEPS], explored[LOSES]] if server == LOSES else [explored[KEEPS]]
    traces = [each.broken[name] for each in searches if name in each.broken]
    known = frozenset[str]().union(*(each.known for each in searches))
    is_enough = explored[KEEPS].is_enough
    verdict = BROKEN if traces else verdict_of(name, (), known if is_enough else ())
    return Cell(
        row,
        name,
        verdict,
        sum(each.states for each in searches),
        traces[-1] if traces else None,
        so_far=verdict != UNKNOWN and not all(each.has_every_single_fault for each in searches),
        silent=verdict == UNKNOWN and is_enough and name not in known,
        server=server,
    )


# Processes.


def _perform(search: RowSearch, task: Task, seed: int) -> Explored | None:
    """What was explored, if this was the last task of the unit; else None."""
    if task.what == LOOK:
        search.look(task.transitions, task.budget)
    elif task.what == EXPLORE:
        search.explore(seed, task.budget)
        return search.explored
    else:
        search.finish(task.budget)
    return None


@quietly()
def _search_here(agenda: Agenda, bounds: dict[str, Any], seed: int) -> None:
    searches: dict[Unit, RowSearch] = {}
    while task := agenda.next():
        unit = task.unit
        if unit not in searches:
            searches[unit] = RowSearch(unit.row, bounds, partial(agenda.tell_of, unit), server=unit.server)
        explored = _perform(searches[unit], task, seed)
        if explored is not None:
            del searches[unit]  # it takes memory
            agenda.end(unit, explored)


def _share_out(agenda: Agenda, bounds: dict[str, Any], seed: int) -> None:
    """Search each unit in its own process, which ends with the unit; ``jobs`` of them work at the same time.

    This is so even with one job, because the end of the process frees the memory at once, without garbage collection.
    """
    context: Any = multiprocessing.get_context("fork")
    workers: dict[Unit, tuple[Any, Any]] = {}  # the process, and the pipe to it
    busy: dict[Any, Unit] = {}  # by pipe
    try:
        while not agenda.is_done:
            while len(busy) < agenda.jobs and (task := agenda.next(tuple(busy.values()))):
                if task.unit not in workers:
                    workers[task.unit] = _hire(context, task.unit, bounds, seed, [pipe for _, pipe in workers.values()])
                pipe = workers[task.unit][1]
                with _from_whom(task.unit):
                    pipe.send(task)
                busy[pipe] = task.unit
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                unit = busy[pipe]
                with _from_whom(unit):
                    message = pipe.recv()
                if isinstance(message, Explored):
                    workers.pop(unit)[0].join()
                    agenda.end(unit, message)
                elif message is not None:
                    agenda.tell_of(unit, *message)
                    continue
                del busy[pipe]
    finally:
        for worker, _ in workers.values():
            worker.kill()
            worker.join()


def _hire(context: Any, unit: Unit, bounds: dict[str, Any], seed: int, pipes: list[Any]) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    worker = context.Process(target=_work, args=(theirs, unit, bounds, seed, [*pipes, ours]), daemon=True)
    worker.start()
    theirs.close()
    return worker, ours


@contextmanager
def _from_whom(unit: Unit) -> Iterator[None]:
    """If the process of the unit dies, raise an error that names its row."""
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError(f"the process that searched {unit.row} died") from None


@quietly()
def _work(pipe: Any, unit: Unit, bounds: dict[str, Any], seed: int, not_ours: list[Any]) -> None:
    ignore_interrupts()
    for other in not_ours:
        other.close()  # the parent's ends: they must close when the parent dies, because its workers wait for that
    sent_at = 0.0

    def tell_of(states: int, broken: int) -> None:
        nonlocal sent_at
        if time.monotonic() > sent_at + 0.1:
            sent_at = time.monotonic()
            pipe.send((states, broken))

    search = RowSearch(unit.row, bounds, tell_of, server=unit.server)
    explored = None
    try:
        while explored is None:
            explored = _perform(search, pipe.recv(), seed)
            pipe.send(explored)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent was killed
    pipe.close()
