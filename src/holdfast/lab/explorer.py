"""The search: every interleaving up to a bound, the shortest trace first.

Breadth first, level by level, so the first trace that breaks an invariant is the shortest. Who calls widens the circle:
no fault, one, two, the mildest kinds and the others. A search can be left and gone on with, so that several can be
begun before any is brought to its end. Random walks with more faults than that come last, each from a seed that brings
it about again.

States are recognised by hash. Two steps *commute* where neither changes the server nor makes an event: they are taken
in one order only. That is a sleep set: a state remembers which of its moves were taken on another way to the same end.
All shortest ways to a state arrive in the same level, so a move is left out only if every one has it asleep;
and the way that is first in the order of clients never has. So no state is missed, only transitions are saved.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast.lab.check import CHECKS, INVARIANTS, Event
from holdfast.lab.model import Model
from holdfast.lab.promises import PROMISES
from holdfast.lab.state import NEVER, Choice, Config, State
from holdfast.lab.trace import BROKEN, UNKNOWN

__all__ = ["Broken", "Explorer", "Search"]

Path = tuple[Any, ...]  # (the path before, a choice), or () at the start
_LOOK_EVERY = 16  # states, each of which may take a millisecond
_COLLECT_EVERY = (20_000, 20, 20)  # objects more than before, and so on: see gc.set_threshold


class Broken(NamedTuple):
    invariant: str
    choices: tuple[Choice, ...]
    why: str
    clients: tuple[int, ...]
    config: Config
    seed: int | None = None


class _Visit:
    """A state of the level, on the way to be expanded."""

    __slots__ = ("asleep", "history", "path", "state")

    def __init__(self, state: State, path: Path, history: tuple[Event, ...], asleep: frozenset[Choice]) -> None:
        self.state = state
        self.path = path
        self.history = history
        self.asleep = asleep


class Search:
    """All that can happen within some bounds, level by level: it can be left, and gone on with later."""

    __slots__ = ("config", "is_done", "transitions", "widening")

    def __init__(self, config: Config, widening: Iterator[None]) -> None:
        self.config = config
        self.widening = widening  # it is at rest between two states
        self.transitions = 0
        self.is_done = False  # nothing is left within the bounds


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
        self.deepest = 0
        self._checks = {name: {**CHECKS, **PROMISES}[name] for name in invariants}
        self._by_kind: dict[str, list[str]] = {}
        for name, check in self._checks.items():
            for kind in check.ends_with:
                self._by_kind.setdefault(kind, []).append(name)
        self._stop_at = frozenset(stop_at)
        self._progress = progress
        self.known: set[str] = set()  # invariants of which some history had something to say

    def search(
        self,
        most_faults: int,
        kinds: tuple[str, ...] | None = None,
        *,
        budget: float | None = None,
        states: int = NEVER,
    ) -> bool:
        """Search everything with at most so many faults of these kinds; whether it came to the end of that.

        It gives up when the budget (in seconds) is used up, when so many states were met in all, or when all that it
        was to stop at is broken.
        """
        return self.go_on(self.begin(most_faults, kinds), budget=budget, states=states)

    def begin(self, most_faults: int, kinds: tuple[str, ...] | None = None) -> Search:
        """A search of everything with at most so many faults of these kinds, before its first step."""
        kinds = self.config.kinds if kinds is None else kinds
        return Search(self.config._replace(most_faults=most_faults, kinds=kinds), self._widen())

    def go_on(
        self, search: Search, *, budget: float | None = None, states: int = NEVER, transitions: int = NEVER
    ) -> bool:
        """Go on where it was left, until it has made so many transitions or gives up; whether it came to its end."""
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
        """Whether all that it was to stop at is broken."""
        return bool(self._stop_at) and self._stop_at <= self.broken.keys()

    def _widen(self) -> Iterator[None]:
        """Level after level, with a rest every few states."""
        model = self.model
        seen: set[int] = set()
        first = model.first()
        level = {hash(first): _Visit(first, (), (), frozenset())}
        seen.update(level)
        self.hashes.update(level)
        count = depth = 0
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
            depth += 1
            self.deepest = max(self.deepest, depth)

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
            # Not its own other steps: a client may tell in which order they were answered.
            asleep = frozenset(other for other in pure if other[1] != choice[1]) if is_pure else frozenset()
            if is_pure:
                pure.append(choice)
            mark = hash(after)
            known = following.get(mark)
            if known is not None:
                known.asleep &= asleep
            elif mark in seen:
                continue  # whatever is broken by this step was broken on the shorter way there
            history = visit.history
            if events:
                history = history + events
                self._judge(history, events, visit.path, choice)
            if known is None:
                following[mark] = _Visit(after, (visit.path, choice), history, asleep)

    def _judge(self, history: tuple[Event, ...], events: tuple[Event, ...], path: Path, choice: Choice) -> None:
        for event in events:
            for name in self._by_kind.get(event.kind, ()):
                if name in self.broken:
                    continue
                report = self._checks[name].judge(history)
                if report.verdict == BROKEN:
                    choices = unrolled((path, choice))
                    self.broken[name] = Broken(name, choices, report.why, report.clients, self.model.config)
            if event.kind == "newcomer" and len(self.known) < len(self._checks):  # a whole run: what does it speak of?
                for name, check in self._checks.items():
                    if name not in self.known and check.judge(history).verdict != UNKNOWN:
                        self.known.add(name)

    # At random.

    def walk(self, seed: int, *, most_faults: int, steps: int = 200) -> tuple[Choice, ...]:
        """One run of chance, from a seed; what happened in it. Faults are rare, and of a few kinds only."""
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
    """Nearly all that a search makes is there to stay: to look through it for garbage took a third of the time."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _polite_interrupts() -> Iterator[list[int]]:
    """Ctrl-C between two states, not within a simulated client, which would take it for its own."""
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


def commutes(choice: Choice, before: State, after: State) -> bool:
    """Whether a step without events concerns nobody but its client, so that it commutes with others of the kind."""
    return (
        choice[0] == "do"
        and after.store == before.store
        and after.under_way == before.under_way
        and after.now_us == before.now_us
        and after.tracked == before.tracked
        and after.free_since == before.free_since
    )


def unrolled(path: Path) -> tuple[Choice, ...]:
    choices = []
    while path:
        path, choice = path
        choices.append(choice)
    return tuple(reversed(choices))
