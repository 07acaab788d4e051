"""A connection of the shared connection's thread, with requests in flight, and the request of one caller.

A request is sent once or never. ``claim`` decides: if the thread claims it first, the thread sends it; if the caller
claims it first, it is never sent. A request whose timeout is over is not sent either, because an interrupted caller may
have left without a claim.
"""

from __future__ import annotations

import _thread
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import hiredis
import redis.exceptions

from holdfast.engines.redis.failures import LATE, OVERDUE_AFTER
from holdfast.engines.redis.protocol import MORE, Op, Parser, pack
from holdfast.lua import Script
from holdfast.protocol.effects import Command, StepFailed

PENDING: Final = object()  # in place of a reply that has not arrived

_NEVER: Final = float("inf")

_CHUNK: Final = 65536
_MOST_CHUNKS: Final = 64  # per read(), so that an endless reply does not block the thread's other work


class Request:
    """Steps of one caller that are sent together. Each gets its own reply or StepFailed."""

    __slots__ = (
        "_answered_at",
        "_claim",
        "_done",
        "_missing",
        "data",
        "left",
        "ops",
        "primary",
        "refused",
        "replies",
        "resent",
        "sent_at",
        "subscribes",
        "until",
    )

    def __init__(
        self, ops: Sequence[Op], timeout: float, scripts: Mapping[str, Script], *, subscribes: bool = False
    ) -> None:
        self.ops = ops
        self.data = [pack(op, scripts) for op in ops]
        self.subscribes = subscribes
        self.replies: list[Any] = [PENDING] * len(ops)
        self.until = time.monotonic() + timeout
        self.primary: Any = None  # that was known when it was queued, behind Sentinels
        self.sent_at = 0.0
        self.resent: set[int] = set()  # steps that were sent again with the source of their script
        self.left = False  # the caller no longer waits
        self.refused: StepFailed | None = None  # why it was not queued
        self._missing = len(ops)
        self._answered_at = 0.0
        self._claim: list[None] = [None]
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def claim(self) -> bool:
        """True for the first call only: then the thread may send the request, or the caller may withdraw it."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def answer(self, place: int, reply: Any) -> None:
        """Set one reply. Only the claimant may call this."""
        self.replies[place] = reply
        self._answered_at = time.monotonic()
        self._missing -= 1
        if not self._missing:
            self._done.release()

    def fail(self, why: Callable[[], StepFailed]) -> None:
        for place in range(len(self.ops)):
            self.answer(place, why())  # one exception per step, because each gets its own traceback

    def wait(self, timeout: float) -> None:
        """Wait until all replies have arrived. Each has the full timeout after the previous one.

        If this thread wakes up late, the process was busy, and so was the reading thread. Then the delay is added once.
        """
        until, was_late = self.until, False
        while True:
            left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
            if self._done.acquire(timeout=left) if left > 0 else self._done.acquire(blocking=False):
                return
            late = time.monotonic() - until
            if late > LATE and not was_late:
                was_late = True
                until += late + min(late, timeout)
                continue
            if self._answered_at + timeout <= until:
                return
            until = self._answered_at + timeout


InFlight: TypeAlias = tuple[Request | None, int]  # a request and the index of its step; None: no caller waits
_IGNORED: Final[InFlight] = None, 0
TRACKING: Final[InFlight] = None, 1  # its reply says whether the server refuses tracking

_TRACK: Final = pack(Command(("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")))
_CACHE: Final = pack(Command(("CLIENT", "CACHING", "YES")))


class Waker:
    """A pipe that wakes a thread from poll().

    Only the garbage collector closes it: another thread may be about to write, and the number of a closed descriptor
    may belong to another file by then.
    """

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: tuple[int, ...] = ()  # __del__ needs it even if os.pipe() fails
        self._fds = os.pipe()
        for fd in self._fds:
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fds[0]

    def wake(self) -> None:
        try:
            os.write(self._fds[1], b"!")
        except BlockingIOError:
            pass  # the pipe is full, so the thread is being woken already

    def drain(self) -> None:
        try:
            os.read(self._fds[0], _CHUNK)
        except BlockingIOError:
            pass

    def close(self) -> None:
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    __del__ = close


class PipelinedConnection:
    """One non-blocking connection and its requests in flight. Only the thread of the shared connection uses it."""

    def __init__(self, connection: Any, *, resp3: bool, subscriber: bool) -> None:
        self.connection = connection
        self.sock: socket.socket = connection._sock
        self.sock.setblocking(False)
        self._parser = Parser()
        self.out: list[bytes] = []
        self.resp3 = resp3
        self.subscriber = subscriber  # whether notifications may be subscribed to here
        self.tracking = False
        self.in_flight: deque[InFlight] = deque()
        # When the oldest request that got no reply in time was sent. Reset only when nothing is in flight. A late reply
        # does not reset it: if one reply is missing, each later reply is assigned to the request before its own.
        self.overdue_since = _NEVER
        self.writing_waits = False  # flush() must wait until the socket is writable
        self.reading_waits = False  # read() must wait for that: TLS may have to write before it can read
        self.events: int = select.POLLIN  # registered with poll()

    def write(self, data: bytes, step: InFlight, *, watch: bool) -> None:
        """Queue one step. ``watch``: the server is to report the next write of another client to its keys."""
        if watch and self.resp3:
            if not self.tracking:
                self.tracking = True
                self.in_flight.append(TRACKING)
                self.out.append(_TRACK)
            self.in_flight.append(_IGNORED)
            self.out.append(_CACHE)
        self.in_flight.append(step)
        self.out.append(data)

    def find_overdue(self, now: float) -> float:
        """When to look again; if that is not in the future, a reply is overdue and the connection must be dropped."""
        look_at = _NEVER
        for request, _ in self.in_flight:
            if request is None or not request.left:
                continue
            if request.until > now:  # the caller was interrupted before its timeout
                look_at = min(look_at, request.until)
            else:
                self.overdue_since = min(self.overdue_since, request.sent_at)
        return min(look_at, self.overdue_since + OVERDUE_AFTER)

    def flush(self) -> None:
        """Send as much as the socket takes without waiting."""
        self.writing_waits = False
        try:
            while self.out:
                data = b"".join(self.out)
                self.out = [data]  # TLS requires a retry with the same bytes first
                self.out = [data[sent:]] if (sent := self.sock.send(data)) < len(data) else []
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.writing_waits = True
        except ssl.SSLWantReadError:
            pass  # TLS must read first, and poll() waits for that anyway

    def read(self) -> list[Any]:
        """The replies that have arrived. If more may be waiting, ``reading_waits`` is set."""
        self.reading_waits = False
        replies: list[Any] = []
        parse = self._parser.next
        try:
            for _ in range(_MOST_CHUNKS):
                chunk = self.sock.recv(_CHUNK)
                if not chunk:
                    raise ConnectionResetError("the server closed the connection")
                reply = parse(chunk)
                while reply is not MORE:
                    replies.append(reply)
                    reply = parse()
                if len(chunk) < _CHUNK and not isinstance(self.sock, ssl.SSLSocket):  # TLS returns one record at a time
                    return replies
            self.reading_waits = True  # TLS may have buffered what poll() would wait for
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self.reading_waits = True
        return replies

    def is_push(self, reply: Any) -> bool:
        # In RESP2, all replies on a subscribed connection are pushes, except for errors.
        return isinstance(reply, hiredis.PushNotification) if self.resp3 else self.subscriber and type(reply) is list

    def close(self) -> None:
        try:
            self.connection.disconnect()
        except (OSError, redis.exceptions.RedisError):
            pass  # it was broken already

    def forget(self) -> None:
        """In a forked child: close our copy of the socket, and send nothing."""
        self.sock.close()
