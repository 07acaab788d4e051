"""What both faces share: the settings of a client, and the checks of names and options."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from holdfast.errors import InvalidConfig, InvalidName, UnsafeRecipeWarning
from holdfast.names import Keys, keys_of, not_a_name, unprintable_in
from holdfast.options import (
    CommonKeywords,
    LockOptions,
    Seconds,
    keywords_of,
    lock_options,
    seconds,
    seconds_or_forever,
    whole,
)
from holdfast.protocol.cache.entry import Entry, Json, Policy, Serializer, entry_of
from holdfast.protocol.cache.name_template import Template, is_coroutine_function
from holdfast.protocol.cache.singleflight import Group
from holdfast.protocol.kinds.handover import Offer, read_ticket
from holdfast.protocol.kinds.latch import WaitersByLatch
from holdfast.protocol.kinds.multi import together
from holdfast.protocol.kinds.pool import ANY
from holdfast.protocol.kinds.rlock import Owned
from holdfast.protocol.kinds.rwlock import HoldsByCaller
from holdfast.protocol.recipes import FENCED, RECIPES, make
from holdfast.translations import unknown_options

__all__ = ["FENCED", "BaseClient", "N_co", "fenced_options", "policy_of"]

# What ``acquire()`` returns instead of a lease: Never if the lock waits forever (wait=None), else None.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    N_co = TypeVar("N_co", covariant=True, bound=None, default=None)
else:
    from typing import TypeVar

    N_co = TypeVar("N_co", covariant=True, bound=None)

_warned: Final[set[str]] = set()  # recipes that have warned in this process

log = logging.getLogger("holdfast")
_JSON: Final = Json()


def fenced_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The checked options of the recipe "holdfast", which is ``lock`` itself."""
    known = sorted(CommonKeywords.__annotations__)
    for option in options:
        if option not in known:
            raise InvalidConfig(f"{option:.60}= of the recipe {FENCED!r}", f"it takes {', '.join(known)}")
    return dict(options)


_remembered: Final = lru_cache(maxsize=256, typed=True)  # typed: True == 1, but is no number


@_remembered
def policy_of(
    shared: LockOptions,
    ttl: Seconds,
    /,
    *,
    stale: Seconds = 0.0,
    errors: Seconds = 0.0,
    early: float = 0.0,
    compute_ttl: Seconds = 10.0,
    max_compute: Seconds | None = None,
    wait: Seconds | None = None,
    serializer: Serializer | None = None,
    **unknown: Any,
) -> Policy:
    """The checked options of a cached value."""
    if unknown:
        raise unknown_options("a cached value", unknown, ["ttl", *keywords_of(policy_of)])
    if isinstance(early, bool) or not isinstance(early, int | float) or not 0 <= early <= 100:
        raise InvalidConfig(f"early={early!r:.60}", "give a number from 0 (never early) to 100; 1 is a good choice")
    serializer = _JSON if serializer is None else serializer
    if not all(callable(getattr(serializer, way, None)) for way in ("dumps", "loads")):
        raise InvalidConfig(
            f"serializer={serializer!r:.60}", "give an object with dumps and loads, like the module json"
        )
    longest = None if max_compute is None else seconds("max_compute", max_compute, least=0.05)
    claimed = seconds("compute_ttl", compute_ttl, least=0.05)
    options = replace(
        shared,
        ttl=claimed if longest is None else min(claimed, longest),  # else a claim could outlast max_compute
        wait=seconds_or_forever("wait", wait),
        max_hold=longest,
        on_lost=None,
        cohort=0,
    )
    return Policy(
        ttl_ms=round(1000 * seconds("ttl", ttl, least=0.001)),
        stale_ms=round(1000 * seconds("stale", stale)),
        errors_ms=round(1000 * seconds("errors", errors)),
        early=float(early),
        options=options,
        serializer=serializer,
    )


class BaseClient:
    """A client: a driver, and what all locks of the client share."""

    _on_lost_choices: tuple[str, ...] = ()  # values of on_lost that are no callable
    _awaits = False  # whether it may decorate coroutine functions

    def __init__(self, driver: Any, *, namespace: str, shared: LockOptions) -> None:
        self._driver = driver
        self._namespace = namespace
        self._shared = shared
        self._singleflight = Group(driver)
        self._latch_waiters: WaitersByLatch = {}
        # A program asks for most of its locks with the same options (benchmarks.shortcuts).
        options_of = partial(lock_options, shared, self._on_lost_choices)
        self._options_of = _remembered(options_of)
        self._options_without_cohort = _remembered(lambda **asked: replace(options_of(**asked), cohort=0))
        self._owned: Owned = WeakValueDictionary()  # reentrant locks, by owner
        self._holds_by_caller: HoldsByCaller = WeakValueDictionary()  # of readers-writer locks
        self._cached: WeakValueDictionary[str, Any] = WeakValueDictionary()  # decorated functions, by template

    def _check(
        self, names: tuple[str, ...], asked: Mapping[str, Any], *, cohort: bool = True
    ) -> tuple[Keys, LockOptions]:
        """The checked keys and options of a lock. ``cohort``: it may be passed on within a process."""
        if len(names) != 1:
            if not names:
                self._options_of.__wrapped__(**asked)  # name="x" is refused there
                raise InvalidName("", 'no name was given: lock("order:42")')
            raise InvalidName(", ".join(map(str, names)), "this takes one name")
        try:
            keys = keys_of(names[0], self._namespace)
        except TypeError:  # unhashable, so it never reached the check
            raise InvalidName(names[0], not_a_name(names[0])) from None
        options_of = self._options_of if cohort else self._options_without_cohort
        try:
            return keys, options_of(**asked)
        except TypeError:  # an unhashable value: a callable may be one; a number is refused
            pass
        return keys, options_of.__wrapped__(**asked)

    def _keys(self, name: str) -> Keys:
        try:
            return keys_of(name, self._namespace)
        except TypeError:
            raise InvalidName(name, not_a_name(name)) from None

    def _check_pattern(self, pattern: str) -> str:
        if not isinstance(pattern, str) or not pattern:
            raise InvalidConfig(f"pattern={pattern!r:.60}", "give a str such as 'order:*', or '*' for all locks")
        if why := unprintable_in(pattern):
            raise InvalidConfig(f"pattern={pattern!r:.60}", why)
        return pattern

    def _make_latch(self, latch_class: type[Any], name: str, count: int, retention: Seconds) -> Any:
        self._driver.require("latch")
        return latch_class(
            self._driver,
            self._latch_waiters,
            self._keys(name),
            count=whole("count", count),
            retention=seconds("retention", retention, least=1.0),
            options=self._shared,
        )

    def _policy(self, ttl: Seconds, options: Mapping[str, Any]) -> Policy:
        self._driver.require("get_or_compute")
        try:
            return policy_of(self._shared, ttl, **options)
        except TypeError:  # an unhashable value: a serializer may be one; a number is refused
            pass
        return policy_of.__wrapped__(self._shared, ttl, **options)

    def _entry(self, key: str) -> Entry:
        try:
            return entry_of(key, self._namespace)
        except TypeError:
            raise InvalidName(key, f"a name is a str, not {type(key).__name__}") from None

    def _template(self, pattern: str, function: Callable[..., Any], use: str) -> Template:
        template = Template(pattern, function, use)
        keys_of(template.sample(), self._namespace)
        if not self._awaits and is_coroutine_function(function):
            raise InvalidConfig(f"{use}({pattern!r:.80})", "the function is a coroutine function: use holdfast.aio")
        return template

    def _check_several(
        self, names: tuple[str, ...], asked: Mapping[str, Any]
    ) -> tuple[tuple[Keys, tuple[Keys, ...]], LockOptions]:
        """The checked keys and options of a lock on several names. No cohort can pass it on."""
        self._driver.require("a lock on several names")
        each = [self._check((name,), asked, cohort=False) for name in names]
        return together(tuple(keys for keys, _ in each)), each[0][1]

    def _check_ticket(self: Any, ticket: str, asked: Mapping[str, Any]) -> tuple[Offer, Any]:
        """What a ticket offers, and a lock of its kind with these options."""
        self._driver.require("hand_over")
        offer = read_ticket(ticket, self._namespace)
        if offer.kind == "semaphore":
            return offer, self.semaphore(*offer.names, int(offer.mode[1:]), **asked)
        if offer.kind == "rwlock":
            sides = self.rwlock(*offer.names, **asked)
            return offer, sides.read if offer.mode == ANY else sides.write
        kind = self.rlock if offer.kind == "rlock" else self.lock
        return offer, kind(*offer.names, **asked)

    def _make_recipe(
        self, name: str, key: str, options: Mapping[str, Any], lock_class: type[Any], lease_class: type[Any]
    ) -> Any:
        """A recipe, with checked options. The first of its kind in a process warns."""
        recipe = make(
            self._driver,
            name,
            key,
            namespace=self._namespace,
            options=options,
            timeout=self._shared.timeout,
            lock_class=lock_class,
            lease_class=lease_class,
        )
        kind = RECIPES[name]
        self._driver.require(f"recipe for {kind.server}")
        if name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"recipe {name!r} is unsafe: {kind.pitfall}. Use client.lock, and see docs/recipes.md",
                UnsafeRecipeWarning,
                stacklevel=3,
            )
        return recipe

    def _log_stale(self, key: str, error: BaseException) -> None:
        log.warning("%r could not be refreshed; served its old value: %r", key, error, exc_info=error)

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled: connect in the other process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Client of {self._driver.address}>"
