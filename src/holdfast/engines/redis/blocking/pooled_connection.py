"""A pooled connection of the blocking engine: one request at a time, sent and awaited by the calling thread.

redis-py opens the connection and performs the handshake (TLS, AUTH, SELECT). After that the calling thread writes
packed bytes to the socket and reads replies with hiredis.

Reads wait in poll() with the remaining time, not in recv(). A timeout of a Python socket costs a poll() before every
write too, and SO_RCVTIMEO starts again with each signal.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from holdfast.engines import greenlets
from holdfast.engines.redis.failures import LATE
from holdfast.engines.redis.protocol import MORE, Parser
from holdfast.engines.redis.target import Target

_TIME_AFTER_ALL: Final = 0.1  # seconds for the reply to a request that this process has sent too late
_ALWAYS_FITS: Final = 16_384  # bytes that the kernel buffers without waiting for the server; a batch may be larger

# Spinning before poll(): a server nearby answers sooner than a sleeping core wakes up.
_SPINS: Final = 100  # non-blocking reads, of 1 to 2 microseconds each
_FAILURES: Final = 4  # after this many spins in a row without a reply, spinning is paused
_PAUSE: Final = 64  # replies that are read without spinning during a pause
_yield_core: Final = getattr(os, "sched_yield", lambda: None)  # the server may need this core


class ReplyTimeout(Exception):
    """No reply in time. Not a TimeoutError, because the caller's signal handler may raise one of those."""


class PooledConnection:
    """One connection, and the replies that come back on it."""

    def __init__(self, target: Target, timeout: float) -> None:
        extra, left = target.prepared(timeout)
        self.connection = target.connection(left, extra)  # of redis-py
        target.connect(self.connection)
        self._sock: socket.socket = self.connection._sock
        self._poll = greenlets.native_poll()
        self._poll.register(self._sock, select.POLLIN)
        # TLS may have buffered what poll() would wait for, and under gevent recv() waits in spite of MSG_DONTWAIT.
        self._plain = type(self._sock).__module__ == "socket"
        if self._plain:
            self._sock.settimeout(None)
        self._parser = Parser()
        self.has_surplus: Callable[[], bool] = self._parser.has_data  # whether bytes follow the reply
        self._spins_left = _FAILURES
        self.idle_since = 0.0
        self.stateful = False  # whether the server keeps state for it: watched keys, or an open MULTI

    def ask(self, data: bytes, deadline: float) -> Any:
        """The reply to one request; ReplyTimeout if there is none by the deadline."""
        self._send(data, deadline)
        return self._receive(deadline)

    def ask_all(self, requests: list[bytes], timeout: float) -> list[Any]:
        """The replies to requests that are sent together. Each reply has the full timeout after the previous one."""
        replies = [self.ask(b"".join(requests), time.monotonic() + timeout)]
        while len(replies) < len(requests):
            reply = self._parser.next()
            replies.append(self._receive(time.monotonic() + timeout) if reply is MORE else reply)
        return replies

    def _receive(self, deadline: float) -> Any:
        while True:
            reply = self._parser.next(self._read(deadline))
            if reply is not MORE:
                return reply
            if time.monotonic() >= deadline:  # a reply in small pieces: spinning found each of them
                raise ReplyTimeout

    def _send(self, data: bytes, deadline: float) -> None:
        if self._plain and len(data) <= _ALWAYS_FITS:
            self._sock.sendall(data)
            return
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._sock.sendall(data)
        except TimeoutError as error:
            raise ReplyTimeout from error
        if self._plain:
            self._sock.settimeout(None)

    def _read(self, deadline: float) -> bytes:
        chunk = self._spin() if self._plain else None
        if chunk is None:
            left = deadline - time.monotonic()
            # After the deadline, bytes that have arrived are still read. If it is long over, this process was stopped
            # or busy, and the server was asked only now.
            left = _TIME_AFTER_ALL if left < -LATE else max(0.0, left)
            if not self._plain:
                chunk = self._read_with_timeout(max(0.001, left))
            elif self._poll.poll(left * 1000):
                chunk = self._sock.recv(65536)
            else:
                raise ReplyTimeout
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        return chunk

    def _read_with_timeout(self, left: float) -> bytes:
        self._sock.settimeout(left)
        try:
            return self._sock.recv(65536)
        except TimeoutError as error:
            raise ReplyTimeout from error

    def _spin(self) -> bytes | None:
        """The bytes that arrive while spinning, or None. While ``_spins_left`` is not positive, spinning is paused."""
        if self._spins_left <= 0:
            self._spins_left += 1
            return None
        recv = self._sock.recv
        for _ in range(_SPINS):
            _yield_core()
            try:
                chunk = recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            self._spins_left = _FAILURES
            return chunk
        self._spins_left = self._spins_left - 1 or -_PAUSE
        return None

    def is_out_of_step(self) -> bool:
        """Whether there is something to read although no request is open: a surplus reply, or the connection's end."""
        return self.has_surplus() or bool(self._poll.poll(0))

    def close(self) -> None:
        self.connection.disconnect()

    def forget(self) -> None:
        """In a forked child: close our copy of the socket, and send nothing."""
        self._sock.close()
