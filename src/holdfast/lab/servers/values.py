"""What a key can hold.

Values are never changed in place: a write puts a new one in the key. So a copy of a store shares them all,
and costs a few small dictionaries however much they hold.
"""

from __future__ import annotations

from collections.abc import Hashable


class Hash(dict[bytes, bytes]):
    """Fields and their values."""

    __slots__ = ()


class SortedSet(dict[bytes, float]):
    """Members and their scores."""

    __slots__ = ()

    def ranked(self) -> list[tuple[bytes, float]]:
        """In the server's order: by score, then by the bytes of the member."""
        return sorted(self.items(), key=lambda pair: (pair[1], pair[0]))


Collection = tuple[bytes, ...] | Hash | SortedSet
Value = bytes | Collection

_NAMES: dict[type, str] = {
    bytes: "string",
    tuple: "list",
    Hash: "hash",
    SortedSet: "zset",
}
KINDS = frozenset(_NAMES.values())


def kind_of(value: Value) -> str:
    """What TYPE calls it."""
    return _NAMES[type(value)]


def freeze(value: Value) -> Hashable:
    """The value as something to be hashed, the same for values that no command tells apart."""
    if isinstance(value, dict):
        return kind_of(value), frozenset(value.items())
    return value
