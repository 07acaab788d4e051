"""Keys of any type, and their ttls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.arguments import deadline_ms, integer
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import Reply, Status
from holdfast.lab.servers.values import kind_of

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store

_NO_KEY, _NO_TTL = -2, -1


@command(write=True)
def del_(store: Store, key: bytes, *keys: bytes) -> Reply:
    return sum(store.remove(each) for each in (key, *keys))


@command()
def exists(store: Store, key: bytes, *keys: bytes) -> Reply:
    return sum(each in store.values for each in (key, *keys))


@command()
def type_(store: Store, key: bytes) -> Reply:
    value = store.values.get(key)
    return Status("none" if value is None else kind_of(value))


@command(write=True)
def expire(store: Store, key: bytes, seconds: bytes) -> Reply:
    return _expire(store, key, deadline_ms(store, "expire", integer(seconds), "EX"))


@command(write=True)
def pexpire(store: Store, key: bytes, milliseconds: bytes) -> Reply:
    return _expire(store, key, deadline_ms(store, "pexpire", integer(milliseconds), "PX"))


def _expire(store: Store, key: bytes, deadline: int) -> int:
    if key not in store.values:
        return 0
    store.expire(key, deadline)
    return 1


@command(write=True)
def persist(store: Store, key: bytes) -> Reply:
    if key not in store.deadlines:
        return 0
    store.replace(key, store.values[key])
    return 1


@command()
def ttl(store: Store, key: bytes) -> Reply:
    left_ms = _pttl(store, key)
    return left_ms if left_ms < 0 else (left_ms + 500) // 1000  # Rounded: a key with a TTL of 0 still exists.


@command()
def pttl(store: Store, key: bytes) -> Reply:
    return _pttl(store, key)


def _pttl(store: Store, key: bytes) -> int:
    if key not in store.values:
        return _NO_KEY
    deadline = store.deadlines.get(key)
    return _NO_TTL if deadline is None else deadline - store.now_ms
