"""Runs protocols with asyncio.

``run`` is the whole driver: it performs one effect after the other in the calling task. The keeper is the same loop in
a task of its own, with a connection of its own. A client belongs to one event loop at a time; in a new loop it starts
afresh, and what it held in the old one is lost.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any, TypeVar

from holdfast.drivers import clock, forks
from holdfast.drivers.body import Body
from holdfast.engines.redis_aio import Engine
from holdfast.engines.target import Target
from holdfast.errors import InvalidConfig
from holdfast.lease import Hold
from holdfast.protocol import effects as fx
from holdfast.protocol.keepalive import CLOSED, Book, keep
from holdfast.protocol.mutex import GRACE

__all__ = ["Bell", "Driver"]

T = TypeVar("T")
log = logging.getLogger("holdfast")


class Bell(asyncio.Event):
    """An event that rings."""

    ring = asyncio.Event.set


class Gate:
    """A mutex between tasks that knows who has passed."""

    __slots__ = ("_lock", "_passed")

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._passed: Hold | None = None

    def locked(self) -> bool:
        return self._lock.locked()

    async def enter(self, hold: Hold, until: float | None) -> bool:
        try:
            # An open gate is passed at once, even without any time left.
            async with asyncio.timeout(None if until is None else until - clock.now()):
                await self._lock.acquire()
        except TimeoutError:
            return False
        self._passed = hold
        return True

    def leave(self, hold: Hold) -> None:
        if self._passed is hold:
            self._passed = None
            self._lock.release()


class Driver:
    """Runs protocols for one client: its engine, its keeper and its book."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.address = target.address
        self.engine = Engine(target, timeout)
        self.book = Book(Bell())
        self.now = clock.now
        self.life = 0  # counts event loops and forks
        self._keepers_engine = Engine(target, timeout, deaf_after=0.3)  # renewal has no time for a dead connection
        self._keeper: asyncio.Task[None] | None = None
        self._told: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        forks.watch(self)

    gate = Gate

    async def run(self, protocol: fx.Effects[T], engine: Engine | None = None) -> T:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        engine = engine or self.engine
        interrupt: BaseException | None = None
        advance: Any = protocol.send
        value: Any = None
        while True:
            try:
                effect = advance(value)
                if isinstance(effect, fx.Call) and effect.shielded:
                    reply = engine.submit(effect.step, effect.timeout)
                    cancelled = await _outlast(reply, engine)
                    interrupt = cancelled or interrupt
                    if cancelled is not None and reply.exception() is not None:
                        raise cancelled  # it had its chance; the caller will not wait for another try
                    advance, value = protocol.send, reply.result()
                else:
                    advance, value = protocol.send, await self._perform(effect, engine)
            except StopIteration as done:
                if interrupt is not None:
                    raise interrupt from None
                result: T = done.value
                return result
            except BaseException as error:
                if fx.is_over(protocol):  # that was its own last word
                    raise interrupt or error from (error.__cause__ if interrupt is None else None)
                if isinstance(error, Exception):
                    advance, value = protocol.throw, error
                else:  # the task was cancelled
                    interrupt = error
                    advance, value = protocol.throw, fx.Interrupted()

    async def _perform(self, effect: fx.Effect, engine: Engine) -> Any:
        if isinstance(effect, fx.Now):
            return clock.now()
        if isinstance(effect, fx.Call):
            return await engine.submit(effect.step, effect.timeout)
        if isinstance(effect, fx.Enter):
            assert isinstance(effect.gate, Gate)
            return await effect.gate.enter(effect.hold, effect.until)
        if isinstance(effect, fx.NewToken):
            return clock.new_token(effect.label)
        if isinstance(effect, fx.Caller):
            return asyncio.current_task()
        if isinstance(effect, fx.Wait):
            return await _wait(effect.bell, effect.until)
        if isinstance(effect, fx.CallEach):
            return await engine.call_each(effect.steps, effect.timeout)
        if isinstance(effect, fx.NewBell):
            return Bell()
        if isinstance(effect, fx.Entrust):
            self.book.entrust(effect.hold, clock.now())
            return self.keep()
        if isinstance(effect, fx.Tell):
            return self._tell(effect.hold)
        if isinstance(effect, fx.Attach):
            body = Body()
            effect.hold.notify = body.cancel
            return body
        effect.hold.notify = None
        return (effect.error, False) if effect.block is None else await effect.block.leave(effect.error)

    def admit(self, hold: Hold) -> None:
        """A hold begins: the keeper looks after it from now on."""
        self.book.enter(hold)
        self.keep()

    def keep(self) -> None:
        """See to it that the keeper runs."""
        if (self._keeper is None or self._keeper.done()) and not self.book.closed:  # somebody may have cancelled it
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="holdfast-keeper")

    async def _keep(self) -> None:
        while not self.book.closed:
            try:
                await self.run(keep(self.book), self._keepers_engine)
            except Exception:
                log.exception("the keeper of %s stumbled and starts again", self.engine.address)
                await asyncio.sleep(1.0)

    def _tell(self, hold: Hold) -> None:
        if hold.notify is None:
            return
        try:
            outcome = hold.notify()
        except Exception:
            log.exception("on_lost of the lock %r failed", hold.name)
            return
        if inspect.isawaitable(outcome):
            task = asyncio.ensure_future(_finish_telling(outcome, hold.name))
            self._told.add(task)
            task.add_done_callback(self._told.discard)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        self.book.close()
        keeper = self._keeper
        if keeper is not None and keeper is not asyncio.current_task():
            await asyncio.wait([keeper], timeout=2.0)
            keeper.cancel()
        for hold in list(self.book.holds.values()):
            if hold.lose(CLOSED):
                self._tell(hold)
            hold.gate.leave(hold)  # whoever waits there is to find out, too
        await self.engine.close()
        await self._keepers_engine.close()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None:
            if self._loop.is_running():  # in another thread
                raise InvalidConfig("a client in two event loops at once", "connect in each of them")
            self._begin_anew("the event loop in which it was acquired has ended")
        self._loop = loop

    def forget(self) -> None:
        """In a forked child: sockets, tasks and leases are the parent's."""
        self._loop = None
        self.engine.forget()
        self._keepers_engine.forget()
        self._begin_anew("this process was forked from the holder; the hold stayed with the parent")

    def _begin_anew(self, reason: str) -> None:
        self.life += 1
        self.book.disown(reason)
        self.book.bell = Bell()
        self._keeper = None


async def _outlast(reply: asyncio.Future[Any], engine: Engine) -> asyncio.CancelledError | None:
    """Wait for the reply even when cancelled, though not for long; the cancellation, if there was one."""
    cancelled = None
    while not reply.done():
        try:
            await asyncio.wait([reply])
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                asyncio.get_running_loop().call_later(GRACE, engine.expire, reply, GRACE)
    return cancelled


async def _wait(bell: fx.Bell | None, until: float) -> None:
    left = max(0.0, min(until - clock.now(), 86_400.0))
    if isinstance(bell, Bell):
        try:
            async with asyncio.timeout(left):
                await bell.wait()
        except TimeoutError:
            pass
    else:
        await asyncio.sleep(left)


async def _finish_telling(outcome: Any, name: str) -> None:
    try:
        await outcome
    except Exception:
        log.exception("on_lost of the lock %r failed", name)
