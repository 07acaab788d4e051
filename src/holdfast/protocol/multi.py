"""A lock on several names: all of them or none.

Invariant. A client holds all names or none. A waiter holds nothing, but a name that comes free at its turn is *kept*
for it: its token is in the key, and stays in the queue, which marks the name as kept. A kept name becomes a hold only
by the acquire step, which takes all names or none.

Atomic: each step is one script over all names, as the mutex's are over one, and idempotent by the same token. They have
one fence, greater than all that any of the names has seen. A lease that has lost one name is lost.

Waiting has two phases. At first the waiter stands in the queue of the name that refused it, and gives back what is kept
for it there if another name refuses. So it holds up no other client, and gets all names as soon as all are free at
once. After PATIENCE in vain it stands in the queues of all names, with one time of arrival, later than that of every
other waiter there, and names that come free at its turn stay kept for it. So its wait ends when the holders and waiters
before it have gone, however busy the names are.

No deadlock. Waiters have one order: the time of arrival, or in the first phase the server's time of the first refusal,
which the waiter says with each step. A kept name gives way to an earlier waiter that asks for it. So the earliest of
all waiters lacks only what is held. A waiter that was struck off in one of its queues arrives anew in all, else it
would be early in one and late in another. A holder may itself wait for a name that is kept (nested locks). A waiter
tells the server which tokens its thread or task holds. What is kept for it behind the first name that is refused (in
sorted order) goes to every waiter that holds a lock, or that itself has all names before this one: so locks that are
nested in sorted order form no cycle with it. A kept name also goes to a waiter that holds what this one waits for. For
other cycles, the next waiter gets the kept name after 2 s, 6 s, 12 s, 20 s and so on of waiting in all queues, and the
next one that holds a lock after a tenth of these times.

Bounds. A kept name lasts 1.5 s, and each step of its waiter, every half second, begins that anew. If the waiter has
ended, another waiter takes the name with its next step, half a second later at most; if it is frozen, once it was
silent for a second.

A notification says only that it is worth asking again, for it speaks of one name. The refusal says which name refused;
a waiter that is first in the queue of that name has its key watched, because a client that knows of no queue may free
it.

Why not one lock after the other in sorted order? It cannot deadlock either, but a waiter for the last name holds the
others all the time.

Where one step cannot reach all names, as in a cluster, it is taken in parts: see parts.py.

Cohorts do not apply: each waiter asks the server itself, and ``cohort`` has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, TypeVar

from holdfast.errors import InvalidName
from holdfast.lease import BaseLease, Hold, Terms, Word
from holdfast.names import Keys
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import Step
from holdfast.protocol.lock import BaseLock, held_by, weakly

__all__ = ["MOST_NAMES", "BaseMultiLock", "MultiHold", "together"]

MOST_NAMES: Final = 32
PATIENCE_US: Final = 100_000  # of waiting at one name; must match lua/multi_acquire.lua

L = TypeVar("L", bound=BaseLease)


def together(several: tuple[Keys, ...]) -> tuple[Keys, tuple[Keys, ...]]:
    """Keys that represent the whole lock, and the keys of each name, sorted."""
    if len(several) > MOST_NAMES:
        raise InvalidName(f"{several[0].name}, ...", f"{len(several)} names are too many: lock at most {MOST_NAMES}")
    if len({keys.main for keys in several}) < len(several):
        twice = next(keys.name for place, keys in enumerate(several) if keys in several[:place])
        raise InvalidName(twice, "it was given twice; name each lock once")
    each = tuple(sorted(several, key=lambda keys: keys.main))
    return each[0]._replace(name=", ".join(keys.name for keys in several)), each


class _Several:
    """The steps of a lock on several names."""

    watches = True
    attended = False  # a waiter may have places in several queues

    def acquire_step(self, hold: MultiHold, channel: str, watch: bool) -> Step:
        ttl, retention, _ = hold.terms.said
        args = hold.token, ttl, retention, "1", channel, str(hold.since_us), hold.nested
        return Step("multi_acquire", _groups(hold), args, watch)

    def release_step(self, hold: MultiHold) -> Step:
        return Step("multi_release", _groups(hold), (hold.token,))

    def abandon_step(self, hold: MultiHold, stands_ms: int) -> Step:
        return Step("multi_abandon", _groups(hold), (hold.token, str(stands_ms)))

    def renew_step(self, hold: MultiHold, ttl_ms: int, watch: bool) -> Step:
        return Step("multi_renew", hold.mains, (hold.token, str(ttl_ms)), watch)

    def hand_over_step(self, hold: MultiHold, stands_ms: int) -> Step:
        return Step("multi_hand_over", _groups(hold), (hold.token, str(hold.terms.ttl_ms), str(stands_ms)))

    def adopt_step(self, hold: MultiHold, giver: str) -> Step:
        ttl, retention, _ = hold.terms.said
        return Step("multi_adopt", _groups(hold), (hold.token, ttl, retention, giver))


_SEVERAL: Final = _Several()


def _groups(hold: MultiHold) -> tuple[str, ...]:
    return tuple(key for keys in hold.each for key in (*keys.shared, keys.tombstone(hold.token)))


class MultiHold(Hold):
    """One acquisition of several names."""

    kind = _SEVERAL
    slot: Any = -1  # the fence of each name, if they are not the same
    since_us = 0  # the server's time of the first refusal
    _asked = (0.0, 0)

    def __init__(self, keys: Keys, each: tuple[Keys, ...], terms: Terms, gate: Gate) -> None:
        super().__init__(keys, terms, gate)
        self.each = each

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(keys.name for keys in self.each)

    @property
    def mains(self) -> tuple[str, ...]:
        return tuple(keys.main for keys in self.each)

    def fences(self, fence: Any) -> dict[str, Any]:
        if isinstance(self.slot, list):  # they live in different places, and each has its own: see parts.py
            return dict(zip(self.names, self.slot, strict=True))
        return super().fences(fence)

    @property
    def asked(self) -> tuple[float, int]:
        return self._asked

    @asked.setter
    def asked(self, when: tuple[float, int]) -> None:
        self._asked = when
        self.since_us = self.since_us or when[1]

    @property
    def ask_within(self) -> float:
        """In the first phase until PATIENCE is over: then its next step takes a place in all queues."""
        left_us = PATIENCE_US - (self.asked[1] - self.since_us)
        return (left_us + 1000) / 1e6 if left_us > 0 else super().ask_within

    def rung(self, word: Word, now: float) -> bool:
        """False: a notification never grants this hold, because it is about one name."""
        return False

    def follow(self, other: Hold) -> None:
        super().follow(other)
        assert isinstance(other, MultiHold)
        self.since_us = other.since_us


class BaseMultiLock(BaseLock[L]):
    """One lock on several names, asked for on given terms."""

    __slots__ = ("_each",)

    def __init__(self, driver: Any, keys: tuple[Keys, tuple[Keys, ...]], terms: Terms, lease_class: type[L]) -> None:
        self._each = keys[1]
        super().__init__(driver, keys[0], terms, lease_class)

    def _new_hold(self) -> Hold:
        return MultiHold(self._keys, self._each, self._terms, self._gate)

    def _mains(self) -> tuple[str, ...]:
        return tuple(keys.main for keys in self._each)

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._lease is not None and self._lease._hold.why_lost(now):
            return super()._why_not(now, me)
        me, held = weakly(me), self._held_here(now)
        found = [(held[keys.main], keys.name) for keys in self._each if keys.main in held]
        if not found:
            return ""
        holder, name = min(found, key=lambda one: one[0] != me)  # above all, whether it is the caller itself
        return held_by(me, holder, name)
