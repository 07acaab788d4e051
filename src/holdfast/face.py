"""What the two faces share: a client's settings, and how a request for a lock is checked."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from holdfast.errors import InvalidConfig, InvalidName, UnsafeRecipeWarning, Unsupported
from holdfast.lease import Terms
from holdfast.names import Keys, check_namespace, keys_of, not_a_name
from holdfast.options import seconds, terms_of, whole
from holdfast.protocol.entries import Entry, Json, Policy, Serializer, entry_of
from holdfast.protocol.flights import Desk
from holdfast.protocol.handover import Offer, read_ticket
from holdfast.protocol.latch import Vigils
from holdfast.protocol.multi import together
from holdfast.protocol.recipes import FENCED, RECIPES, make
from holdfast.protocol.rlock import Owned
from holdfast.protocol.room import ANY
from holdfast.protocol.rwlock import Insiders
from holdfast.protocol.templates import Template, is_coroutine_function

__all__ = ["FENCED", "BaseClient", "N_co", "fenced_options"]

# What ``acquire()`` returns instead of a lease: Never if the lock waits for ever (wait=None), else None.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    N_co = TypeVar("N_co", covariant=True, bound=None, default=None)
else:
    from typing import TypeVar

    N_co = TypeVar("N_co", covariant=True, bound=None)

OPTIONS: Final = ("ttl", "wait", "renew", "max_hold", "on_lost", "label", "cohort")
CACHE_OPTIONS: Final = ("ttl", "stale", "errors", "early", "compute_ttl", "max_compute", "wait", "serializer")

_warned: Final[set[str]] = set()  # of which recipes, once per process

log = logging.getLogger("holdfast")
_JSON: Final = Json()


def fenced_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the lock that is no recipe, though it may be asked for as one."""
    for option in options:
        if option not in OPTIONS:
            raise InvalidConfig(f"{option:.60}= of the recipe {FENCED!r}", f"it takes {', '.join(sorted(OPTIONS))}")
    return dict(options)


@lru_cache(maxsize=256, typed=True)  # typed, for True == 1, but is no number
def policy_of(
    *,
    shared: Terms,
    ttl: float,
    stale: float,
    errors: float,
    early: float,
    compute_ttl: float,
    max_compute: float | None,
    wait: float | None,
    serializer: Serializer | None,
) -> Policy:
    """On what terms a value is cached, checked."""
    if isinstance(early, bool) or not isinstance(early, int | float) or not 0 <= early <= 100:
        raise InvalidConfig(f"early={early!r:.60}", "give a number from 0 (never early) to 100; 1 is a good one")
    serializer = _JSON if serializer is None else serializer
    if not all(callable(getattr(serializer, way, None)) for way in ("dumps", "loads")):
        raise InvalidConfig(
            f"serializer={serializer!r:.60}", "give something with dumps and loads, like the module json"
        )
    longest = None if max_compute is None else seconds("max_compute", max_compute, least=0.05)
    claimed = seconds("compute_ttl", compute_ttl, least=0.05)
    terms = Terms(
        ttl=claimed if longest is None else min(claimed, longest),  # or the server would keep the claim for longer
        wait=None if wait is None or wait == math.inf else seconds("wait", wait),
        renew=True,
        max_hold=longest,
        on_lost=None,
        label="",
        cohort=0,
        timeout=shared.timeout,
        fence_retention=shared.fence_retention,
    )
    return Policy(
        ttl_ms=round(1000 * seconds("ttl", ttl, least=0.001)),
        stale_ms=round(1000 * seconds("stale", stale)),
        errors_ms=round(1000 * seconds("errors", errors)),
        early=float(early),
        terms=terms,
        serializer=serializer,
    )


class BaseClient:
    """A client: a driver and what all of its locks have in common."""

    _words: tuple[str, ...] = ()  # what on_lost may say beside naming a callable
    _awaits = False  # whether functions that it decorates may be coroutine functions

    def __init__(self, driver: Any, *, namespace: str, shared: Terms) -> None:
        self._driver = driver
        self._namespace = check_namespace(namespace)
        self._shared = shared
        self._desk = Desk(driver)
        self._vigils: Vigils = {}  # latches that are waited for
        self._recent: tuple[tuple[Any, ...], list[type], Terms] = (), [], shared
        self._owned: Owned = WeakValueDictionary()  # reentrant locks, by who has them
        self._insiders: Insiders = WeakValueDictionary()  # of readers-writer locks, likewise
        self._cached: WeakValueDictionary[str, Any] = WeakValueDictionary()  # decorated functions, by template
        self._recent_room = shared, replace(shared, cohort=0)

    def _ask(self, names: tuple[str, ...], asked: tuple[Any, ...]) -> tuple[Keys, Terms]:
        """The keys and the terms of a lock, checked; what is asked for comes in the order of OPTIONS."""
        if len(names) != 1:
            if not names:
                raise InvalidName("", 'no name was given: lock("order:42")')
            raise InvalidName(", ".join(map(str, names)), "this takes one name")
        try:
            keys = keys_of(names[0], self._namespace)
        except TypeError:  # unhashable, so it never reached the check
            raise InvalidName(names[0], not_a_name(names[0])) from None
        # Most locks of a program are asked for on the same terms, time and again.
        recent, kinds, terms = self._recent
        if asked != recent or [*map(type, asked)] != kinds:  # types too, for True == 1, but is no number
            terms = terms_of(shared=self._shared, words=self._words, **dict(zip(OPTIONS, asked, strict=True)))
            self._recent = asked, [*map(type, asked)], terms
        return keys, terms

    def _make_latch(self, latch_class: type[Any], name: str, count: int, retention: float) -> Any:
        try:
            keys = keys_of(name, self._namespace)
        except TypeError:
            raise InvalidName(name, f"a name is a str, not {type(name).__name__}") from None
        return latch_class(
            self._driver,
            self._vigils,
            keys,
            count=whole("count", count),
            retention=seconds("retention", retention, least=1.0),
            terms=self._shared,
        )

    def _policy(self, asked: tuple[Any, ...]) -> Policy:
        """The terms of a cached value, checked; what is asked for comes in the order of CACHE_OPTIONS."""
        options = dict(zip(CACHE_OPTIONS, asked, strict=True))
        try:
            return policy_of(shared=self._shared, **options)
        except TypeError:  # something unhashable: a serializer may be, and a number is refused
            return policy_of.__wrapped__(shared=self._shared, **options)

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

    def _ask_all(self, names: tuple[str, ...], asked: tuple[Any, ...]) -> tuple[tuple[Keys, tuple[Keys, ...]], Terms]:
        """The keys and the terms of a lock on several names, checked. No cohort can pass it on."""
        each = [self._ask((name,), asked) for name in names]
        return together(tuple(keys for keys, _ in each)), replace(each[0][1], cohort=0)

    def _read(self: Any, ticket: str, asked: tuple[Any, ...]) -> tuple[Offer, Any]:
        """What a ticket offers, and a lock of the kind that it is for, on these terms."""
        offer = read_ticket(ticket, self._namespace)
        options = dict(zip(OPTIONS, asked, strict=True))
        if offer.species == "semaphore":
            return offer, self.semaphore(*offer.names, int(offer.wanted[1:]), **options)
        if offer.species == "rwlock":
            sides = self.rwlock(*offer.names, **options)
            return offer, sides.read if offer.wanted == ANY else sides.write
        kind = self.rlock if offer.species == "rlock" else self.lock
        return offer, kind(*offer.names, **options)

    def _ask_room(self, name: str, asked: tuple[Any, ...]) -> tuple[Keys, Terms]:
        """The same for a kind of lock that is not passed on within a process."""
        keys, terms = self._ask((name,), asked)
        asked_on, asked_for = self._recent_room
        if terms is not asked_on:
            asked_for = replace(terms, cohort=0)
            self._recent_room = terms, asked_for
        return keys, asked_for

    def _recall(
        self, name: str, key: str, options: Mapping[str, Any], lock_class: type[Any], lease_class: type[Any]
    ) -> Any:
        """A lock of history, checked; and a word of warning to whoever asks for it."""
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
        if getattr(self._driver, "speaks", kind.server) != kind.server:
            raise Unsupported(
                f"recipe {name!r} on {self._driver.address}",
                f"this server is no {kind.server}, and only that has the commands. Here, use client.lock",
            )
        if name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"recipe {name!r} is a lock of history: {kind.pit}. Use client.lock, and see docs/recipes.md",
                UnsafeRecipeWarning,
                stacklevel=3,
            )
        return recipe

    def _served_old(self, name: str, error: BaseException) -> None:
        log.warning("%r could not be refreshed, and its old value was served: %r", name, error, exc_info=error)

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled: connect anew in the other process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Client of {self._driver.address}>"
