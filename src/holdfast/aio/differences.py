"""Where the asyncio face differs from the blocking one.

holdfast/blocking/differences.py has the same names. Both are written by hand; scripts/derive_blocking.py derives the
other modules of holdfast.blocking from those of holdfast.aio.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from holdfast import decorated
from holdfast.lease import BaseLease
from holdfast.protocol.kinds.election import BaseTerms

if TYPE_CHECKING:
    from holdfast.aio.cache import Cached

__all__ = ["Caching", "DroppedTerms", "Excluding", "OnLost", "finished"]

P = ParamSpec("P")
R = TypeVar("R")
D_co = TypeVar("D_co", covariant=True)
L = TypeVar("L", bound=BaseLease)

OnLost = Callable[[L], object] | str | None


async def finished(result: Any, call: str) -> Any:
    """The result of a decorated function, which may be a coroutine function."""
    return decorated.finished(await result if inspect.isawaitable(result) else result, call)


class DroppedTerms(BaseTerms[L]):
    """Terms whose loop may be left without closing them."""

    __slots__ = ()

    def __del__(self) -> None:
        # Nothing can be awaited here.
        try:
            self._drop()
        except (AttributeError, TypeError, RuntimeError):  # the interpreter or the event loop is shutting down
            pass


class Caching(Protocol):
    """A decorator of coroutine functions and of plain functions."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Cached[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Cached[P, R]: ...


class Excluding(Protocol[D_co]):
    """A decorator of coroutine functions and of plain functions; D is the type of what a skipped call returns."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Callable[P, Coroutine[Any, Any, R | D_co]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, Coroutine[Any, Any, R | D_co]]: ...
