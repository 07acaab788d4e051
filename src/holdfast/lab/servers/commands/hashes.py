"""Hashes. Replies in no particular order are sorted, so that equal stores give equal replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.table import command, wrong_arity
from holdfast.lab.servers.replies import Reply
from holdfast.lab.servers.values import Hash

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store


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
def hlen(store: Store, key: bytes) -> Reply:
    return len(store.collection(key, Hash))


@command()
def hgetall(store: Store, key: bytes) -> Reply:
    return [word for pair in sorted(store.collection(key, Hash).items()) for word in pair]
