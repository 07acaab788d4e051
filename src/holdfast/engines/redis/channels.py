"""The channels on which a client is notified by one server: one, or on a node of a cluster one for each slot.

The connection that subscribes belongs to the engine of that server. It asks here what to subscribe to, and says here
what the server has confirmed, and what has ended.
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
    """The channel to which this request subscribes; None if it is no such request."""
    if isinstance(op, Command) and op.args[0] in ("SUBSCRIBE", "SSUBSCRIBE"):
        return str(op.args[1]).encode()
    return None


class Channels(Protocol):
    """Any thread may call these."""

    def missing(self) -> list[Command]:
        """What to send to the server, so that all channels are subscribed to."""

    def confirm(self, channel: bytes) -> None:
        """The server has subscribed us to this channel."""

    def end(self, channel: bytes) -> None:
        """The server has ended this subscription."""

    def lose_all(self) -> bool:
        """The connection has ended; returns whether there was a subscription."""

    def note_refused(self) -> None:
        """The server says that another one has the channel."""

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
        """Nothing: the server ends no plain subscription."""

    def lose_all(self) -> bool:
        was_armed, self._router.armed = self._router.armed, False
        return was_armed

    def note_refused(self) -> None:
        """Nothing: there is no other server."""

    def is_needed(self) -> bool:
        return self._router.is_needed()


class ShardChannels:
    """The channels of a client on one node of a cluster, by slot."""

    def __init__(self, waited_for: Callable[[], set[int]], note_moved: Callable[[], None]) -> None:
        self._waited_for = waited_for  # the slots with waiters
        self._note_moved = note_moved
        self._slots: dict[bytes, int] = {}  # by channel
        self.wanted: dict[int, str] = {}
        self.armed: dict[int, str] = {}  # of these, what the server has confirmed

    def missing(self) -> list[Command]:
        # One command each: the channels of one command must be in one slot.
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
        """A slot for which nothing waits is subscribed to again by its next waiter."""
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
        """This node has that slot, and a waiter needs its channel."""
        self._slots[channel.encode()] = slot
        self.wanted[slot] = channel

    def drop(self, slot: int) -> None:
        """Another node has that slot now."""
        self.wanted.pop(slot, None)
        self.armed.pop(slot, None)

    def forget(self) -> None:
        """In a forked child, or a new event loop: nothing is subscribed to, and nothing waits."""
        self._slots.clear()
        self.wanted.clear()
        self.armed.clear()
