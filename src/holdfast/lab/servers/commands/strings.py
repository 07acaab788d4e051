"""Strings. SET and similar commands remove a ttl; commands that change a string in place (INCR, APPEND) keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.arguments import LARGEST, SYNTAX, deadline_ms, integer
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import OK, Reply, ReplyError

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store

_UNITS = ("EX", "PX", "PXAT")


@command()
def get(store: Store, key: bytes) -> Reply:
    return store.string(key)


@command(deny_oom=True)
def set_(store: Store, key: bytes, value: bytes, *options: bytes) -> Reply:
    only_new, expiry = False, None
    words = iter(options)
    for word in words:
        option = word.decode(errors="replace").upper()
        if option == "NX":
            only_new = True
        elif option in _UNITS and expiry is None and (amount := next(words, None)) is not None:
            expiry = amount, option
        else:
            raise ReplyError(SYNTAX)
    deadline = None
    if expiry is not None:
        if (span := integer(expiry[0])) <= 0:
            raise ReplyError("ERR invalid expire time in 'set' command")
        deadline = deadline_ms(store, "set", span, expiry[1])
    if only_new and key in store.values:
        return None
    store.replace(key, value)
    if deadline is not None:
        store.expire(key, deadline)
    return OK


@command(deny_oom=True)
def setnx(store: Store, key: bytes, value: bytes) -> Reply:
    if key in store.values:
        return 0
    store.replace(key, value)
    return 1


@command(deny_oom=True)
def getset(store: Store, key: bytes, value: bytes) -> Reply:
    old = store.string(key)
    store.replace(key, value)
    return old


@command(deny_oom=True)
def incr(store: Store, key: bytes) -> Reply:
    old = store.string(key)
    value = (0 if old is None else integer(old)) + 1
    if value > LARGEST:
        raise ReplyError("ERR increment or decrement would overflow")
    store.write(key, b"%d" % value)
    return value


@command(deny_oom=True)
def append(store: Store, key: bytes, more: bytes) -> Reply:
    value = (store.string(key) or b"") + more
    store.write(key, value)
    return len(value)
