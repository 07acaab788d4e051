"""The blocking engine: steps on a Redis or Valkey server, over lines of our own.

A line is a connection that redis-py has opened and introduced (TLS, AUTH, SELECT); after that we write packed bytes to
its socket and read replies with hiredis, because a lock's round trip should cost little more than the round trip.
Lines rest on a stack, so the warmest is used first. Whatever is odd about one (a timeout, an interrupt in the middle
of a reply, bytes beyond the reply) closes it: the next request on it would be answered with the reply of another.

A silent connection is most often one that a router or a peer has forgotten, and then it has forgotten the other resting
connections too. So a request that is not answered in time also closes those that rested before it was sent: the next
try opens a new connection, and a crowd of dead connections costs one timeout.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis.exceptions

from holdfast.engines import greenlets
from holdfast.engines.target import Target
from holdfast.engines.wire import (
    MORE,
    Op,
    Parser,
    client_closed,
    connect_failure,
    is_elsewhere,
    is_full,
    is_noscript,
    leaves_nothing,
    lost_connection,
    may_write,
    pack,
    refusal,
    silence,
)
from holdfast.protocol.effects import Command, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis_wire import Wire

__all__ = ["Engine"]

_LOOK_AFTER: Final = 0.005  # a line that rested for so long is looked at; sooner a system call per request would show
_MOST_RESTING: Final = 64
_ALWAYS_FITS: Final = 16_384  # bytes that the kernel takes without waiting for the server; a batch may be more

_LOOKS: Final = 100  # a microsecond or two each
_HOPE: Final = 4  # looking has failed so often in a row: it does not pay here
_PAUSE: Final = 64  # so many replies are waited for without looking, before it is tried again
_give_way: Final = getattr(os, "sched_yield", lambda: None)  # the server may need this very core


class Silence(Exception):
    """No answer in time. A class of our own, for a TimeoutError may be the caller's, raised by a signal handler."""


class Line:
    """One connection, and the replies that come back on it.

    Reading waits in poll(), with what is left of the time, and not in recv(): a timeout of Python's sockets would
    cost a poll() before every write too, and one of the kernel's starts anew with every signal that arrives.

    Before it waits, it looks a few times whether the reply is there. A server nearby answers sooner than a core that
    has gone to sleep wakes up again. Where that does not pay (a server further away, a busy machine) it is left off,
    but for a try now and then.
    """

    __slots__ = ("_connection", "_hope", "_parser", "_plain", "_poll", "_sock", "bound", "has_surplus", "rested_at")

    def __init__(self, target: Target, timeout: float) -> None:
        extra = target.prepare() if target.prepare else {}
        self._connection = target.connection(timeout, extra)
        try:
            self._connection.connect()
        except BaseException:
            self._connection.disconnect()  # redis-py does so only for errors of its own
            raise
        self._sock: socket.socket = self._connection._sock
        self._poll = greenlets.native_poll()
        self._poll.register(self._sock, select.POLLIN)
        # TLS may have read what poll() would wait for, and under gevent every recv() waits, whatever its flags.
        self._plain = type(self._sock).__module__ == "socket"
        if self._plain:
            self._sock.settimeout(None)
        self._parser = Parser()
        self.has_surplus: Callable[[], bool] = self._parser.has_data  # whether more was read than was asked for
        self._hope = _HOPE
        self.rested_at = 0.0
        self.bound = False  # the server remembers something of it: what is watched, or the beginning of a MULTI

    def ask(self, data: bytes, deadline: float) -> Any:
        """Send one request and return its reply. Silence when that takes too long."""
        self._send(data, deadline)
        return self._receive(deadline)

    def _receive(self, deadline: float) -> Any:
        while True:
            reply = self._parser.next(self._read(deadline))
            if reply is not MORE:
                return reply
            if time.monotonic() >= deadline:  # it comes in bits, each of which was there when we looked
                raise Silence

    def ask_all(self, requests: list[bytes], timeout: float) -> list[Any]:
        """Send many requests at once and return their replies. Each has the whole of the time, after the last."""
        replies = [self.ask(b"".join(requests), time.monotonic() + timeout)]
        while len(replies) < len(requests):
            reply = self._parser.next()
            replies.append(self._receive(time.monotonic() + timeout) if reply is MORE else reply)
        return replies

    def _send(self, data: bytes, deadline: float) -> None:
        if self._plain and len(data) <= _ALWAYS_FITS:
            self._sock.sendall(data)
            return
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._sock.sendall(data)
        except TimeoutError as error:
            raise Silence from error
        if self._plain:
            self._sock.settimeout(None)

    def _read(self, deadline: float) -> bytes:
        chunk = self._look() if self._plain else None
        if chunk is None:
            left = max(0.0, deadline - time.monotonic())  # if we come late, what is there is read all the same
            if not self._plain:
                chunk = self._read_in_time(max(0.001, left))
            elif self._poll.poll(left * 1000):
                chunk = self._sock.recv(65536)
            else:
                raise Silence
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        return chunk

    def _read_in_time(self, left: float) -> bytes:
        self._sock.settimeout(left)
        try:
            return self._sock.recv(65536)
        except TimeoutError as error:
            raise Silence from error

    def _look(self) -> bytes | None:
        """What is there already, or comes in a moment. ``_hope`` counts how often that may fail; then it is paused."""
        if self._hope <= 0:
            self._hope += 1
            return None
        recv = self._sock.recv
        for _ in range(_LOOKS):
            _give_way()
            try:
                chunk = recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            self._hope = _HOPE
            return chunk
        self._hope = self._hope - 1 or -_PAUSE
        return None

    def is_out_of_step(self) -> bool:
        """Whether there is something to read although nothing was asked: a surplus reply, or the connection's end."""
        return self.has_surplus() or bool(self._poll.poll(0))

    def close(self) -> None:
        self._connection.disconnect()

    def forget(self) -> None:
        """In a forked child: let go of our copy of the socket without a word to the server."""
        self._sock.close()


class Engine:
    """Runs steps on one server. Any thread may use it."""

    def __init__(self, target: Target) -> None:
        self.address = target.address
        self._target = target
        self._resting: deque[Line] = deque()
        self._open: set[Line] = set()  # resting or not: a forked child must let go of all of them
        self._known = False  # whether this server has ever answered
        self._served = False  # whether it has ever answered a step that may write, without an error
        self._closed = False
        self.spare: Wire | None = None  # for steps, while no connection can be made

    def call(self, op: Op, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        try:
            line = self._take(timeout)
        except StepFailed:
            if not self._has_spare(deadline):
                raise
            return self._call_spare(op, deadline)
        try:
            reply = line.ask(pack(op), deadline)
            if is_noscript(reply):
                reply = line.ask(pack(op, with_source=True), deadline)
        except BaseException as error:
            raise self._broken(line, error, timeout)  # noqa: B904 (it has its cause)
        self._known = True
        if isinstance(reply, hiredis.ReplyError):
            if is_full(reply):  # and about to close the connection
                self._drop(line)
                if self._has_spare(deadline):
                    return self._call_spare(op, deadline)
            else:
                self._put_back(line, reply)
            raise self._judge(reply, op)
        self._put_back(line)
        self._served = self._served or may_write(op)
        return reply

    def _has_spare(self, deadline: float) -> bool:
        """Whether the connection of the wire can be used instead, and there is time for that."""
        return not self._closed and self.spare is not None and self.spare.is_up() and time.monotonic() < deadline

    def _call_spare(self, op: Op, deadline: float) -> Any:
        assert self.spare is not None
        return self.spare.call(op, deadline - time.monotonic())

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each, or its StepFailed."""
        if not ops:
            return []
        try:
            line = self._take(timeout)
            try:
                replies = line.ask_all([pack(op) for op in ops], timeout)
                unknown = [place for place, reply in enumerate(replies) if is_noscript(reply)]
                if unknown:
                    again = line.ask_all([pack(ops[place], with_source=True) for place in unknown], timeout)
                    for place, reply in zip(unknown, again, strict=True):
                        replies[place] = reply
            except BaseException as error:
                raise self._broken(line, error, timeout)  # noqa: B904 (it has its cause)
        except StepFailed as failed:
            return [failed] * len(ops)
        self._known = True
        self._put_back(line, *replies)
        return [self._judge(reply, op) for reply, op in zip(replies, ops, strict=True)]

    # Links: a line for one caller alone, for commands that need one and the same connection.

    def open_link(self, timeout: float) -> Line:
        return self._take(timeout)

    def call_on(self, line: Line, commands: Sequence[Command], timeout: float) -> list[Any]:
        """The reply to each, or its StepFailed. If the line is lost, so is the link."""
        if line not in self._open:  # it was lost before, or the client was closed, or has forked
            raise client_closed(self.address) if self._closed else lost_connection(self.address, None)
        line.bound = not leaves_nothing(commands)
        try:
            if line.is_out_of_step():
                raise ConnectionResetError("the server closed the connection, or sent more than it was asked for")
            replies = line.ask_all([pack(command) for command in commands], timeout)
        except BaseException as error:
            raise self._broken(line, error, timeout)  # noqa: B904 (it has its cause)
        self._known = True
        return [self._judge(reply, command) for reply, command in zip(replies, commands, strict=True)]

    def close_link(self, line: Line) -> None:
        if line not in self._open:
            return
        if line.bound:  # it would spoil the next one's transaction
            self._drop(line)
        else:
            self._put_back(line)

    def has_resting(self) -> bool:
        """Whether a connection can be had without making one."""
        return bool(self._resting)

    def _judge(self, reply: Any, op: Op) -> Any:
        """The reply, or the StepFailed that an error is."""
        if isinstance(reply, hiredis.ReplyError):
            return refusal(reply, self.address, op, served=self._served)
        self._served = self._served or may_write(op)
        return reply

    def _broken(self, line: Line, error: BaseException, timeout: float) -> BaseException:
        """Something went wrong in the middle of an exchange: the line is of no more use. What to raise instead."""
        self._drop(line)
        if isinstance(error, Silence):
            self._drop_rested_before(time.monotonic() - timeout)
            return silence(self.address, timeout, error.__cause__, sent=True, met=self._known)
        # A TimeoutError may be the caller's, raised by a signal handler, unless it is the kernel's.
        kernels = isinstance(error, OSError) and (not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT)
        if kernels or isinstance(error, hiredis.HiredisError):
            self.rest()  # what ended this connection (a restart, a failover) has most likely ended the others
            return lost_connection(self.address, error, met=self._known, tls=self._target.tls)
        return error  # an interrupt: the reply is still to come, and nobody will fetch it

    def _take(self, timeout: float) -> Line:
        if self._closed:
            raise client_closed(self.address)
        while True:
            try:
                line = self._resting.pop()
            except IndexError:
                break
            if time.monotonic() - line.rested_at < _LOOK_AFTER or not line.is_out_of_step():
                return line
            self._drop(line)
        try:
            line = Line(self._target, timeout)
        except Exception as error:  # redis-py, a credential provider, a custom connect function: anything
            raise self._not_connected(error, timeout)  # noqa: B904 (likewise)
        self._open.add(line)
        return line

    def _not_connected(self, cause: Exception, timeout: float) -> StepFailed:
        failed = connect_failure(cause, self.address, timeout, tls=self._target.tls)
        failed.retry = failed.retry and self._known
        return failed

    def _put_back(self, line: Line, *replies: object) -> None:
        if self._closed or len(self._resting) >= _MOST_RESTING:
            self._drop(line)
            return
        if replies and any(map(is_elsewhere, replies)):
            self._drop(line)
            self.rest()
            return
        if line.has_surplus():
            self._drop(line)
            return
        line.rested_at = time.monotonic()
        self._resting.append(line)

    def _drop_rested_before(self, when: float) -> None:
        """A request got no answer: connections without an answer since then may be dead as well."""
        while self._resting:
            try:
                line = self._resting.popleft()  # the one that has rested for longest
            except IndexError:
                return  # another thread was quicker
            if line.rested_at >= when:
                self._resting.appendleft(line)
                return
            self._drop(line)

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
        for line in list(self._open):  # one that an interrupt has cut off from its caller; or in use, and then no more
            self._drop(line)

    def forget(self) -> None:
        """In a forked child: the sockets are the parent's."""
        lines, self._open, self._resting = self._open, set(), deque()
        for line in lines:
            line.forget()
