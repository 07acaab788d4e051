"""Bells and gates of the simulated world: plain records, with whoever waits at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdfast.lease import Hold

__all__ = ["Bell", "Gate"]


class Bell:
    """Rung or not; whoever waits is woken once."""

    def __init__(self) -> None:
        self.rung = False
        self.waiting: list[Callable[[], None]] = []

    def ring(self) -> None:
        self.rung = True
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()

    def clear(self) -> None:
        self.rung = False


class Gate:
    """A mutex within a machine. It passes to the first who waits; one who has left in the meantime says so."""

    def __init__(self) -> None:
        self._passed: Hold | None = None
        self._waiting: deque[tuple[Hold, Callable[[], bool]]] = deque()

    def locked(self) -> bool:
        return self._passed is not None

    def pass_or_queue(self, hold: Hold, offer: Callable[[], bool]) -> bool:
        """Pass now, or be offered the gate later; the offer says whether it was taken."""
        if self._passed is not None:
            self._waiting.append((hold, offer))
            return False
        self._passed = hold
        return True

    def leave(self, hold: Hold) -> None:
        if self._passed is not hold:
            return
        self._passed = None
        while self._waiting and self._passed is None:
            self._passed, offer = self._waiting.popleft()
            if not offer():
                self._passed = None
