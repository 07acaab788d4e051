"""The search of one row, in circles: how many clients, how many faults, of which kinds.

Which trace is shown is one thing: few faults before many, mild ones before worse ones, few clients before many, and
among those of one circle the shortest. In which order the circles are searched is another: a row is looked at first, a
little of every small circle and then a little more, for most pits are shallow. Only then each circle is explored as far
as time allows. So a trace may be found in a wide circle first, and gives way to that of a circle before it.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from holdfast.lab.check import INVARIANTS
from holdfast.lab.explorer import Broken, Explorer, Search
from holdfast.lab.faults import DAILY, TREACHERY
from holdfast.lab.rows import config_of
from holdfast.protocol.recipes import FENCED

__all__ = ["LOOKS", "Circle", "Look", "RowSearch", "circles"]


class Look(NamedTuple):
    """How many transitions of a circle are made by the end of it."""

    of_the_least: int  # without which nothing is said to hold
    of_others: int  # that are small


# Every pit of every row lies within the first 2,000 of some small circle, most within 300; and most rows have no more
# than 6,000 in the circles without which nothing holds.
LOOKS: Final = (Look(300, 300), Look(800, 800), Look(2_000, 2_000), Look(6_000, 2_000))
SHARE_OF_THE_NEEDED: Final = 0.6  # of what is left of the budget, for a search that a verdict takes,
SHARE: Final = 0.15  # for any other but the last,
WALKS_SHARE: Final = 0.1  # and for random walks
MOST_WALKS: Final = 1_000


class Circle(NamedTuple):
    """One of the searches of a row."""

    clients: int
    most_faults: int
    kinds: tuple[str, ...]
    overtaking: bool = False  # replies may be overtaken by notifications: see Config

    @property
    def is_needed(self) -> bool:
        """Whether it takes this much for a verdict."""
        return self.clients == 2 and self.most_faults <= 1 and not self.overtaking


def circles(clients: int, most_faults: int, kinds: tuple[str, ...], *, overtaking: bool = False) -> list[Circle]:
    """Few faults before many, mild ones before worse ones, few clients before many.

    With ``overtaking``, two clients are searched once more with replies that arrive late: without a fault, and with
    one. That is five times as many states; with three clients it would be too many.
    """
    found = [Circle(2, 0, ()), Circle(clients, 0, ())]
    if overtaking:
        found.append(Circle(2, 0, (), overtaking=True))
    for faults in range(1, most_faults + 1):
        mildness = kinds_by_mildness(kinds)
        if faults == 1:  # what happens after a milder one was explored with that
            mildness = [
                tuple(kind for kind in some if kind not in others) for others, some in pairwise([(), *mildness])
            ]
        found += [Circle(few, faults, some) for some in mildness for few in (2, clients)]
        if faults == 1 and overtaking:
            found += [Circle(2, 1, some, overtaking=True) for some in mildness]
    return list(dict.fromkeys(found))


def kinds_by_mildness(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """These kinds of fault in widening circles, so that a trace has the worse ones only if it needs them."""
    mild = tuple(kind for kind in kinds if kind not in TREACHERY)
    daily = tuple(kind for kind in kinds if kind in DAILY)
    return [some for some in dict.fromkeys((daily, mild, kinds)) if some]


class RowSearch:
    """One row, on the way: first to be looked at, then to be explored."""

    def __init__(
        self,
        row: str,
        bounds: dict[str, Any],
        progress: Callable[[int, int], None] | None = None,
        *,
        invariants: Iterable[str] = INVARIANTS,
        stop_at: Iterable[str] = (),
    ) -> None:
        self.row = row
        self.config = config = config_of(row, **bounds)
        self.invariants = tuple(invariants)
        self.circles = circles(config.clients, config.most_faults, config.kinds, overtaking=row == FENCED)
        self.least = [circle for circle in self.circles if circle.is_needed][:2]  # no fault, and one of the mildest
        self._progress = progress
        self._stop_at = frozenset(stop_at)
        self._explorers = {
            (clients, overtaking): Explorer(
                config._replace(clients=clients, overtaking=overtaking),
                invariants=self.invariants,
                stop_at=self._stop_at,
                progress=self._tell,
            )
            for clients, overtaking in {(circle.clients, circle.overtaking) for circle in self.circles}
        }
        self._searches: dict[Circle, Search] = {}
        self._ended: set[Circle] = set()  # nothing is left within them
        self._broken: dict[Circle | None, dict[str, Broken]] = {circle: {} for circle in self.circles}
        self._broken[None] = {}  # by random walks

    # What is known so far.

    @property
    def broken(self) -> dict[str, Broken]:
        """What is broken, by the simplest trace that was found."""
        return self._broken_before(None) | self._broken[None]

    @property
    def states(self) -> int:
        return sum(explorer.states for explorer in self._explorers.values())

    @property
    def transitions(self) -> int:
        return sum(explorer.transitions for explorer in self._explorers.values())

    @property
    def known(self) -> set[str]:
        """Invariants of which some history had something to say."""
        return {name for explorer in self._explorers.values() for name in explorer.known}

    def has_ended(self, circle: Circle) -> bool:
        return circle in self._ended

    # On the way.

    def look(self, look: Look, budget: float) -> None:
        """Make so many transitions of every small circle, those of earlier looks included."""
        ends_at = time.monotonic() + budget
        for circle in self.circles:
            left = ends_at - time.monotonic()
            if left <= 0 or self._is_found(self._broken_before(circle)):
                break
            if self._is_small(circle):
                self._go_on(circle, left, transitions=look.of_the_least if circle in self.least else look.of_others)

    def explore(self, seed: int, budget: float) -> None:
        """Each circle in turn, as far as its share of the time allows, and then runs of chance."""
        ends_at = time.monotonic() + budget
        for circle in self.circles:
            left = ends_at - time.monotonic()
            if left <= 0 or self._is_found(self._broken_before(circle)):
                return
            share = SHARE_OF_THE_NEEDED if circle.is_needed else SHARE
            self._go_on(circle, left * (1 - WALKS_SHARE if circle == self.circles[-1] else share))
            self._searches.pop(circle, None)  # what is left of it takes room, and nobody goes on with it
        if self.config.kinds and not self._is_found(self.broken):
            self._walk(seed, ends_at)

    def _is_found(self, broken: dict[str, Broken]) -> bool:
        """Whether all that it was to stop at is among these."""
        return bool(self._stop_at) and self._stop_at <= broken.keys()

    def _is_small(self, circle: Circle) -> bool:
        """Whether it is looked at. With two faults that is one circle only, the one that has all the others in it."""
        if circle.overtaking:
            return False
        if circle.most_faults == 0:
            return True
        return circle.clients == 2 and (circle.most_faults == 1 or circle.kinds == self.config.kinds)

    def _go_on(self, circle: Circle, budget: float, **limit: int) -> None:
        if circle in self._ended:
            return
        explorer = self._explorers[circle.clients, circle.overtaking]
        search = self._searches.get(circle)
        if search is None:
            search = self._searches[circle] = explorer.begin(circle.most_faults, circle.kinds)
        explorer.broken = ChainMap(self._broken[circle], self._broken_before(circle))
        if explorer.go_on(search, budget=budget, **limit):
            self._ended.add(circle)
            del self._searches[circle]

    def _walk(self, seed: int, ends_at: float) -> None:
        """Runs of chance with one fault more, each from a seed of its own, until the time is up."""
        explorer = self._explorers[self.config.clients, False]
        explorer.broken = ChainMap(self._broken[None], self._broken_before(None))
        number = 0
        while time.monotonic() < ends_at and number < MOST_WALKS:
            explorer.walk(seed * 1_000_003 + number, most_faults=self.config.most_faults + 1)
            number += 1

    def _broken_before(self, circle: Circle | None) -> dict[str, Broken]:
        """What is broken in the circles before this one; None: in all of them."""
        found: dict[str, Broken] = {}
        for before in self.circles:
            if before == circle:
                break
            found = self._broken[before] | found
        return found

    def _tell(self, _: int) -> None:
        if self._progress is not None:
            self._progress(self.states, len(self.broken))
