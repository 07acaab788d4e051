"""What the two faces share: a client's settings, and how a request for a lock is checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from holdfast.errors import InvalidConfig, InvalidName, UnsafeRecipeWarning, Unsupported
from holdfast.lease import Terms
from holdfast.names import Keys, check_namespace, keys_of
from holdfast.options import terms_of
from holdfast.protocol.recipes import FENCED, RECIPES, make

__all__ = ["FENCED", "BaseClient", "fenced_options"]

OPTIONS: Final = ("ttl", "wait", "renew", "max_hold", "on_lost", "label", "cohort")

_warned: Final[set[str]] = set()  # of which recipes, once per process


def fenced_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the lock that is no recipe, though it may be asked for as one."""
    for option in options:
        if option not in OPTIONS:
            raise InvalidConfig(f"{option:.60}= of the recipe {FENCED!r}", f"it takes {', '.join(sorted(OPTIONS))}")
    return dict(options)


class BaseClient:
    """A client: a driver and what all of its locks have in common."""

    _words: tuple[str, ...] = ()  # what on_lost may say beside naming a callable

    def __init__(self, driver: Any, *, namespace: str, shared: Terms) -> None:
        self._driver = driver
        self._namespace = check_namespace(namespace)
        self._shared = shared
        self._recent: tuple[tuple[Any, ...], list[type], Terms] = (), [], shared

    def _ask(self, names: tuple[str, ...], asked: tuple[Any, ...]) -> tuple[Keys, Terms]:
        """The keys and the terms of a lock, checked; what is asked for comes in the order of OPTIONS."""
        if len(names) != 1:
            if not names:
                raise InvalidName("", "name what is to be locked")
            raise Unsupported("a lock on several names", "nest one lock per name, in sorted order")
        try:
            keys = keys_of(names[0], self._namespace)
        except TypeError:  # unhashable, so it never reached the check
            raise InvalidName(names[0], f"a name is a str, not {type(names[0]).__name__}") from None
        # Most locks of a program are asked for on the same terms, time and again.
        recent, kinds, terms = self._recent
        if asked != recent or [*map(type, asked)] != kinds:  # types too, for True == 1, but is no number
            terms = terms_of(shared=self._shared, words=self._words, **dict(zip(OPTIONS, asked, strict=True)))
            self._recent = asked, [*map(type, asked)], terms
        return keys, terms

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

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled: connect anew in the other process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Client of {self._driver.address}>"
