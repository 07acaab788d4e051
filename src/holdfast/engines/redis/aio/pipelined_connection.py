"""One connection of the asyncio engine: its requests in flight, and the replies and pushes that come back.

Replies come in the order of the requests. Under RESP3 the server also pushes messages between two replies:
notifications for this client, and tracked keys that another client wrote.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import hiredis
import redis.exceptions

from holdfast.engines.redis.channels import ENDED, NOTIFIED, SUBSCRIBED, subscribed_to
from holdfast.engines.redis.failures import LATE, OVERDUE_AFTER, lost_connection
from holdfast.engines.redis.protocol import (
    MORE,
    Op,
    Parser,
    ReplyTooLong,
    is_elsewhere,
    is_noscript,
    may_write,
    pack,
)
from holdfast.protocol.effects import Command, Step, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis.aio.engine import Engine

Reply: TypeAlias = "asyncio.Future[Any]"
# Op, future, deadline, the timeout behind the deadline, time of sending. Without an Op: it was sent with its source.
Request: TypeAlias = tuple[Op | None, Reply, float, float, float]

PUSH: Final[Any] = hiredis.PushNotification
_LEAST_CHUNK: Final = 8  # with this many requests, a write need not wait for the end of the loop iteration
_CACHING: Final = pack(Command(("CLIENT", "CACHING", "YES")))


async def outcomes_of(replies: Sequence[Reply]) -> list[Any]:
    """For each reply its value, or its StepFailed."""
    outcomes: list[Any] = []
    try:
        for reply in replies:
            try:
                outcomes.append(await reply)
            except StepFailed as failed:
                outcomes.append(failed)
    finally:
        for reply in replies[len(outcomes) :]:  # we were cancelled: no task waits for these
            if not reply.cancel() and not reply.cancelled():
                reply.exception()
    return outcomes


def answer_in(reply: Reply) -> Any:
    """The value of a reply that has come, or the error reply."""
    if reply.cancelled():
        return None
    failed = reply.exception()
    return reply.result() if failed is None else failed.__cause__


class _Ignored:
    """In place of the future of a reply that no task waits for."""

    def done(self) -> bool:
        return True


_NEVER: Final = float("inf")
_IGNORED: Final[Any] = (None, _Ignored(), _NEVER, 0.0, _NEVER)


class PipelinedConnection(asyncio.Protocol):
    """A connection after redis-py's handshake, until it is lost."""

    def __init__(self, connection: Any, engine: Engine, loop: asyncio.AbstractEventLoop, push: Any) -> None:
        self._connection = connection
        self._transport: Any = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self.engine = engine
        self.loop = loop
        self._scripts = engine.target.scripts
        self._parser = Parser()
        self._push = push  # the type of unsolicited messages
        self._out: list[bytes] = []
        self._out_since = 0.0
        self._error: Exception | None = None
        self.in_flight: deque[Request] = deque()
        self.waiting_since = 0.0  # when the server last sent something, or was first asked after that
        # When the oldest request that got no reply in time was sent. Reset only when nothing is in flight. A late reply
        # does not reset it: if one reply is missing, each later reply is assigned to the request before its own.
        self.overdue_since = _NEVER
        self.open = True  # whether it takes requests
        self._full = False  # whether the transport's buffer is full
        self.lost = False
        self.subscribed = False
        self._late_after = engine.target.late_after
        self.hello: Reply | None = None  # the reply to HELLO, once it was sent
        self.may_speak_resp3 = self.may_track = push is PUSH  # until the server refuses
        self.tracking = False
        self._transport.set_protocol(self)

    def send(self, request: Request, *, with_source: bool = False) -> None:
        op, in_flight, out = request[0], self.in_flight, self._out
        assert op is not None
        data = pack(op, self._scripts, with_source=with_source)
        idle = not in_flight
        if idle:
            self.waiting_since = monotonic()
        if type(op) is Step and op.watch and self._tracks():
            in_flight.append(_IGNORED)
            data = _CACHING + data  # in one write, because CLIENT CACHING applies to the next command only
        if idle and not out:
            self._transport.write(data)  # no other request to combine it with
        else:
            out.append(data)
            if len(out) == 1:
                self._out_since = monotonic()
                self.loop.call_soon(self._flush)
            elif len(out) >= _LEAST_CHUNK and 2 * len(out) > len(in_flight):
                self._flush()  # more requests are gathered than in flight: let the server start
        in_flight.append((None, *request[1:]) if with_source else request)

    def _flush(self) -> None:
        if self._out and not self.lost:
            self._transport.write(b"".join(self._out))
            if (now := monotonic()) > self._out_since + LATE:  # the loop was busy, so the server was asked only now
                self.waiting_since = now
        self._out.clear()

    def _tracks(self) -> bool:
        """Whether client tracking is on; turns it on if the server allows that."""
        if self.may_track and not self.tracking:
            self.engine.resp3.track(self)
        return self.tracking

    def data_received(self, data: bytes) -> None:
        self.waiting_since = monotonic()
        engine, in_flight, push = self.engine, self.in_flight, self._push
        engine.ever_answered = True
        try:
            answer = self._parser.next(data)
            gets = self._parser.gets
            while answer is not MORE:
                kind = type(answer)
                if kind is hiredis.ReplyError:
                    self._take_error(answer)
                elif kind is push:
                    self._take_push(answer)
                else:
                    request = in_flight.popleft()
                    reply = request[1]
                    if not reply.done():
                        if self.waiting_since - request[4] > self._late_after:
                            engine.use_late(answer, reply, request[4], self)
                        else:
                            reply.set_result(answer)
                    if not engine.served:
                        engine.served = request[0] is None or may_write(request[0])
                answer = gets()
            if not in_flight and self.hello is None and push is not list and self._parser.has_data():
                raise hiredis.ProtocolError("the beginning of a reply without a request")  # a push may come in parts
        except hiredis.HiredisError as error:
            self.abort(error)
        except MemoryError:
            self.abort(ReplyTooLong("an array that does not fit into memory"))
        except (IndexError, TypeError, AttributeError) as error:  # a reply without a request, or a malformed push
            self.abort(hiredis.ProtocolError(str(error)))
        if not in_flight and self.overdue_since != _NEVER:
            self.overdue_since = _NEVER
            self.open = not (self.lost or self._full)
        if engine.backlog:
            engine.drain()

    def _take_error(self, answer: hiredis.ReplyError) -> None:
        if not self.in_flight:
            raise answer  # it says why the server is about to close the connection
        request = self.in_flight.popleft()
        op, reply = request[:2]
        if op is not None and is_noscript(answer):
            self.send(request, with_source=True)  # even if its caller has left: the next caller needs the script too
        elif not reply.done():
            self.engine.refuse(self, request, answer)
        if is_elsewhere(answer):
            self.abort()

    def _take_push(self, answer: list[Any]) -> None:
        kind, router = answer[0], self.engine.router
        if kind in NOTIFIED:
            router.deliver(answer[2], self.engine.now())
        elif kind == b"invalidate":
            if answer[1] is None:  # FLUSHALL or FLUSHDB
                router.look_again()
            else:
                for key in answer[1]:
                    router.touched(key.decode(errors="replace"))
        elif kind == ENDED:
            self.engine.channels.end(answer[1])
        elif kind in SUBSCRIBED:  # a push, but its place among the replies is that of a reply
            op, reply = self.in_flight[0][:2]
            if answer[1] != subscribed_to(op):
                raise hiredis.ProtocolError("a confirmation without a SUBSCRIBE")
            self.in_flight.popleft()
            self.subscribed = True
            self.engine.channels.confirm(answer[1])
            if not reply.done():
                reply.set_result(True)

    def is_unresponsive(self, seconds: float) -> bool:
        """Whether the server has been silent for that long with requests in flight, or a reply is that late."""
        return bool(self.in_flight) and monotonic() - min(self.waiting_since, self.overdue_since) >= seconds

    def find_overdue(self, now: float) -> float:
        """When to look again; if that is not in the future, a reply is overdue and the connection must be dropped."""
        look_at = _NEVER
        for *_, timeout, sent_at in self.in_flight:
            if sent_at + timeout > now:
                look_at = min(look_at, sent_at + timeout)
            else:
                self.overdue_since = min(self.overdue_since, sent_at)
                self.open = False  # until all replies have come, which shows that none is missing
        return min(look_at, self.overdue_since + OVERDUE_AFTER)

    def speaks_resp3(self) -> bool:
        hello = self.hello
        return hello is not None and hello.done() and not hello.cancelled() and hello.exception() is None

    def pause_writing(self) -> None:
        self._full, self.open = True, False

    def resume_writing(self) -> None:
        self._full, self.open = False, not self.lost and self.overdue_since == _NEVER
        if self.engine.backlog:
            self.engine.drain()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost, self.open = True, False
        self._stream.connection_lost(error)
        self._connection._reader = self._connection._writer = None  # tells redis-py that it is closed
        in_flight, self.in_flight = self.in_flight, deque()
        engine, cause = self.engine, self._error or error
        for _, reply, *_ in in_flight:
            if not reply.done():  # one exception per request, because each gets its own traceback
                known = engine.ever_answered
                reply.set_exception(lost_connection(engine.address, cause, ever_answered=known, tls=engine.tls))
        engine.note_loss(self)

    def abort(self, error: Exception | None = None) -> None:
        """Drop the connection. Requests in flight fail in the next loop iteration; no more requests are sent."""
        self.lost, self.open, self._error = True, False, error
        self._transport.abort()

    def is_moved(self) -> bool:
        """Whether another server has become the primary."""
        sentinels = self.engine.target.sentinels
        return sentinels is not None and not sentinels.is_primary(self._connection)

    def abort_if_moved(self) -> None:
        """Drop the connection if another server has become the primary."""
        if not self.lost and self.is_moved():
            self.abort(ConnectionResetError("another server has become the primary"))

    def disinherit(self) -> None:
        """In a forked child: close our copy of the socket. Closing the transport would remove the parent's socket from
        the epoll queue that both processes share, so the descriptor is redirected to /dev/null instead."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._transport.get_extra_info("socket").fileno())
        os.close(nowhere)

    async def close(self) -> None:
        self._flush()  # a clean-up may have been sent in this loop iteration
        try:
            await self._connection.disconnect()
        except (OSError, redis.exceptions.RedisError):  # redis-py timed out, on a busy event loop
            self._transport.abort()
