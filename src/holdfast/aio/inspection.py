"""The list of locks of the asyncio face."""

from __future__ import annotations

from holdfast.drivers.aio import Driver
from holdfast.holder import LockInfo
from holdfast.protocol.inspection.locks import BaseLocks

__all__ = ["Locks"]


class Locks(BaseLocks):
    """The locks of a server, one after the other."""

    _driver: Driver

    def __aiter__(self) -> Locks:
        return self

    async def __anext__(self) -> LockInfo:
        info = await self._driver.run(self._next())
        if info is None:
            raise StopAsyncIteration
        return info
