"""The asyncio engine: every task's steps over one connection.

redis-py opens the connection and introduces us (TLS, AUTH, SELECT); then its transport is given a protocol of ours.
Requests of one loop turn are written together, replies come back in order, and each goes to the future that asked.
A caller that was cancelled, or out of patience, simply leaves: its future is done, its reply is dropped when it
comes, and the connection stays in step for everybody else.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import hiredis

from holdfast.engines.target import Target
from holdfast.engines.wire import (
    Op,
    client_closed,
    connect_failure,
    is_elsewhere,
    is_noscript,
    lost_connection,
    pack,
    refusal,
    silence,
)

__all__ = ["Engine"]

Reply: TypeAlias = "asyncio.Future[Any]"


class Wire(asyncio.Protocol):
    """An introduced connection, from the moment it is ours until it is lost."""

    def __init__(self, connection: Any, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._transport: Any = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self._address = address
        self._loop = loop
        self._reader = hiredis.Reader()
        self._out: list[bytes] = []
        self._asked: deque[tuple[Op, Reply]] = deque()
        self._waiting_since = loop.time()  # when the server last said something, or was first asked after that
        self.lost = False
        self._transport.set_protocol(self)

    def send(self, op: Op, reply: Reply, *, with_source: bool = False) -> None:
        if self.lost:  # in the turn of the loop in which it was handed to us
            reply.set_exception(lost_connection(self._address, None))
            return
        if not self._asked:
            self._waiting_since = self._loop.time()
        self._asked.append((op, reply))
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(pack(op, with_source=with_source))

    def _flush(self) -> None:
        if not self.lost:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._waiting_since = self._loop.time()
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            op, reply = self._asked.popleft()
            if is_noscript(answer):
                self.send(op, reply, with_source=True)  # even if its caller has left: the next one needs the script too
            elif reply.done():
                pass
            elif isinstance(answer, hiredis.ReplyError):
                reply.set_exception(refusal(answer, self._address))
                if is_elsewhere(answer):
                    self._transport.abort()
            else:
                reply.set_result(answer)

    def is_deaf(self, timeout: float) -> bool:
        """Whether the server has been silent for that long although it was asked."""
        return bool(self._asked) and self._loop.time() - self._waiting_since >= timeout

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._stream.connection_lost(error)
        self._connection._reader = self._connection._writer = None  # redis-py takes this to mean closed
        for _, reply in self._asked:
            if not reply.done():
                reply.set_exception(lost_connection(self._address, error))  # one each: tracebacks and notes are its own
        self._asked.clear()

    def abort(self) -> None:
        self._transport.abort()

    def disinherit(self) -> None:
        """In a forked child: let go of our copy of the socket. Closing the transport would take the parent's socket out
        of the event queue that parent and child still share, so the descriptor is pointed elsewhere instead."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._transport.get_extra_info("socket").fileno())
        os.close(nowhere)

    async def close(self) -> None:
        await self._connection.disconnect()


class Engine:
    """Runs steps on one server, for the tasks of one event loop."""

    def __init__(self, target: Target, timeout: float, *, deaf_after: float | None = None) -> None:
        self.address = target.address
        self._deaf_after = (deaf_after or timeout) * 0.99  # silence for which a connection is given up
        self._target = target
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wire: Wire | None = None
        self._backlog: list[tuple[Op, Reply]] = []  # asked for while there is no wire
        self._connecting: asyncio.Task[None] | None = None
        self._known = False
        self._closed = False
        self._inherited: list[Wire] = []  # of a parent process; kept, because collecting one would close it

    def submit(self, op: Op, timeout: float) -> Reply:
        """Ask for one step. The future fails with StepFailed; cancelling it costs nobody else anything."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        reply: Reply = loop.create_future()
        if self._closed:
            reply.set_exception(client_closed(self.address))
            return reply
        wire = self._wire
        if wire is not None and not wire.lost:
            wire.send(op, reply)
        else:
            self._backlog.append((op, reply))
            if self._connecting is None or self._connecting.done():
                self._connecting = loop.create_task(self._connect(loop))
        alarm = loop.call_later(timeout, self.expire, reply, timeout)
        reply.add_done_callback(lambda _: alarm.cancel())
        return reply

    async def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        replies = [self.submit(op, timeout) for op in ops]
        return await asyncio.gather(*replies, return_exceptions=True)

    def expire(self, reply: Reply, timeout: float) -> None:
        if reply.done():
            return
        sent = all(waiting is not reply for _, waiting in self._backlog)
        reply.set_exception(silence(self.address, timeout, None, sent=sent))
        if self._wire is not None and self._wire.is_deaf(min(self._deaf_after, self._timeout)):
            self._wire.abort()  # half-open, or hung for so long that a new connection is worth a try

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            try:
                self._wire = await asyncio.wait_for(self._open(loop), self._timeout)
                self._known = True
            finally:
                self._connecting = None
                backlog, self._backlog = self._backlog, []
        except Exception as error:  # redis-py, a credential provider, the embedded server: anything
            for _, reply in backlog:
                if not reply.done():
                    failed = connect_failure(error, self.address, self._timeout)
                    failed.retry = failed.retry and self._known
                    reply.set_exception(failed)
            return
        for op, reply in backlog:
            if not reply.done():
                self._wire.send(op, reply)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Wire:
        extra = await asyncio.to_thread(self._target.prepare) if self._target.prepare else {}
        connection = self._target.connection(self._timeout, extra)
        try:
            await connection.connect()
            # Between redis-py's handshake and our taking over, the end of the connection is told to nobody of ours.
            if connection._writer.transport.is_closing() or connection._reader.at_eof():
                raise ConnectionResetError("the server closed the connection")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Wire(connection, self.address, loop)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """A client outlives event loops (asyncio.run in a loop, a loop per test); its connection does not."""
        old, wire = self._loop, self._wire
        if wire is not None and not wire.lost and old is not None and not old.is_closed():
            wire.abort()
        self._loop, self._wire, self._connecting, self._backlog = loop, None, None, []

    def forget(self) -> None:
        """In a forked child: connection and loop are the parent's."""
        if self._wire is not None:
            if not self._wire.lost:
                self._wire.disinherit()
            self._inherited.append(self._wire)
        self._loop, self._wire, self._connecting, self._backlog = None, None, None, []

    async def close(self) -> None:
        self._closed = True
        connecting, wire, self._wire = self._connecting, self._wire, None
        backlog, self._backlog = self._backlog, []
        for _, reply in backlog:
            if not reply.done():
                reply.set_exception(client_closed(self.address))
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        if wire is not None and not wire.lost:
            await wire.close()
