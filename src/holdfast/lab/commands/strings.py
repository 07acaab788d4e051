"""Strings. SET and its relatives clear a ttl; what changes a string in place (INCR, APPEND) keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command, wrong_arity
from holdfast.lab.commands.words import LARGEST, SMALLEST, SYNTAX, deadline_ms, integer
from holdfast.lab.replies import OK, Reply, ReplyError

if TYPE_CHECKING:
    from holdfast.lab.store import Store

_UNITS = ("EX", "PX", "EXAT", "PXAT")


@command()
def get(store: Store, key: bytes) -> Reply:
    return store.string(key)


@command()
def mget(store: Store, key: bytes, *keys: bytes) -> Reply:
    values = [store.values.get(each) for each in (key, *keys)]
    return [value if isinstance(value, bytes) else None for value in values]


@command()
def strlen(store: Store, key: bytes) -> Reply:
    return len(store.string(key) or b"")


@command(deny_oom=True)
def set_(store: Store, key: bytes, value: bytes, *options: bytes) -> Reply:
    flags, expiry = _read_set_options(options)
    deadline = _future(store, "set", *expiry) if expiry else None
    old = store.string(key) if "GET" in flags else None
    refused = ("NX" in flags and key in store.values) or ("XX" in flags and key not in store.values)
    if not refused:
        store.replace(key, value, store.deadlines.get(key) if "KEEPTTL" in flags else None)
        if deadline is not None:
            store.expire(key, deadline)
    if "GET" in flags:
        return old
    return None if refused else OK


def _read_set_options(options: tuple[bytes, ...]) -> tuple[set[str], tuple[bytes, str] | None]:
    flags: set[str] = set()
    expiry: tuple[bytes, str] | None = None
    words = iter(options)
    for word in words:
        option = word.decode(errors="replace").upper()
        if option in {"NX", "XX", "GET", "KEEPTTL"}:
            flags.add(option)
        elif option in _UNITS and expiry is None and (amount := next(words, None)) is not None:
            expiry = amount, option
        else:
            raise ReplyError(SYNTAX)
    if {"NX", "XX"} <= flags or ("KEEPTTL" in flags and expiry):
        raise ReplyError(SYNTAX)
    return flags, expiry


def _future(store: Store, name: str, amount: bytes, unit: str) -> int:
    value = integer(amount)
    if value <= 0:
        raise ReplyError(f"ERR invalid expire time in '{name}' command")
    return deadline_ms(store, name, value, unit)


@command(deny_oom=True)
def setnx(store: Store, key: bytes, value: bytes) -> Reply:
    if key in store.values:
        return 0
    store.replace(key, value)
    return 1


@command(deny_oom=True)
def setex(store: Store, key: bytes, seconds: bytes, value: bytes) -> Reply:
    store.replace(key, value, _future(store, "setex", seconds, "EX"))
    return OK


@command(deny_oom=True)
def psetex(store: Store, key: bytes, milliseconds: bytes, value: bytes) -> Reply:
    store.replace(key, value, _future(store, "psetex", milliseconds, "PX"))
    return OK


@command(deny_oom=True)
def getset(store: Store, key: bytes, value: bytes) -> Reply:
    old = store.string(key)
    store.replace(key, value)
    return old


@command(write=True)
def getdel(store: Store, key: bytes) -> Reply:
    old = store.string(key)
    store.remove(key)
    return old


@command(deny_oom=True)
def mset(store: Store, key: bytes, value: bytes, *rest: bytes) -> Reply:
    if len(rest) % 2:
        raise wrong_arity("mset")
    words = (key, value, *rest)
    for each, what in zip(words[::2], words[1::2], strict=True):
        store.replace(each, what)
    return OK


@command(deny_oom=True)
def incr(store: Store, key: bytes) -> Reply:
    return _add(store, key, 1)


@command(deny_oom=True)
def decr(store: Store, key: bytes) -> Reply:
    return _add(store, key, -1)


@command(deny_oom=True)
def incrby(store: Store, key: bytes, amount: bytes) -> Reply:
    return _add(store, key, integer(amount))


@command(deny_oom=True)
def decrby(store: Store, key: bytes, amount: bytes) -> Reply:
    value = integer(amount)
    if value == SMALLEST:
        raise ReplyError("ERR decrement would overflow")
    return _add(store, key, -value)


def _add(store: Store, key: bytes, amount: int) -> int:
    old = store.string(key)
    value = (0 if old is None else integer(old)) + amount
    if not SMALLEST <= value <= LARGEST:
        raise ReplyError("ERR increment or decrement would overflow")
    store.write(key, b"%d" % value)
    return value


@command(deny_oom=True)
def append(store: Store, key: bytes, more: bytes) -> Reply:
    value = (store.string(key) or b"") + more
    store.write(key, value)
    return len(value)
