"""What a client knows of its own leases and intents on etcd.

Invariant. A key of ours is bound to an etcd lease that lasts, as far as our clock can tell, at least as long as the
local validity of every hold that relies on it. All holds and waiters of a client with about the same ttl share one
etcd lease, because a lease per lock would cost a request per lock. So a key does not end by itself while its client
renews other locks: a hold that is over is deleted by its client (``LeaseRegistry.keys_expire``).

An etcd lease lasts a quarter longer than the ttl, and two seconds at least (etcd makes one second into two). A hold
begins on a lease that still lasts a whole ttl. Because of the extra quarter, most acquires need not renew it first.

Any thread may call: single dict operations. If two threads find no lease at the same time, each is granted one, and the
one that is not kept ends by itself.

Clocks: our own, and the length of a lease, which only the leader of etcd counts. A new leader begins to count again, so
a lease gets longer by that, never shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from math import ceil
from typing import Any, Final

from holdfast.options import drift
from holdfast.protocol.intents.layout import name_of, read_value
from holdfast.protocol.intents.requests import (
    Answer,
    Delete,
    Item,
    Program,
    Put,
    Request,
    grant_lease,
    keep_lease,
    run_until,
)

SHORTEST: Final = 2  # seconds: etcd grants no shorter lease
LONGER: Final = 1.25  # an etcd lease lasts this many times the ttl
TOMBSTONE_LASTS: Final = 120.0  # seconds for which a request may be late
_MOST_OLD: Final = 20  # old tombstones that are removed when one is written
_EXACT: Final = 64  # seconds; longer leases are rounded up, so that similar ttls share one


class EtcdLease:
    """One lease of etcd. ``seconds`` is what was asked for, by which it is found again."""

    __slots__ = ("id", "lasts", "renewed_at", "seconds")

    def __init__(self, number: int, seconds: int, lasts: float, renewed_at: float) -> None:
        self.id = number
        self.seconds = seconds
        self.lasts = lasts
        self.renewed_at = renewed_at  # by our clock, before the request

    def covers(self, ttl: float, now: float) -> bool:
        """Whether the server keeps it for this ttl from now on, even if all later requests fail."""
        return now + ttl <= self.renewed_at + self.lasts - drift(self.lasts)


class Intent:
    """One place in the queue of a name, or in those of several names."""

    called = False  # what it waited for has changed
    created = 0  # the revision of its creation, which is its place in the queue; 0: not known to exist
    modified = 0  # the revision of the last write of its keys that we know of: they are always written together
    unsure = False  # a request that may have written its keys, or may still do so, has no answer
    fence = 0
    lease: EtcdLease | None = None  # to which its create, or its adoption, binds its keys
    bound: tuple[
        EtcdLease, ...
    ] = ()  # to which its keys may be bound now: several only after a write without an answer
    behind = ""  # the key that it has watched while it waits
    slot = -1
    slot_keys: tuple[str, ...] = ()  # of the permit that it has, or of permits that it may have
    shared = False  # its writer has become a reader
    given_up = False  # its attempt was abandoned, perhaps while a step of it was under way
    giving = False  # it is being handed over, or was
    granted_us = 0  # as ``created_us``; 0: it was granted when it was created, or not yet

    def __init__(self, keys: tuple[str, ...], created_us: int) -> None:
        self.keys = keys  # one for each name
        self.created_us = created_us  # the time of day, for people who inspect it; 0: not known

    @property
    def times(self) -> tuple[int, int]:
        return self.created_us, self.granted_us

    def lose_place(self) -> None:
        """Its keys are gone, or were never ours. The attempt goes on with the same intent, by which it is given up."""
        self.created, self.modified, self.unsure = 0, 0, False
        self.slot, self.slot_keys, self.bound = -1, (), ()

    def bind(self, lease: EtcdLease) -> None:
        """A request is about to bind its keys to that lease."""
        if lease not in self.bound:
            self.bound = (*self.bound, lease)

    def unbind(self, lease: EtcdLease) -> None:
        """No key of it is bound to that lease, nor can be any more."""
        self.bound = tuple(other for other in self.bound if other is not lease)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name_of(key) for key in self.keys)

    @property
    def all_keys(self) -> tuple[str, ...]:
        return self.keys + self.slot_keys


def seconds_for(ttl_ms: int) -> int:
    """How long an etcd lease for this ttl should be."""
    seconds = max(SHORTEST, ceil(ttl_ms * LONGER / 1000))
    if seconds > _EXACT:
        unit = 1 << (seconds.bit_length() - 6)
        seconds = -(-seconds // unit) * unit
    return seconds


class Session:
    """The leases and intents of one client."""

    def __init__(self, fence_floor: int = 0, wall_us: Callable[[], int] = lambda: 0) -> None:
        self.wall_us = wall_us  # the time of day in microseconds, only to be shown to people
        self.fence_floor = fence_floor  # added to the revision, so that fences go on rising after a move to etcd
        self.leases: dict[int, EtcdLease] = {}  # by the seconds asked for
        self.intents: dict[str, Intent] = {}  # by token
        self.tombstones: deque[tuple[float, str]] = deque()  # when they were written, and their keys
        self.handed_over: deque[tuple[float, str]] = deque()  # when their keys end at the latest, and their tokens
        self.renewed: dict[str, float] = {}  # by key of a latch: when this client has last renewed it

    def forget(self) -> None:
        """Forget everything, after a fork or in a new event loop."""
        self.leases.clear()
        self.intents.clear()
        self.tombstones.clear()
        self.handed_over.clear()
        self.renewed.clear()

    def drop(self, lease: EtcdLease) -> None:
        """Forget a lease that etcd no longer knows."""
        if self.leases.get(lease.seconds) is lease:
            self.leases.pop(lease.seconds, None)

    def forget_refused(self, token: str) -> None:
        """Forget an attempt that was refused and has no intent; not if a create of it may still arrive."""
        intent = self.intents.get(token)
        if intent is not None and not intent.unsure:
            self.intents.pop(token, None)

    def fence_of(self, held: Item) -> int:
        """The fence of an intent that holds: the revision of its last write, unless its value says another one."""
        written = read_value(held).get("fence")
        return written if isinstance(written, int) and written > 0 else self.fence_floor + held.modified

    def intent(self, token: str, keys: tuple[str, ...]) -> Intent:
        """The intent of this token. It is noted before anything is sent, so that it can be abandoned at any time."""
        return self.intents.get(token) or self.intents.setdefault(token, Intent(keys, self.wall_us()))

    def attempt(self, token: str, keys: tuple[str, ...], program: Program, reply: Any) -> Program:
        """Run the program of an attempt; once the attempt is given up, send nothing more and return that reply.

        Under asyncio a step goes on after its caller was cancelled. The abandon knows only what was sent before it.
        """
        intent = self.intent(token, keys)

        def stopped() -> bool:
            if intent.given_up and self.intents.get(token) is not intent:
                self.intents.pop(token, None)  # made after the abandon was done; until then the abandon needs the first
            return intent.given_up

        return run_until(stopped, program, reply)

    def bury(self, tombstone: str, intent: Intent, now: float) -> tuple[Put | Delete, ...]:
        """The operations that leave a tombstone, and remove some old ones.

        It is bound to the lease to which the create would bind its keys: once that lease is gone, etcd refuses the
        create anyway. If there is no lease yet, no create was sent.
        """
        if intent.lease is None:
            return ()
        old = self.old_tombstones(now)
        self.tombstones.append((now, tombstone))
        return (Put(tombstone, "", intent.lease.id), *map(Delete, old))

    def old_tombstones(self, now: float) -> list[str]:
        """Take out tombstones that are so old that no request can be as late; the caller deletes them."""
        old: list[str] = []
        while self.tombstones and self.tombstones[0][0] < now - TOMBSTONE_LASTS and len(old) < _MOST_OLD:
            try:
                old.append(self.tombstones.popleft()[1])
            except IndexError:
                break  # another thread was quicker
        return old

    def hand_over(self, token: str, until: float, now: float) -> None:
        """This hold goes to another process. Until its keys have ended, its intent is needed to abandon that."""
        self.handed_over.append((until, token))
        while self.handed_over and self.handed_over[0][0] < now:
            try:
                self.intents.pop(self.handed_over.popleft()[1], None)
            except IndexError:
                break  # another thread was quicker

    def call(self, token: str) -> None:
        """Note that what this waiter waits for has changed."""
        intent = self.intents.get(token)
        if intent is not None:
            intent.called = True


def lease_for(session: Session, ttl_ms: int, now: float) -> Generator[Request, Answer, EtcdLease]:
    """A lease that lasts for this ttl from now on: the shared one, renewed if need be, or a new one."""
    lease = session.leases.get(seconds_for(ttl_ms))
    if lease is not None and (yield from kept(session, lease, ttl_ms / 1000, now)):
        return lease
    lease = yield from new_lease(seconds_for(ttl_ms))
    session.leases[lease.seconds] = lease
    return lease


def new_lease(seconds: int) -> Generator[Request, Answer, EtcdLease]:
    """A lease that is not shared."""
    asked_at, granted = yield from grant_lease(seconds)
    return EtcdLease(granted.lease, seconds, granted.seconds, asked_at)


def kept(session: Session, lease: EtcdLease, ttl: float, now: float) -> Generator[Request, Answer, bool]:
    """Whether this lease lasts for this ttl from now on; it is renewed only if need be."""
    if lease.covers(ttl, now):
        return True
    asked_at, renewed = yield from keep_lease(lease.id)
    if renewed.seconds <= 0:
        session.drop(lease)
        return False
    lease.lasts = renewed.seconds
    lease.renewed_at = max(lease.renewed_at, asked_at)
    return lease.covers(ttl, asked_at)
