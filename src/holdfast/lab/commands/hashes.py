"""Hashes. What the server returns in no particular order comes sorted, so that equal stores answer alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command, wrong_arity
from holdfast.lab.commands.words import LARGEST, SMALLEST, integer
from holdfast.lab.replies import Reply, ReplyError
from holdfast.lab.values import Hash

if TYPE_CHECKING:
    from holdfast.lab.store import Store


@command(deny_oom=True)
def hset(store: Store, key: bytes, field: bytes, value: bytes, *rest: bytes) -> Reply:
    if len(rest) % 2:
        raise wrong_arity("hset")
    old = store.collection(key, Hash)
    words = (field, value, *rest)
    new = Hash(old)
    new.update(zip(words[::2], words[1::2], strict=True))
    store.write(key, new)
    return len(new) - len(old)


@command(deny_oom=True)
def hsetnx(store: Store, key: bytes, field: bytes, value: bytes) -> Reply:
    old = store.collection(key, Hash)
    if field in old:
        return 0
    new = Hash(old)
    new[field] = value
    store.write(key, new)
    return 1


@command()
def hget(store: Store, key: bytes, field: bytes) -> Reply:
    return store.collection(key, Hash).get(field)


@command()
def hmget(store: Store, key: bytes, field: bytes, *fields: bytes) -> Reply:
    found = store.collection(key, Hash)
    return [found.get(each) for each in (field, *fields)]


@command(write=True)
def hdel(store: Store, key: bytes, field: bytes, *fields: bytes) -> Reply:
    old = store.collection(key, Hash)
    new = Hash((each, value) for each, value in old.items() if each not in (field, *fields))
    if len(new) < len(old):
        store.write(key, new)
    return len(old) - len(new)


@command()
def hexists(store: Store, key: bytes, field: bytes) -> Reply:
    return int(field in store.collection(key, Hash))


@command()
def hlen(store: Store, key: bytes) -> Reply:
    return len(store.collection(key, Hash))


@command()
def hkeys(store: Store, key: bytes) -> Reply:
    return [*sorted(store.collection(key, Hash))]


@command()
def hvals(store: Store, key: bytes) -> Reply:
    return [value for _, value in sorted(store.collection(key, Hash).items())]


@command()
def hgetall(store: Store, key: bytes) -> Reply:
    return [word for pair in sorted(store.collection(key, Hash).items()) for word in pair]


@command(deny_oom=True)
def hincrby(store: Store, key: bytes, field: bytes, amount: bytes) -> Reply:
    increment = integer(amount)
    old = store.collection(key, Hash)
    value = integer(old.get(field, b"0"), "ERR hash value is not an integer") + increment
    if not SMALLEST <= value <= LARGEST:
        raise ReplyError("ERR increment or decrement would overflow")
    new = Hash(old)
    new[field] = b"%d" % value
    store.write(key, new)
    return value
