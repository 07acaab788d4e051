"""Sets. Members come sorted, since the server promises no order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command
from holdfast.lab.replies import Reply

if TYPE_CHECKING:
    from holdfast.lab.store import Store


def _members(store: Store, key: bytes) -> frozenset[bytes]:
    return store.collection(key, frozenset)


@command(deny_oom=True)
def sadd(store: Store, key: bytes, member: bytes, *members: bytes) -> Reply:
    old = _members(store, key)
    new = old.union((member, *members))
    if len(new) > len(old):
        store.write(key, new)
    return len(new) - len(old)


@command(write=True)
def srem(store: Store, key: bytes, member: bytes, *members: bytes) -> Reply:
    old = _members(store, key)
    new = old.difference((member, *members))
    if len(new) < len(old):
        store.write(key, new)
    return len(old) - len(new)


@command()
def sismember(store: Store, key: bytes, member: bytes) -> Reply:
    return int(member in _members(store, key))


@command()
def scard(store: Store, key: bytes) -> Reply:
    return len(_members(store, key))


@command()
def smembers(store: Store, key: bytes) -> Reply:
    return [*sorted(_members(store, key))]
