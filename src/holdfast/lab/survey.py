"""The matrix: every row explored within a budget, and what was found of every invariant.

A row is searched in widening circles: no fault, then one, then two; mild ones before worse ones; two clients, then as
many as were asked for. A trace found earlier is simpler, and stays. What is left of the budget goes to random walks.
Rows are shared out to as many processes as there are cores.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidConfig
from holdfast.lab.check import INVARIANTS, MEANING
from holdfast.lab.explorer import Broken, Explorer
from holdfast.lab.faults import DAILY, FAULTS, TREACHERY
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
    "Circle",
    "Progress",
    "explore",
    "find",
    "survey",
    "trace_of",
]

MOST_CLIENTS: Final = 4
SHARE_OF_THE_NEEDED: Final = 0.6  # of what is left of the budget, for a search that a verdict takes,
SHARE: Final = 0.15  # for any other but the last,
WALKS_SHARE: Final = 0.1  # and for random walks
WEIGHTS: Final = {"holdfast": 5, "watch": 3, "setnx_repair": 2, "setnx_repair:as_written": 2}  # rows with more states
MOST_WALKS: Final = 1_000


class Progress(NamedTuple):
    row: str
    states: int  # of this row so far
    broken: int  # invariants of it that are broken so far
    done: int  # rows
    of: int


class Circle(NamedTuple):
    """One of the searches of a row."""

    clients: int
    most_faults: int
    kinds: tuple[str, ...]

    @property
    def is_needed(self) -> bool:
        """Whether it takes this much for a verdict."""
        return self.clients == 2 and self.most_faults <= 1


def circles(clients: int, most_faults: int, kinds: tuple[str, ...]) -> list[Circle]:
    """Few faults before many, mild ones before worse ones, few clients before many."""
    mildness = kinds_by_mildness(kinds)
    found = [Circle(2, 0, ()), Circle(clients, 0, ())]
    for faults in range(1, most_faults + 1):
        found += [Circle(few, faults, some) for some in mildness for few in (2, clients)]
    return list(dict.fromkeys(found))


def kinds_by_mildness(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """These kinds of fault in widening circles, so that a trace has the worse ones only if it needs them."""
    mild = tuple(kind for kind in kinds if kind not in TREACHERY)
    daily = tuple(kind for kind in kinds if kind in DAILY)
    return [some for some in dict.fromkeys((daily, mild, kinds)) if some]


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
    jobs = min(jobs or os.cpu_count() or 1, len(rows))
    tell_of = progress or (lambda _: None)
    ends_at = time.monotonic() + budget
    if jobs <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        found: list[Findings] = []
        for row in rows:
            share = max(0.1, (ends_at - time.monotonic()) / (len(rows) - len(found)))
            found.append(explore(row, bounds, seed, share, _Report(row, len(found), len(rows), tell_of).say))
        return found
    return _share_out(rows, bounds, seed, ends_at=ends_at, jobs=jobs, progress=tell_of)


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


@unheard()
def explore(
    row: str,
    bounds: dict[str, Any],
    seed: int,
    budget: float,
    progress: Callable[[int, int], None] | None = None,
    *,
    invariants: Iterable[str] = INVARIANTS,
    stop_at: Iterable[str] = (),
) -> Findings:
    """One row."""
    ends_at = time.monotonic() + budget
    config = config_of(row, **bounds)
    broken: dict[str, Broken] = {}
    explorers: dict[int, Explorer] = {}

    def tell_of(_: int) -> None:
        if progress is not None:
            progress(sum(explorer.states for explorer in explorers.values()), len(broken))

    for clients in (2, config.clients):
        explorers[clients] = explorer = Explorer(
            config._replace(clients=clients), invariants=invariants, stop_at=stop_at, progress=tell_of
        )
        explorer.broken = broken
    everything = circles(config.clients, config.most_faults, config.kinds)
    exhausted = {}
    for place, circle in enumerate(everything):
        explorer = explorers[circle.clients]
        left = ends_at - time.monotonic()
        share = SHARE_OF_THE_NEEDED if circle.is_needed else SHARE
        share = left * (1 - WALKS_SHARE if place == len(everything) - 1 else share)
        exhausted[circle] = explorer.search(circle.most_faults, circle.kinds, budget=share)
        if explorer.is_found:
            break
    if config.kinds and not explorer.is_found:
        _walk(explorer, seed, ends_at)
    states = sum(explorer.states for explorer in explorers.values())
    known = {name for explorer in explorers.values() for name in explorer.known}
    needed = [exhausted.get(circle, False) for circle in everything if circle.is_needed]
    cells = []
    for name in invariants:
        trace = trace_of(row, broken[name]) if name in broken else None
        enough = all(needed[:2])  # no fault, and one of the mildest
        verdict: Verdict = BROKEN if name in broken else HOLDS if name in known and enough else UNKNOWN
        so_far = verdict == HOLDS and not all(needed)
        silent = verdict == UNKNOWN and enough and name not in known
        cells.append(Cell(row, name, verdict, states, trace, so_far, silent))
    transitions = sum(explorer.transitions for explorer in explorers.values())
    return Findings(row, states, transitions, all(exhausted.get(one, False) for one in everything), tuple(cells))


def _walk(explorer: Explorer, seed: int, ends_at: float) -> None:
    """Runs of chance with one fault more, each from a seed of its own, until the time is up."""
    number = 0
    while time.monotonic() < ends_at and number < MOST_WALKS:
        explorer.walk(seed * 1_000_003 + number, most_faults=explorer.config.most_faults + 1)
        number += 1


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
    report = _Report(row, 0, 1, progress or (lambda _: None))
    found = explore(row, bounds, seed, budget, report.say, stop_at=(invariant,))
    return next(cell for cell in found.cells if cell.invariant == invariant)


# Many rows, many processes.


def _share_out(
    rows: Sequence[str],
    bounds: dict[str, Any],
    seed: int,
    *,
    ends_at: float,
    jobs: int,
    progress: Callable[[Progress], None],
) -> list[Findings]:
    context: Any = multiprocessing.get_context("fork")
    waiting = list(rows)
    running: dict[Any, tuple[str, Any]] = {}  # by pipe
    found: dict[str, Findings] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                left = ends_at - time.monotonic()
                weights = [WEIGHTS.get(row, 1) for row in [*waiting, *(busy for busy, _ in running.values())]]
                row = waiting.pop(0)
                share = max(0.1, min(left, left * jobs * weights[0] / sum(weights)))
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(target=_work, args=(theirs, row, bounds, seed, share), daemon=True)
                worker.start()
                theirs.close()
                running[ours] = row, worker
            for pipe in wait(list(running)):
                row, worker = running[pipe]
                report = _Report(row, len(found), len(rows), progress)
                message = _received(pipe, row)
                if isinstance(message, Findings):
                    found[row] = message
                    del running[pipe]
                    worker.join()
                    report._replace(done=len(found)).say(message.states, _count_broken(message))
                else:
                    report.say(*message)
    finally:
        for _, worker in running.values():
            worker.kill()
            worker.join()
    return [found[row] for row in rows]


def _received(pipe: Any, row: str) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"the search of {row} ended without a word") from None


def _count_broken(findings: Findings) -> int:
    return sum(cell.verdict == BROKEN for cell in findings.cells)


def _work(pipe: Any, row: str, bounds: dict[str, Any], seed: int, budget: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    said_at = 0.0

    def tell_of(states: int, broken: int) -> None:
        nonlocal said_at
        if time.monotonic() > said_at + 0.1:
            said_at = time.monotonic()
            pipe.send((states, broken))

    pipe.send(explore(row, bounds, seed, budget, tell_of))
    pipe.close()
