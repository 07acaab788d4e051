"""Locks of the asyncio face: each method runs one protocol."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from holdfast.aio.leases import Lease, Permit, RLease, WriteLease
from holdfast.drivers.aio import Driver
from holdfast.face import N_co
from holdfast.options import Seconds, patience, whole, with_options_of
from holdfast.protocol.kinds.multi import BaseMultiLock
from holdfast.protocol.kinds.rlock import BaseRLock
from holdfast.protocol.kinds.rwlock import BaseReader, BaseRWLock, BaseWriter, use_a_side
from holdfast.protocol.kinds.semaphore import BaseSemaphore
from holdfast.protocol.lock import BaseLock
from holdfast.protocol.recipes.base import BaseRecipe

L = TypeVar("L", bound=Lease)

__all__ = ["Lock", "MultiLock", "RLock", "RWLock", "ReadLock", "Recipe", "Semaphore", "WriteLock"]


class Lock(BaseLock[Lease], Generic[N_co]):
    """A lock with the methods of asyncio.Lock. ``async with`` gives the Lease."""

    __slots__ = ()
    _driver: Driver

    # The type of ``self`` says which kind of lease the lock gives: a Semaphore gives a Permit.

    @overload
    async def acquire(self: BaseLock[L], blocking: Literal[True] = True, timeout: Literal[-1] = -1) -> L | N_co: ...

    @overload
    async def acquire(self: BaseLock[L], blocking: bool = True, timeout: Seconds = -1) -> L | None: ...

    @overload
    async def acquire(self: BaseLock[L], *, wait: None) -> L: ...

    @overload
    async def acquire(self: BaseLock[L], *, wait: Seconds) -> L | None: ...

    @with_options_of(patience)
    async def acquire(self: BaseLock[L], blocking: bool = True, timeout: Seconds = -1, **options: Any) -> L | None:
        """A lease, or None if the lock was not free in time.

        ``blocking`` and ``timeout`` are those of threading.Lock, ``wait`` is that of ``lock``, which applies if none of
        them is given.
        """
        limit = patience(blocking, timeout, self._options.wait, **options)
        lease: L | None = await self._driver.run(self._acquire(limit))
        return lease

    async def release(self) -> None:
        """Release the hold of this object, from any task. NotHeld if there is none."""
        await self._driver.run(self._release())

    async def locked(self) -> bool:
        """Whether the lock is held at all, asked of the server."""
        return await self._driver.run(self._locked())

    def __aenter__(self: BaseLock[L]) -> Awaitable[L]:
        entered: Awaitable[L] = self._driver.run(self._enter())
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = None
        try:
            entered = self._entered.copy()
            if (rest := self._leave(error)) is not None:
                await self._driver.run(rest)
        except BaseException as struck:
            # Ctrl-C may come before the protocol begins, and then nothing else would release the lease. Only Ctrl-C at
            # the call of this method, before its first instruction, cannot be covered.
            await self._driver.run(self._leave_after_all(entered, struck))
            raise


class MultiLock(BaseMultiLock[Lease], Lock[N_co]):
    """A lock on several names, used like a Lock."""

    __slots__ = ()


class RLock(BaseRLock[RLease], Lock[N_co]):
    """A reentrant lock, used like threading.RLock. Task and name identify its owner, not the object."""

    __slots__ = ()


class Semaphore(BaseSemaphore[Permit], Lock[N_co]):
    """A semaphore with the methods of asyncio.BoundedSemaphore. ``async with`` gives the Permit.

    One object may hold many permits. ``locked()``: are all permits taken?
    """

    __slots__ = ()

    async def release(self, n: int = 1) -> None:
        """Release n permits: first the newest of the calling task, then the oldest. OverRelease if fewer are held."""
        await self._driver.run(self._release(whole("n", n, least=1)))

    async def adopt(self, ticket: str) -> Permit:
        """A Permit for what another process handed over: the same slot, with the options of this object."""
        return await self._driver.run(self._adopt(ticket))


class ReadLock(BaseReader[Lease], Lock[N_co]):
    """The read side of a readers-writer lock. One object may hold many leases. ``locked()``: is there a reader?"""

    __slots__ = ()

    async def adopt(self, ticket: str) -> Lease:
        """A Lease for reading that another process handed over, with the options of this object."""
        return await self._driver.run(self._adopt(ticket))


class WriteLock(BaseWriter[WriteLease], Lock[N_co]):
    """The write side of a readers-writer lock. ``locked()``: is there a writer?"""

    __slots__ = ()

    async def adopt(self, ticket: str) -> WriteLease:
        """A WriteLease for writing that another process handed over, with the options of this object."""
        return await self._driver.run(self._adopt(ticket))


class RWLock(BaseRWLock[ReadLock[N_co], WriteLock[N_co]], Generic[N_co]):
    """A readers-writer lock. Its sides ``read`` and ``write`` are locks."""

    __slots__ = ()
    if not TYPE_CHECKING:  # a type checker must see that it cannot be entered
        __aenter__ = __aexit__ = use_a_side


class Recipe(BaseRecipe[Lease], Lock):
    """A recipe: a lock as older clients deploy it, used like a Lock."""

    __slots__ = ()
