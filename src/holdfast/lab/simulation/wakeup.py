"""The wakeups of the simulated world: a flag and its waiter."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Wakeup:
    """A flag that one process can wait for. It stays set until a process waits for it, or clears it."""

    def __init__(self) -> None:
        self.woken = False
        self.waiter: Callable[[], None] | None = None
        self.caller: Hashable = None

    def wake(self) -> None:
        self.woken = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def prewake(self) -> None:
        self.wake()  # drivers may wake early; the world always does

    def clear(self) -> None:
        self.woken = False
