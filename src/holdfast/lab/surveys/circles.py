"""The search of one row, in circles: a circle is a number of clients, a number of faults, and their kinds.

The trace that is shown comes from the first circle that has one (few faults before many, mild faults before worse ones,
few clients before many), and is the shortest there. The order of the search is different: first a little of every small
circle, then a little more, because most mistakes show early. After that, each circle is explored as far as time allows.
So a trace may be found in a large circle first, and later be replaced by a trace of an earlier circle.

A row is searched twice, because a verdict is about one of two servers (see ``faults``). The circles of the server that
``keeps`` its data have no fault that docs/guarantees.md excludes. In those of the server that ``loses`` it, only runs
with such a fault count.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from holdfast.lab.invariants.locks import INVARIANTS
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Broken, Explorer, Search
from holdfast.lab.search.faults import CLOCK, DAILY, EXCLUDED, KEEPS, LOSES, UNRELIABLE_SERVER
from holdfast.lab.search.state import NEVER
from holdfast.lab.subjects.rows import config_of
from holdfast.lab.surveys.common import trace_of
from holdfast.protocol.recipes import FENCED

# The first looks at all small circles: how many transitions have been made in each when a look ends, for two clients.
# With more clients and a fault it is twice as many. All mistakes of all rows show then, most in the first look.
LOOKS: Final = (300, 800, 4_000)
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
    server: str = KEEPS

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
        groups = groups_of(kinds, faults)
        found += [Circle(few, faults, some, server=server) for some, server in groups for few in (2, clients)]
        if faults == 1 and overtaking:
            found += [Circle(2, 1, some, overtaking=True, server=server) for some, server in groups]
    return list(dict.fromkeys(found))


def groups_of(kinds: tuple[str, ...], faults: int) -> list[tuple[tuple[str, ...], str]]:
    """These kinds of fault in groups, the mildest first, so that a trace has worse faults only if it needs them; and
    what the server does in each. With several faults, a group includes the milder ones."""
    daily = tuple(kind for kind in kinds if kind in DAILY)
    if faults == 1:
        mild = tuple(kind for kind in kinds if kind not in DAILY | UNRELIABLE_SERVER)
        worst = tuple(kind for kind in kinds if kind in UNRELIABLE_SERVER)
    else:
        mild = tuple(kind for kind in kinds if kind not in EXCLUDED)
        worst = kinds
    lossy = tuple(kind for kind in worst if kind not in CLOCK)  # data that is lost while the clock is set back is worse
    groups = [(daily, KEEPS), (mild, KEEPS), (lossy, LOSES), (worst, LOSES)]
    if faults == 1:
        groups.remove((lossy, LOSES))
    return [(some, server) for some, server in groups if some and (server == KEEPS or EXCLUDED & {*some})]


class Explored(NamedTuple):
    """How far the search of a row came, for one of the two servers."""

    states: int  # distinct
    transitions: int
    broken: dict[str, Trace]  # by invariant, the simplest that was found
    known: frozenset[str]  # invariants that some history gave a verdict on
    is_enough: bool  # for a verdict: no fault, and one of the mildest
    has_every_single_fault: bool
    is_exhausted: bool  # nothing within the bounds is left


class RowSearch:
    """The search of one row for one of the two servers: first looked at, then explored."""

    def __init__(
        self,
        row: str,
        bounds: dict[str, Any],
        progress: Callable[[int, int], None] | None = None,
        *,
        server: str = KEEPS,
        invariants: Iterable[str] = INVARIANTS,
        stop_at: Iterable[str] = (),
    ) -> None:
        self.row = row
        config = config_of(row, **bounds)
        found = circles(config.clients, config.most_faults, config.kinds, overtaking=row == FENCED)
        self.circles = [circle for circle in found if circle.server == server]
        self.needed = [circle for circle in self.circles if circle.is_needed]
        widest = next((circle for circle in reversed(self.circles) if circle.clients == 2), None)
        self.small = [  # those that are looked at; with two faults, only the one with most kinds
            circle for circle in self.circles if not circle.overtaking and (circle.most_faults <= 1 or circle == widest)
        ]
        if server == LOSES:
            self._config = config._replace(required=EXCLUDED)
        else:
            self._config = config._replace(kinds=tuple(kind for kind in config.kinds if kind not in EXCLUDED))
        self._progress = progress
        self._stop_at = frozenset(stop_at)
        self._explorers = {
            (clients, overtaking): Explorer(
                self._config._replace(clients=clients, overtaking=overtaking),
                invariants=invariants,
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
    def explored(self) -> Explored:
        return Explored(
            states=self.states,
            transitions=sum(explorer.transitions for explorer in self._explorers.values()),
            broken={name: trace_of(self.row, broken) for name, broken in self.broken.items()},
            known=frozenset(name for explorer in self._explorers.values() for name in explorer.known),
            is_enough=all(map(self.has_ended, self.needed[:2])),
            has_every_single_fault=all(map(self.has_ended, self.needed)),
            is_exhausted=all(map(self.has_ended, self.circles)),
        )

    def has_ended(self, circle: Circle) -> bool:
        return circle in self._ended

    # Searching.

    def look(self, transitions: int, budget: float) -> None:
        """Search every small circle up to that number of transitions, including those of earlier looks."""
        limits = {
            circle: transitions * 2 if circle.clients > 2 and circle.most_faults else transitions
            for circle in self.small
        }
        self._advance(self.small, budget, limits)

    def finish(self, budget: float) -> None:
        """Explore the circles that a verdict needs."""
        self._advance(self.needed, budget)

    def simplify(self, budget: float) -> None:
        """Look for a simpler trace than the one that was found, in the circles that come before and end soon."""
        self._advance([c for c in self.small if c.is_needed or not c.most_faults], budget)

    def explore(self, seed: int, budget: float) -> None:
        """Explore each circle in turn, as far as its share of the time allows, and then walk at random."""
        ends_at = time.monotonic() + budget
        shares = {circle: SHARE_OF_THE_NEEDED if circle.is_needed else SHARE for circle in self.circles}
        shares[self.circles[-1]] = 1 - WALKS_SHARE
        for circle, share in shares.items():
            self._advance([circle], (ends_at - time.monotonic()) * share)
            self._searches.pop(circle, None)  # it takes memory, and will not be resumed
        if self._config.kinds and not self.is_found:
            self._walk(seed, ends_at)

    @property
    def is_found(self) -> bool:
        """Whether all invariants of ``stop_at`` are broken."""
        return self._are_all_in(self.broken)

    def _are_all_in(self, broken: dict[str, Broken]) -> bool:
        return bool(self._stop_at) and self._stop_at <= broken.keys()

    def _advance(self, circles: Iterable[Circle], budget: float, limits: Mapping[Circle, int] | None = None) -> None:
        """Search these circles in turn, each up to its number of transitions, until the time is up or everything that
        was looked for is found."""
        ends_at = time.monotonic() + budget
        for circle in circles:
            left = ends_at - time.monotonic()
            if left <= 0 or self._are_all_in(self._broken_before(circle)):
                return
            self._go_on(circle, left, NEVER if limits is None else limits[circle])

    def _go_on(self, circle: Circle, budget: float, transitions: int) -> None:
        if circle in self._ended:
            return
        explorer = self._explorers[circle.clients, circle.overtaking]
        search = self._searches.get(circle)
        if search is None:
            search = self._searches[circle] = explorer.begin(circle.most_faults, circle.kinds)
        explorer.broken = ChainMap(self._broken[circle], self._broken_before(circle))
        if explorer.go_on(search, budget=budget, transitions=transitions):
            self._ended.add(circle)
            del self._searches[circle]

    def _walk(self, seed: int, ends_at: float) -> None:
        """Random walks with one more fault, each from its own seed, until the time is up."""
        explorer = self._explorers[self._config.clients, False]
        explorer.broken = ChainMap(self._broken[None], self._broken_before(None))
        number = 0
        while time.monotonic() < ends_at and number < MOST_WALKS:
            explorer.walk(seed * 1_000_003 + number, most_faults=self._config.most_faults + 1)
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
