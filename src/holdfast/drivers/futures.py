"""What tasks of asyncio wait for: wake-ups, replies that a cancelled task still takes, tasks that run before it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any, Final
from weakref import ref

from holdfast.drivers import clock
from holdfast.protocol.mutex import CLEANUP_WAIT

_LONGEST_TIMER: Final = 86_400.0  # seconds; a longer wait is repeated
_NEVER: Final = float("inf")


class Wakeup:
    """A wake-up that is kept until the next wait. One task waits at a time."""

    __slots__ = ("_timer", "_waiter", "caller", "woken")

    def __init__(self) -> None:
        self.woken = False
        self.caller: Hashable = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self.woken = True
        waiter = self._waiter
        if waiter is None:
            return
        loop = waiter.get_loop()
        if asyncio._get_running_loop() is loop:
            _wake(waiter)
        else:  # a dropped lease may be collected in any thread
            try:
                loop.call_soon_threadsafe(_wake, waiter)
            except RuntimeError:
                pass  # that loop is closed, so no task waits there

    def prewake(self) -> None:
        """Nothing: a task needs no time to wake up."""

    def clear(self) -> None:
        self.woken = False

    def wait(self, loop: asyncio.AbstractEventLoop, until: float) -> asyncio.Future[None]:
        """A future that is done at ``wake``, or at that time of our clock. Call ``rest`` after it."""
        waiter = self._waiter = asyncio.Future(loop=loop)
        if (task := asyncio.current_task(loop)) is not None:
            self.caller = ref(task)
        if until != _NEVER:
            self._timer = loop.call_later(min(until - clock.now(), _LONGEST_TIMER), _wake, waiter)
        return waiter

    def rest(self) -> None:
        self._waiter = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Shielded(asyncio.Future[Any]):
    """A reply for which a cancelled task still waits, for CLEANUP_WAIT at most.

    Cancelling a task cancels the future that it awaits. If the future refuses, the task gets CancelledError once the
    future is done.
    """

    __slots__ = ("engine",)

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.engine: Any = engine  # until the first cancel()

    def cancel(self, msg: object = None) -> bool:
        engine, self.engine = self.engine, None
        if engine is not None and not self.done():
            self.get_loop().call_later(CLEANUP_WAIT, engine.expire, self, CLEANUP_WAIT)
        return False


class Lanes:
    """Tasks beside each other, and in each lane one after the other."""

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Task[None]] = {}  # of each lane

    def start(self, lane: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._run_after(self._last.get(lane), work)
        self._last[lane] = asyncio.get_running_loop().create_task(task, name="holdfast-replicas")

    async def _run_after(self, before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
        try:
            if before is not None:
                await asyncio.wait((before,))
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    def cancel(self) -> None:
        """Cancel all tasks: one that waits for another ends with it."""
        for task in self._last.values():
            task.cancel()
