"""Runs protocols with asyncio.

``run`` is the whole driver: it performs one effect after the other in the calling task, and awaits nothing but the
future of a reply or of a bell, for every coroutine in between is paid for by every lock. The keeper is the same loop in
a task of its own, on the same connection as long as that is well. A client belongs to one event loop at a time; in a
new loop it starts afresh, and what it held in the old one is lost.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from secrets import token_hex
from time import time
from typing import Any, TypeVar

from holdfast.drivers import clock, forks
from holdfast.drivers.body import Body
from holdfast.drivers.traces import cut_short
from holdfast.engines.redis_aio import Engine, Lifeline
from holdfast.engines.redis_aio_links import Links
from holdfast.engines.target import Target
from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.lease import Hold
from holdfast.protocol import effects as fx
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.cohort import Cohorts
from holdfast.protocol.keepalive import Book, keep
from holdfast.protocol.mutex import GRACE

__all__ = ["Bell", "Driver"]

T = TypeVar("T")
log = logging.getLogger("holdfast")

_LONGEST_TIMER = 86_400.0  # what is still to come then, is waited for again


class Bell:
    """A ring that is kept until somebody waits for it. One waits at a time."""

    __slots__ = ("_timer", "_waiter", "rung")

    def __init__(self) -> None:
        self.rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        self.rung = True
        waiter = self._waiter
        if waiter is None:
            return
        loop = waiter.get_loop()
        if asyncio._get_running_loop() is loop:
            _wake(waiter)
        else:  # a lease that nobody has any more may be collected in whatever thread
            try:
                loop.call_soon_threadsafe(_wake, waiter)
            except RuntimeError:
                pass  # that loop is closed, and nobody waits there

    def stir(self) -> None:
        """Nothing: a task is as quick to wake up as it is to be woken."""

    def clear(self) -> None:
        self.rung = False

    def wait(self, loop: asyncio.AbstractEventLoop, until: float) -> asyncio.Future[None]:
        """A future that is done when it rings, or at that time by our clock. Call ``rest`` after it."""
        waiter = self._waiter = loop.create_future()
        if until != float("inf"):
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
    """A reply for which a cancelled task still waits, though not for long.

    To cancel a task is to cancel what it awaits; if that says no, the task is told of it when the wait is over.
    """

    __slots__ = ("engine",)
    engine: (
        Engine | None
    )  # until it was cancelled once; set by whoever makes it, as an __init__ would cost as much again

    def cancel(self, msg: object = None) -> bool:
        engine, self.engine = self.engine, None
        if engine is not None and not self.done():
            self.get_loop().call_later(GRACE, engine.expire, self, GRACE)
        return False


class Driver:
    """Runs protocols for one client: its engine, its keeper and its book."""

    speaks = "redis"

    def __init__(self, target: Target, timeout: float, *, namespace: str = "") -> None:
        self.address = target.address
        self.book = Book(Bell())
        self.board = Switchboard(self.book, Bell)
        self.cohorts = Cohorts(Bell)
        self.engine = Engine(target, timeout, self.board, clock.now)
        self.now = clock.now
        self.life = 0  # counts event loops and forks
        self._namespace = namespace
        self._lifeline = Lifeline(self.engine)
        self._links = Links(self.engine)
        self._keeper: asyncio.Task[None] | None = None
        self._told: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[Any] | None = None  # the task that closes the client, while it does
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_once: dict[type, Callable[[Any], Any]] = {  # effects that need no waiting
            fx.NewToken: lambda effect: clock.new_token(effect.label),
            fx.Caller: lambda _: asyncio.current_task(self._loop),
            fx.Entrust: self._entrust,
            fx.Attend: self._attend,
            fx.Tell: lambda effect: self._tell(effect.hold),
            fx.Warn: lambda effect: log.warning("%s", effect.message),
            fx.CloseLink: lambda effect: self._links.close(effect.link),
        }
        self._name_channel()
        forks.watch(self)

    def _name_channel(self) -> None:
        self.board.channel = f"{self._namespace}holdfast:bell:{token_hex(8)}"

    async def run(self, protocol: fx.Effects[T], engine: Engine | None = None) -> T:  # noqa: PLR0915 (hot, so in one)
        loop = self._loop
        if loop is None or asyncio._get_running_loop() is not loop:
            loop = self._find_loop()
        engine = engine or self.engine
        submit, now, send, at_once = engine.submit, clock.now, protocol.send, self._at_once
        interrupt: BaseException | None = None
        advance: Any = send
        value: Any = None
        try:
            while True:
                try:
                    while True:
                        effect = advance(value)
                        advance = send
                        kind = type(effect)
                        if kind is fx.Now:
                            value = time() if effect.wall else now()
                        elif kind is fx.Call:
                            step, timeout, shielded = effect
                            if not shielded:
                                value = await submit(step, timeout)
                                continue
                            reply = Shielded(loop=loop)
                            reply.engine = engine
                            try:
                                value = await submit(step, timeout, reply)
                            except asyncio.CancelledError as cancelled:
                                interrupt = cancelled
                                if not reply.done() or reply.exception() is not None:
                                    raise  # it had its chance; the caller will not wait for another try
                                value = reply.result()
                        elif kind is fx.Wait:
                            bell = effect.bell or Bell()
                            if not bell.rung:
                                try:
                                    await bell.wait(loop, effect.until)
                                finally:
                                    bell.rest()
                            bell.rung = False  # unless we were cancelled: then it is kept
                            value = now()
                        elif kind is fx.Attach:
                            body = Body(loop)
                            effect.hold.notify = body.cancel
                            value = body.task, body
                        elif kind is fx.Detach:
                            effect.hold.notify = None
                            value = (
                                (await effect.block.leave(effect.error)) if effect.block.cut else (effect.error, False)
                            )
                        elif kind in at_once:
                            value = at_once[kind](effect)
                        elif kind is fx.CallEach:
                            value = await engine.call_each(effect.steps, effect.timeout)
                        elif kind is fx.Listen:
                            value = await engine.listen(effect.timeout)
                        elif kind is fx.CallOn:
                            value = await self._links.call_on(effect.link, effect.commands, effect.timeout)
                        else:
                            assert kind is fx.OpenLink
                            value = await self._links.open(effect.timeout)
                except StopIteration as done:
                    if interrupt is not None:
                        raise interrupt from None
                    result: T = done.value
                    return result
                except BaseException as error:
                    if fx.is_over(protocol):  # that was its own last word
                        if error.__suppress_context__:
                            error.__context__ = None  # a StepFailed, which knows this very error
                        raise interrupt or error from (error.__cause__ if interrupt is None else None)
                    advance, value = protocol.throw, error
                    if not isinstance(error, Exception):  # the task was cancelled
                        interrupt, value = error, fx.Interrupted()
        except HoldfastError as error:
            cut_short(error)
            raise
        finally:
            value = interrupt = None  # an error keeps alive the frames that it went through, and this is one of them

    def _entrust(self, effect: fx.Entrust) -> None:
        self.book.entrust(effect.hold, clock.now())
        self.keep()

    def _attend(self, effect: fx.Attend) -> None:
        self.book.attend(effect.hold, clock.now())
        self.keep()

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
                await self.run(keep(self.book), self._lifeline)
            except Exception:
                log.exception("the keeper of %s stumbled and starts again", self.engine.address)
                await asyncio.sleep(1.0)

    def _tell(self, hold: Hold) -> None:
        self._call_back(hold, hold.observer)
        if self._closing is None or not _is_body_of(hold, self._closing):
            self._call_back(hold, hold.notify)

    def _call_back(self, hold: Hold, callback: Callable[[], object] | None) -> None:
        if callback is None:
            return
        try:
            outcome = callback()
        except Exception:
            log.exception("on_lost of the lock %r failed", hold.name)
            return
        if inspect.isawaitable(outcome):
            task = asyncio.ensure_future(_finish_telling(outcome, hold.name))
            self._told.add(task)
            task.add_done_callback(self._told.discard)

    async def close(self, timeout: float) -> None:
        """Tell the holders that their leases are lost, give these back, and let go of connections and tasks."""
        self._find_loop()
        until, me = clock.now() + timeout, asyncio.current_task()
        self._closing = me  # whose own bodies are cancelled last, lest that cuts this short
        lost: list[Hold] = []
        try:
            lost = await self.run(lose_all(self.book))
            others = {task for task in (self._keeper, *self._told) if task is not None and task is not me}
            if others:
                await asyncio.wait(others, timeout=max(0.0, until - clock.now()))
            await self.run(give_back(lost, self.book, self.cohorts, until))
        finally:
            if self._keeper is not None and self._keeper is not me:
                self._keeper.cancel()
            for hold in list(self.book.holds.values()):
                self.cohorts.leave(hold)
            await self.engine.close()
            await self._lifeline.close()
            await self._links.close_all()
            self.board.look_again()  # wake all waiters, so that they see that the client is closed
            self._closing = None
            for hold in lost:
                if _is_body_of(hold, me):
                    self._tell(hold)

    def _find_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs here, and in which we are from now on."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidConfig(
                "holdfast.aio without a running asyncio event loop",
                "under trio or curio use holdfast.connect in a worker thread; else start asyncio (asyncio.run)",
            ) from None
        if loop is not self._loop:
            if self._loop is not None:
                if self._loop.is_running():  # in another thread
                    raise InvalidConfig("a client in two event loops at once", "connect in each of them")
                self._begin_anew("the event loop in which it was acquired has ended")
            self._loop = loop
            self.engine.move_to(loop)
            self._lifeline.move_to(loop)
            self._links.move_to(loop)
        return loop

    def forget(self) -> None:
        """In a forked child: sockets, tasks and leases are the parent's."""
        self._loop = None
        self.engine.forget()
        self._lifeline.forget()
        self._links.forget()
        self._begin_anew("this process was forked from the holder; the hold stayed with the parent")

    def _begin_anew(self, reason: str) -> None:
        self.life += 1
        self.book.disown(reason)
        self.book.bell = Bell()
        self.board.forget()
        self.cohorts.forget()
        self._name_channel()
        self._keeper = None


def _is_body_of(hold: Hold, task: asyncio.Task[Any] | None) -> bool:
    """Whether to tell of the loss of this hold is to cancel that task."""
    body = getattr(hold.notify, "__self__", None)
    return isinstance(body, Body) and body.task is task


async def _finish_telling(outcome: Any, name: str) -> None:
    try:
        await outcome
    except Exception:
        log.exception("on_lost of the lock %r failed", name)
