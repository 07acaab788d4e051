"""What both faces share of the decorators ``cached`` and ``exclusive``.

``cached`` makes an object that is called like the function, and that also gives the key of a call and invalidates its
result. The object binds as a function does, so it may be a method: ``shop.price.invalidate("tea")`` needs no ``self``.
It pickles by its name, as functions do. A type checker sees the function's arguments and result.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import update_wrapper
from types import MethodType
from typing import Any, Final, Literal, TypedDict
from weakref import WeakSet

from holdfast.errors import InvalidConfig
from holdfast.lease import BaseLease
from holdfast.options import Seconds
from holdfast.protocol.cache.entry import Policy, Serializer
from holdfast.protocol.cache.name_template import Template

_BUSY: Final = ("raise", "skip", "wait")
_caching: Final[WeakSet[Any]] = WeakSet()  # clients of this process that have decorated a function
_lease: Final[ContextVar[BaseLease | None]] = ContextVar("holdfast.current_lease", default=None)


class Skipped(StrEnum):
    """The type of SKIPPED. An enum, so that ``is`` narrows types, and copies and unpickled ones are the same object.

    A str, so that JSON can express it: as "skipped", which is equal to SKIPPED.
    """

    SKIPPED = "skipped"

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "holdfast.SKIPPED"

    __str__ = __repr__


SKIPPED: Final = Skipped.SKIPPED  # the result of a call that ``@exclusive(busy="skip")`` did not run


def current_lease() -> BaseLease | None:
    """The lease of the innermost ``@client.exclusive`` function that runs here; None outside of one.

    It is kept in a context variable: tasks that the function starts, and ``asyncio.to_thread``, see it too; a plain
    thread does not.
    """
    return _lease.get()


@contextmanager
def holding(lease: BaseLease) -> Iterator[None]:
    """Make this the current lease."""
    token = _lease.set(lease)
    try:
        yield
    finally:
        _lease.reset(token)


class CacheKeywords(TypedDict, total=False):
    """The options of ``get_or_compute``, except key, function and ttl."""

    stale: Seconds
    errors: Seconds
    early: float
    compute_ttl: Seconds
    max_compute: Seconds | None
    wait: Seconds | None
    serializer: Serializer | None


class BaseCached:
    """A function whose results are cached. The two faces add how to call it, and how to invalidate a result."""

    _bound: tuple[Any, ...] = ()  # the instance, if this is a bound method
    __name__: str
    __qualname__: str

    def __init__(self, client: Any, function: Callable[..., Any], template: Template, policy: Policy) -> None:
        _refuse_shared(client, template, function)
        self._client = client
        self._function = function
        self._template = template
        self._policy = policy
        made: Any = self
        update_wrapper(made, function)

    def key(self, *args: Any, **kwargs: Any) -> str:
        """The key of that call. Arguments that the key does not depend on may be left out."""
        return self._template.name_of((*self._bound, *args), kwargs)

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Policy, Callable[[], Any]]:
        """The entry, the policy and the computation of that call."""
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


def exclusive_wait(wait: Seconds | None, busy: str, default: object) -> Seconds | None:
    """How long to wait for the lock: with busy="wait" forever, unless ``wait`` is given."""
    if busy not in _BUSY:
        raise InvalidConfig(f"busy={busy!r:.60}", f"give one of {', '.join(map(repr, _BUSY))}")
    if default is not SKIPPED and busy != "skip":
        raise InvalidConfig(f"default={default!r:.60}", f"it is for busy='skip': with {busy!r} no call is skipped")
    return None if busy == "wait" and not wait else wait


def refuse_bare(name: object, use: str) -> None:
    """Refuse a name that is not a str: a decorator without parentheses gets the function as its name."""
    if not isinstance(name, str):
        given = getattr(name, "__qualname__", repr(name))
        raise InvalidConfig(
            f"{use}({given:.60})",
            f'give a name: @client.{use}("a-name"), or, depending on an argument, @client.{use}("a-name:{{argument}}")',
        )


def _refuse_shared(client: Any, template: Template, function: Callable[..., Any]) -> None:
    """Refuse a second function with the same keys, in this client or another of this process: each would return the
    other's values. A function that is decorated again (a reloaded module, a factory) is the same one."""
    shape = template.shape()
    if _find_other(client, shape, function) is not None:
        gc.collect()  # the other function, or its client, may be garbage
    first = _find_other(client, shape, function)
    if first is not None:
        raise InvalidConfig(
            f"cached({template.pattern!r:.80}) of {_full_name(function):.100}",
            f"{_full_name(first):.100} has this template (names of fields do not count): they would return each "
            "other's values. Give each its own",
        )
    _caching.add(client)
    try:
        client._cached[shape] = function
    except TypeError:
        pass  # a function that takes no weak references is not remembered


def _find_other(client: Any, shape: str, function: Callable[..., Any]) -> Any:
    """Another function of this process whose values would have the same keys; None if there is none."""
    for one in [client, *_caching]:
        first = one._cached.get(shape) if _is_same_place(one, client) else None
        if first is not None and not _is_same_function(first, function):
            return first
    return None


def _is_same_place(one: Any, other: Any) -> bool:
    """Whether these clients have the same keys on the same server."""
    ours, theirs = one._driver, other._driver
    return one is other or (
        (ours.address, one._namespace) == (theirs.address, other._namespace) and not ours.registry.closed
    )


def _is_same_function(one: Any, other: Any) -> bool:
    """Whether both come from the same definition. Lambdas share a name, so their code is compared as well."""
    if one is other:
        return True
    if _full_name(one) != _full_name(other):
        return False
    return not _full_name(one).endswith("<lambda>") or _code_of(one) == _code_of(other)


def _code_of(function: Any) -> object:
    return getattr(inspect.unwrap(function), "__code__", None)


def _full_name(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{function.__module__}.{name}"


def refuse_result(fn: Any, key: object) -> None:
    """Refuse the result of a function where the function itself is needed."""
    if not callable(fn):
        if inspect.iscoroutine(fn):
            fn.close()
        raise InvalidConfig(
            f"get_or_compute({key!r:.60}) with an object of type {type(fn).__name__}",
            "give the function itself, which is called only if there is no value",
        )


def refuse_skipped(value: Any, key: str) -> Any:
    """The value to store under a key; InvalidConfig if the call that should make it was skipped."""
    if value is SKIPPED:
        problem = "the call that computes it was skipped, and that would be stored. Give @exclusive busy='wait'"
        raise InvalidConfig(f"the value of {key!r:.60}", problem)
    return value


def finished(result: Any, call: str) -> Any:
    """The result of a function; InvalidConfig if its work is not done yet."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidConfig(call, "the function returned a coroutine, which is not awaited here: use holdfast.aio")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidConfig(call, "the function returned a generator, which has done nothing yet: return a list")
    return result
