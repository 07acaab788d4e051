"""The steps of a kind of lock on the server, and those of the lock itself.

Invariant. Every kind is acquired, renewed and released by the same protocols (mutex.py, keepalive.py, handover.py). A
kind differs in its steps only, and in the flags that say what its steps can do. To add a kind, write its scripts and a
Steps object, and give its Hold that object as ``steps``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.protocol.effects import Step

if TYPE_CHECKING:
    from holdfast.protocol.hold import Hold


class Steps(Protocol):
    """The steps of one kind of lock. Their replies are those of the mutex (see replies.py)."""

    tracks_key: bool  # the key is tracked while it is held for long; else a renewal or membership.py finds a loss
    shown_by_keeper: bool  # the ``present`` step knows its queue, so the keeper can show that many waiters are alive
    first_waiter_asks: bool  # among many waiters, the first asks by itself: only its own step can be granted
    foreign_clients: bool  # clients of other libraries may take it by polling, so a free key is tracked at once

    def acquire_step(self, hold: Any, channel: str, watch: bool) -> Step: ...
    def release_step(self, hold: Any) -> Step: ...
    def abandon_step(self, hold: Any, tombstone_ms: int) -> Step: ...
    def renew_step(self, hold: Any, ttl_ms: int, watch: bool) -> Step: ...
    def leave_step(self, hold: Any, lasts_ms: int) -> Step: ...
    def hand_over_step(self, hold: Any, tombstone_ms: int) -> Step: ...
    def adopt_step(self, hold: Any, giver: str) -> Step: ...


def way_to_wait(hold: Hold, channel: str) -> str:
    """What an acquire step says about waiting: the number of local waiters and the channel; empty: it does not wait."""
    return f"{len(hold.local_queue())} {channel}" if channel else ""


class _LockSteps:
    tracks_key = True
    shown_by_keeper = True
    first_waiter_asks = False
    foreign_clients = True

    def acquire_step(self, hold: Hold, channel: str, watch: bool) -> Step:
        """Take it, or (unless the channel is empty) a place in its queue."""
        keys, token = hold.keys, hold.token
        ttl, retention, fences = hold.options.wire_args
        args = token, ttl, retention, fences, way_to_wait(hold, channel), hold.nested
        return Step("acquire", (*keys.shared, keys.tombstone(token)), args, watch)

    def release_step(self, hold: Hold) -> Step:
        return Step("release", hold.keys.shared, (hold.token,))

    def abandon_step(self, hold: Hold, tombstone_ms: int) -> Step:
        keys = hold.keys
        return Step("abandon", (*keys.shared, keys.tombstone(hold.token)), (hold.token, str(tombstone_ms)))

    def renew_step(self, hold: Hold, ttl_ms: int, watch: bool) -> Step:
        return Step("renew", (hold.keys.main,), (hold.token, str(ttl_ms)), watch)

    def leave_step(self, hold: Hold, lasts_ms: int) -> Step:
        return Step("multi_leave", hold.main_keys, (hold.token, str(lasts_ms)))

    def hand_over_step(self, hold: Hold, tombstone_ms: int) -> Step:
        keys, args = hold.keys, (hold.token, str(hold.options.ttl_ms), str(tombstone_ms))
        return Step("hand_over", (keys.main, keys.tombstone(hold.token)), args)

    def adopt_step(self, hold: Hold, giver: str) -> Step:
        keys, token = hold.keys, hold.token
        ttl, retention, _ = hold.options.wire_args
        return Step("adopt", (*keys.shared[:2], keys.tombstone(token)), (token, ttl, retention, giver))


LOCK_STEPS: Final = _LockSteps()
