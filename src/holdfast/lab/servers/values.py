"""The values that a key can have.

Values are never changed in place: a write replaces the value of the key. So a copy of a store shares all values, and
costs a few small dictionaries, however large the values are.
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
    """The reply of TYPE for this value."""
    return _NAMES[type(value)]


def freeze(value: Value) -> Hashable:
    """The value in hashable form. Equal for values that no command can distinguish."""
    if isinstance(value, dict):
        return kind_of(value), frozenset(value.items())
    return value
