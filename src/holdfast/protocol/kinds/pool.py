"""Permit pools: what a semaphore and a readers-writer lock have in common.

Invariant. A pool has permits. A holder has one of them (numbered for a semaphore, one of very many for a reader) or all
of them (a writer). Clients for which there are too few permits wait in one queue. The first waiter is granted its
permits as soon as they are free, then the next, and so on. So adjacent readers are granted together, and no waiter
passes an earlier one: neither readers nor writers starve.

Each holder has a lease of its own, with its own token, ttl, fence and end. It is acquired, renewed, lost and released
by the protocols of the mutex; only the steps are different. A holder that is silent loses its permit when its ttl ends;
other holders are not affected.

Atomic: each step in lua/pool. Clocks: as in mutex.py; the end of each lease is counted by the server's clock.

A semaphore or reader object may have many leases, of many threads or tasks, each with an object slot of its own (see
cohort.py); a writer object has one, like any lock. Cohorts do not apply: a permit that is passed on within a process
would keep earlier waiters of other processes waiting.

If a permit is taken away, the keeper notifies its holder, because it has the pool watched: see membership.py. Waiters
ask every half second, and so find out that a pool was emptied by hand.

Damage by hand. All that the server knows of a holder is in one key. If it is deleted, the holder is notified. If
another key of the pool is deleted, the holder still counts. So if a deleted key lets a second holder in where one is
allowed, one of the two is notified.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final, TypeVar

from holdfast.errors import HoldfastError, NotHeld
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol.effects import STOPPED, Effects, Step, caller
from holdfast.protocol.hold import ENDED, HELD
from holdfast.protocol.kinds.handover import adopt, read_ticket
from holdfast.protocol.kinds.membership import SharedHold
from holdfast.protocol.leases import release_lease
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.steps import way_to_wait
from holdfast.protocol.wait.cohort import ObjectSlot

# Modes. That of a semaphore is "n5": one of five numbered permits.
ALL: Final = "all"  # all permits: there is no other holder
ANY: Final = "any"  # any one of very many permits

L = TypeVar("L", bound=BaseLease)


def pool_keys(keys: Keys) -> tuple[str, ...]:
    """The keys of every step of a permit pool: the holders, the fence, the queue and its waiters."""
    _, fence, queue, waiters = keys.shared
    return f"{keys.head}holders{keys.tail}", fence, queue, waiters


class _PoolSteps:
    """The steps of a permit pool."""

    tracks_key = False  # membership.py finds a loss
    shown_by_keeper = True
    first_waiter_asks = True
    foreign_clients = False

    def acquire_step(self, hold: PoolHold, channel: str, watch: bool) -> Step:
        keys, token = hold.keys, hold.token
        ttl, retention, _ = hold.options.wire_args
        return Step(
            "pool_acquire",
            (*hold.pool, keys.tombstone(token), keys.main),
            (token, ttl, retention, hold.kind, way_to_wait(hold, channel), hold.mode),
        )

    def release_step(self, hold: PoolHold) -> Step:
        return Step("pool_release", hold.pool, (hold.token,))

    def abandon_step(self, hold: PoolHold, tombstone_ms: int) -> Step:
        return Step("pool_abandon", (*hold.pool, hold.keys.tombstone(hold.token)), (hold.token, str(tombstone_ms)))

    def renew_step(self, hold: PoolHold, ttl_ms: int, watch: bool) -> Step:
        return Step("pool_renew", hold.pool, (hold.token, str(ttl_ms)))

    def leave_step(self, hold: PoolHold, lasts_ms: int) -> Step:
        return Step("pool_leave", hold.pool, (hold.token, str(lasts_ms)))

    def hand_over_step(self, hold: PoolHold, tombstone_ms: int) -> Step:
        keys = (*hold.pool, hold.keys.tombstone(hold.token))
        return Step("pool_hand_over", keys, (hold.token, str(hold.options.ttl_ms), str(tombstone_ms)))

    def adopt_step(self, hold: PoolHold, giver: str) -> Step:
        ttl, retention, _ = hold.options.wire_args
        keys = (*hold.pool, hold.keys.tombstone(hold.token))
        return Step("pool_adopt", keys, (hold.token, ttl, retention, giver, hold.mode))


_POOL_STEPS: Final = _PoolSteps()


class PoolHold(SharedHold):
    """One acquisition of a permit, or of all."""

    steps = _POOL_STEPS

    def __init__(
        self, keys: Keys, options: LockOptions, object_slot: ObjectSlot, pool: tuple[str, ...], *, kind: str, mode: str
    ) -> None:
        super().__init__(keys, options, object_slot)
        self.pool = pool
        self.kind = kind
        self.mode = mode
        self.owner: Hashable = None  # the thread or task that has acquired it
        self.among: object = None  # the set of its owner's holds (see rwlock.py), which this reference keeps alive

    @property
    def permit(self) -> str:
        if self.mode == ALL:
            return "write"
        return "read" if self.mode == ANY else f"permit {self.slot} of {self.mode[1:]}"


class BasePool(BaseLock[L]):
    """A semaphore, or one side of a readers-writer lock: many leases of one object."""

    __slots__ = ("_leases", "_pool", "_tidy_at")

    _kind = ""
    _not_held_type: type[NotHeld] = NotHeld

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L]) -> None:
        self._pool = pool_keys(keys)
        super().__init__(driver, keys, replace(options, cohort=0) if options.cohort else options, lease_class)

    def _begin_generation(self) -> None:
        super()._begin_generation()
        self._leases: dict[PoolHold, L] = {}  # oldest first; may contain leases that were released directly
        self._tidy_at = 8

    def _mode(self) -> str:
        raise NotImplementedError

    def _new_object_slot(self) -> ObjectSlot:
        """One for each hold, so that leases of one object do not wait for each other."""
        return ObjectSlot(self._driver.cohorts)

    def _new_hold(self) -> PoolHold:
        object_slot, mode = self._new_object_slot(), self._mode()
        hold = PoolHold(self._keys, self._options, object_slot, self._pool, kind=self._kind, mode=mode)
        hold.not_held_type = self._not_held_type
        return hold

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        lease = None
        try:
            lease = yield from super()._obtain(patience, weakly(me))
            self._note(lease, me)
        except STOPPED:  # interrupted before the lease was noted: the caller does not get it
            if lease is not None:
                yield from self._withdraw(lease._hold)
            raise
        return lease

    def _note(self, lease: L, me: Hashable) -> None:
        """Remember it, for ``release``."""
        hold = lease._hold
        assert isinstance(hold, PoolHold)
        hold.owner = me
        self._leases[hold] = lease
        self._lease = None
        if len(self._leases) >= self._tidy_at:
            for known in list(self._leases):  # one by one, because other threads add theirs meanwhile
                if known.phase is ENDED:
                    self._leases.pop(known, None)
            self._tidy_at = 2 * len(self._leases) + 8

    def _adopt(self, ticket: str) -> Effects[L]:
        """Adopt what was handed over, with the options of this object; InvalidConfig if the ticket is for another."""
        return adopt(self, read_ticket(ticket, self._keys.main.removesuffix(self.name)))

    def _release(self, n: int = 1) -> Effects[None]:
        """Give back n leases, all or none: the caller's latest first, then the oldest of all."""
        me = yield from caller()
        taken: list[L] = []
        try:
            while len(taken) < n:
                held = [hold for hold in list(self._leases) if hold.phase is not ENDED]
                if len(taken) + len(held) < n:
                    raise self._not_held(len(taken) + len(held), n)
                hold = next((hold for hold in reversed(held) if hold.owner == me), held[0])
                lease = self._leases.pop(hold, None)
                if lease is not None:  # else another thread has just taken it
                    taken.append(lease)
            errors = []
            while taken:
                try:
                    yield from release_lease(taken[0])
                except HoldfastError as error:  # still release the others
                    errors.append(error)
                del taken[0]
        finally:  # leases are left only if another thread took the others, or after an interrupt: put them back
            self._leases.update((lease._hold, lease) for lease in reversed(taken))  # type: ignore[misc]
        if errors:
            raise errors[0]

    def _not_held(self, held: int, n: int) -> NotHeld:
        """The error of releasing n leases where that many are held."""
        return self._not_held_type(self.name, key=self.key)

    def _look(self) -> Effects[tuple[int, bool]]:
        """How many holders are inside, and whether one of them has all permits."""
        inside: int
        alone: bool
        inside, alone = yield from self._ask_server(Step("pool_look", self._pool, ()))
        return inside, alone

    def _why_not(self, now: float, me: Hashable) -> str:
        return ""

    def __repr__(self) -> str:
        held = sum(hold.phase is HELD for hold in list(self._leases))
        return f"<{type(self).__module__}.{type(self).__name__} object {self.key!r}, {held} held, at {id(self):#x}>"
