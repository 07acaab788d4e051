"""Lists, kept as tuples with the head first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command
from holdfast.lab.commands.words import LARGEST, SMALLEST, integer, natural, span
from holdfast.lab.replies import Reply, ReplyError

if TYPE_CHECKING:
    from holdfast.lab.store import Store


def _items(store: Store, key: bytes) -> tuple[bytes, ...]:
    return store.collection(key, tuple)


@command(deny_oom=True)
def lpush(store: Store, key: bytes, item: bytes, *items: bytes) -> Reply:
    new = (item, *items)[::-1] + _items(store, key)
    store.write(key, new)
    return len(new)


@command(deny_oom=True)
def rpush(store: Store, key: bytes, item: bytes, *items: bytes) -> Reply:
    new = (*_items(store, key), item, *items)
    store.write(key, new)
    return len(new)


@command(write=True)
def lpop(store: Store, key: bytes, count: bytes | None = None) -> Reply:
    return _pop(store, key, count, head=True)


@command(write=True)
def rpop(store: Store, key: bytes, count: bytes | None = None) -> Reply:
    return _pop(store, key, count, head=False)


def _pop(store: Store, key: bytes, count: bytes | None, *, head: bool) -> Reply:
    wanted = 1 if count is None else natural(count)
    items = _items(store, key)
    if not items:
        return None
    if wanted == 0:
        return []
    taken = items[:wanted] if head else items[-1 : -wanted - 1 : -1]
    store.write(key, items[wanted:] if head else items[:-wanted])
    return taken[0] if count is None else [*taken]


@command()
def llen(store: Store, key: bytes) -> Reply:
    return len(_items(store, key))


@command()
def lindex(store: Store, key: bytes, index: bytes) -> Reply:
    items = _items(store, key)
    if not items:
        return None
    position = integer(index)
    return items[position] if -len(items) <= position < len(items) else None


@command()
def lrange(store: Store, key: bytes, start: bytes, stop: bytes) -> Reply:
    integer(start), integer(stop)  # The server reads its numbers before it looks at the key.
    items = _items(store, key)
    return [*items[span(start, stop, len(items))]]


@command(write=True)
def lrem(store: Store, key: bytes, count: bytes, item: bytes) -> Reply:
    limit = integer(count)
    if limit == SMALLEST:
        raise ReplyError(f"ERR value is out of range, value must between {-LARGEST} and {LARGEST}")
    items = _items(store, key)
    places = [place for place, each in enumerate(items) if each == item]
    doomed = set(places[:limit] if limit > 0 else places[limit:])  # Zero takes all, and so does places[0:].
    if doomed:
        store.write(key, tuple(each for place, each in enumerate(items) if place not in doomed))
    return len(doomed)
