"""Guarded writes to a Redis or Valkey server, through the caller's own client.

The fence and the holder of the last write to a key are in a side key, in the same slot. One script compares and writes.
Deleting a guarded key leaves the side key, else a stale holder could write the key again.

Any client with redis-py's ``register_script`` will do. A client that resends a request without an answer may run a
command twice, as it may without a guard.
"""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any, Final, Protocol, TypeAlias

from holdfast.errors import InvalidConfig, InvalidName, Unsupported
from holdfast.guard.stamp import Stamp, stamp
from holdfast.lease import BaseLease
from holdfast.lua import SCRIPTS
from holdfast.names import Keys, keys_of
from holdfast.options import Seconds, seconds
from holdfast.untrusted import number

__all__ = ["COMMANDS", "AioRedisGuard", "RedisGuard"]

Value: TypeAlias = str | bytes | int | float

# Writes whose only key is their first argument: the script guards no other key.
_WRITES: Final = """
    SET SETEX PSETEX SETNX SETRANGE SETBIT APPEND GETSET GETDEL INCR INCRBY INCRBYFLOAT DECR DECRBY
    DEL UNLINK EXPIRE PEXPIRE EXPIREAT PEXPIREAT PERSIST
    HSET HSETNX HDEL HINCRBY HINCRBYFLOAT
    LPUSH RPUSH LPUSHX RPUSHX LPOP RPOP LSET LTRIM LREM LINSERT
    SADD SREM ZADD ZREM ZINCRBY ZREMRANGEBYRANK ZREMRANGEBYSCORE PFADD XADD XDEL XTRIM
"""
COMMANDS: Final = frozenset(_WRITES.split())
_ONE_KEY_ONLY: Final = frozenset({"DEL", "UNLINK"})  # further arguments would be further keys
_MOST_ARGUMENTS: Final = 4000  # Lua can pass about 8000 to a function


class _Scripted(Protocol):
    """The part of redis-py's clients that is used here."""

    def register_script(self, script: Any) -> Any: ...


class _Guard:
    """What the blocking and the asyncio guard have in common."""

    _awaited = False

    def __init__(self, client: _Scripted, *, retention: Seconds | None = None) -> None:
        self._retention_ms = "" if retention is None else str(_milliseconds("retention", retention))
        if hasattr(client, "command_stack"):
            raise Unsupported("a guarded write in a pipeline", "a refusal would come too late; give the client itself")
        if not hasattr(client, "register_script"):
            kind = "redis.asyncio.Redis" if self._awaited else "redis.Redis"
            raise InvalidConfig(
                f"a client of type {type(client).__name__}",
                f"give a {kind} for the server that you write to, such as {kind}.from_url(...)",
            )
        self._script = client.register_script(SCRIPTS["guard_write"].source)
        if iscoroutinefunction(type(self._script).__call__) != self._awaited:
            kind, other = ("a blocking", "RedisGuard") if self._awaited else ("an asyncio", "AioRedisGuard")
            raise InvalidConfig(f"{kind} client", f"use guard.{other} for it")

    def _run(self, key: str, ours: Stamp, *command: Value) -> Any:
        """Run the script: with a command and its arguments after the key, or for the fence alone."""
        keys = _keys_of(key)
        return self._script(
            keys=[keys.main, f"{keys.head}guard{keys.tail}", keys.shared[1]],
            args=[ours.fence, ours.holder, self._retention_ms, *command],
        )


def _check_command(command: str, arguments: tuple[Value, ...]) -> str:
    command = command.upper()
    if command not in COMMANDS:
        raise Unsupported(f"a guarded {command}", "use a write of one key, such as SET, HSET, RPUSH or DEL")
    if len(arguments) > (0 if command in _ONE_KEY_ONLY else _MOST_ARGUMENTS):
        raise InvalidConfig(
            f"{command} with {len(arguments)} arguments after the key", "write in several steps, each of them guarded"
        )
    return command


def _keys_of(key: str) -> Keys:
    try:
        return keys_of(key)
    except InvalidName as error:
        raise InvalidConfig(f"key {key!r:.60}", error.problem) from None


def _check_reply(reply: Any, key: str, ours: Stamp) -> Any:
    if reply[0] == 0:
        raise ours.refusal(key, number(reply[1]))
    if reply[0] == -1:
        raise InvalidConfig(f"key {key!r}", "it is a lock on this server, and writing to it would break the lock")
    if reply[0] == -2:
        raise InvalidConfig(
            f"the record of key {key!r}", "it holds no fence and holder; restore it, or remove it if no holder is left"
        )
    return reply[1] if len(reply) > 1 else None


class RedisGuard(_Guard):
    """Guarded writes through a ``redis.Redis``, or any client like it.

    ``retention``: for how many seconds after a write its fence is remembered (None: forever). A holder that was
    stopped for longer than that is no longer recognised as stale.
    """

    def enter(self, key: str, lease: BaseLease | Stamp, *, name: str | None = None) -> None:
        """Refuse earlier holders from now on, and write nothing. Do it before you read what you will change."""
        ours = stamp(lease, name=name)
        _check_reply(self._run(key, ours), key, ours)

    def execute(
        self, command: str, key: str, *arguments: Value, lease: BaseLease | Stamp, name: str | None = None
    ) -> Any:
        """Run one write of one key, and return the server's reply as it is; StaleFence if it was refused."""
        ours = stamp(lease, name=name)
        return _check_reply(self._run(key, ours, _check_command(command, arguments), *arguments), key, ours)

    def set(
        self, key: str, value: Value, lease: BaseLease | Stamp, *, ttl: Seconds | None = None, name: str | None = None
    ) -> None:
        """Set a string, for ``ttl`` seconds if given."""
        self.execute("SET", key, value, *_expiry(ttl), lease=lease, name=name)

    def delete(self, key: str, lease: BaseLease | Stamp, *, name: str | None = None) -> bool:
        """Delete a key. Returns whether it was there. Its fence stays on record."""
        return bool(self.execute("DEL", key, lease=lease, name=name))


class AioRedisGuard(_Guard):
    """The same through a ``redis.asyncio.Redis``."""

    _awaited = True

    async def enter(self, key: str, lease: BaseLease | Stamp, *, name: str | None = None) -> None:
        """Refuse earlier holders from now on, and write nothing. Do it before you read what you will change."""
        ours = stamp(lease, name=name)
        _check_reply(await self._run(key, ours), key, ours)

    async def execute(
        self, command: str, key: str, *arguments: Value, lease: BaseLease | Stamp, name: str | None = None
    ) -> Any:
        """Run one write of one key, and return the server's reply as it is; StaleFence if it was refused."""
        ours = stamp(lease, name=name)
        return _check_reply(await self._run(key, ours, _check_command(command, arguments), *arguments), key, ours)

    async def set(
        self, key: str, value: Value, lease: BaseLease | Stamp, *, ttl: Seconds | None = None, name: str | None = None
    ) -> None:
        """Set a string, for ``ttl`` seconds if given."""
        await self.execute("SET", key, value, *_expiry(ttl), lease=lease, name=name)

    async def delete(self, key: str, lease: BaseLease | Stamp, *, name: str | None = None) -> bool:
        """Delete a key. Returns whether it was there. Its fence stays on record."""
        return bool(await self.execute("DEL", key, lease=lease, name=name))


def _expiry(ttl: Seconds | None) -> tuple[Value, ...]:
    return () if ttl is None else ("PX", _milliseconds("ttl", ttl))


def _milliseconds(what: str, value: Seconds) -> int:
    return round(seconds(what, value, least=0.001) * 1000)
