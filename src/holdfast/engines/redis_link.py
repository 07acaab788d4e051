"""What the wire is made of: a request and its way there and back, a connection, and how its thread is woken.

A request is sent once, or not at all, and who gets hold of its claim first decides: the thread of the wire, which then
sends it, or its caller, who leaves and may be sure that it never will be. A request that is past its time is not sent
either, for a caller who was interrupted may not have come to take it back.
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
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import hiredis
import redis.exceptions

from holdfast.engines.wire import LATE, MORE, OVERDUE_AFTER, Op, Parser, pack
from holdfast.protocol.effects import StepFailed

__all__ = ["PENDING", "Asked", "Link", "Request", "Waker"]

PENDING: Final = object()  # where a reply is to come

_NEVER: Final = float("inf")

_CHUNK: Final = 65536
_MOST_CHUNKS: Final = 64  # read at a time, so that an endless reply cannot keep the thread from its other work


class Request:
    """What one caller asks for: steps that are sent together. Each has a reply, or a StepFailed, of its own."""

    __slots__ = (
        "_claim",
        "_done",
        "_heard_at",
        "_missing",
        "data",
        "left",
        "listens",
        "ops",
        "replies",
        "resent",
        "sent_at",
        "until",
    )

    def __init__(self, ops: Sequence[Op], timeout: float, *, listens: bool = False) -> None:
        self.ops = ops
        self.data = [pack(op) for op in ops]
        self.listens = listens
        self.replies: list[Any] = [PENDING] * len(ops)
        self.until = time.monotonic() + timeout
        self.sent_at = 0.0
        self.resent: set[int] = set()  # which of its steps were sent again with the source of their script
        self.left = False  # its caller does not wait any more
        self._missing = len(ops)
        self._heard_at = 0.0
        self._claim: list[None] = [None]
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def claim(self) -> bool:
        """Decide whether it is sent; True for exactly one caller."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def answer(self, place: int, reply: Any) -> None:
        """By whoever has the claim, and nobody else."""
        self.replies[place] = reply
        self._heard_at = time.monotonic()
        self._missing -= 1
        if not self._missing:
            self._done.release()

    def fail(self, why: Callable[[], StepFailed]) -> None:
        for place in range(len(self.ops)):
            self.answer(place, why())  # one each: tracebacks and notes are its own

    def wait(self, timeout: float) -> None:
        """Until all is answered. Each reply has the whole of the time, after the last.

        If this thread wakes up late, the process was busy, and so was the thread that reads: both get that time again.
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
            if self._heard_at + timeout <= until:
                return
            until = self._heard_at + timeout


Asked: TypeAlias = tuple[Request | None, int]  # whose request, and which of its steps; None: nobody's


class Waker:
    """A pipe that gets a thread out of poll().

    Nobody closes it but the collector: a descriptor that is closed while another thread is about to write to it may be
    somebody else's file by then.
    """

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: tuple[int, ...] = ()  # should there be no pipe to be had
        self._fds = os.pipe()
        for fd in self._fds:
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fds[0]

    def wake(self) -> None:
        try:
            os.write(self._fds[1], b"!")
        except BlockingIOError:
            pass  # it is full, so somebody did

    def calm(self) -> None:
        try:
            os.read(self._fds[0], _CHUNK)
        except BlockingIOError:
            pass

    def close(self) -> None:
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    __del__ = close


class Link:
    """One connection, and what is under way on it. Only the thread of the wire touches it."""

    __slots__ = (
        "_connection",
        "_parser",
        "asked",
        "events",
        "is_ear",
        "out",
        "owing_since",
        "reading_waits",
        "resp3",
        "sock",
        "tracking",
        "writing_waits",
    )

    def __init__(self, connection: Any, *, resp3: bool, is_ear: bool) -> None:
        self._connection = connection
        self.sock: socket.socket = connection._sock
        self.sock.setblocking(False)
        self._parser = Parser()
        self.out: list[bytes] = []
        self.resp3 = resp3
        self.is_ear = is_ear  # whether bells are rung here
        self.tracking = False
        self.asked: deque[Asked] = deque()
        # When the first request was sent that was not answered in time, since all was answered for the last time. That
        # it was taken off since then means nothing: if one reply is missing, each one is taken for that of the next.
        self.owing_since = _NEVER
        self.writing_waits = False  # for the server to take in what was sent
        self.reading_waits = False  # likewise, which happens to TLS
        self.events: int = select.POLLIN  # what is waited for

    def write(self, data: bytes, *asked: Asked) -> None:
        self.asked.extend(asked)
        self.out.append(data)

    def look_for_overdue(self, now: float) -> float:
        """Note what its caller has given up; when to look again, or give this connection up."""
        look_at = _NEVER
        for request, _ in self.asked:
            if request is None or not request.left:
                continue
            if request.until > now:  # its caller was interrupted
                look_at = min(look_at, request.until)
            else:
                self.owing_since = min(self.owing_since, request.sent_at)
        return min(look_at, self.owing_since + OVERDUE_AFTER)

    def flush(self) -> None:
        """Send as much as goes out without waiting."""
        self.writing_waits = False
        try:
            while self.out:
                data = b"".join(self.out)
                self.out = [data]  # what cannot go now must come first in the next try, or TLS complains
                self.out = [data[sent:]] if (sent := self.sock.send(data)) < len(data) else []
        except (BlockingIOError, ssl.SSLWantWriteError):
            self.writing_waits = True
        except ssl.SSLWantReadError:
            pass  # the session must be told something first, and that is something to read

    def read(self) -> list[Any]:
        """What has come. More may be left for the next time, which is then at once."""
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
                if len(chunk) < _CHUNK and not isinstance(self.sock, ssl.SSLSocket):  # which gives one record at a time
                    return replies
            self.reading_waits = True  # TLS may have read what poll() would wait for
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except ssl.SSLWantWriteError:
            self.reading_waits = True
        return replies

    def is_push(self, reply: Any) -> bool:
        # Before RESP3, a connection that listens has nothing else to say than what is pushed, but for errors.
        return isinstance(reply, hiredis.PushNotification) if self.resp3 else self.is_ear and type(reply) is list

    def close(self) -> None:
        try:
            self._connection.disconnect()
        except (OSError, redis.exceptions.RedisError):
            pass  # it was broken already

    def forget(self) -> None:
        """In a forked child: let go of our copy of the socket without a word to the server."""
        self.sock.close()
