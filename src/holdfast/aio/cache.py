"""Cached functions of the asyncio face."""

from __future__ import annotations

from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from holdfast.decorated import BaseCached

__all__ = ["Cached"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class Cached(BaseCached, Generic[P, R]):
    """A function whose results are cached, made by ``@client.cached``."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = await self._client._fetch(*self._request(args, kwargs))
        return result

    async def invalidate(self, *args: Any, **kwargs: Any) -> bool:
        """Forget the result of a call; True if there was one. Leave out arguments that the key does not name."""
        forgotten: bool = await self._client.invalidate(self.key(*args, **kwargs))
        return forgotten

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Cached[P, R]: ...

    @overload
    def __get__(self: Cached[Concatenate[S, Q], R], instance: S, owner: Any = None) -> Cached[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._bind(instance)
