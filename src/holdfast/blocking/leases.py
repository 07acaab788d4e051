# Derived from holdfast/aio/leases.py by scripts/derive_blocking.py: edit that file, then run this script.
"""Leases of the blocking face."""

from __future__ import annotations

from holdfast.drivers.blocking import Driver
from holdfast.lease import BaseLease
from holdfast.options import Seconds, as_seconds, seconds
from holdfast.protocol.kinds.handover import hand_over
from holdfast.protocol.kinds.rlock import ReentrantLease, hand_over_level, release_level
from holdfast.protocol.kinds.rwlock import BaseWriteLease, downgrade_lease
from holdfast.protocol.kinds.semaphore import BasePermit
from holdfast.protocol.leases import extend_lease, release_lease, wait_until_lost
from holdfast.protocol.lock import BaseLost
from holdfast.protocol.recipes.base import FencelessLease, refuse_to_extend, release_recipe

__all__ = ["Lease", "Lost", "Permit", "RLease", "RecipeLease", "WriteLease"]


class Lost(BaseLost):
    """An event that is set once the lease is lost."""

    __slots__ = ()
    _driver: Driver

    def wait(self, timeout: Seconds | None = None) -> bool:
        """True once the lease is lost; False after ``timeout`` seconds (None: wait forever)."""
        return self._driver.run(wait_until_lost(self._hold, as_seconds(timeout)))


class Lease(BaseLease):
    """A hold on a lock, from ``acquire()`` or ``with`` until it is released or lost."""

    __slots__ = ()
    _driver: Driver

    @property
    def lost(self) -> Lost:
        """An event that is set once the lease is lost: ``is_set()``, ``wait(timeout)``."""
        return Lost(self._driver, self._hold)

    def extend(self, n: Seconds) -> None:
        """Make the lease last at least n seconds from now. It never gets shorter."""
        self._driver.run(extend_lease(self, seconds("extend", n, least=0.01)))

    def release(self) -> None:
        """Release the lock. LeaseLost if the lease was lost before, NotHeld if it was released before."""
        self._driver.run(release_lease(self))

    def hand_over(self) -> str:
        """A ticket with which another process can take over this hold (``client.adopt``). This lease ends here.

        The ticket is valid for one ttl from now. It gives access to the lock: keep it out of logs.
        """
        return self._driver.run(hand_over(self))


class RLease(ReentrantLease, Lease):
    """A hold on a reentrant lock."""

    __slots__ = ()

    def release(self) -> None:
        """Release one level; the last one releases the lock. NotHeld if another thread holds it."""
        self._driver.run(release_level(self))

    def hand_over(self) -> str:
        """A ticket, as of any lease. Unsupported while the lock is acquired more than once."""
        return self._driver.run(hand_over_level(self))


class Permit(BasePermit, Lease):
    """A hold on one permit of a semaphore."""

    __slots__ = ()


class WriteLease(BaseWriteLease, Lease):
    """A hold on the write side of a readers-writer lock."""

    __slots__ = ()

    def downgrade(self) -> None:
        """Turn this hold into a reading one, with no writer in between. Release it as before."""
        self._driver.run(downgrade_lease(self))


class RecipeLease(FencelessLease, Lease):
    """A hold on a recipe: no fence, no renewal."""

    __slots__ = ()

    def extend(self, n: Seconds) -> None:
        """Always raises Unsupported: no recipe can extend its hold."""
        self._driver.run(refuse_to_extend(self._hold))

    def release(self) -> None:
        """Release the lock as the recipe does. LeaseLost if the recipe notices that it no longer held the lock."""
        self._driver.run(release_recipe(self._hold))
