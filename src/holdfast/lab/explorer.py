"""The search: every interleaving up to a bound, the shortest trace first.

Breadth first, level by level, so the first trace that breaks an invariant is the shortest. Who calls widens the circle:
no fault at first, then one, then two, the mildest kinds before the others. Random walks with more faults than that
come last, each from a seed that brings it about again.

States are recognised by hash. Two steps *commute* where neither changes the server nor makes an event: they are taken
in one order only. That is a sleep set: a state remembers which of its moves were taken on another way to the same end.
All shortest ways to a state arrive in the same level, so a move is left out only if every one has it asleep;
and the way that is first in the order of clients never has. So no state is missed, only transitions are saved.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast.lab.check import CHECKS, INVARIANTS, Event
from holdfast.lab.model import Model
from holdfast.lab.promises import PROMISES
from holdfast.lab.state import NEVER, Choice, Config, State
from holdfast.lab.trace import BROKEN, UNKNOWN

__all__ = ["Broken", "Explorer"]

Path = tuple[Any, ...]  # (the path before, a choice), or () at the start
_LOOK_EVERY = 16  # states, each of which may take a millisecond


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
        self.broken: dict[str, Broken] = {}
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
        self._ends_at = float("inf")
        self._interrupts: list[int] = []
        self._most_states = NEVER
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
        self._ends_at = time.monotonic() + (float("inf") if budget is None else budget)
        self._most_states = states
        if kinds is None:
            kinds = self.config.kinds
        self.model.config = self.config._replace(most_faults=most_faults, kinds=kinds)
        with _polite_interrupts() as interrupts:
            self._interrupts = interrupts
            return self._widen()

    @property
    def states(self) -> int:
        return len(self.hashes)

    @property
    def is_found(self) -> bool:
        """Whether all that it was to stop at is broken."""
        return bool(self._stop_at) and self._stop_at <= self.broken.keys()

    def _is_over(self) -> bool:
        if self._interrupts:
            raise KeyboardInterrupt
        return self.is_found or len(self.hashes) >= self._most_states or time.monotonic() >= self._ends_at

    def _widen(self) -> bool:
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
                    if self._is_over():
                        return False
                    if self._progress is not None:
                        self._progress(len(self.hashes))
                self._expand(visit, seen, following)
            if self.is_found:
                return False
            self.hashes.update(following)
            seen.update(following)
            level = following
            depth += 1
            self.deepest = max(self.deepest, depth)
        return not self.is_found

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
