"""Bells of the simulated world: plain records, with whoever waits at them."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Bell"]


class Bell:
    """Rung or not. A ring is kept until somebody waits, or clears it."""

    def __init__(self) -> None:
        self.rung = False
        self.waiter: Callable[[], None] | None = None

    def ring(self) -> None:
        self.rung = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def stir(self) -> None:
        self.ring()  # what may happen is what happens here

    def clear(self) -> None:
        self.rung = False
