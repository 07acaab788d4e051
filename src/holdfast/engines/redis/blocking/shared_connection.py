"""The connection that all threads of a client share: for the keeper, for tracked keys and for notifications.

Theory of operation. A separate thread (connection_thread.py) owns the connection. A caller puts a request into the
thread's queue, wakes the thread, and waits for the replies until its timeout. So Ctrl-C in a calling thread cannot
leave half a request on the connection, and no TLS session is used by two threads. A caller that leaves early does not
disturb others: replies come in order, each goes to its request, and a reply without a waiting caller is dropped.

Overdue replies. If one reply is missing, all that follow go to the wrong requests. So the connection is dropped when
the oldest request whose caller has left is overdue, even if other replies still arrive. All requests in flight fail at
once, and their callers send them again over a new connection.

Pushes. RESP3 lets the server push messages between two replies: notifications (pub/sub), and the keys that other
clients wrote after a step has read them with ``watch`` (client tracking; OPTIN selects these steps, NOLOOP leaves out
what this connection writes itself). Without RESP3, a second connection subscribes, and nothing is tracked.

The connection is opened on first use. A client that never waits and never holds a lock for long does not need it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hiredis

from holdfast.engines.redis.blocking.connection_thread import ConnectionThread
from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.blocking.opener import Capabilities
from holdfast.engines.redis.blocking.pipelined_connection import PENDING, PipelinedConnection, Request
from holdfast.engines.redis.channels import Channels, SoleChannel
from holdfast.engines.redis.failures import lost_connection, refusal, silence
from holdfast.engines.redis.protocol import Op
from holdfast.engines.redis.target import Target
from holdfast.protocol.effects import StepFailed

if TYPE_CHECKING:
    from holdfast.protocol.wait.notifications import NotificationRouter

log = logging.getLogger("holdfast")


class SharedConnection:
    """Runs steps on one server, and subscribes to its notifications. Any thread may use it."""

    def __init__(
        self,
        target: Target,
        router: NotificationRouter,
        now: Callable[[], float],
        fallback: Engine,
        channels: Channels | None = None,
    ) -> None:
        self._target = target
        self.fallback = fallback  # runs steps while there is no connection
        self._scripts = target.scripts
        self._channels = channels or SoleChannel(router)
        self._logged_polling = False  # whether polling was logged since the last subscription
        self._new_thread: Callable[[], ConnectionThread] = partial(
            ConnectionThread, target, router, now, Capabilities(), self._channels
        )
        self._thread = self._new_thread()
        target.on_move(self._note_move)

    def start(self) -> None:
        """Start the thread, unless it runs. It connects when the first request comes."""
        self._thread.start()

    def call(self, op: Op, timeout: float) -> Any:
        """The reply to one step; StepFailed if there is none, or an error reply."""
        reply = self.call_each((op,), timeout)[0]
        if isinstance(reply, StepFailed):
            raise reply
        return reply

    def call_each(self, ops: Sequence[Op], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        if not ops:
            return []
        self._target.recheck()
        if self.is_up() or not self.fallback.has_idle():
            return self.collect(self.submit(ops, timeout), timeout)
        # If no connection can be made (a server at maxclients), use an idle one of the pool, without tracking.
        until = time.monotonic() + timeout
        replies = self.collect(self.submit(ops, timeout / 2), timeout / 2)
        unsent = all(isinstance(reply, StepFailed) and not reply.sent for reply in replies)
        left = until - time.monotonic()
        return self.fallback.call_each(ops, left) if unsent and left > 0 and not self._thread.closed else replies

    def _note_move(self) -> None:
        self._thread.note_abandoned()

    def is_up(self) -> bool:
        """Whether there is a connection that takes requests."""
        return self._thread.is_up()

    def load(self) -> tuple[list[PipelinedConnection], int]:
        """The connections, and the number of requests that are not sent yet."""
        return list(self._thread.connections.values()), len(self._thread.queue)

    def listen(self, timeout: float, keys: tuple[str, ...] = ()) -> bool:
        """Subscribe to notifications; False if the server does not allow that. One channel covers all keys."""
        request = self._thread.resubscription.request(timeout)
        if not request.ops:
            return True
        replies = self.collect(self._submit(request), timeout)
        for reply in replies:
            if isinstance(reply, StepFailed):
                refused_for_now = reply.retry and not (reply.silent or reply.connection_broke)
                if refused_for_now and not self._logged_polling:
                    self._logged_polling = True
                    log.warning("waiters poll until notifications can be subscribed to: %s", reply.error)
                raise reply
        self._logged_polling = False
        return all(replies)

    def resubscribe(self) -> None:
        """Subscribe to missing channels, in the background."""
        self._thread.resubscribe_soon()

    def submit(self, ops: Sequence[Op], timeout: float) -> Request:
        """Send steps. Pass the result to ``collect``, which waits for the replies."""
        return self._submit(Request(ops, timeout, self._scripts))

    def _submit(self, request: Request) -> Request:
        request.primary = self._target.primary()
        try:
            self._thread.submit(request)
        except StepFailed as failed:
            request.refused = failed
        return request

    def collect(self, request: Request, timeout: float) -> list[Any]:
        """The reply to each step of a request, or its StepFailed."""
        if request.refused is not None:
            return [request.refused] * len(request.ops)
        unsent = False
        try:
            request.wait(timeout)
        finally:
            request.left = True
            unsent = request.claim()
        replies = list(request.replies)
        answered = any(reply is not PENDING for reply in replies)
        if answered and self._target.has_moved(request.primary, request.until - timeout):
            return [lost_connection(self._target.where, None) for _ in replies]
        if not unsent and any(reply is PENDING for reply in replies):
            self._thread.note_abandoned()
        return [
            self._checked(reply, op, timeout, sent=not unsent) for reply, op in zip(replies, request.ops, strict=True)
        ]

    def _checked(self, reply: Any, op: Op, timeout: float, *, sent: bool) -> Any:
        if reply is PENDING:
            return silence(self._target.where, timeout, None, sent=sent)
        return refusal(reply, self._target.where, op) if isinstance(reply, hiredis.ReplyError) else reply

    def close(self) -> None:
        self._thread.close()

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets, and begin again without a thread."""
        old, self._thread = self._thread, self._new_thread()
        self._thread.closed = old.closed
        old.forget()
        self._channels.lose_all()


def engines(target: Target, router: NotificationRouter, now: Callable[[], float]) -> tuple[Engine, SharedConnection]:
    """The pool and the shared connection for one server. Each runs the other's steps while that has no connection."""
    engine = Engine(target)
    engine.fallback = shared = SharedConnection(target, router, now, engine)
    return engine, shared
