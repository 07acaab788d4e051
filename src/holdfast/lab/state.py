"""The values of a search: what is explored (``Config``), and one state of it.

A state is a handful of numbers and small tuples, so that it can be hashed and compared: stores and clients are named by
their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, NamedTuple, Protocol

from holdfast.lab.faults import FAULTS
from holdfast.lab.visits import take_and_give_back

__all__ = ["NEVER", "NOBODY", "Choice", "Config", "Reply", "State", "Under", "View", "is_answered", "under_way"]

Choice = tuple[Any, ...]  # what happens; plain data
NOBODY: Final = -1
NEVER: Final = 1 << 62


class Under(NamedTuple):
    """Something under way: to the server (a request that nobody waits for any more), or to a client."""

    kind: str  # "ghost", "bell", "push", "cut", "reply" or "late" (a reply that time may overtake)
    client: int
    content: Any


class View(Protocol):
    """What a search sees of something that is no single key, in the store of its server."""

    has_owner: bool  # the search looks at one key as well, and whose it is
    in_turn: bool  # only who has waited longest can go on; else everybody can

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether that client could go on, if it is its turn; or, if nobody waits, whether it is free."""

    def has_place(self, store: Any, name: str) -> bool:
        """Whether anything there shuts others out in the name of that client."""


class Config(NamedTuple):
    """What is explored, and within which bounds."""

    make_lock: Callable[[Any], Any]  # given a driver
    key: str
    deadline_us: Callable[[bytes, int | None], int | None]  # until when what the key holds shuts others out
    new_store: Callable[[], Any]
    by_server: bool = True  # that deadline is kept by the server's clock, not by those of the clients
    clients: int = 3
    kinds: tuple[str, ...] = tuple(FAULTS)
    opening: tuple[str, ...] | None = None  # what the first fault may be, if not all of these
    spares_holders: bool = False  # no fault befalls who has the lock, and whom one befell before does not stay
    most_faults: int = 2
    ttl_us: int = 3_000_000
    stay_us: int = 1_200_000
    leaves_us: tuple[tuple[int, int], ...] = ((0, 0), (50_000, 150_000))  # when it may leave before that is over
    late: bool = False  # clients may come at any time, not only at the beginning
    polls: bool = False  # who waits does so between two tries, each of which is an attempt of its own
    horizon_us: int = 10_000_000
    overtaking: bool = False  # notifications, and replies to later steps, may arrive before the reply to a step
    lag: int = 1  # how many of the last writes a replica may lack
    patience: float | None = 4.5  # how long a client waits for the lock; None for ever
    idle_us: int = 200_000  # how long a free lock may be left alone while somebody waits,
    idle_us_per_fault: int = 1_000_000  # and how much longer for each fault, after which a step is sent again
    newcomer_us: int = 2_000_000  # how much longer than a ttl a newcomer may need
    tick_us: int = 0  # by how much time passes with each step; 0: steps take no time, so that clocks can agree
    view: View | None = None  # who can go on, where that is not told by one key
    queue: str = ""  # a key that names a waiter in this queue is kept for that waiter, and nobody's
    program: Callable[[Any], Coroutine[Any, Any, None]] = take_and_give_back  # what every client does, given its site
    alike: bool = True  # all clients do the same, so that it is all the same who of them comes first
    mortal: bool = False  # when all is over, nothing may be left that no time removes
    heeds: frozenset[str] = frozenset()  # steps whose execution is an event of its own
    looks: Callable[[Any, State, State], Iterator[tuple[int, str, str]]] | None = None  # what else is to be seen
    # when one state of a model becomes the next: clients, kinds of event, and what they say
    reduce: bool = True  # local steps happen at once, and steps that commute are taken in one order only


class State(NamedTuple):
    now_us: int
    store: int
    locals: tuple[int, ...]
    under_way: tuple[Under, ...] = ()
    stopped: tuple[int, ...] = ()  # until when each client is paused; NEVER if it has crashed
    held_back: tuple[bool, ...] = ()  # whether it was stopped before it could send, and has not done so since
    since: tuple[int, ...] = ()  # since when each could have made progress
    tracked: frozenset[tuple[bytes, int]] = frozenset()
    faults: int = 0
    owner: int = NOBODY  # whose the key is
    free_since: int = 0  # since when the lock is free, or its owner does not know that it has it; else -1
    arrived: tuple[int, ...] = ()  # who waits, in the order of arrival
    touched: int = 0  # whom a fault has befallen, as bits
    come: int = 0  # how many clients have come
    fence: int = 0  # the highest that was minted
    before: tuple[int, ...] = ()  # stores that a replica may still be at
    broken_links: frozenset[str] = frozenset()  # connections to a server that is no more


def under_way(state: State) -> Iterator[tuple[tuple[str, int, int], Under]]:
    """What is under way, each with a name: its kind, its client, and its place among those of that kind and client."""
    count: dict[tuple[str, int], int] = {}
    for item in sorted(set(state.under_way), key=repr) if len(state.under_way) > 1 else state.under_way:
        place = count[item.kind, item.client] = count.get((item.kind, item.client), -1) + 1
        yield (item.kind, item.client, place), item


class Reply(NamedTuple):
    """The content of a reply under way. It is compared as text, for -1 and -2 have the same hash."""

    number: int  # of the request
    replies: tuple[Any, ...]
    text: str
    at_us: int = 0  # when the step was executed,
    local: int = 0  # and the mark of its sender then; 0 if its sender was stopped

    def is_overtaken(self, state: State, client: int) -> bool:
        """Whether anything has happened to its receiver since. Else it is as if it had arrived at once."""
        return state.locals[client] != self.local or state.now_us > self.at_us


def is_answered(state: State, client: int, number: int) -> bool:
    """Whether the server has executed it, and the reply is still under way."""
    return any(
        item.kind in ("reply", "late") and item.client == client and item.content.number == number
        for item in state.under_way
    )
