"""Notifications: how messages of the server reach the waiters of this client.

Invariant. Notifications are hints. If one is lost, late or doubled, that costs time, never safety: a waiter asks again
every half second, and the keeper asks about every hold that it renews. A notification is matched by token (a grant,
which serves one acquisition) or by key (another client wrote it), never by order.

A client has one subscriber, whatever the number of its waiters, and one channel with a random name. A notification is
``token fence now_us slot``: at that time of the server's clock the lock was granted to that token, for the ttl that its
waiter has asked for (slot -1: no numbered permit). It has no duration, so a forged one cannot stretch anything. Or it
is ``token ask now_us pause_ms``: the waiter should send its step again after that pause. A notification about a cached
value has the key of its claim in place of the token: it is for every search of this client that waits for that value.
One of them may leave before it comes, and the others must receive it all the same.

In a cluster a script can only notify on channels of its own slot, so a client has one channel for each slot in which it
waits, subscribed to on the node of that slot. ``shards`` knows them.

Clocks. ``Hold.accept`` places the server's time on ours, by the last step that brought back both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Protocol

from holdfast import untrusted
from holdfast.protocol.effects import Wakeup
from holdfast.protocol.hold import Hold
from holdfast.protocol.keepalive import LeaseRegistry
from holdfast.protocol.wait.asks import Asks
from holdfast.protocol.wait.waiter import Notification
from holdfast.protocol.wait.waiting import NO_CHANNEL

MOST_ASKS: Final = 500  # waiters' steps under way at once
MOST_NESTED: Final = 8  # locks of one caller that the server is told of

_PARTS: Final = 4
_LONGEST_PAUSE_MS: Final = 500  # a waiter that paused for longer would lose its place in the queue


class Shards(Protocol):
    """The channels of a client in a cluster."""

    def channel_of(self, keys: tuple[str, ...]) -> str:
        """The channel of the first key, if those of all keys are subscribed to; else ""."""


class NotificationRouter:
    """Routes what the server sends to the holds that wait for it. Single dict operations, so any thread may call."""

    def __init__(self, registry: LeaseRegistry, new_wakeup: Callable[[], Wakeup], most_asks: int = MOST_ASKS) -> None:
        self.new_wakeup = new_wakeup
        self.asks = Asks(most_asks, new_wakeup)
        self.crowd = registry.crowd
        self.channel = ""  # of this client; set by its driver
        self.armed = False  # whether the subscriber is up; set by its engine
        self.shards: Shards | None = None  # in a cluster, instead of one channel; set by its engine
        self.no_pubsub = False  # whether the server forbids pub/sub
        self.waiting: dict[str, Hold] = {}  # by token
        self.searching: dict[str, dict[Hold, None]] = {}  # by key of the claim: the waiters for that cached value
        self.watching: dict[str, Hold] = {}  # by key: the waiter that is first in the queue, and has the key watched
        self.registry = registry

    def enlist(self, hold: Hold) -> str:
        """Route notifications for this hold to it. Returns their channel, or "" as long as there is no subscriber.

        A hold that is in the server's queue already keeps its place while the subscriber is away.
        """
        channel = self.channel if self.armed else "" if self.shards is None else self.channel_of(hold)
        if channel:
            hold.wait_at_server()
            self.waiting[hold.token] = hold
            return channel
        return NO_CHANNEL if self.no_pubsub or hold.waiter.queued else ""

    def channel_of(self, hold: Hold) -> str:
        """The channel on which the server can notify this hold; "" as long as there is no subscriber."""
        if self.shards is not None:
            return self.shards.channel_of(hold.main_keys)
        return self.channel if self.armed else ""

    def keys_waited_for(self) -> set[str]:
        """The keys of all waiters."""
        waited_for = {key for hold in list(self.waiting.values()) for key in hold.main_keys}
        return waited_for.union(list(self.searching))

    def join_search(self, hold: Hold) -> None:
        """Route notifications about the key of this hold to it, and to all other holds that wait for that key."""
        hold.wait_at_server()
        key, group = hold.keys.main, None
        while group is None or self.searching.get(key) is not group:  # or another thread has just removed the group
            group = self.searching.setdefault(key, {})
            group[hold] = None

    def holds_any(self) -> bool:
        return bool(self.registry.holds)

    def held_by(self, caller: Hashable) -> str:
        """The tokens that this thread or task holds through this client, in the format of an acquire step."""
        return "".join([f";{hold.token}" for hold in self.registry.held_by(caller)[:MOST_NESTED]])

    def is_crowded(self) -> bool:
        """Whether the keeper shows the presence of the waiters, because there are many."""
        return len(self.waiting) > self.crowd.most_alone

    def dismiss(self, hold: Hold) -> None:
        """It waits no longer."""
        self.waiting.pop(hold.token, None)
        group = self.searching.get(hold.keys.main)
        if group is not None:
            group.pop(hold, None)
            if not group:
                self.searching.pop(hold.keys.main, None)
                if group:  # another thread has joined it meanwhile
                    self.searching.setdefault(hold.keys.main, group)
        self.crowd.leave(hold)
        if self.watching:
            for key in hold.main_keys:
                if self.watching.get(key) is hold:
                    self.watching.pop(key, None)

    def deliver(self, message: bytes, now: float) -> None:
        """A notification has come. One that is malformed, or for no waiter of ours, is ignored."""
        parts = message.decode(errors="replace").rsplit(" ", _PARTS - 1)  # a key may have spaces
        waiter = self.waiting.get(parts[0])
        holds = [waiter] if waiter is not None else list(self.searching.get(parts[0], ()))
        if not holds or (told := untrusted.notification(parts[1:])) is None:
            return
        fence, at_us, last = told
        detail = {"slot": last} if fence else {"pause_ms": max(0, min(last, _LONGEST_PAUSE_MS))}
        for hold in holds:
            hold.waiter.notify(Notification(fence, at_us, now, **detail))

    def touched(self, key: str) -> None:
        """Another client wrote that key: the waiter or holder that has it watched should look."""
        waiter = self.watching.pop(key, None)
        if waiter is not None:
            waiter.waiter.wake()
        self.registry.check_key(key)

    def look_again(self) -> None:
        """The subscriber was away, so notifications may be lost: wake all waiters. For a crowd, the keeper asks."""
        asleep = self.crowd.members if not self.registry.closed else {}
        for waiter in list(self.waiting.values()):
            if waiter.token not in asleep:
                waiter.waiter.wake()
        self.registry.look_for_crowd()
        self.registry.look_at_all()

    def is_needed(self) -> bool:
        """Whether a waiter or a watched key needs the subscriber."""
        return bool(self.waiting or self.registry.is_watching())

    def forget(self) -> None:
        """Forget all waiters, after a fork or in a new event loop."""
        self.armed = False
        self.asks.forget()
        self.waiting.clear()
        self.searching.clear()
        self.watching.clear()
