"""The values of a search: what is explored (``Config``), and one state of the search (``State``).

A state consists of numbers and small tuples, so that it can be hashed and compared: stores and clients are named by
their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, NamedTuple, Protocol

from holdfast.lab.search.faults import DEFAULT_FAULTS
from holdfast.lab.search.visits import take_and_give_back

Choice = tuple[Any, ...]  # what happens; plain data
NOBODY: Final = -1
NEVER: Final = 1 << 62


class Under(NamedTuple):
    """A message under way: to the server (a request whose sender has given up), or to a client.

    Its kind is "ghost" (such a request), "bell" (a notification, named as in saved traces), "push" (of client
    tracking), "cut" (the subscriber's connection broke), "reply", or "late" (a reply that time may overtake).
    """

    kind: str
    client: int
    content: Any


class View(Protocol):
    """What a search reads from the store about a lock that is more than one key."""

    has_owner: bool  # the search also tracks the owner of one key
    in_turn: bool  # only the client that has waited longest can proceed; else all clients can

    def is_free(self, store: Any, name: str | None) -> bool:
        """Whether that client could proceed if it is its turn; without a client, whether the lock is free."""

    def is_blocked_by(self, store: Any, name: str) -> bool:
        """Whether an entry of that client keeps other clients out."""


class Config(NamedTuple):
    """What is explored, and within which bounds."""

    make_lock: Callable[[Any], Any]  # given a driver
    key: str
    deadline_us: Callable[[bytes, int | None], int | None]  # until when a key with that value blocks others
    new_store: Callable[[], Any]
    by_server: bool = True  # that deadline is measured by the server's clock, not by the clients' clocks
    clients: int = 3
    kinds: tuple[str, ...] = DEFAULT_FAULTS
    first: str = ""  # the kind of the first fault of a run; empty: any of ``kinds``
    spares_holders: bool = False  # no fault hits a holder, and a client that was hit earlier leaves at once
    most_faults: int = 2
    required: frozenset[str] = frozenset()  # only runs with a fault of one of these kinds count; empty: all runs
    ttl_us: int = 3_000_000
    stay_us: int = 1_200_000
    leaves_us: tuple[tuple[int, int], ...] = ((0, 0), (50_000, 150_000))  # when a holder may leave earlier than that
    late: bool = False  # clients may come at any time, not only at the beginning
    polls: bool = False  # a waiter waits between two tries, each of which is a separate attempt
    horizon_us: int = 10_000_000
    overtaking: bool = False  # notifications, and replies to later steps, may arrive before the reply to a step
    lag: int = 1  # how many of the last writes a replica may lack
    sentinels: tuple[tuple[int, ...], ...] = ()  # for each client those that it asks, in this order: see failover.py
    beside: bool = False  # a replica follows the old primary for a while
    hangs: bool = False  # the old primary hangs, and clients come after it was replaced
    stuck: bool = False  # the first request of the last client was sent to the old primary before it hung
    promotes: str = ""  # if grants are confirmed, which replica takes over: a "confirmed" one has all of them, or "any"
    patience: float | None = 4.5  # how long a client waits for the lock; None forever
    idle_us: int = 200_000  # how long a lock may stay free while a client waits for it
    idle_us_per_fault: int = 1_000_000  # added to idle_us for each fault, because a step must be sent again
    newcomer_us: int = 2_000_000  # how much longer than a ttl a newcomer may need
    divided: bool = False  # each name is in a slot of its own: a step on several names is sent slot by slot
    tick_us: int = 0  # how long each step takes; 0: no time, so two clients can read the same time
    view: View | None = None  # which clients can proceed, if one key does not show that
    queue: str = ""  # if the key's value is in this queue, the key is kept for that waiter and has no owner
    program: Callable[[Any], Coroutine[Any, Any, None]] = take_and_give_back  # what every client does, given its site
    alike: bool = True  # all clients run the same program, so their order does not matter
    mortal: bool = False  # when all clients are done, every remaining key must have a ttl
    heeds: frozenset[str] = frozenset()  # steps whose execution is an event
    looks: Callable[[Any, State, State], Iterator[tuple[int, str, str]]] | None = None  # further events of a
    # transition between two states of a model: client, kind of event, and what it says
    reduce: bool = True  # local steps happen at once, and steps that commute are taken in one order only


class State(NamedTuple):
    now_us: int
    store: int
    locals: tuple[int, ...]
    under_way: tuple[Under, ...] = ()
    stopped: tuple[int, ...] = ()  # until when each client is paused; NEVER if it has crashed
    held_back: tuple[bool, ...] = ()  # whether each was stopped before it could send, and has not sent since
    since: tuple[int, ...] = ()  # since when each could have made progress
    tracked: frozenset[tuple[bytes, int]] = frozenset()
    faults: int = 0
    owner: int = NOBODY  # the client that the key belongs to
    free_since: int = 0  # since when the lock has been free, or its owner has not known of the grant; else -1
    arrived: tuple[int, ...] = ()  # the waiters, in the order of arrival
    touched: int = 0  # the clients that a fault has hit, as bits; one more bit for a fault of a required kind
    come: int = 0  # how many clients have come
    fence: int = 0  # the highest fence that was minted
    before: tuple[int, ...] = ()  # earlier stores, which a replica may still have
    broken_links: frozenset[str] = frozenset()  # dedicated connections to a server that was replaced
    moved_by: int = 0  # when the slot will have moved; 0 if it is not moving
    fleet: Any = None  # the Fleet of a failover that Sentinels lead
    old: int = 0  # the store of a primary that was replaced, and goes on
    outdated: int = 0  # the clients that would send their next step to the old node of the slot, as bits


def under_way(state: State) -> Iterator[tuple[tuple[str, int, int], Under]]:
    """The messages under way, each with a name: its kind, its client, and its number among those of both."""
    count: dict[tuple[str, int], int] = {}
    for item in sorted(set(state.under_way), key=repr) if len(state.under_way) > 1 else state.under_way:
        place = count[item.kind, item.client] = count.get((item.kind, item.client), -1) + 1
        yield (item.kind, item.client, place), item


class Reply(NamedTuple):
    """The content of a reply under way. ``text`` tells -1 and -2 apart, which have the same hash."""

    number: int  # of the request
    replies: tuple[Any, ...]
    text: str
    at_us: int = 0  # when the step was executed
    local: int = 0  # the mark of its sender at that time; 0 if its sender was stopped

    def is_overtaken(self, state: State, client: int) -> bool:
        """Whether its receiver has had another input since. If not, the reply could have arrived at once."""
        return state.locals[client] != self.local or state.now_us > self.at_us


def is_answered(state: State, client: int, number: int) -> bool:
    """Whether the server has executed that request, and the reply is still under way."""
    return any(
        item.kind in ("reply", "late") and item.client == client and item.content.number == number
        for item in state.under_way
    )
