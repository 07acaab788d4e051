"""How a thread sleeps until it is woken, and what represents it as the owner of its holds."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Hashable

from holdfast.drivers import clock
from holdfast.protocol import effects as fx


class Owner:
    """Represents a thread as the owner of its holds. A thread's ident would not do: it is reused after the thread."""

    __slots__ = ("__weakref__",)


class Wakeup:
    """A lock that is held until ``wake``.

    ``wake`` is one operation, so any thread may call it, and a signal handler in the waiting thread too. With
    threading.Event the handler could deadlock, because an Event has a lock inside.
    """

    __slots__ = ("_asleep", "caller")

    def __init__(self) -> None:
        self.caller: Hashable = None
        self._asleep = _thread.allocate_lock()
        self._asleep.acquire()

    def wake(self) -> None:
        if self._asleep.locked():  # else the wake-up is pending already
            try:
                self._asleep.release()
            except RuntimeError:
                pass  # another thread was quicker

    # A thread needs time to wake up, which overlaps with the caller's remaining work.
    prewake = wake

    def clear(self) -> None:
        self._asleep.acquire(blocking=False)

    def wait(self, seconds: float) -> None:
        """Wait for ``wake``, which ends one wait. One caller at a time."""
        if seconds > threading.TIMEOUT_MAX:
            self._asleep.acquire()  # no timeout, because Python would set a timer for it
        elif seconds > 0:
            self._asleep.acquire(timeout=seconds)
        else:
            self._asleep.acquire(blocking=False)


def sleep(wakeup: fx.Wakeup | None, until: float) -> float:
    """Sleep until then, or until the wake-up; returns the time."""
    left = until - clock.now()
    if isinstance(wakeup, Wakeup):
        wakeup.wait(left)
    elif left > 0:
        time.sleep(min(left, threading.TIMEOUT_MAX))
    return clock.now()
