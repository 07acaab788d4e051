"""The acquire steps of a client's waiters: how many of them may be under way at once.

Invariant. At most ``most`` waiters of a client have sent a step that is not answered yet; every other waiter stands in
a queue, in the order of arrival, until another one has its answer or its own time is over. So twenty thousand waiters
that ask at once (all start, the server has restarted) do not delay the renewals of their client, and threads do not
open a connection each.

Atomic: single dict, deque and list operations, so any thread may call. A ticket is a list with the waiter in it:
``pop`` succeeds for exactly one caller, which either admits the waiter or takes it out of the queue. The limit is soft:
threads that enter at the same moment may exceed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.errors import Unavailable, rounded
from holdfast.lease import Hold
from holdfast.protocol.effects import STOPPED, Bell, Effects, StepFailed, clock, wait

__all__ = ["Asks"]

_LOOK_AGAIN: Final = 2.0  # seconds in the queue after which a waiter looks whether it still stands there


class Asks:
    """The waiters of one client that ask the server just now, and those that stand in the queue for it."""

    def __init__(self, most: int, new_bell: Callable[[], Bell]) -> None:
        self.most = most
        self.outage: StepFailed | None = None  # why the last waiter that asked more than once was not answered
        self.under_way: dict[Hold, None] = {}
        self._queue: deque[list[Hold]] = deque()
        self._new_bell = new_bell

    def is_full(self) -> bool:
        return len(self.under_way) >= self.most or bool(self._queue)

    def begin(self, hold: Hold) -> None:
        self.under_way[hold] = None

    def end(self, hold: Hold) -> None:
        """It has its answer, or has given up; harmless if it was not under way."""
        self.under_way.pop(hold, None)
        if self._queue:
            self._admit()

    def wait_for_turn(self, hold: Hold, until: float) -> Effects[float]:
        """Wait until it may ask (then it is ``under_way``), is notified, or until that time; what time it is then."""
        if hold.bell is None:
            hold.bell = self._new_bell()
        ticket: list[Hold] = []
        try:
            now = yield from clock()
            while True:
                if not ticket:  # at first; and if the caller that took it out was interrupted before it could admit us
                    ticket.append(hold)
                    self._queue.append(ticket)
                    self._admit()  # another may have ended since the caller looked
                now = yield from wait(hold.bell, min(until, now + _LOOK_AGAIN))
                if hold in self.under_way or hold.word is not None or now >= until:
                    ticket.clear()
                    return now
        except STOPPED:
            ticket.clear()
            self.end(hold)
            raise

    def too_busy(self, waited: float) -> StepFailed:
        """Its time is over and it could not ask: because the server does not answer others either, or because of us."""
        if (failed := self.outage) is not None:
            return StepFailed(failed.error, sent=False, retry=failed.retry, met=failed.met, silent=failed.silent)
        what = f"this process was too busy to ask it within {rounded(waited)} s"
        error = Unavailable({"the server": what}, "Wait longer, or for fewer locks at once")
        return StepFailed(error, sent=False, retry=True)

    def _admit(self) -> None:
        while len(self.under_way) < self.most:
            try:
                ticket = self._queue.popleft()
            except IndexError:
                return
            try:
                hold = ticket.pop()
            except IndexError:
                continue  # it has left the queue
            self.under_way[hold] = None
            assert hold.bell is not None  # made before it came into the queue
            hold.bell.ring()

    def forget(self) -> None:
        """In a forked child, or a new event loop: no waiter is left."""
        self.under_way.clear()
        self._queue.clear()
        self.outage = None
