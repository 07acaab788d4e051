"""Lists, kept as tuples with the head first: the history of a lock, and keys that were damaged by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.arguments import integer
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import OK, Reply

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store


@command(deny_oom=True)
def rpush(store: Store, key: bytes, item: bytes, *items: bytes) -> Reply:
    new = (*store.collection(key, tuple), item, *items)
    store.write(key, new)
    return len(new)


@command(deny_oom=True)
def lpush(store: Store, key: bytes, item: bytes, *items: bytes) -> Reply:
    new = (*reversed((item, *items)), *store.collection(key, tuple))
    store.write(key, new)
    return len(new)


@command(write=True)
def ltrim(store: Store, key: bytes, first: bytes, last: bytes) -> Reply:
    kept = _part(store, key, integer(first), integer(last))
    if key in store.values:
        store.write(key, kept)
    return OK


@command()
def lrange(store: Store, key: bytes, first: bytes, last: bytes) -> Reply:
    return list(_part(store, key, integer(first), integer(last)))


def _part(store: Store, key: bytes, first: int, last: int) -> tuple[bytes, ...]:
    """The items from the first place to the last, both counted from the end if they are negative."""
    items = store.collection(key, tuple)
    start, stop = (place if place >= 0 else place + len(items) for place in (first, last))
    return items[max(0, start) : max(0, stop + 1)]
