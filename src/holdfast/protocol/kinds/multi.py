"""A lock on several names: all of them or none.

Invariant. A client holds all names or none. A waiter holds nothing, but a name that becomes free while it is first in
the queue is *kept* for it: its token is in the key, and stays in the queue, which marks the name as kept. A kept name
becomes a hold only by the acquire step, which takes all names or none.

Atomic: each step is one script over all names, as a step of the mutex is over one, and idempotent by the same token.
All names have one fence, greater than all earlier fences of any of them. A lease that has lost one name is lost.

Waiting has two phases. At first the waiter is in the queue of the name that refused it. If another name refuses it, it
releases what is kept for it there. So it delays no other client, and gets all names when all are free at the same time.
If that does not happen within PATIENCE, the waiter joins the queues of all names, with one time of arrival, later than
that of every other waiter there. From then on, names that become free while it is first stay kept for it. So its wait
ends when the holders and waiters before it have left, even if the names are always busy.

No deadlock. Waiters have one order: the time of arrival, or in the first phase the server's time of the first refusal,
which the waiter sends with each step. A kept name goes to an earlier waiter that asks for it. So the earliest of all
waiters lacks only names that are held. A waiter that was removed from one of its queues joins all of them again;
otherwise it would be early in one and late in another.

Nested locks. A holder may itself wait for a name that is kept. So a waiter sends the tokens that its thread or task
holds, and a name that is kept for a waiter goes to another waiter in these cases, too:

- The kept name comes, in sorted order, after the first name that refuses the waiter. Then it goes to every waiter that
  holds a lock, or that itself has all names before this one. So locks nested in sorted order form no cycle.
- The other waiter holds what this waiter waits for.
- Against all other cycles: this waiter has waited in all queues for 2 s, 6 s, 12 s, 20 s and so on. Then the next
  waiter gets the kept name. The next waiter that holds a lock gets it after a tenth of these times.

Bounds. A kept name lasts 1.5 s, counted again from each step of its waiter, every half second. If the waiter has ended,
another waiter takes the name with its next step, half a second later at most. If the waiter is frozen, another takes
the name after a second of silence.

A notification is about one name, so it only tells the waiter to ask again. The refusal says which name refused. A
waiter that is first in the queue of that name has its key watched, because a client without a queue may free it.

Why not one lock after the other in sorted order? It cannot deadlock either, but a waiter for the last name holds the
others all the time.

Where one step cannot reach all names, as in a cluster, it is taken in parts: see parts.py.

Cohorts do not apply: each waiter asks the server itself, and ``cohort`` has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, TypeVar

from holdfast.errors import InvalidName
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol.effects import Step
from holdfast.protocol.hold import Hold
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.refusals import held_by
from holdfast.protocol.replies import Refused
from holdfast.protocol.steps import way_to_wait
from holdfast.protocol.wait.cohort import ObjectSlot
from holdfast.protocol.wait.contact import Contact
from holdfast.protocol.wait.waiter import Notification
from holdfast.untrusted import MOST_NAMES

PATIENCE_US: Final = 100_000  # of waiting at one name; must match lua/multi/acquire.lua

L = TypeVar("L", bound=BaseLease)


def together(several: tuple[Keys, ...]) -> tuple[Keys, tuple[Keys, ...]]:
    """Keys that represent the whole lock, and the keys of each name, sorted."""
    if len(several) > MOST_NAMES:
        raise InvalidName(f"{several[0].name}, ...", f"{len(several)} names are too many: lock at most {MOST_NAMES}")
    if len({keys.main for keys in several}) < len(several):
        twice = next(keys.name for place, keys in enumerate(several) if keys in several[:place])
        raise InvalidName(twice, "it was given twice; name each lock once")
    each = tuple(sorted(several, key=lambda keys: keys.main))
    name, key = (", ".join(parts) for parts in zip(*((keys.name, keys.key) for keys in several), strict=True))
    return each[0]._replace(name=name, key=key), each


class _Several:
    """The steps of a lock on several names."""

    tracks_key = True
    shown_by_keeper = False  # a waiter may have places in several queues
    first_waiter_asks = True
    foreign_clients = False

    def acquire_step(self, hold: MultiHold, channel: str, watch: bool) -> Step:
        ttl, retention, _ = hold.options.wire_args
        args = hold.token, ttl, retention, "1", way_to_wait(hold, channel), str(hold.since_us), hold.nested
        return Step("multi_acquire", _groups(hold), args, watch)

    def release_step(self, hold: MultiHold) -> Step:
        return Step("multi_release", _groups(hold), (hold.token,))

    def abandon_step(self, hold: MultiHold, tombstone_ms: int) -> Step:
        return Step("multi_abandon", _groups(hold), (hold.token, str(tombstone_ms)))

    def renew_step(self, hold: MultiHold, ttl_ms: int, watch: bool) -> Step:
        return Step("multi_renew", hold.main_keys, (hold.token, str(ttl_ms)), watch)

    def leave_step(self, hold: MultiHold, lasts_ms: int) -> Step:
        return Step("multi_leave", hold.main_keys, (hold.token, str(lasts_ms)))

    def hand_over_step(self, hold: MultiHold, tombstone_ms: int) -> Step:
        return Step("multi_hand_over", _groups(hold), (hold.token, str(hold.options.ttl_ms), str(tombstone_ms)))

    def adopt_step(self, hold: MultiHold, giver: str) -> Step:
        ttl, retention, _ = hold.options.wire_args
        return Step("multi_adopt", _groups(hold), (hold.token, ttl, retention, giver))


_SEVERAL: Final = _Several()


def _groups(hold: MultiHold) -> tuple[str, ...]:
    return tuple(key for keys in hold.each for key in (*keys.shared, keys.tombstone(hold.token)))


class MultiHold(Hold):
    """One acquisition of several names."""

    steps = _SEVERAL
    slot: Any = -1  # the fence of each name, if they are not the same
    since_us = 0  # the server's time of the first refusal

    def __init__(self, keys: Keys, each: tuple[Keys, ...], options: LockOptions, object_slot: ObjectSlot) -> None:
        super().__init__(keys, options, object_slot)
        self.each = each

    @property
    def main_keys(self) -> tuple[str, ...]:
        return tuple(keys.main for keys in self.each)

    @property
    def contact(self) -> Contact:
        return self.object_slot.cohorts.contacts.of(*self.main_keys)

    def all_keys(self) -> tuple[Keys, ...]:
        return self.each

    def fences(self, fence: Any) -> dict[str, Any]:
        if isinstance(self.slot, list):  # acquired in parts, each with its own fence: see parts.py
            return dict(zip(self.names, self.slot, strict=True))
        return super().fences(fence)

    def refuse(self, refused: Refused, now: float, *, queued: bool, foreign: bool) -> None:
        super().refuse(refused, now, queued=queued, foreign=foreign)
        self.since_us = self.since_us or refused.now_us

    @property
    def ask_within(self) -> float:
        """In the first phase, the time until PATIENCE is over: then its next step takes a place in all queues."""
        left_us = PATIENCE_US - (self.waiter.asked[1] - self.since_us)
        return (left_us + 1000) / 1e6 if left_us > 0 else super().ask_within

    def accept(self, notification: Notification, now: float) -> bool:
        """False: a notification never grants this hold, because it is about one name."""
        return False

    def take_queue_place(self, other: Hold) -> None:
        super().take_queue_place(other)
        assert isinstance(other, MultiHold)
        self.since_us = other.since_us


class BaseMultiLock(BaseLock[L]):
    """One lock on several names, with its options."""

    __slots__ = ("_each",)

    def __init__(
        self, driver: Any, keys: tuple[Keys, tuple[Keys, ...]], options: LockOptions, lease_class: type[L]
    ) -> None:
        self._each = keys[1]
        super().__init__(driver, keys[0], options, lease_class)

    def _new_hold(self) -> Hold:
        return MultiHold(self._keys, self._each, self._options, self._object_slot)

    def _mains(self) -> tuple[str, ...]:
        return tuple(keys.main for keys in self._each)

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._lease is not None and self._lease._hold.why_lost(now):
            return super()._why_not(now, me)
        me, held = weakly(me), self._held_here(now)
        found = [(held[keys.main], keys.key) for keys in self._each if keys.main in held]
        if not found:
            return ""
        holder, key = min(found, key=lambda one: one[0] != me)  # prefer a name that the caller itself holds
        return held_by(me, holder, key)
