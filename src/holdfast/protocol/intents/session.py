"""What a client knows of its own leases and intents on etcd.

Invariant. A key of ours is bound to an etcd lease that lasts, as far as our clock can tell, at least as long as the
local validity of every hold that relies on it. All holds and waiters of a client with about the same ttl share one
etcd lease, because a lease per lock would cost a request per lock. So a key does not end by itself while its client
renews other locks: a hold that is over is deleted by its client (``LeaseRegistry.keys_expire``).

If a create without an answer was given up, it may arrive at any later time, and its key would last as long as the lease
that it shares. So all creates of an attempt name the same lease, and the tombstone of the attempt is bound to that one:
it is there for as long as etcd would execute the create. After ``MOST_TOMBSTONES`` of them nothing new is bound to that
lease, so it ends with the last hold that is on it, and so do the tombstones.

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
    Item,
    NotExecuted,
    Program,
    Put,
    Request,
    grant_lease,
    keep_lease,
    run_until,
)

SHORTEST: Final = 2  # seconds: etcd grants no shorter lease
LONGER: Final = 1.25  # an etcd lease lasts this many times the ttl
MOST_TOMBSTONES: Final = 100  # on one lease
NOTED: Final = 120  # seconds for which a client remembers at least what was counted or broken
_EXACT: Final = 64  # seconds; longer leases are rounded up, so that similar ttls share one


class EtcdLease:
    """One lease of etcd. ``seconds`` is what was asked for, by which it is found again."""

    __slots__ = ("id", "lasts", "renewed_at", "seconds", "tombstones")

    def __init__(self, number: int, seconds: int, lasts: float, renewed_at: float) -> None:
        self.id = number
        self.seconds = seconds
        self.lasts = lasts
        self.renewed_at = renewed_at  # by our clock, before the request
        self.tombstones = 0  # that are bound to it

    @property
    def ends_at(self) -> float:
        """Until then the server keeps it, even if all later requests fail."""
        return self.renewed_at + self.lasts - drift(self.lasts)

    def covers(self, ttl: float, now: float) -> bool:
        """Whether the server keeps it for this ttl from now on, even if all later requests fail."""
        return now + ttl <= self.ends_at


class Intent:
    """One place in the queue of a name, or in those of several names."""

    called = False  # what it waited for has changed
    created = 0  # the revision of its creation, which is its place in the queue; 0: not known to exist
    modified = 0  # the revision of the last write of its keys that we know of: they are always written together
    unsure = False  # a request that may have written its keys, or may still do so, has no answer
    was_unsure = False  # that has happened: a create may arrive when its keys are gone
    fence = 0
    lease: EtcdLease | None = None  # to which its create, or its adoption, binds its keys
    bound: tuple[EtcdLease, ...] = ()  # to which its keys may be bound: several only after a write without an answer
    behind = ""  # the key that it has watched while it waits
    slot = -1
    slot_keys: tuple[str, ...] = ()  # of the permit that it has, or of permits that it may have
    shared = False  # its writer has become a reader
    programs = 0  # of acquire steps that run: several after a waiter was cancelled and another one has its place
    given_up = False  # its attempt was abandoned or its hold released, perhaps while a step of it was under way
    giving = False  # it is being handed over, or was: a renewal that began before binds its keys to no other lease
    granted_us = 0  # as ``created_us``; 0: it was granted when it was created, or not yet

    def __init__(self, keys: tuple[str, ...], created_us: int) -> None:
        self.keys = keys  # one for each name
        self.created_us = created_us  # the time of day, for people who inspect it; 0: not known

    @property
    def times(self) -> tuple[int, int]:
        return self.created_us, self.granted_us

    def lose_place(self, created: int) -> None:
        """Its keys of that creation are gone, or were never ours. The attempt goes on with the same intent.

        Nothing is lost if it has other keys by now, or was given up: another step with this token was quicker.
        """
        if self.created != created or self.given_up:
            return
        self.created, self.modified, self.unsure = 0, 0, self.was_unsure
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
        self.notes: EtcdLease | None = None  # see lease_of_notes
        self.handed_over: deque[tuple[float, str]] = deque()  # when their keys may have ended, and their tokens
        self.renewed: dict[str, float] = {}  # by key of a latch: when this client has last renewed it

    def forget(self) -> None:
        """Forget everything, after a fork or in a new event loop."""
        self.leases.clear()
        self.intents.clear()
        self.notes = None
        self.handed_over.clear()
        self.renewed.clear()

    def drop(self, lease: EtcdLease) -> None:
        """Bind nothing new to this lease: etcd no longer knows it, or it has many tombstones."""
        if self.leases.get(lease.seconds) is lease:
            self.leases.pop(lease.seconds, None)

    def forget_refused(self, token: str) -> None:
        """Forget an attempt that was refused and has no keys; not if a create of it may still arrive."""
        intent = self.intents.get(token)
        if intent is not None and not intent.created and not intent.unsure and intent.programs <= 1:
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

        return self._run(token, intent, run_until(stopped, program, reply))

    def _run(self, token: str, intent: Intent, program: Program) -> Program:
        """Run the program of an attempt. If none of its requests was executed, its caller has nothing to abandon."""
        intent.programs += 1
        try:
            return (yield from program)
        except NotExecuted:
            self.forget_refused(token)
            raise
        finally:
            intent.programs -= 1

    def bury(self, tombstone: str, intent: Intent) -> tuple[Put, ...]:
        """The operation that leaves a tombstone.

        It is bound to the lease to which the create would bind its keys: once that lease is gone, etcd refuses the
        create anyway. No operation if every create was answered, or names a lease that is gone.
        """
        lease = intent.lease
        if lease is None or not (intent.unsure or intent.was_unsure):
            return ()
        lease.tombstones += 1
        if lease.tombstones >= MOST_TOMBSTONES:
            self.drop(lease)
        return (Put(tombstone, "", lease.id),)

    def hand_over(self, token: str, until: float, now: float) -> None:
        """This hold goes to another process. Until its keys have ended, its intent is needed to abandon that.

        Its holder may go on all the same: if it was cancelled, it never learned of the hand-over. Then it renews.
        """
        self.handed_over.append((until, token))
        while self.handed_over and self.handed_over[0][0] < now:
            try:
                _, ended = self.handed_over.popleft()
            except IndexError:
                break  # another thread was quicker
            intent = self.intents.get(ended)
            until = max((lease.ends_at for lease in intent.bound), default=0.0) if intent is not None else 0.0
            if until < now:
                self.intents.pop(ended, None)
            else:
                self.handed_over.append((until, ended))

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


def lease_of_attempt(
    session: Session, intent: Intent, ttl_ms: int, now: float
) -> Generator[Request, Answer, EtcdLease]:
    """The lease that the attempt has named before, unless that is gone; it lasts for this ttl from now on."""
    lease = intent.lease
    if lease is None or not (yield from kept(session, lease, ttl_ms / 1000, now)):
        lease = yield from lease_for(session, ttl_ms, now)
    intent.lease = lease
    return lease


def lease_of_notes(session: Session, now: float) -> Generator[Request, Answer, EtcdLease]:
    """The lease for what was counted or broken, and by which token: it lasts for two minutes, and is not renewed."""
    lease = session.notes
    if lease is None or not lease.covers(NOTED, now):
        lease = session.notes = yield from new_lease(2 * NOTED)
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
