"""The thread of a shared connection. Only this thread opens, writes, reads and closes the sockets, and polls them."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hiredis
import redis.exceptions

from holdfast.engines import greenlets
from holdfast.engines.redis.blocking.opener import Capabilities, Opener
from holdfast.engines.redis.blocking.pipelined_connection import TRACKING, PipelinedConnection, Request, Waker
from holdfast.engines.redis.blocking.resubscription import Resubscription
from holdfast.engines.redis.channels import ENDED, NOTIFIED, SUBSCRIBED, Channels, subscribed_to
from holdfast.engines.redis.failures import client_closed, connect_failure, log_no_pubsub, lost_connection, refusal
from holdfast.engines.redis.protocol import is_elsewhere, is_noscript, is_redirection, pack
from holdfast.engines.redis.target import Target
from holdfast.protocol.effects import Step, StepFailed

if TYPE_CHECKING:
    from holdfast.protocol.wait.notifications import NotificationRouter

log = logging.getLogger("holdfast")

_FIRST_TIMEOUT, _LONGEST_TIMEOUT = 1.0, 5.0  # seconds to open a connection; doubled after a timeout
_FIRST_PAUSE: Final = 0.05  # seconds between attempts
_NEVER: Final = float("inf")


class ConnectionThread:
    """Sends the requests of all callers and distributes the replies. Callers use the public methods only."""

    def __init__(
        self,
        target: Target,
        router: NotificationRouter,
        now: Callable[[], float],
        capabilities: Capabilities,
        channels: Channels,
    ) -> None:
        self._target = target
        self._router = router
        self._now = now  # the clock of notifications; timeouts use time.monotonic
        self._capabilities = capabilities
        self._channels = channels
        self.closed = False
        self.queue: deque[Request] = deque()
        self._running: dict[None, threading.Thread] = {}  # one entry at most: setdefault decides which thread runs
        self._waker: Waker | None = None
        self._polling = False
        self._abandoned = False  # whether a caller may have left a request in flight, or the primary has changed
        self.resubscription = Resubscription(channels, target.scripts)
        # The rest is used by the thread alone.
        self._opener = Opener(target, capabilities)
        self.connections: dict[int, PipelinedConnection] = {}  # by descriptor: main and subscriber, often the same
        self._main: PipelinedConnection | None = None  # takes steps
        self._subscriber: PipelinedConnection | None = None
        self._poll: Any = None
        self._marks: list[greenlets.Mark] = []
        self._connect_timeout = _FIRST_TIMEOUT
        self._not_before = 0.0  # the next attempt to connect

    # For callers

    def start(self) -> None:
        if not self._running:
            # An interrupt (Ctrl-C) at this point may lead to two threads or to none. Of two threads, only one gets the
            # entry in _running, and the other ends. If there is none, the next caller starts one.
            threading.Thread(target=self._run, name="holdfast-connection", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises StepFailed if it will not be sent."""
        if self.closed:
            raise client_closed(self._target.where)
        self.queue.append(request)
        try:
            self.start()
        except RuntimeError as error:  # the interpreter is exiting, or there are too many threads
            with suppress(ValueError, IndexError):  # another caller has just started the thread, which took the request
                self.queue.remove(request)
            raise connect_failure(error, self._target.where, 0.0) from error
        self._wake()
        if self.closed and request.claim():  # the thread may have ended before it could see this request
            raise client_closed(self._target.where)

    def resubscribe_soon(self) -> None:
        """Subscribe to missing channels, and let all waiters look again: they may have missed a notification."""
        self.resubscription.changed = True
        with suppress(RuntimeError):  # no thread can be started: the next request tries again
            self.start()
        self._wake()

    def note_abandoned(self) -> None:
        """A caller has left a request in flight, or the primary has changed: connections must be checked."""
        self._abandoned = True
        self._wake()

    def is_up(self) -> bool:
        connection = self._main
        return connection is not None and connection.overdue_since == _NEVER

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None and self._polling:
            waker.wake()

    def close(self) -> None:
        self.closed = True
        self._refuse_all(lambda: client_closed(self._target.where))
        if (waker := self._waker) is not None:
            waker.wake()
        thread = self._running.get(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)  # longer only while the thread connects; it ends by itself after that

    def forget(self) -> None:
        """In a forked child: close our copies of the sockets. This object is not used again."""
        for mark in self._marks:
            mark.end()
        for connection in self.connections.values():
            connection.forget()
        self._opener.forget()
        if self._waker is not None:
            self._waker.close()

    def _refuse_all(self, why: Callable[[], StepFailed]) -> None:
        """Fail the requests that are queued now, but not requests that are added meanwhile."""
        for _ in range(len(self.queue)):
            try:
                request = self.queue.popleft()
            except IndexError:
                return
            if request.claim():
                request.fail(why)

    # For the thread

    def _run(self) -> None:
        try:
            waker = Waker()
        except OSError as error:  # too many open files
            self._refuse_all(partial(connect_failure, error, self._target.where, 0.0))
            return
        if self._running.setdefault(None, threading.current_thread()) is not threading.current_thread():
            return
        self._marks = greenlets.mark()
        self._poll = select.poll()  # made here, because gevent's belongs to the thread that makes it
        self._poll.register(waker, select.POLLIN)
        self._waker = waker
        del waker  # the traceback of an error would keep it open, because it refers to this frame
        while not self.closed:
            try:
                if self._abandoned:
                    self._drop_overdue()  # first, so that no further request goes to such a connection
                self._send_all()
                self._regain_resp3()
                self._resubscribe()
                self._wait()
            except Exception as error:
                log.exception("the connection thread of %s failed; restarting", self._target.where)
                for connection in list(self.connections.values()):
                    self._drop(connection, error)
                time.sleep(_FIRST_PAUSE)
        for connection in list(self.connections.values()):
            self._drop(connection, None)
        self._refuse_all(lambda: client_closed(self._target.where))
        self._waker = None

    def _send_all(self) -> None:
        """Send the queued requests. If there is no connection, open one."""
        while self.queue and not self.closed:
            try:
                request = self.queue[0]  # it stays in the queue for now, so that close() finds it
                connection = self._subscriber if request.subscribes else self._main
                if connection is None:
                    if time.monotonic() < self._not_before:
                        return
                    self._connect(subscriber=request.subscribes)
                elif connection.overdue_since != _NEVER:
                    return  # wait until all replies have come, or the connection is dropped
                elif self.queue.popleft() is request and time.monotonic() < request.until and request.claim():
                    self._send(connection, request)
            except IndexError:
                return  # close() was quicker

    def _send(self, connection: PipelinedConnection, request: Request) -> None:
        if request.subscribes and not self._channels.missing():
            for place in range(len(request.ops)):
                request.answer(place, True)
            return
        request.sent_at = time.monotonic()
        for place, data in enumerate(request.data):
            self._write(connection, request, place, data)

    def _write(self, connection: PipelinedConnection, request: Request, place: int, data: bytes) -> None:
        op = request.ops[place]
        watch = isinstance(op, Step) and op.watch and self._capabilities.tracking
        connection.write(data, (request, place), watch=watch)

    def _connect(self, *, subscriber: bool) -> None:
        """Open a connection. After a timeout the requests stay queued; after another failure they fail."""
        for _ in range(len(self.queue)):
            request = self.queue.popleft()
            if time.monotonic() < request.until and not request.left:
                self.queue.append(request)
        if not self.queue:
            return
        timeout = self._connect_timeout
        self._not_before = time.monotonic() + _FIRST_PAUSE
        try:
            connection = self._opener.open(timeout, subscriber=subscriber)
        except (TimeoutError, redis.exceptions.TimeoutError):
            self._connect_timeout = min(2 * timeout, _LONGEST_TIMEOUT)
            return
        except Exception as error:  # from redis-py, a credential provider, a custom connect function
            self._refuse_all(partial(connect_failure, error, self._target.where, timeout, tls=self._target.tls))
            return
        self._connect_timeout, self._not_before = _FIRST_TIMEOUT, 0.0
        self._install(connection, subscriber=subscriber)

    def _install(self, connection: PipelinedConnection, *, subscriber: bool) -> None:
        if connection.subscriber and self._subscriber is None:
            self._subscriber = connection
        if self._main is None and (connection.resp3 or not subscriber):
            self._main = connection
        self.connections[connection.sock.fileno()] = connection
        self._poll.register(connection.sock, connection.events)
        self._opener.note_installed(connection)

    def _regain_resp3(self) -> None:
        """After a connection was cut during HELLO, try HELLO on a new one. If it is answered, use that one instead."""
        if time.monotonic() < self._opener.probe_at or self._is_busy():
            return
        if self._main is None:
            self._opener.probe_at = _NEVER  # the next connection tries RESP3 anyway
            return
        connection = self._opener.probe(needed=self._router.is_needed())
        if connection is None:
            return
        for old in list(self.connections.values()):
            self._drop(old, None)
        self._install(connection, subscriber=True)
        self._router.look_again()  # so that all keys are watched again

    def _is_busy(self) -> bool:
        return any(connection.in_flight for connection in self.connections.values())

    def _resubscribe(self) -> None:
        """Subscribe again after the subscriber was lost, while a waiter or a hold needs it."""
        attempt = self.resubscription.next_attempt()
        if attempt is not None:
            self._abandoned = True  # the previous attempt may still be in flight
            self.queue.append(attempt)
            self._send_all()
            self.resubscription.note_sent(attempt)

    def _wait(self) -> None:
        """Read replies and pushes until there is something else to do."""
        for connection in list(self.connections.values()):
            self._guarded(connection, self._flush)
        self._polling = True
        # From here on, a caller that queues or abandons a request sees _polling and wakes us, or we see its request.
        wakes_at = self.resubscription.due_at
        if not self._is_busy():
            wakes_at = min(wakes_at, self._opener.probe_at)
        if self._abandoned:
            wakes_at = min(wakes_at, self._drop_overdue())
        if self.queue and all(connection.overdue_since == _NEVER for connection in self.connections.values()):
            wakes_at = min(wakes_at, self._not_before)
        ready = self._poll.poll(None if wakes_at == _NEVER else max(0.0, wakes_at - time.monotonic()) * 1000)
        self._polling = False
        for descriptor, _ in ready:
            readable = self.connections.get(descriptor)
            if readable is not None:
                self._guarded(readable, self._read)
            elif self._waker is not None and descriptor == self._waker.fileno():
                self._waker.drain()

    def _guarded(self, connection: PipelinedConnection, work: Callable[[PipelinedConnection], None]) -> None:
        try:
            work(connection)
        except (OSError, hiredis.HiredisError) as error:
            self._drop(connection, error)

    def _flush(self, connection: PipelinedConnection) -> None:
        if connection.out:
            connection.flush()
        waits = connection.writing_waits or connection.reading_waits
        events = select.POLLIN | select.POLLOUT if waits else select.POLLIN
        if events != connection.events:
            connection.events = events
            self._poll.modify(connection.sock, events)

    def _drop_overdue(self) -> float:
        """Drop connections with an overdue reply, and connections to an old primary. Returns when to look again."""
        self._abandoned = False  # reset before the check: a caller that leaves meanwhile sets it again
        now, look_at = time.monotonic(), _NEVER
        for connection in list(self.connections.values()):
            self._guarded(connection, lambda one: self._target.refuse_old_primary(one.connection))
            if (due := connection.find_overdue(now)) <= now:
                self._drop(connection, TimeoutError("a reply is overdue"))
            else:
                look_at = min(look_at, due)
        self._abandoned = self._abandoned or look_at < _NEVER
        return look_at

    def _read(self, connection: PipelinedConnection) -> None:
        now = self._now()
        replies = connection.read()
        self._target.refuse_old_primary(connection.connection)
        for reply in replies:
            if connection.is_push(reply):
                self._on_push(connection, reply, now)
            elif connection.in_flight:
                self._on_reply(connection, *connection.in_flight.popleft(), reply)
            elif isinstance(reply, hiredis.ReplyError):
                raise reply  # it says why the server is about to close the connection
            else:
                raise hiredis.ProtocolError("a reply without a request")
        if not connection.in_flight:
            connection.overdue_since = _NEVER

    def _on_reply(self, connection: PipelinedConnection, request: Request | None, place: int, reply: Any) -> None:
        is_error = isinstance(reply, hiredis.ReplyError)
        if request is None:
            if place == TRACKING[1] and is_error:
                self._capabilities.tracking = False
        elif is_noscript(reply) and not request.left and place not in request.resent:
            request.resent.add(place)
            self._write(connection, request, place, pack(request.ops[place], self._target.scripts, with_source=True))
        elif request.subscribes and is_redirection(reply):
            self._channels.note_refused()
            request.answer(place, reply)
        elif request.subscribes and is_error and not refusal(reply, self._target.where).retry:
            self.resubscription.give_up()
            if not self._capabilities.logged_no_pubsub:
                self._capabilities.logged_no_pubsub = True
                log_no_pubsub(self._target.where, self._router, reply)
            request.answer(place, False)
        elif request.subscribes and not is_error:
            connection.in_flight.appendleft((request, place))
            raise hiredis.ProtocolError("a SUBSCRIBE was answered by something else than a push")
        else:
            request.answer(place, reply)
            if is_elsewhere(reply):
                self._drop(connection, None)

    def _on_push(self, connection: PipelinedConnection, push: list[Any], now: float) -> None:
        try:
            kind, about = push[0], push[1]
            if kind in NOTIFIED:
                self._router.deliver(push[2], now)
            elif kind == b"invalidate":
                if about is None:
                    self._router.look_again()  # FLUSHALL or FLUSHDB
                for key in about or ():
                    self._router.touched(key.decode(errors="replace"))
            elif kind in SUBSCRIBED:
                self._on_subscribed(connection, about)
            elif kind == ENDED:
                self._channels.end(about)
        except (IndexError, TypeError, AttributeError) as error:
            raise hiredis.ProtocolError("a malformed push") from error

    def _on_subscribed(self, connection: PipelinedConnection, channel: bytes) -> None:
        """Take a confirmation. It must answer the oldest request in flight, a SUBSCRIBE."""
        request, place = connection.in_flight[0] if connection.in_flight else (None, 0)
        if request is None or not request.subscribes or channel != subscribed_to(request.ops[place]):
            raise hiredis.ProtocolError("a confirmation without a SUBSCRIBE")
        connection.in_flight.popleft()
        self._channels.confirm(channel)
        request.answer(place, True)
        if self.resubscription.note_confirmed():
            self._router.look_again()

    def _drop(self, connection: PipelinedConnection, error: Exception | None) -> None:
        """Close a connection and fail what is in flight there."""
        if self.connections.pop(connection.sock.fileno(), None) is None:
            return  # it was dropped already
        self._poll.unregister(connection.sock)
        connection.close()
        was_armed = connection is self._subscriber and self._channels.lose_all()
        self._main = None if connection is self._main else self._main
        self._subscriber = None if connection is self._subscriber else self._subscriber
        for request, place in connection.in_flight:
            if request is not None:
                request.answer(place, lost_connection(self._target.where, error, tls=self._target.tls))
        connection.in_flight.clear()
        if was_armed:
            self.resubscription.note_loss()
        if (was_armed or connection.tracking) and not self.closed:
            self._router.look_again()
