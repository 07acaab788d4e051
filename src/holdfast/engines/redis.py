"""The blocking engine: steps on a Redis or Valkey server, over lines of our own.

A line is a connection that redis-py has opened and introduced (TLS, AUTH, SELECT); after that we write packed bytes to
its socket and read replies with hiredis, because a lock's round trip should cost little more than the round trip.
Lines rest on a stack, so the warmest is used first. Whatever is odd about one (a timeout, an interrupt in the middle
of a reply) closes it: a line with a reply outstanding would hand that reply to somebody else.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis
import redis.exceptions

from holdfast.engines.target import Target
from holdfast.engines.wire import (
    Op,
    client_closed,
    connect_failure,
    is_noscript,
    lost_connection,
    pack,
    refusal,
    silence,
)
from holdfast.protocol.effects import StepFailed

__all__ = ["Engine"]

_STALE_AFTER: Final = 1.0  # a line that rested so long is looked at before it is trusted
_MOST_RESTING: Final = 64


class Line:
    """One connection, and the replies that come back on it."""

    __slots__ = ("_connection", "_reader", "_sock", "_timeout", "rested_at")

    def __init__(self, target: Target, timeout: float) -> None:
        extra = target.prepare() if target.prepare else {}
        self._connection = target.connection(timeout, extra)
        self._connection.connect()
        self._sock = self._connection._sock
        self._timeout = timeout
        self._sock.settimeout(timeout)
        self._reader = hiredis.Reader()
        self.rested_at = 0.0

    def exchange(self, data: bytes, count: int, timeout: float) -> list[Any]:
        sock, reader = self._sock, self._reader
        if timeout != self._timeout:
            sock.settimeout(timeout)
            self._timeout = timeout
        sock.sendall(data)
        replies: list[Any] = []
        while True:
            reply = reader.gets()
            if reply is not False:
                replies.append(reply)
                if len(replies) == count:
                    return replies
                continue
            chunk = sock.recv(65536)
            if not chunk:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(chunk)

    def is_dead(self) -> bool:
        """Whether something can be read although nothing was asked: that is the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._connection.disconnect()

    def forget(self) -> None:
        """In a forked child: let go of our copy of the socket without a word to the server."""
        self._sock.close()


class Engine:
    """Runs steps on one server. Any thread may use it."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.address = target.address
        self._target = target
        self._timeout = timeout
        self._resting: deque[Line] = deque()
        self._open: set[Line] = set()  # resting or not: a forked child must let go of all of them
        self._known = False  # whether this server was ever reached
        self._closed = False

    def call(self, op: Op, timeout: float) -> Any:
        reply = self._exchange([op], timeout)[0]
        if isinstance(reply, hiredis.ReplyError):
            raise refusal(reply, self.address)
        return reply

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        try:
            replies = self._exchange(ops, timeout)
        except StepFailed as failed:
            return [failed] * len(ops)
        return [
            refusal(reply, self.address) if isinstance(reply, hiredis.ReplyError) else reply
            for reply in replies
        ]

    def _exchange(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        line = self._take(timeout)
        try:
            if len(ops) == 1:
                replies = line.exchange(pack(ops[0]), 1, timeout)
                if is_noscript(replies[0]):
                    replies = line.exchange(pack(ops[0], with_source=True), 1, timeout)
            else:
                replies = line.exchange(b"".join(map(pack, ops)), len(ops), timeout)
                unknown = [place for place, reply in enumerate(replies) if is_noscript(reply)]
                if unknown:
                    data = b"".join(pack(ops[place], with_source=True) for place in unknown)
                    for place, reply in zip(unknown, line.exchange(data, len(unknown), timeout), strict=True):
                        replies[place] = reply
        except TimeoutError as error:
            self._drop(line)
            raise silence(self.address, timeout, error, sent=True) from error
        except OSError as error:
            self._drop(line)
            self.rest()  # what ended this connection (a restart, a failover) has most likely ended the others
            raise lost_connection(self.address, error) from error
        except BaseException:  # an interrupt: the reply is still to come, and nobody will fetch it
            self._drop(line)
            raise
        self._put_back(line)
        return replies

    def _take(self, timeout: float) -> Line:
        if self._closed:
            raise client_closed(self.address)
        while True:
            try:
                line = self._resting.pop()
            except IndexError:
                break
            if time.monotonic() - line.rested_at < _STALE_AFTER or not line.is_dead():
                return line
            self._drop(line)
        try:
            line = Line(self._target, timeout)
        except Exception as error:  # redis-py, a credential provider, a custom connect function: anything
            failed = connect_failure(error, self.address, timeout)
            failed.retry = failed.retry and self._known
            raise failed from error
        self._known = True
        self._open.add(line)
        return line

    def _put_back(self, line: Line) -> None:
        if self._closed or len(self._resting) >= _MOST_RESTING:
            self._drop(line)
            return
        line.rested_at = time.monotonic()
        self._resting.append(line)

    def _drop(self, line: Line) -> None:
        self._open.discard(line)
        try:
            line.close()
        except (OSError, redis.exceptions.RedisError):
            pass  # it was broken already, which is why it is dropped

    def rest(self) -> None:
        """Close what is not in use."""
        while self._resting:
            try:
                self._drop(self._resting.pop())
            except IndexError:
                return  # another thread was quicker

    def close(self) -> None:
        self._closed = True
        self.rest()

    def forget(self) -> None:
        """In a forked child: the sockets are the parent's."""
        lines, self._open, self._resting = self._open, set(), deque()
        for line in lines:
            line.forget()
