"""Turns what the server says about a name into what people see of it.

Invariant. Nothing that is shown could be used to release a lock. What was written by hand, or by another program, is
left out or has empty fields; it never stops an inspection.

Clocks: the server's alone. ``since`` and ``waiting`` come from times that the server wrote, and from its time now. etcd
keeps no times: there they come from the clocks of the holder, the waiter and the inspector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from holdfast import untrusted
from holdfast.holder import Holder, LockInfo, Waiter, holder_of, is_foreign
from holdfast.lease import MAX_FENCE
from holdfast.names import Keys
from holdfast.protocol.replies import Inspected, Pooled, Queued

PAGE: Final = 100  # holders, and waiters, that one step reads
RESERVED: Final = "reserved"
CACHE: Final = "cache"
PRESENCE_US: Final = 1_000_000  # as in lua/include/queue.lua

_MODES: Final = {b"any": "read", b"all": "write"}
_SIDES: Final = {-1: "read", -2: "write"}  # the slots of a readers-writer lock


class Seen(NamedTuple):
    """A lock, with holders and waiters by their tokens."""

    keys: Keys
    kind: str
    holders: dict[bytes, Holder]
    waiters: dict[bytes, Waiter]
    holder_count: int
    waiter_count: int
    at_us: int
    left: int | None = None

    def info(self) -> LockInfo:
        holders, waiters = tuple(self.holders.values()), tuple(self.waiters.values())
        counts = self.holder_count, self.waiter_count
        name, key = self.keys[:2]
        return LockInfo(name, self.kind, holders, waiters, *counts, self.left, self.at_us / 1e6, key)

    def joined(self, more: Seen) -> Seen:
        """This page and the next one. An entry that moved between the two reads is in both, and is shown once."""
        return self._replace(holders=self.holders | more.holders, waiters=self.waiters | more.waiters)


def keys_read(keys: Keys) -> tuple[str, ...]:
    """The keys of the inspect step."""
    parts = ("holders", "latch", "latch:waiters", "cache:claim", "cache:waiters")
    return (*keys.shared, *(f"{keys.head}{part}{keys.tail}" for part in parts))


def seen_in(keys: Keys, found: Inspected) -> list[Seen]:
    """What a name is in use as: as a lock of some kind, and as a cached value that is computed. Empty: not in use."""
    lock = _lock(keys, found) if found.latch is None else _latch(keys, *found.latch, found.now_us)
    return [seen for seen in (lock, _claim(keys, found)) if seen is not None]


def _lock(keys: Keys, found: Inspected) -> Seen | None:
    held = [one for one in found.holders if one.ends_us is None or one.ends_us > found.now_us]
    holders = {one.token: _pool_holder(one, found.now_us) for one in held}
    if found.lock is not None:
        holders[found.lock[0]] = _mutex_holder(*found.lock, found.now_us)
    waiters = {one.token: waiter for one in found.waiters if (waiter := _waiter(one, found.now_us)) is not None}
    if not holders and not waiters:
        return None
    # A page leaves out leases that have ended and waiters that are absent. If there are more pages, both are counted.
    holder_count = len(holders) if found.holder_count <= PAGE else found.holder_count
    waiter_count = len(waiters) if found.waiter_count <= PAGE else found.waiter_count
    return Seen(keys, found.kind or _kind(found), holders, waiters, holder_count, waiter_count, found.now_us)


def _kind(found: Inspected) -> str:
    """The kind, if its mark was deleted by hand; a mutex has none."""
    if found.lock is not None or not found.holders:
        return "lock"
    return "rwlock" if any(one.slot in _SIDES for one in found.holders) else "semaphore"


def _latch(keys: Keys, state: bytes, waiter_count: int, members: list[bytes], now_us: int) -> Seen | None:
    left, _ = untrusted.latch(state) or (0, 0)
    if not left:  # no caller waits for an open latch
        return None
    waiters = {member: _latch_waiter(member) for member in members}
    return Seen(keys, "latch", {}, waiters, 0, waiter_count, now_us, left)


def _claim(keys: Keys, found: Inspected) -> Seen | None:
    if found.claim is None:
        return None
    token, left_ms, waiting = found.claim
    waiters = {b"%d" % number: Waiter() for number in range(min(waiting, PAGE))}  # only their channels are known
    return Seen(keys, CACHE, {token: holder_of(token, _seconds(left_ms))}, waiters, 1, waiting, found.now_us)


def _mutex_holder(token: bytes, left_ms: int, fences: bytes | None, kept: bool, now_us: int) -> Holder:
    holder = holder_of(token, _seconds(left_ms), RESERVED if kept else "")
    given = untrusted.fences(fences)
    if given is None or kept or is_foreign(token) or not token.endswith(given.mark):
        return holder
    return _since(holder, given.first, now_us, given.since_us)


def _pool_holder(one: Pooled, now_us: int) -> Holder:
    slot = one.slot if one.slot is not None and one.slot >= 0 else None
    remaining = None if one.ends_us is None else max(0.0, (one.ends_us - now_us) / 1e6)
    holder = holder_of(one.token, remaining, _SIDES.get(one.slot or 0, ""))
    return _since(replace(holder, slot=slot), one.fence, now_us, one.since_us)


def _since(holder: Holder, fence: int | None, now_us: int, since_us: int | None) -> Holder:
    """The holder with its fence and since when it holds. Without ``since_us``, the fence is the time of the grant,
    unless the clock was behind the last fence."""
    if fence is None or not 0 < fence <= MAX_FENCE:
        return holder
    since_us = fence if since_us is None else since_us
    return replace(holder, fence=fence, since=min(since_us, now_us) / 1e6 if now_us and since_us else None)


def _waiter(queued: Queued, now_us: int) -> Waiter | None:
    """None if it is absent: its process has ended, and the next step removes it."""
    place = untrusted.place(queued.entry)
    if place is None or abs(now_us - place.seen_us) > PRESENCE_US:
        return None
    who = holder_of(queued.token)
    waiting = max(0.0, (now_us - queued.arrived_us) / 1e6) if now_us and queued.arrived_us else None
    return Waiter(who.label, who.host, who.pid, waiting, _MODES.get(place.request, ""), place.local)


def _latch_waiter(member: bytes) -> Waiter:
    who = holder_of(member.partition(b" ")[0])
    return Waiter(who.label, who.host, who.pid)


def _seconds(left_ms: int) -> float | None:
    return left_ms / 1000 if left_ms >= 0 else None
