"""Keys of any type, and how long they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command
from holdfast.lab.commands.words import deadline_ms, integer
from holdfast.lab.replies import OK, Reply, ReplyError, Status
from holdfast.lab.values import kind_of

if TYPE_CHECKING:
    from holdfast.lab.store import Store

_NO_KEY, _NO_TTL = -2, -1
_UNITS = {"expire": "EX", "pexpire": "PX", "expireat": "EXAT", "pexpireat": "PXAT"}


@command(write=True)
def del_(store: Store, key: bytes, *keys: bytes) -> Reply:
    return sum(store.remove(each) for each in (key, *keys))


@command(write=True)
def unlink(store: Store, key: bytes, *keys: bytes) -> Reply:
    return sum(store.remove(each) for each in (key, *keys))


@command()
def exists(store: Store, key: bytes, *keys: bytes) -> Reply:
    return sum(each in store.values for each in (key, *keys))


@command()
def type_(store: Store, key: bytes) -> Reply:
    value = store.values.get(key)
    return Status("none" if value is None else kind_of(value))


@command(write=True)
def rename(store: Store, key: bytes, target: bytes) -> Reply:
    _move(store, key, target)
    return OK


@command(write=True)
def renamenx(store: Store, key: bytes, target: bytes) -> Reply:
    if key in store.values and target in store.values:
        return 0
    _move(store, key, target)
    return 1


def _move(store: Store, key: bytes, target: bytes) -> None:
    """The value goes with its own ttl or without one; the target's own is dropped in either case."""
    if key not in store.values:
        raise ReplyError("ERR no such key")
    if key != target:
        value, deadline = store.values[key], store.deadlines.get(key)
        store.remove(key)
        store.replace(target, value, deadline)


@command(write=True)
def expire(store: Store, key: bytes, seconds: bytes, *options: bytes) -> Reply:
    return _expire(store, "expire", key, seconds, options)


@command(write=True)
def pexpire(store: Store, key: bytes, milliseconds: bytes, *options: bytes) -> Reply:
    return _expire(store, "pexpire", key, milliseconds, options)


@command(write=True)
def expireat(store: Store, key: bytes, seconds: bytes, *options: bytes) -> Reply:
    return _expire(store, "expireat", key, seconds, options)


@command(write=True)
def pexpireat(store: Store, key: bytes, milliseconds: bytes, *options: bytes) -> Reply:
    return _expire(store, "pexpireat", key, milliseconds, options)


def _expire(store: Store, name: str, key: bytes, amount: bytes, options: tuple[bytes, ...]) -> int:
    flags = _read_expire_options(options)
    deadline = deadline_ms(store, name, integer(amount), _UNITS[name])
    if key not in store.values:
        return 0
    # To GT and LT a key without a ttl lives for ever: nothing is later, and everything is sooner.
    current = store.deadlines.get(key)
    if (
        ("NX" in flags and current is not None)
        or ("XX" in flags and current is None)
        or ("GT" in flags and (current is None or deadline <= current))
        or ("LT" in flags and current is not None and deadline >= current)
    ):
        return 0
    store.expire(key, deadline)
    return 1


def _read_expire_options(options: tuple[bytes, ...]) -> set[str]:
    flags = {option.decode(errors="replace").upper() for option in options}
    for flag in flags - {"NX", "XX", "GT", "LT"}:
        raise ReplyError(f"ERR Unsupported option {flag}")
    if "NX" in flags and len(flags) > 1:
        raise ReplyError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if {"GT", "LT"} <= flags:
        raise ReplyError("ERR GT and LT options at the same time are not compatible")
    return flags


@command(write=True)
def persist(store: Store, key: bytes) -> Reply:
    if key not in store.deadlines:
        return 0
    store.replace(key, store.values[key])
    return 1


@command()
def ttl(store: Store, key: bytes) -> Reply:
    left_ms = _left_ms(store, key)
    return left_ms if left_ms < 0 else (left_ms + 500) // 1000  # To the nearest second, so 0 is not yet gone.


@command()
def pttl(store: Store, key: bytes) -> Reply:
    return _left_ms(store, key)


@command()
def expiretime(store: Store, key: bytes) -> Reply:
    deadline = _deadline(store, key)
    return deadline if deadline < 0 else (deadline + 500) // 1000


@command()
def pexpiretime(store: Store, key: bytes) -> Reply:
    return _deadline(store, key)


def _left_ms(store: Store, key: bytes) -> int:
    deadline = _deadline(store, key)
    return deadline if deadline < 0 else deadline - store.now_ms


def _deadline(store: Store, key: bytes) -> int:
    return store.deadlines.get(key, _NO_TTL) if key in store.values else _NO_KEY
