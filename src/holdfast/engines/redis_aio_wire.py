"""A connection of the asyncio engine, as the event loop knows it: what was asked on it, and what comes back.

Replies come in the order of the requests. Under RESP3 the server also speaks unasked, between two replies: bells that
were rung for this client, and keys that it has watched and that somebody else wrote.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import hiredis
import redis.exceptions

from holdfast.engines.wire import (
    LATE,
    MORE,
    OVERDUE_AFTER,
    Op,
    Parser,
    ReplyTooLong,
    is_elsewhere,
    is_noscript,
    lost_connection,
    may_write,
    pack,
    refusal,
)
from holdfast.protocol.effects import Command, Step

if TYPE_CHECKING:
    from holdfast.engines.redis_aio import Engine

__all__ = ["PUSH", "Reply", "Request", "Wire", "subscribe_to"]

Reply: TypeAlias = "asyncio.Future[Any]"
# With its deadline, the timeout that this came from, and when it was sent. No Op: it was sent again with its source.
Request: TypeAlias = tuple[Op | None, Reply, float, float, float]

PUSH: Final[Any] = hiredis.PushNotification
_LEAST_CHUNK: Final = 8  # requests that are worth a write before the turn is over
_CACHING: Final = pack(Command(("CLIENT", "CACHING", "YES")))


def subscribe_to(channel: str) -> Command:
    return Command(("SUBSCRIBE", channel))


class _Nobody:
    """Whoever waits for a reply that nobody waits for."""

    def done(self) -> bool:
        return True


_NEVER: Final = float("inf")
_NOBODYS: Final[Any] = (None, _Nobody(), _NEVER, 0.0, _NEVER)


class Wire(asyncio.Protocol):
    """An introduced connection, from the moment it is ours until it is lost."""

    def __init__(self, connection: Any, engine: Engine, loop: asyncio.AbstractEventLoop, push: Any) -> None:
        self._connection = connection
        self._transport: Any = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self.engine = engine
        self.loop = loop
        self._parser = Parser()
        self._push = push  # the type of what was not asked for
        self._out: list[bytes] = []
        self._out_since = 0.0
        self._error: Exception | None = None
        self.asked: deque[Request] = deque()
        self.waiting_since = 0.0  # when the server last said something, or was first asked after that
        # When the first request was sent that was not answered in time, since all was answered for the last time. That
        # it was taken off since then means nothing: if one reply is missing, each one is taken for that of the next.
        self.owing_since = _NEVER
        self.open = True  # whether it takes more
        self._full = False  # whether more has been written than the kernel takes
        self.lost = False
        self.listening = False
        self.greeting: Reply | None = None  # to HELLO, once it was sent
        self.may_speak_resp3 = self.may_track = push is PUSH  # until the server refuses it
        self.tracking = False
        self._transport.set_protocol(self)

    def send(self, request: Request, *, with_source: bool = False) -> None:
        op, asked, out = request[0], self.asked, self._out
        assert op is not None
        data = pack(op, with_source=with_source)
        idle = not asked
        if idle:
            self.waiting_since = monotonic()
        if type(op) is Step and op.watch and self._tracks():
            asked.append(_NOBODYS)
            data = _CACHING + data  # in one piece with the step: it speaks of the very next command
        if idle and not out:
            self._transport.write(data)  # no reason to wait for others
        else:
            out.append(data)
            if len(out) == 1:
                self._out_since = monotonic()
                self.loop.call_soon(self._flush)
            elif len(out) >= _LEAST_CHUNK and 2 * len(out) > len(asked):
                self._flush()  # the server has less in hand than we have gathered: let it begin while we go on
        asked.append((None, *request[1:]) if with_source else request)

    def _flush(self) -> None:
        if self._out and not self.lost:
            self._transport.write(b"".join(self._out))
            if (now := monotonic()) > self._out_since + LATE:  # the loop was busy: the server could not answer before
                self.waiting_since = now
        self._out.clear()

    def _tracks(self) -> bool:
        """See to it that this connection is tracked, if the server can do that."""
        if self.may_track and not self.tracking:
            self.engine.resp3.track(self)
        return self.tracking

    def data_received(self, data: bytes) -> None:
        self.waiting_since = monotonic()
        engine, asked, push = self.engine, self.asked, self._push
        engine.known = True
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
                    request = asked.popleft()
                    reply = request[1]
                    if not reply.done():
                        reply.set_result(answer)
                    if not engine.served:
                        engine.served = request[0] is None or may_write(request[0])
                answer = gets()
            if not asked and self.greeting is None and push is not list and self._parser.has_data():
                raise hiredis.ProtocolError(
                    "the beginning of a reply to nothing"
                )  # and no push, which may come in parts
        except hiredis.HiredisError as error:
            self.abort(error)
        except MemoryError:
            self.abort(ReplyTooLong("an array that does not fit into memory"))
        except (IndexError, TypeError, AttributeError) as error:  # a reply to nothing, or a push that is none
            self.abort(hiredis.ProtocolError(str(error)))
        if not asked and self.owing_since != _NEVER:
            self.owing_since = _NEVER
            self.open = not (self.lost or self._full)
        if engine.backlog:
            engine.drain()

    def _take_error(self, answer: hiredis.ReplyError) -> None:
        if not self.asked:
            raise answer  # why the server is about to close the connection
        request = self.asked.popleft()
        op, reply = request[:2]
        if op is not None and is_noscript(answer):
            self.send(request, with_source=True)  # even if its caller has left: the next one needs the script too
        elif not reply.done():
            reply.set_exception(refusal(answer, self.engine.address, op, served=self.engine.served))
        if is_elsewhere(answer):
            self.abort()

    def _take_push(self, answer: list[Any]) -> None:
        kind, board = answer[0], self.engine.board
        if kind == b"message":
            board.deliver(answer[2], self.engine.now())
        elif kind == b"invalidate":
            if answer[1] is None:  # everything was flushed
                board.look_again()
            else:
                for key in answer[1]:
                    board.touched(key.decode(errors="replace"))
        elif kind == b"subscribe":  # in its place among the replies, though it is none
            op, reply = self.asked[0][:2]
            if op != subscribe_to(board.channel) or answer[1] != board.channel.encode():
                raise hiredis.ProtocolError("a confirmation of a subscription that was not asked for")
            self.asked.popleft()
            self.listening = board.armed = True
            if not reply.done():
                reply.set_result(True)

    def is_deaf(self, timeout: float) -> bool:
        """Whether the server has been silent for that long although it was asked, or has owed a reply for that long."""
        return bool(self.asked) and monotonic() - min(self.waiting_since, self.owing_since) >= timeout

    def look_for_overdue(self, now: float) -> float:
        """Note what is not answered in time; when to look again, or give this connection up."""
        look_at = _NEVER
        for *_, timeout, sent_at in self.asked:
            if sent_at + timeout > now:
                look_at = min(look_at, sent_at + timeout)
            else:
                self.owing_since = min(self.owing_since, sent_at)
                self.open = False  # until all is answered, which shows that none was taken for another
        return min(look_at, self.owing_since + OVERDUE_AFTER)

    def pause_writing(self) -> None:
        self._full, self.open = True, False

    def resume_writing(self) -> None:
        self._full, self.open = False, not self.lost and self.owing_since == _NEVER
        if self.engine.backlog:
            self.engine.drain()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost, self.open = True, False
        self._stream.connection_lost(error)
        self._connection._reader = self._connection._writer = None  # redis-py takes this to mean closed
        asked, self.asked = self.asked, deque()
        for _, reply, *_ in asked:
            if not reply.done():  # one each: tracebacks and notes are its own
                engine = self.engine
                cause = self._error or error
                reply.set_exception(lost_connection(engine.address, cause, met=engine.known, tls=engine.tls))
        self.engine.note_loss(self)

    def abort(self, error: Exception | None = None) -> None:
        """Give it up. Who is waiting learns it in the next turn; who comes now is sent elsewhere."""
        self.lost, self.open, self._error = True, False, error
        self._transport.abort()

    def disinherit(self) -> None:
        """In a forked child: let go of our copy of the socket. Closing the transport would take the parent's socket out
        of the event queue that parent and child still share, so the descriptor is pointed elsewhere instead."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._transport.get_extra_info("socket").fileno())
        os.close(nowhere)

    async def close(self) -> None:
        self._flush()  # a clean-up that was asked for in this very turn of the loop
        try:
            await self._connection.disconnect()
        except (OSError, redis.exceptions.RedisError):  # redis-py gave up waiting for its end, on a busy event loop
            self._transport.abort()
