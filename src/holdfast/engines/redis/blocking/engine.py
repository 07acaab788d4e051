"""The engine for threads: runs steps on a Redis or Valkey server over a pool of connections.

Idle connections are a stack: the connection used last is used next. If the replies of a connection may be out of step
(after a timeout, an interrupt in the middle of a reply, bytes after the reply), the connection is closed, because its
next request would get the reply to an earlier one.

If a connection gets no reply, the usual cause is a router or a server that has dropped it, and the other idle
connections with it. So a request that times out also closes the connections that were idle before it was sent. The next
attempt opens a new connection, and many dead connections cost only one timeout.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis.exceptions

from holdfast.engines.redis.blocking.pooled_connection import PooledConnection, ReplyTimeout
from holdfast.engines.redis.failures import client_closed, connect_failure, is_full, lost_connection, refusal, silence
from holdfast.engines.redis.protocol import (
    MASTERS,
    Op,
    is_elsewhere,
    is_noscript,
    is_unknown,
    leaves_nothing,
    may_write,
    of_sentinel,
    pack,
)
from holdfast.engines.redis.scanning import Part, read_part
from holdfast.engines.redis.target import Target
from holdfast.protocol.effects import Scan, StepFailed

if TYPE_CHECKING:
    from holdfast.engines.redis.blocking.shared_connection import SharedConnection

_CHECK_AFTER: Final = 0.005  # seconds; a connection that was idle for longer is checked, which costs a system call
_MOST_IDLE: Final = 64
_MASTERS_TIMEOUT: Final = 0.5  # seconds to find out whether the server is a Sentinel


class Engine:
    """Runs steps on one server. Any thread may use it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._scripts = target.scripts
        self._has_sentinels = target.sentinels is not None
        self._idle: deque[PooledConnection] = deque()
        self._open: set[PooledConnection] = set()  # idle or in use: a forked child must close its copy of each
        self._ever_answered = False  # whether this server has ever answered
        self._served = False  # whether it has ever answered a step that may write, without an error
        self._closed = False
        self.fallback: SharedConnection | None = None  # runs steps while no connection can be made
        target.on_move(self.close_idle)  # connections in use are dropped after their reply

    @property
    def address(self) -> str:
        return self._target.where

    def call(self, op: Op, timeout: float) -> Any:
        """The reply to one step; StepFailed if there is none, or an error reply."""
        deadline = time.monotonic() + timeout
        try:
            connection = self._take(timeout)
        except StepFailed:
            if not self._has_fallback(deadline):
                raise
            return self._call_fallback(op, deadline)
        try:
            reply = connection.ask(pack(op, self._scripts), deadline)
            if is_noscript(reply):
                reply = connection.ask(pack(op, self._scripts, with_source=True), deadline)
            if self._has_sentinels:
                self._target.refuse_old_primary(connection.connection, deadline - timeout)
        except BaseException as error:
            raise self._broken(connection, error, timeout)  # noqa: B904 (it has its cause)
        self._ever_answered = True
        if isinstance(reply, hiredis.ReplyError):
            if is_full(reply):  # and about to close the connection
                self._drop(connection)
                if self._has_fallback(deadline):
                    return self._call_fallback(op, deadline)
            else:
                self._put_back(connection, reply)
            raise self._checked(reply, op)
        self._put_back(connection)
        self._served = self._served or may_write(op)
        return reply

    def scan(self, wanted: Scan) -> Part:
        return read_part(self.call(wanted.step, wanted.timeout), self.address)

    def _has_fallback(self, deadline: float) -> bool:
        return not self._closed and self.fallback is not None and self.fallback.is_up() and time.monotonic() < deadline

    def _call_fallback(self, op: Op, deadline: float) -> Any:
        assert self.fallback is not None
        return self.fallback.call(op, deadline - time.monotonic())

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        if not ops:
            return []
        asked_at = time.monotonic()
        try:
            connection = self._take(timeout)
            try:
                replies = connection.ask_all([pack(op, self._scripts) for op in ops], timeout)
                unknown = [place for place, reply in enumerate(replies) if is_noscript(reply)]
                if unknown:
                    sources = [pack(ops[place], self._scripts, with_source=True) for place in unknown]
                    again = connection.ask_all(sources, timeout)
                    for place, reply in zip(unknown, again, strict=True):
                        replies[place] = reply
                self._target.refuse_old_primary(connection.connection, asked_at)
            except BaseException as error:
                raise self._broken(connection, error, timeout)  # noqa: B904 (it has its cause)
        except StepFailed as failed:
            return [failed] * len(ops)
        self._ever_answered = True
        self._put_back(connection, *replies)
        return [self._checked(reply, op) for reply, op in zip(replies, ops, strict=True)]

    # Dedicated connections: each belongs to one caller, for commands that need the same connection (WATCH).

    def open_connection(self, timeout: float) -> PooledConnection:
        return self._take(timeout)

    def call_on(self, connection: PooledConnection, commands: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each command, or its StepFailed. Raises StepFailed if the connection is lost."""
        if connection not in self._open:  # lost before, or the client was closed, or this process was forked
            raise client_closed(self.address) if self._closed else lost_connection(self.address, None)
        connection.stateful = not leaves_nothing(commands)
        try:
            if connection.is_out_of_step():
                raise ConnectionResetError("the server closed the connection, or sent more than it was asked for")
            # Scripts go with their source: after NOSCRIPT, a script sent again would run after the other commands.
            packed = [pack(command, self._scripts, with_source=True) for command in commands]
            asked_at = time.monotonic()
            replies = connection.ask_all(packed, timeout)
            self._target.refuse_old_primary(connection.connection, asked_at)
        except BaseException as error:
            raise self._broken(connection, error, timeout)  # noqa: B904 (it has its cause)
        self._ever_answered = True
        return [self._checked(reply, command) for reply, command in zip(replies, commands, strict=True)]

    def close_connection(self, connection: PooledConnection) -> None:
        if connection not in self._open:
            return
        if connection.stateful:  # its WATCH or MULTI would affect the next caller
            self._drop(connection)
        else:
            self._put_back(connection)

    def trust(self) -> None:
        """Assume that this server exists, because another one named it: if it cannot be reached now, retry later."""
        self._ever_answered = self._served = True

    def has_idle(self) -> bool:
        """Whether a step can run without opening a connection."""
        return bool(self._idle)

    def _checked(self, reply: Any, op: Op) -> Any:
        """The reply, or the StepFailed for an error reply."""
        if isinstance(reply, hiredis.ReplyError):
            if is_unknown(reply) and op is not MASTERS:
                reply = of_sentinel(reply, self._ask_masters())
            return refusal(reply, self.address, op, served=self._served)
        self._served = self._served or may_write(op)
        return reply

    def _ask_masters(self) -> Any:
        try:
            return self.call(MASTERS, _MASTERS_TIMEOUT)
        except StepFailed as failed:
            return failed.__cause__

    def _broken(self, connection: PooledConnection, error: BaseException, timeout: float) -> BaseException:
        """Drop a connection on which a request failed, and return the error to raise."""
        self._drop(connection)
        if isinstance(error, ReplyTimeout):
            self._drop_idle_since_before(time.monotonic() - timeout)
            return silence(self.address, timeout, error.__cause__, sent=True, ever_answered=self._ever_answered)
        # A TimeoutError without ETIMEDOUT comes from the caller's signal handler.
        of_system = isinstance(error, OSError) and (
            not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT
        )
        if of_system or isinstance(error, hiredis.HiredisError):
            self.close_idle()  # a restart or a failover that ended this connection has most likely ended the others
            return lost_connection(self.address, error, ever_answered=self._ever_answered, tls=self._target.tls)
        return error  # an interrupt; the connection is closed because its reply is still to come

    def _take(self, timeout: float) -> PooledConnection:
        if self._closed:
            raise client_closed(self.address)
        if self._has_sentinels:
            self._target.recheck()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if time.monotonic() - connection.idle_since < _CHECK_AFTER or not connection.is_out_of_step():
                return connection
            self._drop(connection)
        try:
            connection = PooledConnection(self._target, timeout)
        except Exception as error:  # from redis-py, a credential provider, a custom connect function
            raise self._not_connected(error, timeout)  # noqa: B904 (it has its cause)
        self._open.add(connection)
        return connection

    def _not_connected(self, cause: Exception, timeout: float) -> StepFailed:
        failed = connect_failure(
            cause,
            self.address,
            timeout,
            tls=self._target.tls,
            known=self._ever_answered or self._has_sentinels,
        )
        if not self._ever_answered:
            failed.retry = failed.ever_answered = False
        return failed

    def _put_back(self, connection: PooledConnection, *replies: object) -> None:
        if self._closed or len(self._idle) >= _MOST_IDLE:
            self._drop(connection)
            return
        if replies and any(map(is_elsewhere, replies)):
            self._drop(connection)
            self.close_idle()
            return
        if connection.has_surplus():
            self._drop(connection)
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _drop_idle_since_before(self, when: float) -> None:
        """Close connections that were idle before ``when``: they may be dead, like the one that got no reply."""
        while self._idle:
            try:
                connection = self._idle.popleft()  # the one that was idle for longest
            except IndexError:
                return  # another thread was quicker
            if connection.idle_since >= when:
                self._idle.appendleft(connection)
                return
            self._drop(connection)

    def _drop(self, connection: PooledConnection) -> None:
        self._open.discard(connection)
        try:
            connection.close()
        except (OSError, redis.exceptions.RedisError):
            pass  # it was broken already

    def count_connections(self) -> tuple[int, int]:
        """How many connections are open, and how many of them are idle."""
        return len(self._open), len(self._idle)

    def close_idle(self) -> None:
        while self._idle:
            try:
                self._drop(self._idle.pop())
            except IndexError:
                return  # another thread was quicker

    def close(self) -> None:
        self._closed = True
        self.close_idle()
        for connection in list(self._open):  # in use, or lost to its caller by an interrupt
            self._drop(connection)

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets, and start with an empty pool."""
        connections, self._open, self._idle = self._open, set(), deque()
        for connection in connections:
            connection.forget()
