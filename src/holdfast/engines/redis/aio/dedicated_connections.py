"""Dedicated connections under asyncio: each belongs to one caller, for commands that need the same connection (WATCH).

All other requests of a client share one connection, where WATCH and MULTI of two tasks would interfere. When a caller
closes a dedicated connection, it stays open for the next caller, unless a request failed on it or the server still
keeps state for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from holdfast.engines.redis.aio.pipelined_connection import PipelinedConnection
from holdfast.engines.redis.failures import client_closed, connect_failure, lost_connection, silence
from holdfast.engines.redis.protocol import Op, leaves_nothing
from holdfast.protocol.effects import Step, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis.aio.engine import Engine

_MOST_IDLE: Final = 16


class DedicatedConnections:
    """The dedicated connections of one client, in one event loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[PipelinedConnection] = set()  # idle or in use
        self.idle: list[PipelinedConnection] = []
        self._stateful: set[PipelinedConnection] = set()  # the server keeps state for these: watched keys, or MULTI
        self._inherited: list[PipelinedConnection] = []  # from a parent process; if not kept, they would be closed
        self._closed = False
        engine.target.on_move(self._drop_moved)

    def connections(self) -> list[PipelinedConnection]:
        return list(self._open)

    async def open(self, timeout: float) -> PipelinedConnection:
        while self.idle:
            connection = self.idle.pop()
            if not connection.lost:
                return connection
            self._open.discard(connection)
        if self._closed:
            raise client_closed(self._engine.address)
        try:
            connection = await asyncio.wait_for(self._engine.open(), timeout)
        except Exception as error:  # from redis-py, a credential provider, the embedded server
            raise connect_failure(error, self._engine.address, timeout, tls=self._engine.tls)  # noqa: B904 (has it)
        if self._closed:  # while it was opened
            connection.abort()
            raise client_closed(self._engine.address)
        self._open.add(connection)
        return connection

    async def call_on(self, connection: PipelinedConnection, commands: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each command, or its StepFailed. A cancelled call drops the connection, because its replies are
        still to come."""
        if connection not in self._open or connection.lost:
            raise client_closed(self._engine.address) if self._closed else lost_connection(self._engine.address, None)
        self._stateful.discard(connection)
        if not leaves_nothing(commands):
            self._stateful.add(connection)
        replies = [connection.loop.create_future() for _ in commands]
        now = monotonic()
        deadline = now + timeout
        for command, reply in zip(commands, replies, strict=True):
            # Scripts go with their source: after NOSCRIPT, a script sent again would run after the other commands.
            connection.send((command, reply, deadline, timeout, now), with_source=type(command) is Step)
        try:
            _, missing = await asyncio.wait(replies, timeout=timeout)
        except BaseException:
            self._drop(connection, replies)
            raise
        if missing:
            self._drop(connection, replies)
            for idle in self.idle:  # a router that has dropped one connection has most likely dropped all
                self._drop(idle, [])
            self.idle.clear()
            raise silence(self._engine.address, timeout, None, sent=True, ever_answered=self._engine.ever_answered)
        outcomes = [reply.exception() or reply.result() for reply in replies]
        if connection.lost:
            self._forget(connection)
            for outcome in outcomes:
                if isinstance(outcome, StepFailed) and outcome.connection_broke:
                    raise outcome
        return outcomes

    def close(self, connection: PipelinedConnection) -> None:
        """Give the connection back. Does nothing if it was lost or closed before."""
        if connection not in self._open:
            return
        unusable = connection.lost or connection in self._stateful or connection.in_flight
        if unusable or self._closed or len(self.idle) >= _MOST_IDLE:
            self._drop(connection, [])
        else:
            self.idle.append(connection)

    def _drop(self, connection: PipelinedConnection, replies: Sequence[asyncio.Future[Any]]) -> None:
        for reply in replies:
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # marks it as retrieved, so that asyncio does not log it
        self._forget(connection)
        if not connection.lost:
            connection.abort()

    def _drop_moved(self) -> None:
        for connection in list(self._open):
            connection.abort_if_moved()

    def _forget(self, connection: PipelinedConnection) -> None:
        self._open.discard(connection)
        self._stateful.discard(connection)

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in this loop from now on. Connections of the old loop are dropped."""
        for connection in self._open:
            if not connection.lost and not connection.loop.is_closed():
                connection.abort()
        self._clear()

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets."""
        for connection in self._open:
            if not connection.lost:
                connection.disinherit()
            self._inherited.append(connection)
        self._clear()

    def _clear(self) -> None:
        self._open, self._stateful, self.idle = set(), set(), []

    async def close_all(self) -> None:
        self._closed = True
        connections = [connection for connection in self._open if not connection.lost]
        self._clear()
        for connection in connections:
            await connection.close()
