# Derived from holdfast/aio/inspection.py by scripts/derive_blocking.py: edit that file, then run this script.
"""The list of locks of the blocking face."""

from __future__ import annotations

from holdfast.drivers.blocking import Driver
from holdfast.holder import LockInfo
from holdfast.protocol.inspection.locks import BaseLocks

__all__ = ["Locks"]


class Locks(BaseLocks):
    """The locks of a server, one after the other."""

    _driver: Driver

    def __iter__(self) -> Locks:
        return self

    def __next__(self) -> LockInfo:
        info = self._driver.run(self._next())
        if info is None:
            raise StopIteration
        return info
