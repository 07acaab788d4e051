"""A mutex between threads that Ctrl-C cannot leave shut.

With threading.Lock, an interrupt that strikes after the lock was taken and before that is written down leaves it taken
by nobody. Here taking it *is* writing it down: who wants to pass puts a claim of its own on the one seat, in a single
operation, and whoever was interrupted can still see whether its claim is there. The claim is the hold itself.
"""

from __future__ import annotations

import threading

from holdfast.drivers import clock
from holdfast.lease import Hold

__all__ = ["Gate"]


class Gate:
    __slots__ = ("_seat", "_waiting")

    def __init__(self) -> None:
        self._seat: dict[None, Hold] = {}
        self._waiting: list[threading.Event] = []  # and no deque, for there is a gate to every lock object

    def locked(self) -> bool:
        return bool(self._seat)

    def enter(self, hold: Hold, until: float | None) -> bool:
        """Pass, by that time (None: whenever); whether it was passed."""
        return self._seat.setdefault(None, hold) is hold or self._wait(hold, until)

    def _wait(self, hold: Hold, until: float | None) -> bool:
        bell = threading.Event()
        self._waiting.append(bell)
        try:
            while self._seat.setdefault(None, hold) is not hold:
                left = threading.TIMEOUT_MAX if until is None else until - clock.now()
                if left <= 0:
                    return False
                bell.wait(min(left, threading.TIMEOUT_MAX))
                bell.clear()
            return True
        finally:
            self._waiting.remove(bell)
            if not self._seat:
                self._wake_first()  # we may have been woken, and are leaving: the next one needs to know

    def leave(self, hold: Hold) -> None:
        if self._seat.get(None) is hold:
            del self._seat[None]
        if not self._seat:  # also when asked again, after an interrupt between the two
            self._wake_first()

    def _wake_first(self) -> None:
        if self._waiting:
            try:
                self._waiting[0].set()
            except IndexError:
                pass  # it has just left, and nobody else waits
