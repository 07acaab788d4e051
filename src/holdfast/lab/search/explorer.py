"""The search: every interleaving up to a bound, the shortest trace first.

Breadth first, level by level, so the first trace that breaks an invariant is the shortest. The caller chooses the
bounds: no fault, one, two, and of which kinds. A search can be suspended and resumed, so that several can advance in
turn. Random walks with more faults come last, each from a seed that reproduces it.

States are recognised by hash. Two steps *commute* if neither changes the server nor makes an event: they are taken in
one order only. This uses sleep sets: a state remembers which of its moves need not be taken (are *asleep*), because
another path takes them in the other order. All shortest paths to a state arrive in the same level, so a move is left
out only if it is asleep on all of them; and on the path that is first in the order of clients it never is. So the
search misses no state, and only saves transitions.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.lab.invariants.history import BROKEN, UNKNOWN, Event
from holdfast.lab.invariants.locks import CHECKS, INVARIANTS
from holdfast.lab.invariants.primitives import PRIMITIVE_CHECKS
from holdfast.lab.search.model import Model
from holdfast.lab.search.state import NEVER, Choice, Config, State

Path = tuple[Any, ...]  # (the path before, a choice), or () at the start
_LOOK_EVERY = 16  # after this many states, check the limits; a state may take a millisecond
_COLLECT_EVERY = (200_000, 20, 100)  # the arguments of gc.set_threshold: rare collections


class Broken(NamedTuple):
    invariant: str
    choices: tuple[Choice, ...]
    why: str
    clients: tuple[int, ...]
    config: Config
    seed: int | None = None


@dataclass(slots=True)
class _Visit:
    """A state of the current level, to be expanded."""

    state: State
    path: Path
    history: tuple[Event, ...]
    asleep: frozenset[Choice]


@dataclass(slots=True)
class Search:
    """A search of all states within some bounds, level by level, which can be suspended and resumed."""

    config: Config
    widening: Iterator[None]  # suspended between two states
    transitions: int = 0
    is_done: bool = False  # nothing is left within the bounds


class Explorer:
    def __init__(
        self,
        config: Config,
        *,
        invariants: Iterable[str] = INVARIANTS,
        stop_at: Iterable[str] = (),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.model = Model(config)
        self.broken: MutableMapping[str, Broken] = {}
        self.transitions = 0
        self.hashes: set[int] = set()
        self._checks = {name: {**CHECKS, **PRIMITIVE_CHECKS}[name] for name in invariants}
        self._by_kind: dict[str, list[str]] = {}
        for name, check in self._checks.items():
            for kind in check.ends_with:
                self._by_kind.setdefault(kind, []).append(name)
        self._stop_at = frozenset(stop_at)
        self._progress = progress
        self.known: set[str] = set()  # invariants that some history gave a verdict on

    def search(
        self,
        most_faults: int,
        kinds: tuple[str, ...] | None = None,
        *,
        budget: float | None = None,
        states: int = NEVER,
    ) -> bool:
        """Whether all states with at most that number of faults, of these kinds, were explored.

        The search stops early when the budget (in seconds) is used up, when ``states`` were met in all, or when all
        invariants of ``stop_at`` are broken.
        """
        return self.go_on(self.begin(most_faults, kinds), budget=budget, states=states)

    def begin(self, most_faults: int, kinds: tuple[str, ...] | None = None) -> Search:
        """A new search of all states with at most that number of faults, of these kinds."""
        kinds = self.config.kinds if kinds is None else kinds
        return Search(self.config._replace(most_faults=most_faults, kinds=kinds), self._widen())

    def go_on(
        self, search: Search, *, budget: float | None = None, states: int = NEVER, transitions: int = NEVER
    ) -> bool:
        """Resume a search until it has made ``transitions`` in all, or stops early. Returns whether it is complete."""
        if search.is_done or search.transitions >= transitions:
            return search.is_done
        ends_at = float("inf") if budget is None else time.monotonic() + budget
        self.model.config = search.config
        before = self.transitions - search.transitions
        with _rare_collections(), _polite_interrupts() as interrupts:
            try:
                for _ in search.widening:
                    if interrupts:
                        raise KeyboardInterrupt
                    if self.is_found or len(self.hashes) >= states or self.transitions - before >= transitions:
                        return False
                    if time.monotonic() >= ends_at:
                        return False
                    if self._progress is not None:
                        self._progress(len(self.hashes))
            finally:
                search.transitions = self.transitions - before
        search.is_done = True
        return True

    @property
    def states(self) -> int:
        return len(self.hashes)

    @property
    def is_found(self) -> bool:
        """Whether all invariants of ``stop_at`` are broken."""
        return bool(self._stop_at) and self._stop_at <= self.broken.keys()

    def _widen(self) -> Iterator[None]:
        """Explore level after level; yield every few states."""
        model = self.model
        seen: set[int] = set()
        first = model.first()
        level = {hash(first): _Visit(first, (), (), frozenset())}
        seen.update(level)
        self.hashes.update(level)
        count = 0
        while level:
            following: dict[int, _Visit] = {}
            for visit in level.values():
                count += 1
                if count % _LOOK_EVERY == 0:
                    yield
                self._expand(visit, seen, following)
            if self.is_found:
                yield
            self.hashes.update(following)
            seen.update(following)
            level = following

    def _expand(self, visit: _Visit, seen: set[int], following: dict[int, _Visit]) -> None:
        model, state = self.model, visit.state
        reduce = self.config.reduce
        pure: list[Choice] = []  # moves that commute with each other
        for choice in model.moves(state):
            if choice in visit.asleep:
                pure.append(choice)
                continue
            self.transitions += 1
            after, events = model.after(state, choice)
            is_pure = reduce and not events and commutes(choice, state, after)
            # Not other steps of the same client: the client may depend on the order of their replies.
            asleep = frozenset(other for other in pure if other[1] != choice[1]) if is_pure else frozenset()
            if is_pure:
                pure.append(choice)
            mark = hash(after)
            known = following.get(mark)
            if known is not None:
                known.asleep &= asleep
            elif mark in seen:
                continue  # if this step breaks an invariant, the shorter path to that state has broken it too
            history = visit.history
            if events:
                history = history + events
                self._judge(history, events, visit.path, choice)
            if known is None:
                following[mark] = _Visit(after, (visit.path, choice), history, asleep)

    def _judge(self, history: tuple[Event, ...], events: tuple[Event, ...], path: Path, choice: Choice) -> None:
        required = self.model.config.required
        before = _before_fault(history, required)
        for event in events:
            for name in self._by_kind.get(event.kind, ()):
                if name in self.broken or len(before) == len(history):
                    continue
                judge = self._checks[name].judge
                report = judge(history)
                if report.verdict == BROKEN and (not required or judge(before).verdict != BROKEN):
                    choices = unrolled((path, choice))
                    self.broken[name] = Broken(name, choices, report.why, report.clients, self.model.config)
            if event.kind == "newcomer" and len(self.known) < len(
                self._checks
            ):  # a complete run: which invariants does it judge?
                for name, check in self._checks.items():
                    if name not in self.known and check.judge(history).verdict != UNKNOWN:
                        self.known.add(name)

    # At random.

    def walk(self, seed: int, *, most_faults: int, steps: int = 200) -> tuple[Choice, ...]:
        """The choices of one random run from a seed. Faults are rare, and of three kinds at most."""
        dice = random.Random(seed)
        model = self.model
        kinds = dice.sample(self.config.kinds, min(len(self.config.kinds), 3))
        model.config = self.config._replace(most_faults=most_faults, kinds=tuple(kinds))
        state = model.first()
        history: tuple[Event, ...] = ()
        path: Path = ()
        for _ in range(steps):
            moves = model.moves(state)
            if not moves:
                break
            faults = [move for move in moves if move[0] == "fault"]
            others = [move for move in moves if move[0] != "fault"]
            choice = dice.choice(faults if faults and (not others or dice.random() < 0.1) else others)
            state, events = model.after(state, choice)
            self.transitions += 1
            self.hashes.add(hash(state))
            if events:
                history += events
                before = set(self.broken)
                self._judge(history, events, path, choice)
                for name in self.broken.keys() - before:
                    self.broken[name] = self.broken[name]._replace(seed=seed)
            path = (path, choice)
        return unrolled(path)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: nearly all objects of a search stay, and collections took a third of the time."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _polite_interrupts() -> Iterator[list[int]]:
    """Handle Ctrl-C between two states. A simulated client would treat it as an interrupt of its own."""
    struck: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield struck
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield struck
        return
    signal.signal(signal.SIGINT, lambda number, frame: struck.append(number))
    try:
        yield struck
    finally:
        signal.signal(signal.SIGINT, before)


def _before_fault(history: tuple[Event, ...], kinds: frozenset[str]) -> tuple[Event, ...]:
    """The part of a history before the first fault of these kinds; nothing if all runs count."""
    if not kinds:
        return ()
    faults = (place for place, event in enumerate(history) if event.kind == "touched" and event.what in kinds)
    return history[: next(faults, len(history))]


def commutes(choice: Choice, before: State, after: State) -> bool:
    """Whether a step without events changes its client only, so that it commutes with other such steps."""
    return (
        choice[0] == "do"
        and after.store == before.store
        and after.under_way == before.under_way
        and after.now_us == before.now_us
        and after.tracked == before.tracked
        and after.free_since == before.free_since
        and after.fleet == before.fleet
    )


def unrolled(path: Path) -> tuple[Choice, ...]:
    choices = []
    while path:
        path, choice = path
        choices.append(choice)
    return tuple(reversed(choices))
