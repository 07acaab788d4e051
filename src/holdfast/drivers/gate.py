"""A mutex between threads that Ctrl-C cannot leave shut.

With threading.Lock, an interrupt that strikes after the lock was taken and before that is written down leaves it taken
by nobody. Here taking it *is* writing it down: who wants to pass puts a claim of its own on the one seat, in a single
operation, and whoever was interrupted can still see whether its claim is there.
"""

from __future__ import annotations

import threading
from collections import deque

from holdfast.drivers import clock

__all__ = ["Gate"]


class Gate:
    __slots__ = ("_seat", "_waiting")

    def __init__(self) -> None:
        self._seat: dict[None, object] = {}
        self._waiting: deque[threading.Event] = deque()

    def locked(self) -> bool:
        return bool(self._seat)

    def enter(self, until: float | None) -> bool:
        """Pass, by that time (None: whenever); whether it was passed."""
        claim = object()
        try:
            return self._seat.setdefault(None, claim) is claim or self._wait(claim, until)
        except BaseException:
            if self._seat.get(None) is claim:
                self.release()
            raise

    def _wait(self, claim: object, until: float | None) -> bool:
        bell = threading.Event()
        self._waiting.append(bell)
        try:
            while self._seat.setdefault(None, claim) is not claim:
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

    def release(self) -> None:
        if not self._seat:
            raise RuntimeError("a gate that is open was released")
        self._seat.clear()
        self._wake_first()

    def _wake_first(self) -> None:
        try:
            self._waiting[0].set()
        except IndexError:
            pass  # nobody waits
