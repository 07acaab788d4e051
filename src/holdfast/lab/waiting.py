"""Bells and gates of the simulated world: plain records, with whoever waits at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

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
        self._shut = False
        self._waiting: deque[Callable[[], bool]] = deque()

    def locked(self) -> bool:
        return self._shut

    def pass_or_queue(self, offer: Callable[[], bool]) -> bool:
        """Pass now, or be offered the gate later; the offer says whether it was taken."""
        if self._shut:
            self._waiting.append(offer)
            return False
        self._shut = True
        return True

    def release(self) -> None:
        if not self._shut:
            raise RuntimeError("a gate that is open was released")
        while self._waiting:
            if self._waiting.popleft()():
                return
        self._shut = False
