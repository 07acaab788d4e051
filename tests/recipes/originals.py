"""The programs that the recipes must meet, each written anew from the commands of its original, on a bare socket.

They know nothing of Holdfast, nor of redis-py: that is what makes them witnesses. ``attempt`` is one try of the
original, ``lock`` its loop, ``unlock`` its way to give back. Where an original has no loop or no unlock of its own, the
plainest one is used: a millisecond between tries, and DEL.
"""

from __future__ import annotations

import math
import socket
import time
import uuid
from typing import Any

__all__ = ["ORIGINALS", "CppGetSet", "Original", "Socket"]

SAME_VALUE = """if redis.call("get",KEYS[1]) == ARGV[1]
then
    return redis.call("del",KEYS[1])
else
    return 0
end"""


class Socket:
    """As much of the protocol as the originals need."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def ask(self, *words: object) -> Any:
        return self.ask_all(words)[0]

    def ask_all(self, *commands: tuple[object, ...]) -> list[Any]:
        """Several commands in one write, as a pipeline does."""
        self._socket.sendall(b"".join(map(_packed, commands)))
        return [self._read() for _ in commands]

    def _read(self) -> Any:
        line = self._file.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._read() for _ in range(int(rest))]
        if kind == b"-":
            raise AssertionError(rest.decode())
        return rest

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def _packed(words: tuple[object, ...]) -> bytes:
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)


def atol(value: bytes | None) -> int:
    digits = value or b""
    end = 0
    while end < len(digits) and digits[end : end + 1].isdigit():
        end += 1
    return int(digits[:end] or 0)


class Original:
    """One client of the original program."""

    recipe: str  # which of ours must meet it
    options: dict[str, Any] = {}  # noqa: RUF012 (and with which options)
    prefix = ""
    excludes = True
    lock_timeout = 10

    def __init__(self, port: int, name: str) -> None:
        self.redis = Socket(port)
        self.key = self.prefix + name

    def attempt(self) -> bool:
        raise NotImplementedError

    def lock(self) -> None:
        while not self.attempt():
            time.sleep(0.001)

    def unlock(self) -> None:
        self.redis.ask("DEL", self.key)

    def close(self) -> None:
        self.redis.close()


class PhpSetnx(Original):
    """PHP, the first version: if ($redis->setnx('lock_key', 1)) ... $redis->delete('lock_key')."""

    recipe = "setnx"

    def attempt(self) -> bool:
        return bool(self.redis.ask("SETNX", self.key, 1) == 1)


class PhpSetnxExpire(PhpSetnx):
    """PHP, version 2.1, and plan 1 of the articles: setnx, then expire."""

    recipe = "setnx_expire"

    def attempt(self) -> bool:
        if not super().attempt():
            return False
        self.redis.ask("EXPIRE", self.key, self.lock_timeout)
        return True


class PhpMulti(Original):
    """PHP, version 2.2. phpredis sends each command of a MULTI by itself, and is told QUEUED."""

    recipe = "multi"

    def attempt(self) -> bool:
        assert self.redis.ask("MULTI") == b"OK"
        assert self.redis.ask("SETNX", self.key, 1) == b"QUEUED"
        assert self.redis.ask("EXPIRE", self.key, self.lock_timeout) == b"QUEUED"
        return bool(self.redis.ask("EXEC")[0] == 1)


class PhpGetSet(Original):
    """PHP, version 3: an absolute time in ms, nothing added, released by delete."""

    recipe = "getset"
    options = {"unit": "ms", "prefix": "", "release": "del"}  # noqa: RUF012

    def attempt(self) -> bool:
        now = int(time.time() * 1000)
        timeout = now + self.lock_timeout * 1000
        return bool(
            self.redis.ask("SETNX", self.key, timeout)
            or (
                now > float(self.redis.ask("GET", self.key) or 0)
                and now > float(self.redis.ask("GETSET", self.key, timeout) or 0)
            )
        )


class CppGetSet(Original):
    """The C++ client: microseconds, one added, DEL unless GET says that it is past."""

    recipe = "getset"
    prefix = "lock."

    def attempt(self) -> bool:
        now = time.time_ns() // 1000
        value = now + 10_000_000 + 1
        if self.redis.ask("SETNX", self.key, value) == 1:
            return True
        if atol(self.redis.ask("GET", self.key)) >= now:
            return False
        return not atol(self.redis.ask("GETSET", self.key, value)) >= now

    def unlock(self) -> None:
        now = time.time_ns() // 1000
        if atol(self.redis.ask("GET", self.key)) < now:
            return
        self.redis.ask("DEL", self.key)


class SecondsGetSet(Original):
    """SETNX lock.foo <current Unix time + lock timeout + 1>, released by a script that compares the value."""

    recipe = "getset"
    options = {"unit": "s", "release": "same_value"}  # noqa: RUF012
    prefix = "lock."

    def attempt(self) -> bool:
        now = int(time.time())
        self.value = str(now + self.lock_timeout + 1)
        if self.redis.ask("SETNX", self.key, self.value) == 1:
            return True
        return (
            int(self.redis.ask("GET", self.key) or 0) < now
            and int(self.redis.ask("GETSET", self.key, self.value) or 0) < now
        )

    def unlock(self) -> None:
        self.redis.ask("EVAL", SAME_VALUE, 1, self.key, self.value)


class PlanTwo(Original):
    """Plan 2 of the articles: GETSET must return exactly what GET has seen; DEL only within the own time."""

    recipe = "getset_equal"

    def attempt(self) -> bool:
        now = time.time_ns() // 1000
        if self.redis.ask("SETNX", self.key, now + self.lock_timeout * 1_000_000) == 1:
            self.since = time.monotonic()
            return True
        old = self.redis.ask("GET", self.key)
        if int(old or 0) >= now:
            return False
        if self.redis.ask("GETSET", self.key, now + self.lock_timeout * 1_000_000) != old:
            return False
        self.since = time.monotonic()
        return True

    def unlock(self) -> None:
        if time.monotonic() - self.since < self.lock_timeout:
            self.redis.ask("DEL", self.key)


class PythonRepair(Original):
    """Python's acquire_lock_with_timeout, and the release that belongs to it."""

    recipe = "setnx_repair"
    prefix = "lock:"
    lock_timeout = math.ceil(9.5)

    def attempt(self) -> bool:
        self.identifier = getattr(self, "identifier", None) or str(uuid.uuid4())
        if self.redis.ask("SETNX", self.key, self.identifier):
            self.redis.ask("EXPIRE", self.key, self.lock_timeout)
            return True
        if not self.redis.ask("TTL", self.key):
            self.redis.ask("EXPIRE", self.key, self.lock_timeout)
        return False

    def unlock(self) -> None:
        while True:
            self.redis.ask("WATCH", self.key)
            if self.redis.ask("GET", self.key) != self.identifier.encode():
                self.redis.ask("UNWATCH")
                return
            if self.redis.ask_all(("MULTI",), ("DEL", self.key), ("EXEC",))[-1] is not None:
                return


class PythonWatch(PythonRepair):
    """What Python's first program would be if it looked at the key."""

    recipe = "watch"

    def attempt(self) -> bool:
        self.identifier = str(uuid.uuid4())
        self.redis.ask("WATCH", self.key)
        if self.redis.ask("GET", self.key) is not None:
            self.redis.ask("UNWATCH")
            return False
        take = ("SET", self.key, self.identifier, "EX", self.lock_timeout)
        return self.redis.ask_all(("MULTI",), take, ("EXEC",))[-1] is not None


class PythonWatchBlind(Original):
    """Python's acquire by WATCH, which updates the key and asks nothing."""

    recipe = "watch_blind"
    prefix = "lock:"
    excludes = False

    def attempt(self) -> bool:
        self.redis.ask("WATCH", self.key)
        return self.redis.ask_all(("MULTI",), ("SET", self.key, 1), ("EXEC",))[-1] is not None


class SetExNx(Original):
    """set(key, 1, 30, NX)."""

    recipe = "set_nx_plain"

    def attempt(self) -> bool:
        return bool(self.redis.ask("SET", self.key, 1, "EX", 30, "NX") == b"OK")


class SetNx(Original):
    """set lock.foo a13f2ca23.1554550498 EX 60 NX, and the comparing script."""

    recipe = "set_nx"
    options = {"prefix": "lock."}  # noqa: RUF012
    prefix = "lock."

    def attempt(self) -> bool:
        self.token = f"{uuid.uuid4().hex[:9]}.{int(time.time())}"
        return bool(self.redis.ask("SET", self.key, self.token, "EX", 60, "NX") == b"OK")

    def unlock(self) -> None:
        self.redis.ask("EVAL", SAME_VALUE, 1, self.key, self.token)


ORIGINALS: list[type[Original]] = [
    PhpSetnx,
    PhpSetnxExpire,
    PhpMulti,
    PhpGetSet,
    CppGetSet,
    SecondsGetSet,
    PlanTwo,
    PythonRepair,
    PythonWatch,
    PythonWatchBlind,
    SetExNx,
    SetNx,
]
