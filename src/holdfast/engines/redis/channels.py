"""The channels on which a client is notified by one server: one, or on a node of a cluster one for each slot.

The engine of that server owns the connection that subscribes. The engine reads here which channels to subscribe to, and
records here which subscriptions the server has confirmed or ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.engines.redis.protocol import Op
from holdfast.protocol.effects import Command

if TYPE_CHECKING:
    from holdfast.protocol.wait.notifications import NotificationRouter

SUBSCRIBED: Final = (b"subscribe", b"ssubscribe")  # pushes that confirm a subscription
NOTIFIED: Final = (b"message", b"smessage")
ENDED: Final = b"sunsubscribe"  # sent when a slot has moved to another node


def subscribed_to(op: Op | None) -> bytes | None:
    """The channel that this request subscribes to; None if it is not a subscription."""
    if isinstance(op, Command) and op.args[0] in ("SUBSCRIBE", "SSUBSCRIBE"):
        return str(op.args[1]).encode()
    return None


class Channels(Protocol):
    """Any thread may call these."""

    def missing(self) -> list[Command]:
        """The commands that subscribe to the channels that are still missing."""

    def confirm(self, channel: bytes) -> None:
        """Record that the server has confirmed the subscription to this channel."""

    def end(self, channel: bytes) -> None:
        """Record that the server has ended this subscription."""

    def lose_all(self) -> bool:
        """Record that the connection has ended; returns whether there was a subscription."""

    def note_refused(self) -> None:
        """Record that the server refused a channel because another server has it."""

    def is_needed(self) -> bool:
        """Whether anything waits for a notification of this server."""


class SoleChannel:
    """The one channel of a client on a single server."""

    def __init__(self, router: NotificationRouter) -> None:
        self._router = router

    def missing(self) -> list[Command]:
        return [] if self._router.armed else [Command(("SUBSCRIBE", self._router.channel))]

    def confirm(self, channel: bytes) -> None:
        self._router.armed = True

    def end(self, channel: bytes) -> None:
        """Do nothing: a server never ends a plain subscription."""

    def lose_all(self) -> bool:
        was_armed, self._router.armed = self._router.armed, False
        return was_armed

    def note_refused(self) -> None:
        """Do nothing: there is no other server."""

    def is_needed(self) -> bool:
        return self._router.is_needed()


class ShardChannels:
    """The channels of a client on one node of a cluster, by slot."""

    def __init__(self, waited_for: Callable[[], set[int]], note_moved: Callable[[], None]) -> None:
        self._waited_for = waited_for  # the slots with waiters
        self._note_moved = note_moved
        self._slots: dict[bytes, int] = {}  # by channel
        self.wanted: dict[int, str] = {}
        self.armed: dict[int, str] = {}  # the part of ``wanted`` that the server has confirmed

    def missing(self) -> list[Command]:
        # One command per channel, because all channels of one command must be in one slot.
        return [
            Command(("SSUBSCRIBE", channel)) for slot, channel in list(self.wanted.items()) if slot not in self.armed
        ]

    def confirm(self, channel: bytes) -> None:
        slot = self._slots.get(channel, -1)
        if (wanted := self.wanted.get(slot)) is not None:
            self.armed[slot] = wanted

    def end(self, channel: bytes) -> None:
        self.armed.pop(self._slots.get(channel, -1), None)
        self._note_moved()

    def lose_all(self) -> bool:
        """As in Channels. Slots without waiters are dropped: the next waiter of such a slot subscribes again."""
        was_armed = bool(self.armed)
        self.armed.clear()
        waited_for = self._waited_for()
        for slot in list(self.wanted):
            if slot not in waited_for:
                self.wanted.pop(slot, None)
        return was_armed

    def note_refused(self) -> None:
        self._note_moved()

    def is_needed(self) -> bool:
        return not self._waited_for().isdisjoint(list(self.wanted))

    def want(self, slot: int, channel: str) -> None:
        """Ask for the channel of a slot that this node serves and that a waiter needs."""
        self._slots[channel.encode()] = slot
        self.wanted[slot] = channel

    def drop(self, slot: int) -> None:
        """Forget a slot that another node serves now."""
        self.wanted.pop(slot, None)
        self.armed.pop(slot, None)

    def forget(self) -> None:
        """In a forked child, or a new event loop: nothing is subscribed to, and nothing waits."""
        self._slots.clear()
        self.wanted.clear()
        self.armed.clear()
