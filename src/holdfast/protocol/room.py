"""Rooms: what a semaphore and a readers-writer lock have in common.

Invariant. A room has places. Whoever holds has one of them (a permit, with a number; a reader, one of very many) or all
of them (a writer). Those who do not fit stand in one queue, and whoever is at its head comes in as soon as it fits,
then the next, and so on. So readers that stand next to each other come in together; and nobody passes whoever does not
fit, which is why neither readers nor writers starve.

Each holder has a lease of its own, with its own token, ttl, fence and end; it is acquired, kept, lost and given back by
the protocols of the mutex, of which only the steps are different. One that falls silent loses its place when its ttl is
over, and nobody else loses anything by that.

Atomic: each room_*.lua step. Clocks: as in mutex.py; when a lease inside ends is counted by the server's clock.

An object of a room may have many leases, of many threads or tasks, each with a gate of its own (see cohort.py); a
writer's object has one gate, like any lock. Cohorts do not apply: a permit that goes round within a process would keep
others waiting who were first.

A holder whose permit is taken away learns that from its keeper, which has the pool watched: see
lookout.py. Waiters do not: they ask every half second, and so find out that a room was emptied by hand.

Damage by hand. All that the server knows of a holder is in one key. If that is deleted, the holder is told; if another
key of the room is deleted, the holder still counts. So no key can be deleted that lets two in without telling one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final, TypeVar

from holdfast.errors import HoldfastError, NotHeld
from holdfast.lease import ENDED, HELD, BaseLease, Terms
from holdfast.names import Keys
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import STOPPED, Effects, Step, caller
from holdfast.protocol.handover import adopt, read_ticket
from holdfast.protocol.lock import BaseLock, release_lease, weakly
from holdfast.protocol.lookout import SharedHold
from holdfast.protocol.replies import POOL

__all__ = ["ALL", "ANY", "BaseRoom", "RoomHold", "room_keys"]

ALL: Final = "all"  # of the places: nobody else is inside
ANY: Final = "any"  # place will do, and there are very many; else "n5": one of five that have numbers

L = TypeVar("L", bound=BaseLease)


def room_keys(keys: Keys) -> tuple[str, ...]:
    """The holders, the fence, the queue, its waiters: what every step of a permit pool wants."""
    _, fence, queue, waiters = keys.shared
    return f"{keys.head}holders{keys.tail}", fence, queue, waiters


class _Room:
    """The steps of a room."""

    watches = False  # by these steps, that is
    attended = True

    def acquire_step(self, hold: RoomHold, channel: str, watch: bool) -> Step:
        keys, token = hold.keys, hold.token
        ttl, retention, _ = hold.terms.said
        return Step(
            "room_acquire",
            (*hold.room, keys.tombstone(token), keys.main),
            (token, ttl, retention, f"{hold.species}{POOL}", channel, hold.wanted),
        )

    def release_step(self, hold: RoomHold) -> Step:
        return Step("room_release", hold.room, (hold.token,))

    def abandon_step(self, hold: RoomHold, stands_ms: int) -> Step:
        return Step("room_abandon", (*hold.room, hold.keys.tombstone(hold.token)), (hold.token, str(stands_ms)))

    def renew_step(self, hold: RoomHold, ttl_ms: int, watch: bool) -> Step:
        return Step("room_renew", hold.room, (hold.token, str(ttl_ms)))

    def hand_over_step(self, hold: RoomHold, stands_ms: int) -> Step:
        keys = (*hold.room, hold.keys.tombstone(hold.token))
        return Step("room_hand_over", keys, (hold.token, str(hold.terms.ttl_ms), str(stands_ms)))

    def adopt_step(self, hold: RoomHold, giver: str) -> Step:
        ttl, retention, _ = hold.terms.said
        keys = (*hold.room, hold.keys.tombstone(hold.token))
        return Step("room_adopt", keys, (hold.token, ttl, retention, giver, hold.wanted))


_ROOM: Final = _Room()


class RoomHold(SharedHold):
    """One acquisition of a place, or of all."""

    kind = _ROOM

    def __init__(
        self, keys: Keys, terms: Terms, gate: Gate, room: tuple[str, ...], *, species: str, wanted: str
    ) -> None:
        super().__init__(keys, terms, gate)
        self.room = room
        self.species = species
        self.wanted = wanted
        self.owner: Hashable = None  # the thread or task that has acquired it
        self.among: object = None  # what else that one reads; kept alive from here

    @property
    def place(self) -> str:
        """What it has, in words."""
        if self.wanted == ALL:
            return "write"
        return "read" if self.wanted == ANY else f"permit {self.slot} of {self.wanted[1:]}"


class BaseRoom(BaseLock[L]):
    """One way into a room, for as many leases as there are places."""

    __slots__ = ("_leases", "_room", "_tidy_at")

    _species = ""
    _unheld: type[NotHeld] = NotHeld

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L]) -> None:
        self._room = room_keys(keys)
        super().__init__(driver, keys, replace(terms, cohort=0) if terms.cohort else terms, lease_class)

    def _begin_life(self) -> None:
        super()._begin_life()
        self._leases: dict[RoomHold, L] = {}  # oldest first; with some that were given back by themselves
        self._tidy_at = 8

    def _wanted(self) -> str:
        raise NotImplementedError

    def _new_gate(self) -> Gate:
        """Of its own, so that nobody waits for another's lease of the same object."""
        gate = Gate()
        gate.cohorts = self._driver.cohorts
        return gate

    def _new_hold(self) -> RoomHold:
        gate, wanted = self._new_gate(), self._wanted()
        hold = RoomHold(self._keys, self._terms, gate, self._room, species=self._species, wanted=wanted)
        hold.unheld = self._unheld
        return hold

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        lease = None
        try:
            lease = yield from super()._obtain(patience, weakly(me))
            self._note(lease, me)
        except STOPPED:  # a signal handler struck before the lease was noted, and nobody will have it
            if lease is not None:
                yield from self._withdraw(lease._hold)
            raise
        return lease

    def _note(self, lease: L, me: Hashable) -> None:
        """Remember it, for ``release``."""
        hold = lease._hold
        assert isinstance(hold, RoomHold)
        hold.owner = me
        self._leases[hold] = lease
        self._lease = None
        if len(self._leases) >= self._tidy_at:
            for known in list(self._leases):  # one by one, for other threads add theirs meanwhile
                if known.phase is ENDED:
                    self._leases.pop(known, None)
            self._tidy_at = 2 * len(self._leases) + 8

    def _adopt(self, ticket: str) -> Effects[L]:
        """Go on with what was handed over, on the terms of this object; InvalidConfig if it is a ticket for another."""
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
                if lease is not None:  # else another thread was first to take that one
                    taken.append(lease)
            errors = []
            while taken:
                try:
                    yield from release_lease(taken[0])
                except HoldfastError as error:  # the others are given back all the same
                    errors.append(error)
                del taken[0]
        finally:  # nothing is left, unless another thread or an interrupt has come between
            self._leases.update((lease._hold, lease) for lease in reversed(taken))  # type: ignore[misc]
        if errors:
            raise errors[0]

    def _not_held(self, held: int, n: int) -> NotHeld:
        """The error of releasing n leases where that many are held."""
        return self._unheld(self.name)

    def _look(self) -> Effects[tuple[int, bool]]:
        """How many are inside, and whether it is one who has the room to itself."""
        inside: int
        alone: bool
        inside, alone = yield from self._ask_server(Step("room_look", self._room, ()))
        return inside, alone

    def _why_not(self, now: float, me: Hashable) -> str:
        return ""

    def __repr__(self) -> str:
        held = sum(hold.phase is HELD for hold in list(self._leases))
        return f"<{type(self).__module__}.{type(self).__name__} object {self.name!r}, {held} held, at {id(self):#x}>"
