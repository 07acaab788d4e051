"""The semaphore: a room with so many places, each with a number.

Invariant. At most ``permits`` hold at the same time, as long as all ask for the same number; and no two of them have
the same slot, which is below that number. A fence is greater than that of every earlier holder, of whatever slot.

The number of permits is no setting on the server: it comes with each request. So a smaller number takes nothing from
anybody who is inside. It holds for those who ask with it, and they come in once fewer than that are left.

Why numbered? Because what a permit stands for often has a name of its own: a port, a directory, one of five licences.
``lease.slot`` says which is yours; and what that slot guards can refuse lower fences than it has seen.

Atomic and clocks: as in room.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from holdfast.errors import NotHeld, OverRelease
from holdfast.lease import BaseLease, Terms
from holdfast.names import Keys
from holdfast.protocol.effects import Effects
from holdfast.protocol.room import BaseRoom

__all__ = ["BasePermit", "BaseSemaphore"]

L = TypeVar("L", bound=BaseLease)


class BasePermit(BaseLease):
    """A hold on one permit of a semaphore."""

    __slots__ = ()

    @property
    def slot(self) -> int:
        """Which of the permits it is: the lowest number that was free, from 0. Nobody else has it meanwhile."""
        return self._hold.slot


class BaseSemaphore(BaseRoom[L]):
    """One semaphore, asked for on given terms."""

    __slots__ = ("_permits",)

    _species = "semaphore"
    _unheld = OverRelease

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L], permits: int) -> None:
        self._permits = permits
        super().__init__(driver, keys, terms, lease_class)

    @property
    def permits(self) -> int:
        """How many may hold at the same time."""
        return self._permits

    def _wanted(self) -> str:
        return f"n{self._permits}"

    def _not_held(self, held: int, n: int) -> NotHeld:
        return OverRelease(self.name, held=held, released=n)

    def _locked(self) -> Effects[bool]:
        inside, _ = yield from self._look()
        return inside >= self._permits

    def _why_not(self, now: float, me: Hashable) -> str:
        said = "its permit is" if self._permits == 1 else f"all of its {self._permits} permits are"
        return f"{said} taken. Wait longer (wait=), or catch AcquireTimeout and come back later"
