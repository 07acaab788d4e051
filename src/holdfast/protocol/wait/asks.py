"""The acquire steps of a client's waiters: a limit on how many are under way at once.

Invariant. At most ``most`` waiters of a client have sent a step that is not answered yet. Every other waiter is in a
queue, in the order of arrival, until another waiter has its answer or its own wait is over. So if 20,000 waiters want
to ask at once (after a start, or a restart of the server), they do not delay the renewals of their client, and threads
do not open a connection each.

Atomic: single dict, deque and list operations, so any thread may call. A ticket is a list that contains the waiter:
``pop`` succeeds for exactly one caller, which either admits the waiter or removes it from the queue. The limit is soft:
threads that enter at the same moment may exceed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.protocol.effects import STOPPED, Effects, Wakeup, clock, wait
from holdfast.protocol.hold import Hold

_LOOK_AGAIN: Final = 2.0  # seconds in the queue after which a waiter checks that it is still queued


class Asks:
    """The waiters of one client that are asking the server, and the queue of waiters that want to ask."""

    def __init__(self, most: int, new_wakeup: Callable[[], Wakeup]) -> None:
        self.most = most
        self.under_way: dict[Hold, None] = {}
        self._queue: deque[list[Hold]] = deque()
        self._new_wakeup = new_wakeup

    def is_full(self) -> bool:
        return len(self.under_way) >= self.most or bool(self._queue)

    def begin(self, hold: Hold) -> None:
        self.under_way[hold] = None

    def end(self, hold: Hold) -> None:
        """End the ask of this hold, answered or not; does nothing if it was not under way."""
        self.under_way.pop(hold, None)
        if self._queue:
            self._admit()

    def wait_for_turn(self, hold: Hold, ends: Callable[[], float]) -> Effects[float]:
        """Wait until the hold may ask (is ``under_way``), is notified, or its wait ends; returns the time.

        ``ends``: when its wait ends, as far as is known; asked again after each wake-up.
        """
        waiter = hold.wait_at_server()
        if waiter.wakeup is None:
            waiter.wakeup = self._new_wakeup()
        ticket: list[Hold] = []
        try:
            now = yield from clock()
            while True:
                if not ticket:  # the first time, or the caller that popped it was interrupted before it admitted us
                    ticket.append(hold)
                    self._queue.append(ticket)
                    self._admit()  # another ask may have ended since the caller checked
                now = yield from wait(waiter.wakeup, min(ends(), now + _LOOK_AGAIN))
                if hold in self.under_way or waiter.notification is not None or now >= ends():
                    ticket.clear()
                    return now
        except STOPPED:
            ticket.clear()
            self.end(hold)
            raise

    def wake_all(self) -> None:
        """Wake the waiters in the queue, so that they see that contact with the server is lost."""
        for ticket in list(self._queue):
            for hold in list(ticket):
                hold.waiter.wake()

    def _admit(self) -> None:
        while len(self.under_way) < self.most:
            try:
                ticket = self._queue.popleft()
            except IndexError:
                return
            try:
                hold = ticket.pop()
            except IndexError:
                continue  # the waiter has left the queue
            self.under_way[hold] = None
            hold.waiter.wake()

    def forget(self) -> None:
        """Forget all waiters, after a fork or in a new event loop."""
        self.under_way.clear()
        self._queue.clear()
