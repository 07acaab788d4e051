"""Where the blocking face differs from the asyncio one.

holdfast/aio/differences.py has the same names. Both are written by hand; scripts/derive_blocking.py derives the other
modules of holdfast.blocking from those of holdfast.aio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from holdfast.decorated import finished
from holdfast.lease import BaseLease
from holdfast.protocol.effects import Effects
from holdfast.protocol.kinds.election import BaseTerms

if TYPE_CHECKING:
    from holdfast.blocking.cache import Cached

__all__ = ["Caching", "DroppedTerms", "Excluding", "OnLost", "finished"]

P = ParamSpec("P")
R = TypeVar("R")
D_co = TypeVar("D_co", covariant=True)
L = TypeVar("L", bound=BaseLease)

OnLost = Callable[[L], object] | None


class DroppedTerms(BaseTerms[L]):
    """Terms whose loop may be left without closing them."""

    __slots__ = ("_thread",)
    _thread: object  # that iterates

    def _begin(self) -> Effects[L | None]:
        self._thread = self._driver.caller()
        return super()._begin()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and must not make another thread wait for a server.
        try:
            if self._lease is not None:
                if self._thread is self._driver.caller():
                    self._driver.run(self._close())
                else:
                    self._drop()
        except (AttributeError, TypeError):  # the interpreter is shutting down
            pass


class Caching(Protocol):
    """A decorator of functions."""

    def __call__(self, function: Callable[P, R], /) -> Cached[P, R]: ...


class Excluding(Protocol[D_co]):
    """The same; D is the type of what a skipped call returns."""

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | D_co]: ...
