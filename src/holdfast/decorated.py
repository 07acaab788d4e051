"""What ``cached`` makes of a function: an object that is called like it, and knows the name and the end of its values.

It binds as a function does, so that it may be a method; and what it is then asked for is asked of that very object:
``shop.price.invalidate("tea")`` needs no ``self``. It pickles by its name, as functions do.

To a type checker it has the arguments of the function, and what the function returns.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Literal, TypedDict
from weakref import WeakSet

from holdfast.errors import InvalidConfig
from holdfast.lease import BaseLease
from holdfast.protocol.entries import Policy, Serializer
from holdfast.protocol.templates import Template

__all__ = [
    "SKIPPED",
    "BaseCached",
    "CacheOptions",
    "Skipped",
    "current_lease",
    "exclusive_wait",
    "finished",
    "holding",
    "refuse_bare",
    "refuse_result",
]

_BUSY: Final = ("raise", "skip", "wait")
_caching: Final[WeakSet[Any]] = WeakSet()  # clients of this process that have decorated a function
_lease: Final[ContextVar[BaseLease | None]] = ContextVar("holdfast.current_lease", default=None)


class Skipped(Enum):
    """The type of SKIPPED. An enum, so that ``is`` narrows types, and a copy or an unpickled one is the same object."""

    SKIPPED = "skipped"

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "holdfast.SKIPPED"

    __str__ = __repr__


SKIPPED: Final = Skipped.SKIPPED  # what a call returns that ``@exclusive(busy="skip")`` has left out


def current_lease() -> BaseLease | None:
    """The lease under which the innermost ``@client.exclusive`` function runs here; None outside of one.

    It is kept in a context variable: tasks that the function starts, and ``asyncio.to_thread``, see it too; a plain
    thread does not.
    """
    return _lease.get()


@contextmanager
def holding(lease: BaseLease) -> Iterator[None]:
    """Make it the current lease."""
    token = _lease.set(lease)
    try:
        yield
    finally:
        _lease.reset(token)


class CacheOptions(TypedDict, total=False):
    """What ``get_or_compute`` takes beside a key, a function and a ttl."""

    stale: float
    errors: float
    early: float
    compute_ttl: float
    max_compute: float | None
    wait: float | None
    serializer: Serializer | None


class BaseCached:
    """A function whose results are cached. The two faces add how it is called, and how a result is forgotten."""

    _bound: tuple[Any, ...] = ()  # the object whose method it is
    __name__: str
    __qualname__: str

    def __init__(self, client: Any, function: Callable[..., Any], template: Template, policy: Policy) -> None:
        _refuse_shared(client, template.pattern, function)
        self._client = client
        self._function = function
        self._template = template
        self._policy = policy
        made: Any = self
        update_wrapper(made, function)

    def key(self, *args: Any, **kwargs: Any) -> str:
        """The key of that call. What the key does not depend on may be left out."""
        return self._template.name_of((*self._bound, *args), kwargs)

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Policy, Callable[[], Any]]:
        """What is asked of the client for that call."""
        args = (*self._bound, *args)
        entry = self._client._entry(self._template.name(args, kwargs))
        return entry, self._policy, lambda: self._function(*args, **kwargs)

    def _bind(self, instance: object) -> Any:
        if instance is None or self._bound:
            return self
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._bound = (instance,)
        bound.__wrapped__ = MethodType(self._function, instance)  # type: ignore[attr-defined]  # for inspect.signature
        return bound

    def __reduce__(self) -> Any:
        return (getattr, (self._bound[0], self.__name__)) if self._bound else self.__qualname__

    def __repr__(self) -> str:
        return f"<cached {self._function!r}>"


def exclusive_wait(wait: float | None, busy: str, default: object) -> float | None:
    """How long to wait for one's turn: with busy="wait" for ever, unless it was said how long."""
    if busy not in _BUSY:
        raise InvalidConfig(f"busy={busy!r:.60}", f"give one of {', '.join(map(repr, _BUSY))}")
    if default is not SKIPPED and busy != "skip":
        raise InvalidConfig(f"default={default!r:.60}", f"it is for busy='skip': with {busy!r} no call is left out")
    return None if busy == "wait" and not wait else wait


def refuse_bare(name: object, use: str) -> None:
    """Who writes the decorator without a name gives it the function instead; said before that is called in vain."""
    if not isinstance(name, str):
        given = getattr(name, "__qualname__", repr(name))
        raise InvalidConfig(
            f"{use}({given:.60})",
            f'give a name: @client.{use}("a-name"), or, depending on an argument, @client.{use}("a-name:{{argument}}")',
        )


def _refuse_shared(client: Any, pattern: str, function: Callable[..., Any]) -> None:
    """Two functions whose values have the same keys would return each other's results; said when the second is
    decorated, by this client or another of this process. A function that is decorated again (a reloaded module, a
    factory) is the same one."""
    if _find_other(client, pattern, function) is not None:
        gc.collect()  # its client, or the function itself, may be garbage
    first = _find_other(client, pattern, function)
    if first is not None:
        raise InvalidConfig(
            f"cached({pattern!r:.80}) of {_full_name(function):.100}",
            f"{_full_name(first):.100} has this template: they would return each other's values. Give each its own",
        )
    _caching.add(client)
    try:
        client._cached[pattern] = function
    except TypeError:
        pass  # no weak references to it: it is not remembered


def _find_other(client: Any, pattern: str, function: Callable[..., Any]) -> Any:
    """Another function of this process whose values would have the same keys; None if there is none."""
    for one in [client, *_caching]:
        first = one._cached.get(pattern) if _is_same_place(one, client) else None
        if first is not None and first is not function and _full_name(first) != _full_name(function):
            return first
    return None


def _is_same_place(one: Any, other: Any) -> bool:
    """Whether the values of these clients have the same keys on the same server."""
    ours, theirs = one._driver, other._driver
    return one is other or (
        (ours.address, one._namespace) == (theirs.address, other._namespace) and not ours.book.closed
    )


def _full_name(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{function.__module__}.{name}"


def refuse_result(fn: Any, key: object) -> None:
    """Whoever gives the result of a function instead of it has called it already; said before anybody is asked."""
    if not callable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise InvalidConfig(
            f"get_or_compute({key!r:.60}) with an object of type {type(fn).__name__}",
            "give the function itself, which is called only if there is no value",
        )


def finished(result: Any, said: str) -> Any:
    """What a function has returned; but not if its work is still to be done."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidConfig(said, "the function returned a coroutine, which nobody awaits here: use holdfast.aio")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidConfig(said, "the function returned a generator, which has done nothing yet: return a list")
    return result
