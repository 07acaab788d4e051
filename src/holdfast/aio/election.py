"""Elections of the asyncio face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.aio.differences import DroppedTerms
from holdfast.aio.leases import Lease
from holdfast.aio.locks import Lock
from holdfast.drivers.aio import Driver
from holdfast.protocol.kinds.election import BaseElection, Leader, use_lead_or_terms

__all__ = ["Election", "Terms"]


class Terms(DroppedTerms[Lease]):
    """Terms as leader, one after the other, until closed. A loop gets the lease of each term."""

    __slots__ = ()
    _driver: Driver

    def __aiter__(self) -> Terms:
        return self

    async def __anext__(self) -> Lease:
        lease = await self._driver.run(self._begin())
        if lease is None:
            raise StopAsyncIteration
        return lease

    async def aclose(self) -> None:
        """Step down if this candidate leads, from any task. The loop ends at its next round."""
        await self._driver.run(self._close())


class Election(BaseElection[Lease]):
    """An election. Each object is one candidate, and leads at most once at a time."""

    __slots__ = ()
    _driver: Driver
    _lock: Lock

    def lead(self) -> Lock:
        """The lock whose holder leads: ``async with election.lead() as lease``."""
        return self._lock

    async def leader(self) -> Leader | None:
        """The current leader, asked of the server; None if there is none. Also for programs that are no candidate."""
        return await self._driver.run(self._leader())

    async def resign(self) -> None:
        """Step down, from any task. NotHeld if this candidate does not lead."""
        await self._driver.run(self._resign())

    def terms(self) -> Terms:
        """Lead again and again: ``async for lease in election.terms()``. Each round ends a term and campaigns again."""
        return Terms(self._driver, self._lock)

    if not TYPE_CHECKING:  # a type checker must see that it cannot be entered
        __aenter__ = __aexit__ = __aiter__ = use_lead_or_terms
