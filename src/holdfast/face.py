"""What the two faces share: a client's settings, and how a request for a lock is checked."""

from __future__ import annotations

from typing import Any, Final

from holdfast.errors import InvalidName, Unsupported
from holdfast.lease import Terms
from holdfast.names import Keys, check_namespace, keys_of
from holdfast.options import terms_of

__all__ = ["BaseClient"]

OPTIONS: Final = ("ttl", "wait", "renew", "max_hold", "on_lost", "label", "cohort")


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

    def __reduce__(self) -> Any:
        raise TypeError("a client cannot be pickled: connect anew in the other process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Client of {self._driver.address}>"
