"""A connection of pymemcache whose commands end at a deadline, and whose replies have a limit and are checked.

pymemcache reads a reply in parts and waits up to its timeout for each. So a server that sends one byte now and then
would never be given up, and a line without an end would be read until no memory is left. The socket here counts time
and bytes of a whole reply. pymemcache also believes the numbers of a ``VALUE`` line; they are checked here first.

After any error a connection must be closed, because the next command on it might get the reply to another one.
"""

from __future__ import annotations

import re
import select
import socket
from time import monotonic
from typing import Any, Final

from pymemcache.client.base import Client
from pymemcache.exceptions import MemcacheError, MemcacheUnknownError

from holdfast.engines import greenlets
from holdfast.engines.redis.protocol import LONGEST_REPLY
from holdfast.protocol.effects import Command

_MOMENT: Final = 0.001  # seconds
_SHOWN: Final = 32  # bytes of a bad reply
_VALUE: Final = re.compile(rb"VALUE ([!-~]{1,250}) \d{1,10} \d{1,10} \d{1,20}")
_NEVER: Final = 2**40  # seconds since 1970
_DELETED: Final = frozenset((b"HD", b"EX", b"NF"))  # replies to md


def _text(value: Any) -> str:
    """A name or a value of the statistics; pymemcache makes numbers of some values, and truth values of others."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class ReplyTooLong(MemcacheError):  # type: ignore[misc]  # pymemcache has no types
    """A reply is longer than LONGEST_REPLY."""


class _Socket:
    """The socket of a connection, as far as pymemcache uses it."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._poll = greenlets.native_poll()
        self._poll.register(inner, select.POLLIN)
        self.close = inner.close
        self.expect(0.0)

    def expect(self, deadline: float) -> None:
        """From now on, count the time and the bytes of the next reply."""
        self._deadline = deadline
        self._timed_at = 0.0
        self._received = 0
        self._is_over = False

    def sendall(self, data: bytes) -> None:
        self._limit()
        self._inner.sendall(data)

    def recv(self, size: int) -> bytes:
        if monotonic() > self._timed_at + _MOMENT:  # benchmarks.etcd: the first recv can use the timeout of the send
            self._limit()
        data = self._inner.recv(size)
        self._received += len(data)
        if self._received > LONGEST_REPLY:
            raise ReplyTooLong(f"more than {LONGEST_REPLY} bytes")
        return data

    def _limit(self) -> None:
        """Wait only until the deadline. The first call after it gets a moment: the reply may be there already."""
        self._timed_at = monotonic()
        left = self._deadline - self._timed_at
        if left <= 0:
            if self._is_over:
                raise TimeoutError("the deadline has passed")
            self._is_over, left = True, _MOMENT
        self._inner.settimeout(left)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))


class Connection(Client):  # type: ignore[misc]
    """One connection, which is made at once. OSError if that fails."""

    sock: Any  # of pymemcache; it reconnects if this is None
    _bounded: _Socket | None = None

    def __init__(self, where: tuple[str, int], timeout: float) -> None:
        super().__init__(where, connect_timeout=timeout, timeout=timeout, no_delay=True)
        self._connect()
        self.sock = self._bounded = _Socket(self.sock)

    def close(self) -> None:
        """Close it for good. ``sock`` stays: without it, a command of another thread would connect again."""
        if self._bounded is None:
            super().close()
        else:
            self._bounded.close()

    def is_out_of_step(self) -> bool:
        """Whether there is something to read although no command is open: a surplus reply, or the connection's end."""
        assert self._bounded is not None
        return self._bounded.is_readable()

    def perform(self, command: Command, deadline: float) -> Any:
        """The reply to one command: its first word, such as b"STORED"; data and cas; the time; or the statistics.

        OSError or MemcacheError if there is none by the deadline, or no valid one.
        """
        assert self._bounded is not None
        self._bounded.expect(deadline)
        if command.args[0] == "clock":
            return self._clock()
        if command.args[0] == "stats":
            return {_text(name): _text(value) for name, value in self.stats(*command.args[1:]).items()}
        name, key, *rest = command.args
        if name == "add":
            _, seconds, data = rest
            return b"STORED" if self.add(key, str(data), int(seconds), noreply=False) else b"NOT_STORED"
        if name == "cas":
            _, seconds, cas, data = rest
            stored = self.cas(key, str(data), str(cas), int(seconds), noreply=False)
            return {True: b"STORED", False: b"EXISTS", None: b"NOT_FOUND"}[stored]
        if name == "gets":
            data, cas = self.gets(key)
            return None if cas is None else [bytes(data), int(cas)]
        assert name == "md"
        # Without end_tokens: with them, pymemcache loses the beginning of a reply that comes in two parts.
        line = self.raw_command(" ".join(("md", str(key), *map(str, rest))), end_tokens="")
        deleted = line.partition(b" ")[0]
        if deleted not in _DELETED:
            raise MemcacheUnknownError(line[:_SHOWN])
        return deleted

    def _clock(self) -> int:
        """The server's clock, in seconds since 1970."""
        try:
            time = self.stats()[b"time"]
        except LookupError:  # pymemcache's own, for a line without a name
            time = None
        if not isinstance(time, int) or not 0 < time < _NEVER:
            raise MemcacheUnknownError(b"stats without a time")
        return time

    def _extract_value(self, expect_cas: bool, line: bytes, buf: bytes, remapped_keys: Any, prefixed_keys: Any) -> Any:
        found = _VALUE.fullmatch(line)
        if found is None or found[1] not in remapped_keys:
            raise MemcacheUnknownError(line[:_SHOWN])
        return super()._extract_value(expect_cas, line, buf, remapped_keys, prefixed_keys)
