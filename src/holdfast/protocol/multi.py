"""A lock on several names: all of them or none.

Invariant. The keys of all names hold the token of one hold, or none does for longer than one reservation (0.75 s).
A waiter holds nothing: it stands in the queue of the first name that refused it, and what is granted to it there,
but is not enough, is given back in the very step that finds this out. So nobody holds one name while it waits for
another, and no order in which names are asked for can end in a deadlock.

Atomic: each step is one script over all names, as the mutex's are over one, and idempotent by the same token. They
have one fence, greater than all that any of the names has seen. A lease that has lost one name is lost.

Waiting. A bell only says that it is worth asking again, for it speaks of one name. Which one refused it the waiter is
told, and, being the first in its queue, has that one watched, for somebody who knows of no queue may free it. Among
those who want several the one who has waited longest comes first, by the server's time of its first refusal, which it
says with each step. Without that, four who want the same two names can go round in circles, each woken for one while
another is woken for the other. One who wants several names under constant load can wait for long: there must be a
moment at which all of them are free, and nobody holds others up until there is. That is the price of holding no
reservation.

Why not one lock after the other in sorted order? It cannot deadlock either, but whoever waits for the last name
keeps everybody from the first.

Where one step cannot reach all names, as in a cluster, it is taken in parts: see parts.py.

Cohorts do not apply: each of these locks speaks for itself.
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
    """The keys that stand for all of them where one is asked for, and those of each, in sorted order."""
    if len(several) > MOST_NAMES:
        raise InvalidName(f"{several[0].name}, ...", f"{len(several)} names are too many: lock at most {MOST_NAMES}")
    if len({keys.main for keys in several}) < len(several):
        twice = next(keys.name for place, keys in enumerate(several) if keys in several[:place])
        raise InvalidName(twice, "it is there twice; name each lock once")
    each = tuple(sorted(several, key=lambda keys: keys.main))
    return each[0]._replace(name=", ".join(keys.name for keys in several)), each


class _Several:
    """The steps of a lock on several names."""

    watches = True
    attended = False  # a waiter may have places in several queues

    def acquire_step(self, hold: MultiHold, channel: str, watch: bool) -> Step:
        ttl, retention, _ = hold.terms.said
        args = hold.token, ttl, retention, "1", channel, str(hold.since_us)
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
        """Until PATIENCE is over: then its next step takes a place in the queues of all names."""
        left_us = PATIENCE_US - (self.asked[1] - self.since_us)
        return (left_us + 1000) / 1e6 if left_us > 0 else super().ask_within

    def rung(self, word: Word, now: float) -> bool:
        """One name is kept for it; all of them have to be asked for."""
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
        return held_by(me, holder, repr(name))
