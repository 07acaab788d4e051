"""The semaphore: a pool of numbered permits.

Invariant. At most ``permits`` holders at the same time, as long as all ask for the same number of permits. No two of
them have the same slot, which is below that number. A fence is greater than that of every earlier holder of any slot.

The number of permits is not stored on the server: it comes with each request. So a smaller number takes no permit from
a holder. It applies to the requests that carry it: they are granted once there are fewer holders than that.

Why numbered? A permit often represents a port, a directory, or one of five licences. ``lease.slot`` says which one is
yours; and the resource of that slot can refuse lower fences than it has seen.

Atomic and clocks: as in pool.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from holdfast.errors import NotHeld, OverRelease
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol.effects import Effects
from holdfast.protocol.kinds.pool import BasePool

L = TypeVar("L", bound=BaseLease)


class BasePermit(BaseLease):
    """A hold on one permit of a semaphore."""

    __slots__ = ()

    @property
    def slot(self) -> int:
        """The number of this permit: the lowest free one, from 0. No other holder has it at the same time."""
        return self._hold.slot


class BaseSemaphore(BasePool[L]):
    """One semaphore, with its options."""

    __slots__ = ("_permits",)

    _kind = "semaphore"
    _not_held_type = OverRelease

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L], permits: int) -> None:
        self._permits = permits
        super().__init__(driver, keys, options, lease_class)

    @property
    def permits(self) -> int:
        """How many holders there can be at the same time."""
        return self._permits

    def _mode(self) -> str:
        return f"n{self._permits}"

    def _not_held(self, held: int, n: int) -> NotHeld:
        return OverRelease(self.name, held=held, released=n, key=self.key)

    def _locked(self) -> Effects[bool]:
        inside, _ = yield from self._look()
        return inside >= self._permits

    def _why_not(self, now: float, me: Hashable) -> str:
        permits = "its permit is" if self._permits == 1 else f"all of its {self._permits} permits are"
        return f"{permits} taken. Wait longer (wait=), or catch AcquireTimeout and try again later"
