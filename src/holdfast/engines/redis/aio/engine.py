"""The engine for asyncio: all tasks of an event loop share one connection.

redis-py opens the connection and performs the handshake (TLS, AUTH, SELECT); then its transport gets a protocol of ours
(pipelined_connection.py). Requests of one loop iteration are written together, replies come back in order, and each
goes to the future of its request. A caller that is cancelled or times out just leaves: its future is done, and its
reply is dropped when it comes.

A connection with an overdue reply is dropped, even if other replies still arrive: if one reply is missing, all that
follow go to the wrong requests. Requests in flight there fail at once, and their callers send them again.

The number of requests in flight is limited. Further requests, and requests without a connection, wait in a backlog in
order. Their timeout starts when they are submitted; if it ends in the backlog, nothing was sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import hiredis
import redis.exceptions

from holdfast.engines.redis.aio.pipelined_connection import (
    PUSH,
    PipelinedConnection,
    Reply,
    Request,
    answer_in,
    outcomes_of,
)
from holdfast.engines.redis.aio.resp3 import Resp3
from holdfast.engines.redis.aio.subscription import Subscription
from holdfast.engines.redis.channels import Channels, SoleChannel
from holdfast.engines.redis.failures import LATE, client_closed, connect_failure, lost_connection, refusal, silence
from holdfast.engines.redis.protocol import MASTERS, Op, is_unknown, of_sentinel
from holdfast.engines.redis.scanning import Part, read_part
from holdfast.engines.redis.sentinel import Sentinels
from holdfast.engines.redis.target import Target
from holdfast.protocol.effects import Scan, StepFailed
from holdfast.protocol.wait.notifications import NotificationRouter

MOST_IN_FLIGHT: Final = 1000  # with more, the server is not faster, and a lost connection costs more

_FIRST_TIMEOUT: Final = 1.0  # seconds to open a connection; doubled for the next attempt

_NEVER: Final = float("inf")


class Engine:
    """Runs steps on one server for the tasks of one event loop, and subscribes to its notifications."""

    def __init__(
        self,
        target: Target,
        timeout: float,
        router: NotificationRouter,
        now: Callable[[], float],
        channels: Channels | None = None,
    ) -> None:
        self.tls = target.tls
        self.timeout = timeout
        self.router = router
        self.channels = channels or SoleChannel(router)
        self.now = now  # the clock of notifications
        self.backlog: deque[Request] = deque()  # requests without a connection, or beyond MOST_IN_FLIGHT
        self.target = target
        self.ever_answered = False  # whether this server has ever answered
        self.served = False  # whether it has ever answered a step that may write, without an error
        self.closed = False
        self.logged_no_pubsub = False
        self._inherited: list[PipelinedConnection] = []  # from a parent process; if not kept, they would be closed
        self._begin_anew(None)
        target.on_move(self._drop_moved)

    @property
    def address(self) -> str:
        return self.target.where

    def _begin_anew(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self.shared: PipelinedConnection | None = None
        self._connecting: asyncio.Task[Exception | None] | None = None
        self._connecting_since = 0.0
        self._rechecking: asyncio.Task[None] | None = None  # asks whether the primary has changed; steps wait for it
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self._excused = 0.0  # requests that were due before this time have had their extra time
        self.resp3 = Resp3(self)
        self.subscription = Subscription(self)
        self.backlog.clear()

    def submit(self, op: Op, timeout: float, reply: Reply | None = None, *, first: bool = False) -> Reply:
        """A future for the reply to one step. It fails with StepFailed; cancelling it does not affect other steps.

        ``first``: the request goes to the front of the backlog, as renewals must.
        """
        if reply is None:
            reply = asyncio.Future(loop=self._loop)
        if self.closed:
            reply.set_exception(client_closed(self.address))
            return reply
        if self.target.sentinels is not None and self.target.sentinels.is_recheck_due():
            self._recheck(self.target.sentinels)
        now = monotonic()
        deadline = now + timeout
        shared = self.shared
        request = op, reply, deadline, timeout, now
        if (
            shared is not None
            and shared.open
            and self._rechecking is None
            and (first or (len(shared.in_flight) < MOST_IN_FLIGHT and not self.backlog))
        ):
            shared.send(request)
        else:
            self.backlog.appendleft(request) if first else self.backlog.append(request)
            if shared is None or shared.lost:
                self.connect()
        if deadline < self._timer_at:
            self._set_timer(deadline)
        return reply

    async def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        return await outcomes_of([self.submit(op, timeout) for op in ops])

    async def scan(self, wanted: Scan) -> Part:
        return read_part(await self.submit(wanted.step, wanted.timeout), self.address)

    def ask(self, connection: PipelinedConnection, op: Op) -> Reply:
        """A future for the reply to one step on this connection, ahead of the backlog."""
        reply: Reply = connection.loop.create_future()
        if connection.lost:
            reply.set_exception(lost_connection(self.address, None))
            return reply
        now = monotonic()
        deadline = now + self.timeout
        connection.send((op, reply, deadline, self.timeout, now))
        if deadline < self._timer_at:
            self._set_timer(deadline)
        return reply

    def drain(self) -> None:
        """Send requests from the backlog while the connection takes them."""
        backlog, shared = self.backlog, self.shared
        if self._rechecking is not None:
            return
        while backlog and shared is not None and shared.open and len(shared.in_flight) < MOST_IN_FLIGHT:
            request = backlog.popleft()
            if not request[1].done():
                shared.send((*request[:4], monotonic()))

    # Timeouts. One timer fires at the earliest deadline. Later requests rarely have an earlier one.

    def _set_timer(self, when: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_later(when - monotonic(), self._expire_due)

    def _expire_due(self) -> None:
        """Fail requests whose time is over, and drop connections with overdue replies.

        If the timer fires late, this process was busy: the reply may be waiting, or the request was only just written.
        Then each request that is due gets the same delay as extra time, once.
        """
        now, earliest = monotonic(), _NEVER
        late = now - self._timer_at
        self._timer, self._timer_at = None, _NEVER
        over = now
        if late > LATE:
            over, self._excused = self._excused, now
            earliest = now + min(late, self.timeout)
        self.backlog = deque(request for request in self.backlog if not request[1].done())
        connections = [connection for connection in self.connections() if not connection.lost]
        for requests, sent in [(self.backlog, False), *((connection.in_flight, True) for connection in connections)]:
            for _, reply, deadline, timeout, _ in requests:
                if reply.done():
                    continue
                if deadline > now:
                    earliest = min(earliest, deadline)
                elif deadline <= over:
                    reply.set_exception(self._silence(timeout, sent=sent))
        for connection in connections:
            if over < now:
                break
            if (look_at := connection.find_overdue(now)) <= now:
                connection.abort(TimeoutError("a reply is overdue"))
            else:
                earliest = min(earliest, look_at)
        if earliest < _NEVER:
            self._set_timer(earliest)

    def expire(self, reply: Reply, timeout: float) -> None:
        """Fail a request now: its caller has waited for ``timeout`` and leaves."""
        if not reply.done():
            sent = all(request[1] is not reply for request in self.backlog)
            reply.set_exception(self._silence(timeout, sent=sent))

    def _silence(self, timeout: float, *, sent: bool) -> StepFailed:
        tls = self.tls and not sent and self._connecting is not None
        return silence(self.address, timeout, None, sent=sent, ever_answered=self.ever_answered, tls=tls)

    # Connections.

    def connections(self) -> list[PipelinedConnection]:
        return [connection for connection in (self.shared, self.subscription.connection) if connection is not None]

    def connect(self) -> asyncio.Task[Exception | None]:
        """The task that opens the shared connection, started if none runs. Its result is None, or why that failed."""
        assert self._loop is not None
        if self._connecting is None:
            self._connecting_since = monotonic()
            self._connecting = self._loop.create_task(self._open_shared())
        return self._connecting

    async def _open_shared(self) -> Exception | None:
        try:
            try:
                shared = await self._open_in_time()
            finally:
                self._connecting = None
        except Exception as error:  # from redis-py, a credential provider, the embedded server
            backlog, self.backlog = self.backlog, deque()
            self._refuse([request for request in backlog if not request[1].done()], error)
            return error
        if self.closed:  # close() came while it was being opened, too late to cancel this
            await shared.close()
            return client_closed(self.address)
        self.shared = shared
        self.drain()
        if shared.lost and self.backlog:  # it was lost before it was in use, so note_loss did not reconnect
            self.connect()
        return None

    async def _open_in_time(self) -> PipelinedConnection:
        """A new connection. An attempt without an answer is repeated while there is time: a route may be dead."""
        until = monotonic() + self.timeout
        patience = self.timeout if self.target.starts_server else _FIRST_TIMEOUT
        while True:
            left = until - monotonic()
            try:
                return await asyncio.wait_for(self.open(PUSH), min(patience, left))
            except TimeoutError:
                if patience >= left:
                    raise
                patience *= 2

    def _refuse(self, requests: list[Request], error: Exception) -> None:
        """Fail requests for which no connection could be opened."""
        for _, reply, *_ in requests:
            reply.set_exception(self.failed(error))

    def refuse(self, connection: PipelinedConnection, request: Request, answer: hiredis.ReplyError) -> None:
        """Fail a request that the server answered with an error."""
        if is_unknown(answer) and request[0] is not MASTERS:
            masters = self.ask(connection, MASTERS)
            masters.add_done_callback(lambda _: self._fail(request, of_sentinel(answer, answer_in(masters))))
        else:
            self._fail(request, answer)

    def _fail(self, request: Request, answer: hiredis.ReplyError) -> None:
        op, reply = request[:2]
        if not reply.done():
            reply.set_exception(refusal(answer, self.address, op, served=self.served))

    def failed(self, error: Exception) -> StepFailed:
        """The StepFailed for an error of ``connect`` or of a step."""
        if isinstance(error, StepFailed):
            return error
        known = self.ever_answered or self.target.sentinels is not None
        failed = connect_failure(error, self.address, self.timeout, tls=self.tls, known=known)
        if not self.ever_answered:
            failed.retry = failed.ever_answered = False
        return failed

    async def open(self, push: Any = None) -> PipelinedConnection:
        """A new connection. ``push``: the type of its unsolicited messages."""
        extra = await self.target.prepare(self.timeout / 2) if self.target.prepare else {}
        connection = self.target.connection(self.timeout, extra)
        try:
            await connection.connect()
            if self.target.sentinels is not None:
                await self.target.sentinels.check_async(connection)
            # Between redis-py's handshake and our protocol, asyncio reports neither the end of the connection nor an
            # error that the server sent before it, most likely about maxclients.
            if received := bytes(connection._reader._buffer):
                raise redis.exceptions.ResponseError(received.decode(errors="replace").strip().removeprefix("-"))
            if connection._writer.transport.is_closing() or connection._reader.at_eof():
                raise ConnectionResetError("the server closed the connection")
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return PipelinedConnection(connection, self, asyncio.get_running_loop(), push)

    def _recheck(self, sentinels: Sentinels) -> None:
        if self._rechecking is None and self._loop is not None:
            self._rechecking = self._loop.create_task(sentinels.recheck_async())
            self._rechecking.add_done_callback(self._note_recheck)

    def _note_recheck(self, task: asyncio.Task[None]) -> None:
        if task is self._rechecking:
            self._rechecking = None
            self.drain()

    def use_late(self, answer: Any, reply: Reply, asked_at: float, connection: PipelinedConnection) -> None:
        """Use a late answer once a Sentinel was asked, and only if its server is still the primary."""

        def use(_: object) -> None:
            if reply.done():
                return
            if connection.is_moved():
                reply.set_exception(lost_connection(self.address, None))
            else:
                reply.set_result(answer)

        sentinels = self.target.sentinels
        if sentinels is not None and sentinels.has_to_ask(asked_at):
            self._recheck(sentinels)
        if self._rechecking is None:
            use(None)
        else:
            self._rechecking.add_done_callback(use)

    def _drop_moved(self) -> None:
        """Drop connections to an old primary."""
        for connection in self.connections():
            connection.abort_if_moved()

    def note_loss(self, connection: PipelinedConnection) -> None:
        """Called by a connection that has ended."""
        if self.closed or connection.loop is not self._loop:
            return
        self.subscription.note_loss(connection)
        if connection is self.shared and self.backlog:
            self.connect()

    def is_up(self) -> bool:
        return self.shared is not None and not self.shared.lost

    def is_unresponsive(self, seconds: float) -> bool:
        """Whether a request, or an attempt to connect, has been without an answer for that long."""
        if self.shared is not None and not self.shared.lost:
            return self.shared.is_unresponsive(seconds)
        return self._connecting is not None and monotonic() - self._connecting_since >= seconds

    def has_overdue(self) -> bool:
        """Whether a request got no reply in time. Then the connection takes no more requests until all are answered."""
        return self.shared is not None and not self.shared.lost and self.shared.overdue_since < _NEVER

    def abort(self) -> None:
        """Drop the shared connection."""
        if self.shared is not None and not self.shared.lost:
            self.shared.abort()

    async def listen(self, timeout: float, keys: tuple[str, ...] = ()) -> bool:
        """Subscribe to notifications; False if the server does not allow that. One channel covers all keys."""
        return await self.subscription.listen(timeout)

    # New loops, forks, and the end.

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in this loop from now on. A client outlives event loops (one asyncio.run after the other); its
        connections do not. The driver passes the loop, because asking for it costs a system call before Python 3.12."""
        old = self._loop
        for connection in self.connections():
            if not connection.lost and old is not None and not old.is_closed():
                connection.abort()
        self._begin_anew(loop)

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets, and begin again without a loop."""
        for connection in self.connections():
            if not connection.lost:
                connection.disinherit()
            self._inherited.append(connection)
        self._begin_anew(None)

    async def close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        backlog, self.backlog = self.backlog, deque()
        for _, reply, *_ in backlog:
            if not reply.done():
                reply.set_exception(client_closed(self.address))
        opening: list[asyncio.Task[Any] | None] = [self._connecting, self._rechecking]
        tasks = self.subscription.tasks() + [task for task in opening if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.resp3.close()
        for connection in self.connections():
            if not connection.lost:
                await connection.close()
