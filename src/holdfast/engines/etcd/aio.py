"""The engine for asyncio: each step is a task of the client's event loop, over the pool of one httpx client.

A caller that is cancelled or times out just leaves: its future is done, and the task of its step ends by itself. A
tombstone protects against what such a step does on etcd later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from holdfast.engines.etcd import failures, gateway
from holdfast.engines.etcd.conversation import NO_ANSWER, HttpCall, Members, converse
from holdfast.engines.etcd.target import EtcdTarget, wall_us
from holdfast.engines.etcd.transport import aio_transport, aread_body
from holdfast.engines.etcd.watches import MOST_STREAMS, Watches
from holdfast.engines.others import Connection
from holdfast.protocol.effects import Scan, StepFailed
from holdfast.protocol.intents.programs import can_join, joint_program, program_of
from holdfast.protocol.intents.requests import Op, Program
from holdfast.protocol.intents.session import Session
from holdfast.protocol.wait.notifications import NotificationRouter


class Engine:
    """Runs steps on etcd for the tasks of one event loop; it is also the standby engine of its driver."""

    def __init__(self, target: EtcdTarget, router: NotificationRouter, now: Callable[[], float]) -> None:
        self.address = target.address
        self._target = target
        self._router = router
        self._now = now
        self._session = Session(target.fence_floor, wall_us)
        self._members = Members(target)
        self._watches = Watches(self._members, self._session, router, now)
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._inherited: list[Any] = []  # objects from a parent process, or from an event loop that has ended
        self._closed = False
        self.backlog: tuple[Any, ...] = ()  # for statistics; always empty, because each request is sent at once
        router.armed = True  # notifications need no subscription: a watch comes with each refusal
        router.crowd.most_alone = MOST_STREAMS

    def submit(self, op: Op, timeout: float, reply: asyncio.Future[Any] | None = None) -> asyncio.Future[Any]:
        """A future of the reply to one step, or of its StepFailed."""
        assert self._loop is not None
        future: asyncio.Future[Any] = reply if reply is not None else self._loop.create_future()
        try:
            program = program_of(self._session, op, self._now())
        except StepFailed as failed:
            future.set_exception(failed)
            return future
        task = self._loop.create_task(self._fulfil(program, timeout, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _fulfil(self, program: Program, timeout: float, future: asyncio.Future[Any]) -> None:
        try:
            outcome = await self._run(program, timeout)
        except StepFailed as failed:
            if not future.done():
                future.set_exception(failed)
                future.exception()  # marks it as retrieved: the caller may have left just now
        except Exception as error:  # a mistake of ours, which the caller should see
            if not future.done():
                future.set_exception(error)
                future.exception()
        except BaseException as error:
            if not future.done():
                future.set_exception(failures.client_closed(self.address))
            if not isinstance(error, asyncio.CancelledError):
                raise
        else:
            if not future.done():
                future.set_result(outcome)

    async def call_each(self, ops: Sequence[Any], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed."""
        if ops and can_join(ops):
            try:
                replies: list[Any] = await self._run(joint_program(self._session, ops, self._now()), timeout)
            except StepFailed as failed:
                return [failed] * len(ops)
            return replies
        return await asyncio.gather(*(self.submit(op, timeout) for op in ops), return_exceptions=True)

    async def scan(self, wanted: Scan) -> Any:
        return await self.submit(wanted.step, wanted.timeout)

    async def _run(self, program: Program, timeout: float) -> Any:
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
                    value = await self._post(asked)
                except NO_ANSWER as error:
                    advance, value = conversation.throw, error
        except StopIteration as done:
            return done.value
        finally:
            value = None  # the traceback of an error refers to this frame: break the cycle

    async def _post(self, call: HttpCall) -> tuple[int, Any]:
        transport = self._transport
        if transport is None:
            transport = self._transport = aio_transport(self._target)
        answer = await transport.handle_async_request(call.request())
        try:
            return answer.status_code, call.content(answer, await aread_body(answer))
        except gateway.Unreadable:
            await answer.extensions["network_stream"].aclose()  # else another request might get the rest of this reply
            raise
        finally:
            await answer.aclose()

    def expire(self, reply: asyncio.Future[Any], waited: float) -> None:
        """Fail a request now: its cancelled caller has waited long enough."""
        if not reply.done():
            reply.set_exception(
                failures.silence(
                    self._members.shown, waited, None, sent=True, ever_answered=self._members.ever_answered
                )
            )

    async def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        self._router.armed = True
        return True

    def connections(self) -> list[Any]:
        pool = getattr(self._transport, "_pool", None)
        return [Connection() for _ in range((len(pool.connections) if pool else 0) + len(self._watches.by_key))]

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work in this loop from now on. Objects of another loop are not touched."""
        if self._loop is loop:
            return
        if self._loop is not None:
            self._begin_anew()
        self._loop = loop

    def forget(self) -> None:
        """In a forked child: start again with a new client, and do not touch the parent's sockets."""
        self._begin_anew()
        self._loop = None

    def _begin_anew(self) -> None:
        self._inherited += [self._transport, self._watches, self._tasks]
        self._transport, self._tasks = None, set()
        self._session.forget()
        self._members.forget()
        self._watches = Watches(self._members, self._session, self._router, self._now)

    async def close(self) -> None:
        self._closed = True
        await self._watches.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self._transport is not None:
            await self._transport.aclose()
