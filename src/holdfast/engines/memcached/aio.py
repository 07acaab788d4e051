"""The engine for asyncio: the steps of the engine for threads, each in a worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast.engines.memcached import blocking
from holdfast.engines.memcached.target import MemcachedTarget
from holdfast.engines.others import Connection
from holdfast.errors import Unavailable, rounded
from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.wait.notifications import NotificationRouter

_THREADS: Final = 16


class Engine:
    """Runs steps on memcached for the tasks of one event loop."""

    def __init__(self, target: MemcachedTarget, router: NotificationRouter, now: Callable[[], float]) -> None:
        self.address = target.address
        self.backlog: tuple[Any, ...] = ()
        self._inner = blocking.Engine(target, router, now)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._acquiring: dict[str, asyncio.Future[Any]] = {}  # by token

    def submit(self, op: Any, timeout: float, reply: asyncio.Future[Any] | None = None) -> asyncio.Future[Any]:
        """A future of the reply to one step, or of its StepFailed."""
        assert self._loop is not None
        future: asyncio.Future[Any] = reply if reply is not None else self._loop.create_future()
        script, token = (op.script, op.args[0]) if isinstance(op, Step) else ("", "")

        def start(_: object = None) -> None:
            try:
                running = self._in_thread(self._inner.call, op, timeout, future.done)
            except RuntimeError:  # the client was closed
                if not future.done():
                    future.set_exception(self._inner.closed_failure())
                return
            running.add_done_callback(lambda done: _pass_on(done, future))
            if script == "acquire":
                self._acquiring[token] = running
                running.add_done_callback(lambda done: self._acquiring.pop(token, None))

        # An acquire whose caller was cancelled still runs in its thread. The abandon must not overtake it.
        acquiring = self._acquiring.get(token) if script == "abandon" else None
        if acquiring is None:
            start()
        else:
            acquiring.add_done_callback(start)
        return future

    async def call_each(self, ops: Sequence[Any], timeout: float) -> list[Any]:
        try:
            running = self._in_thread(self._inner.call_each, ops, timeout)
        except RuntimeError:  # the client was closed
            return [self._inner.closed_failure()] * len(ops)
        replies: list[Any] = await running
        return replies

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        assert self._loop is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-memcached")
        return self._loop.run_in_executor(self._threads, function, *args)

    def expire(self, reply: asyncio.Future[Any], waited: float) -> None:
        """Fail a request now: its cancelled caller has waited long enough."""
        if not reply.done():
            error = Unavailable({self.address: f"it did not answer within {rounded(waited)} s"}, "It may be hung")
            reply.set_exception(StepFailed(error, sent=True, retry=True, silent=True))

    async def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        return False

    def connections(self) -> list[Connection]:
        return [Connection() for _ in range(self._inner.count_connections()[0])]

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._acquiring.clear()

    def forget(self) -> None:
        """In a forked child: start again with new threads, because the old ones exist in the parent only."""
        self._inner.forget()
        self._loop = self._threads = None
        self._acquiring.clear()

    async def close(self) -> None:
        self._inner.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _pass_on(done: asyncio.Future[Any], future: asyncio.Future[Any]) -> None:
    if done.cancelled():
        return
    error = done.exception()  # before the next line: asyncio logs an exception that is not asked for
    if future.done():
        return
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)
