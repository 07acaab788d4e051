"""When the thread of a shared connection subscribes without a caller: after a loss, or when channels were added."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from holdfast.engines.redis.blocking.pipelined_connection import PENDING, Request
from holdfast.engines.redis.channels import Channels
from holdfast.lua import Script

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts
_NEVER: Final = float("inf")


class Resubscription:
    """The attempts of one thread. Other threads may use only ``changed`` and ``request``."""

    def __init__(self, channels: Channels, scripts: Mapping[str, Script]) -> None:
        self._channels = channels
        self._scripts = scripts
        self.changed = False  # whether a channel was added that no caller subscribes to
        self._at = _NEVER
        self._pause = _FIRST_PAUSE
        self._last: Request | None = None
        self._missed = False  # whether notifications may have been lost since there was a subscription

    def request(self, timeout: float) -> Request:
        """A request that subscribes to all missing channels."""
        return Request(self._channels.missing(), timeout, self._scripts, subscribes=True)

    @property
    def due_at(self) -> float:
        return 0.0 if self.changed else self._at

    def note_loss(self) -> None:
        """Record that the subscriber's connection was lost."""
        self._missed, self._at = True, time.monotonic() + _FIRST_PAUSE

    def next_attempt(self) -> Request | None:
        """The request to send now; None if no attempt is due, or nothing needs the subscription."""
        if self.changed:
            self.changed, self._missed, self._at = False, True, 0.0
        if self._at == _NEVER or time.monotonic() < self._at:
            return None
        attempt = self.request(_LONGEST_PAUSE)
        if not attempt.ops or not self._channels.is_needed():
            self._at = _NEVER
            return None
        if self._last is not None:
            self._last.left = True
        self._last = attempt
        return attempt

    def note_sent(self, attempt: Request) -> None:
        pending = PENDING in attempt.replies
        self._at = attempt.until if pending else time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def note_confirmed(self) -> bool:
        """Record a confirmation. True if it was the last one missing, and notifications may have been lost."""
        self._pause = _FIRST_PAUSE
        if self._channels.missing():
            return False
        missed, self._missed, self._at = self._missed, False, _NEVER
        return missed

    def give_up(self) -> None:
        """Make no further attempt, because the server forbids subscriptions."""
        self._at = _NEVER
