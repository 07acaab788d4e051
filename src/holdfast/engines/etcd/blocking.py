"""The engine for threads: each step runs in the calling thread, over the connection pool of one transport of httpx."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from holdfast.engines.etcd import failures, gateway
from holdfast.engines.etcd.conversation import NO_ANSWER, HttpCall, Members, converse
from holdfast.engines.etcd.target import EtcdTarget, wall_us
from holdfast.engines.etcd.transport import blocking_transport, read_body
from holdfast.engines.etcd.watches import MOST_STREAMS, WatchThread
from holdfast.protocol.effects import Scan, StepFailed
from holdfast.protocol.intents.programs import can_join, joint_program, program_of
from holdfast.protocol.intents.requests import Op, Program
from holdfast.protocol.intents.session import Session
from holdfast.protocol.wait.notifications import NotificationRouter


class Engine:
    """Runs steps on etcd. Any thread may use it; it is also the shared connection of its driver."""

    def __init__(self, target: EtcdTarget, router: NotificationRouter, now: Callable[[], float]) -> None:
        self.address = target.address
        self._target = target
        self._router = router
        self._now = now
        self._session = Session(target.fence_floor, wall_us)
        self._members = Members(target)
        self._watches = WatchThread(self._members, self._session, router, now)
        self._transport: httpx.HTTPTransport | None = None
        self._making = threading.Lock()  # two threads may both be the first to need a client
        self._inherited: list[Any] = []  # from a parent process; if not kept, their sockets would be closed
        self._closed = False
        router.armed = True  # notifications need no subscription: a watch comes with each refusal
        router.crowd.most_alone = MOST_STREAMS

    def call(self, op: Op, timeout: float) -> Any:
        """The reply to one step; StepFailed if there is none."""
        return self.run(program_of(self._session, op, self._now()), timeout)

    def call_each(self, ops: Sequence[Any], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        if ops and can_join(ops):
            try:
                replies: list[Any] = self.run(joint_program(self._session, ops, self._now()), timeout)
            except StepFailed as failed:
                return [failed] * len(ops)
            return replies
        return [self._reply_or_failure(op, timeout) for op in ops]

    def scan(self, wanted: Scan) -> Any:
        return self.call(wanted.step, wanted.timeout)

    def _reply_or_failure(self, op: Op, timeout: float) -> Any:
        try:
            return self.call(op, timeout)
        except StepFailed as failed:
            return failed

    def run(self, program: Program, timeout: float) -> Any:
        """The reply of a program; StepFailed if there is none."""
        if self._closed:
            program.close()
            raise failures.client_closed(self.address)
        conversation = converse(program, self._members, timeout, self._now)
        advance: Any = conversation.send
        value: Any = None
        try:
            while True:
                asked = advance(value)
                advance = conversation.send
                if type(asked) is not HttpCall:
                    self._watches.follow(asked)
                    value = None
                    continue
                try:
                    value = self._post(asked)
                except NO_ANSWER as error:
                    advance, value = conversation.throw, error
        except StopIteration as done:
            return done.value
        finally:
            value = None  # the traceback of an error refers to this frame: break the cycle

    def _post(self, call: HttpCall) -> tuple[int, Any]:
        transport = self._transport or self._make_transport()
        answer = transport.handle_request(call.request())
        try:
            return answer.status_code, call.content(answer, read_body(answer))
        except gateway.Unreadable:
            answer.extensions["network_stream"].close()  # else another request might get the rest of this reply
            raise
        finally:
            answer.close()

    def _make_transport(self) -> httpx.HTTPTransport:
        with self._making:
            if self._transport is None:
                self._transport = blocking_transport(self._target)
            return self._transport

    # What a driver needs from its shared connection.

    def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        self._router.armed = True
        return True

    def start(self) -> None:
        """Start the thread of the watches. The keeper has started, so watches will be needed soon."""
        self._watches.start()

    def count_connections(self) -> tuple[int, int]:
        """How many connections are open, and how many of them are idle."""
        pool = getattr(self._transport, "_pool", None)
        open_ones = list(pool.connections) if pool is not None else []
        return len(open_ones) + self._watches.streams(), sum(one.is_idle() for one in open_ones)

    def load(self) -> tuple[list[Any], int]:
        return [], 0

    def close(self) -> None:
        self._closed = True
        self._watches.close()
        if self._transport is not None:
            self._transport.close()

    def forget(self) -> None:
        """In a forked child: start again with a new client, and do not touch the parent's sockets."""
        self._inherited += [self._transport, self._watches]
        self._transport, self._making = None, threading.Lock()
        self._session.forget()
        self._members.forget()
        self._watches = WatchThread(self._members, self._session, self._router, self._now)
