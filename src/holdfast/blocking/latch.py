# Derived from holdfast/aio/latch.py by scripts/derive_blocking.py: edit that file, then run this script.
"""The latch of the blocking face."""

from __future__ import annotations

from holdfast.drivers.blocking import Driver
from holdfast.options import Seconds, seconds_or_forever, whole
from holdfast.protocol.kinds.latch import BaseLatch

__all__ = ["Latch"]


class Latch(BaseLatch):
    """A latch: it opens once it is counted down to 0, and stays open."""

    __slots__ = ()
    _driver: Driver

    def count_down(self, n: int = 1) -> int:
        """Count down by n. Returns what is left: at 0 the latch is open, and counting further changes nothing."""
        return self._driver.run(self._count_down(whole("n", n, least=1)))

    def wait(self, timeout: Seconds | None = None) -> bool:
        """True once the latch is open; False after ``timeout`` seconds (None: wait forever)."""
        return self._driver.run(self._wait(seconds_or_forever("timeout", timeout)))

    def count(self) -> int:
        """How much is left to count down, asked of the server."""
        return self._driver.run(self._look())
