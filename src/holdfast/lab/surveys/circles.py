"""The search of one row, in circles: a circle is a number of clients, a number of faults, and their kinds.

The trace that is shown comes from the first circle that has one (few faults before many, mild faults before worse ones,
few clients before many), and is the shortest there. The order of the search is different: first a little of every small
circle, then a little more, because most mistakes show early. After that, each circle is explored as far as time allows.
So a trace may be found in a large circle first, and later be replaced by a trace of an earlier circle.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

from holdfast.lab.invariants.locks import INVARIANTS
from holdfast.lab.search.explorer import Broken, Explorer, Search
from holdfast.lab.search.faults import DAILY, UNRELIABLE_SERVER
from holdfast.lab.subjects.rows import config_of
from holdfast.protocol.recipes import FENCED


class Look(NamedTuple):
    """A first look at all small circles: how many transitions have been made in each when the look ends."""

    of_the_least: int  # in the circles that every verdict of "holds" needs
    of_others: int


# All mistakes of all rows show within the first 2,000 transitions of some small circle, most within 300. The circles
# that every verdict of "holds" needs have at most 6,000 transitions in most rows.
LOOKS: Final = (
    Look(300, 300),
    Look(800, 800),
    Look(2_000, 2_000),
    Look(6_000, 2_000),
)
SHARE_OF_THE_NEEDED: Final = 0.6  # share of the remaining budget for a circle that a verdict needs
SHARE: Final = 0.15  # share for any other circle, except the last
WALKS_SHARE: Final = 0.1  # share for random walks
MOST_WALKS: Final = 1_000


class Circle(NamedTuple):
    """One of the searches of a row."""

    clients: int
    most_faults: int
    kinds: tuple[str, ...]
    overtaking: bool = False  # notifications may overtake replies: see Config

    @property
    def is_needed(self) -> bool:
        """Whether a verdict needs this circle."""
        return self.clients == 2 and self.most_faults <= 1 and not self.overtaking


def circles(clients: int, most_faults: int, kinds: tuple[str, ...], *, overtaking: bool = False) -> list[Circle]:
    """The circles: few faults before many, mild faults before worse ones, few clients before many.

    With ``overtaking``, two clients are searched once more with replies that arrive late: without a fault, and with
    one. This has five times as many states; three clients would be too many.
    """
    found = [Circle(2, 0, ()), Circle(clients, 0, ())]
    if overtaking:
        found.append(Circle(2, 0, (), overtaking=True))
    for faults in range(1, most_faults + 1):
        mildness = kinds_by_mildness(kinds)
        if faults == 1:  # milder kinds were explored before
            mildness = [
                tuple(kind for kind in some if kind not in others) for others, some in pairwise([(), *mildness])
            ]
        found += [Circle(few, faults, some) for some in mildness for few in (2, clients)]
        if faults == 1 and overtaking:
            found += [Circle(2, 1, some, overtaking=True) for some in mildness]
    return list(dict.fromkeys(found))


def kinds_by_mildness(kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    """These kinds of fault in growing sets, so that a trace has worse faults only if it needs them."""
    mild = tuple(kind for kind in kinds if kind not in UNRELIABLE_SERVER)
    daily = tuple(kind for kind in kinds if kind in DAILY)
    return [some for some in dict.fromkeys((daily, mild, kinds)) if some]


class RowSearch:
    """The search of one row: first looked at, then explored."""

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
        self._ended: set[Circle] = set()  # explored completely
        self._broken: dict[Circle | None, dict[str, Broken]] = {circle: {} for circle in self.circles}
        self._broken[None] = {}  # by random walks

    # Results so far.

    @property
    def broken(self) -> dict[str, Broken]:
        """The broken invariants, each with the simplest trace found."""
        return self._broken_before(None) | self._broken[None]

    @property
    def states(self) -> int:
        return sum(explorer.states for explorer in self._explorers.values())

    @property
    def transitions(self) -> int:
        return sum(explorer.transitions for explorer in self._explorers.values())

    @property
    def known(self) -> set[str]:
        """Invariants that some history gave a verdict on."""
        return {name for explorer in self._explorers.values() for name in explorer.known}

    def has_ended(self, circle: Circle) -> bool:
        return circle in self._ended

    # Searching.

    def look(self, look: Look, budget: float) -> None:
        """Search every small circle up to that number of transitions, including those of earlier looks."""
        ends_at = time.monotonic() + budget
        for circle in self.circles:
            left = ends_at - time.monotonic()
            if left <= 0 or self._is_found(self._broken_before(circle)):
                break
            if self._is_small(circle):
                self._go_on(circle, left, transitions=look.of_the_least if circle in self.least else look.of_others)

    def explore(self, seed: int, budget: float) -> None:
        """Explore each circle in turn, as far as its share of the time allows, and then walk at random."""
        ends_at = time.monotonic() + budget
        for circle in self.circles:
            left = ends_at - time.monotonic()
            if left <= 0 or self._is_found(self._broken_before(circle)):
                return
            share = SHARE_OF_THE_NEEDED if circle.is_needed else SHARE
            self._go_on(circle, left * (1 - WALKS_SHARE if circle == self.circles[-1] else share))
            self._searches.pop(circle, None)  # it takes memory, and will not be resumed
        if self.config.kinds and not self._is_found(self.broken):
            self._walk(seed, ends_at)

    def _is_found(self, broken: dict[str, Broken]) -> bool:
        """Whether all invariants of ``stop_at`` are among these."""
        return bool(self._stop_at) and self._stop_at <= broken.keys()

    def _is_small(self, circle: Circle) -> bool:
        """Whether ``look`` searches it. Of the circles with two faults, only the one with all kinds of fault is."""
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
        """Random walks with one more fault, each from its own seed, until the time is up."""
        explorer = self._explorers[self.config.clients, False]
        explorer.broken = ChainMap(self._broken[None], self._broken_before(None))
        number = 0
        while time.monotonic() < ends_at and number < MOST_WALKS:
            explorer.walk(seed * 1_000_003 + number, most_faults=self.config.most_faults + 1)
            number += 1

    def _broken_before(self, circle: Circle | None) -> dict[str, Broken]:
        """What is broken in the circles before this one; None: in all circles."""
        found: dict[str, Broken] = {}
        for before in self.circles:
            if before == circle:
                break
            found = self._broken[before] | found
        return found

    def _tell(self, _: int) -> None:
        if self._progress is not None:
            self._progress(self.states, len(self.broken))
