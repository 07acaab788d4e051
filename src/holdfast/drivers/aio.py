"""Runs protocols with asyncio.

``run`` is the whole driver: it performs one effect after the other in the calling task. It awaits the futures of
replies and wake-ups directly, because each coroutine in between would make every lock slower. The keeper is the same
loop in a task of its own, on the same connection while that is healthy. A client belongs to one event loop at a time;
in a new loop it begins again, and its holds of the old loop are lost.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from functools import partial
from secrets import token_hex
from time import time
from typing import Any, TypeAlias, TypeVar

from holdfast.drivers import clock, forks
from holdfast.drivers.body import Body
from holdfast.drivers.futures import Lanes, Shielded, Wakeup
from holdfast.drivers.observing import Observers
from holdfast.drivers.running import is_over
from holdfast.drivers.traces import cut_short
from holdfast.engines.capabilities import require
from holdfast.engines.redis.aio.dedicated_connections import DedicatedConnections
from holdfast.engines.redis.aio.engine import Engine
from holdfast.engines.redis.aio.standby import StandbyEngine
from holdfast.engines.redis.cluster.aio import ClusterEngine
from holdfast.engines.redis.cluster.dedicated import ClusterDedicated
from holdfast.engines.redis.cluster.standby import ClusterStandby
from holdfast.engines.redis.target import Target
from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.protocol import effects as fx
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.hold import Hold
from holdfast.protocol.keepalive import LeaseRegistry, keep
from holdfast.protocol.reporting import log_outages, lost_event
from holdfast.protocol.wait.cohort import Cohorts
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.statistics import NodeStatistics

T = TypeVar("T")
AnyEngine: TypeAlias = Engine | ClusterEngine | ClusterStandby
log = logging.getLogger("holdfast")


class Driver:
    """Runs protocols for one client, with its engines, keeper and lease registry."""

    # target: a Target, or that of another engine
    def __init__(self, target: Any, timeout: float, *, namespace: str = "", observers: Observers | None = None) -> None:
        self.address = target.address
        self.require = partial(require, engine=target.engine, address=target.address)  # raises Unsupported
        self.observers = observers or Observers()
        self.registry = LeaseRegistry(Wakeup())
        self.registry.observed = self.observers.listen
        self.router = NotificationRouter(self.registry, Wakeup)
        self.cohorts = Cohorts(Wakeup, self.registry.contacts)
        log_outages(self, log.warning)
        self.engine: Any  # an Engine, or a ClusterEngine
        self._standby: Any  # a StandbyEngine, or a ClusterStandby
        self._dedicated: Any  # DedicatedConnections, or ClusterDedicated
        if not isinstance(target, Target):
            self.engine, self._standby, self._dedicated = target.aio_engines(timeout, self.router, clock.now)
        elif target.seeds:
            self.engine = ClusterEngine(target, timeout, self.router, clock.now)
            self._standby, self._dedicated = ClusterStandby(self.engine), ClusterDedicated(self.engine)
        else:
            self.engine = Engine(target, timeout, self.router, clock.now)
            self._standby, self._dedicated = StandbyEngine(self.engine), DedicatedConnections(self.engine)
        self.registry.keys_expire = target.keys_expire
        self.now = clock.now
        self.generation = 0  # counts event loops and forks
        self._namespace = namespace
        self._keeper: asyncio.Task[None] | None = None
        self._on_lost_tasks: set[asyncio.Task[Any]] = set()
        self._beside = Lanes()
        self._closing: asyncio.Task[Any] | None = None  # the task that is closing the client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._at_once: dict[type, Callable[[Any], Any]] = {  # effects that need no waiting
            fx.NewToken: lambda effect: clock.new_token(effect.label),
            fx.Caller: lambda _: asyncio.current_task(self._loop),
            fx.DeferCleanup: self._defer_cleanup,
            fx.ShowPresence: self._attend,
            fx.ReportLoss: lambda effect: self._tell(effect.hold),
            fx.Start: lambda effect: self._beside.start(effect.place, self._run_beside(effect.protocol)),
            fx.Warn: lambda effect: log.warning("%s", effect.message),
            fx.Report: lambda effect: self.observers.report(effect.event),
            fx.CloseConnection: lambda effect: self._dedicated.close(effect.connection),
        }
        self._name_channel()
        forks.watch(self)

    def _name_channel(self) -> None:
        self.router.channel = f"{self._namespace}holdfast:bell:{token_hex(8)}"

    async def run(self, protocol: fx.Effects[T], engine: AnyEngine | None = None) -> T:  # noqa: PLR0915 (hot path)
        loop = self._loop
        if loop is None or asyncio._get_running_loop() is not loop:
            loop = self._find_loop()
        engine = engine or self.engine
        # No bound methods and effects in local variables: each waiting task would keep them (benchmarks.crowd).
        now, at_once = clock.now, self._at_once
        interrupt: BaseException | None = None
        failure: BaseException | None = None  # of the last effect
        effect: Any
        value: Any = None
        try:
            while True:
                try:
                    while True:
                        if failure is None:
                            effect = protocol.send(value)
                        else:
                            effect = protocol.throw(failure)
                            failure = None
                        kind = type(effect)
                        if kind is fx.Now:
                            value = time() if effect.wall else now()
                        elif kind is fx.Call:
                            sent_at = now()
                            try:
                                if not effect.shielded:
                                    value = await engine.submit(effect.step, effect.timeout)
                                else:
                                    reply = Shielded(engine, loop)
                                    try:
                                        value = await engine.submit(effect.step, effect.timeout, reply)
                                    except asyncio.CancelledError as cancelled:
                                        interrupt = cancelled
                                        if not reply.done() or reply.exception() is not None:
                                            raise  # the caller does not wait for another attempt
                                        value = reply.result()
                            except fx.StepFailed as failed:
                                self.registry.contacts.note_failure(effect.step, sent_at, failed, now())
                                raise
                            contacts = self.registry.contacts
                            if contacts.calm:
                                contacts.only.served_at = max(contacts.only.served_at, sent_at)
                            else:
                                contacts.note_reply(effect.step, value, sent_at, now())
                        elif kind is fx.Wait:
                            wakeup, until = effect.wakeup or Wakeup(), effect.until
                            if not wakeup.woken:
                                del effect
                                try:
                                    await wakeup.wait(loop, until)
                                finally:
                                    wakeup.rest()
                            wakeup.woken = False  # not if the task was cancelled: the wake-up is kept then
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
                            sent_at = now()
                            value = await engine.call_each(effect.steps, effect.timeout)
                            self.registry.contacts.note(effect.steps, value, sent_at, now())
                        elif kind is fx.Listen:
                            value = await engine.listen(effect.timeout, effect.keys)
                        elif kind is fx.Scan:
                            value = await self.engine.scan(effect)
                        elif kind is fx.CallOn:
                            value = await self._dedicated.call_on(effect.connection, effect.commands, effect.timeout)
                        else:
                            assert kind is fx.OpenConnection
                            value = await self._dedicated.open(effect.timeout)
                except StopIteration as done:
                    if interrupt is not None:
                        raise interrupt from None
                    result: T = done.value
                    return result
                except BaseException as error:
                    if is_over(protocol):  # the protocol itself raised it
                        if error.__suppress_context__:
                            error.__context__ = None  # a StepFailed that refers to this error: a cycle
                        raise interrupt or error from (error.__cause__ if interrupt is None else None)
                    failure = error
                    if not isinstance(error, Exception):  # the task was cancelled
                        interrupt, failure = error, fx.Interrupted()
        except HoldfastError as error:
            cut_short(error)
            raise
        finally:
            value = interrupt = failure = None  # the error's traceback refers to this frame: break the cycle

    def _defer_cleanup(self, effect: fx.DeferCleanup) -> None:
        self.registry.defer_cleanup(effect.hold, clock.now())
        self.keep()

    def _attend(self, effect: fx.ShowPresence) -> None:
        self.registry.show_presence(effect.hold, clock.now())
        self.keep()

    def admit(self, hold: Hold) -> None:
        """Register a hold, so that the keeper renews it."""
        self.registry.enter(hold)
        self.keep()

    def keep(self) -> None:
        """Start the keeper, unless it runs."""
        if (self._keeper is None or self._keeper.done()) and not self.registry.closed:  # a cancelled keeper is done
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="holdfast-keeper")

    async def _keep(self) -> None:
        while not self.registry.closed:
            try:
                await self.run(keep(self.registry), self._standby)
            except Exception:
                log.exception("renewal loop for %s failed; restarting", self.engine.address)
                await asyncio.sleep(1.0)

    async def _run_beside(self, protocol: fx.Effects[None]) -> None:
        try:
            await self.run(protocol)
        except Exception:
            log.exception("a task beside the keeper of %s failed", self.engine.address)

    def _tell(self, hold: Hold) -> None:
        self._call_back(hold, hold.observer)
        if self._closing is None or not _is_body_of(hold, self._closing):
            self._call_back(hold, hold.notify)
        self.observers.report(lost_event(hold, clock.now()))

    def _call_back(self, hold: Hold, callback: Callable[[], object] | None) -> None:
        if callback is None:
            return
        try:
            outcome = callback()
        except Exception:
            log.exception("on_lost of the lock %r failed", hold.key)
            return
        if inspect.isawaitable(outcome):
            task = asyncio.ensure_future(_finish_on_lost(outcome, hold.key))
            self._on_lost_tasks.add(task)
            task.add_done_callback(self._on_lost_tasks.discard)

    async def close(self, timeout: float) -> None:
        """Mark all leases lost and call on_lost, release them on the server, then end connections and tasks."""
        self._find_loop()
        until, me = clock.now() + timeout, asyncio.current_task()
        self._closing = me  # its own blocks are cancelled last, or that would interrupt closing
        lost: list[Hold] = []
        try:
            lost = await self.run(lose_all(self.registry))
            others = {task for task in (self._keeper, *self._on_lost_tasks) if task is not None and task is not me}
            if others:
                await asyncio.wait(others, timeout=max(0.0, until - clock.now()))
            await self.run(give_back(lost, self.registry, self.cohorts, until))
        finally:
            if self._keeper is not None and self._keeper is not me:
                self._keeper.cancel()
            self._beside.cancel()
            for hold in list(self.registry.holds.values()):
                self.cohorts.leave(hold)
            await self.engine.close()
            await self._standby.close()
            await self._dedicated.close_all()
            self.router.look_again()  # wake all waiters, so that they see that the client is closed
            self._closing = None
            for hold in lost:
                if _is_body_of(hold, me):
                    self._tell(hold)

    def nodes(self) -> dict[str, NodeStatistics]:
        """For ``client.statistics()``."""
        if isinstance(self.engine, ClusterEngine):
            return {
                f"{host}:{port}": _count(node.engine, node.standby, node.dedicated, bool(node.channels.armed))
                for (host, port), node in list(self.engine.topology.nodes.items())
            }
        return {self.address: _count(self.engine, self._standby, self._dedicated, self.router.armed)}

    def _find_loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, to which the client moves."""
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
            self._standby.move_to(loop)
            self._dedicated.move_to(loop)
        return loop

    def forget(self) -> None:
        """In a forked child: begin again. Sockets, tasks and leases belong to the parent."""
        self._loop = None
        self.engine.forget()
        self._standby.forget()
        self._dedicated.forget()
        self._begin_anew("this process was forked from the holder; the hold stayed with the parent")

    def _begin_anew(self, reason: str) -> None:
        self.generation += 1
        self.registry.disown(reason)
        self.registry.wakeup = Wakeup()
        self.router.forget()
        self.cohorts.forget()
        self._name_channel()
        self._keeper, self._beside = None, Lanes()


def _is_body_of(hold: Hold, task: asyncio.Task[Any] | None) -> bool:
    """Whether a loss of this hold cancels that task."""
    body = getattr(hold.notify, "__self__", None)
    return isinstance(body, Body) and body.task is task


async def _finish_on_lost(outcome: Any, key: str) -> None:
    try:
        await outcome
    except Exception:
        log.exception("on_lost of the lock %r failed", key)


def _count(engine: Any, standby: Any, dedicated: Any, subscribed: bool) -> NodeStatistics:
    """What a client has at one server."""
    parts = (engine, standby, dedicated)
    connections = [connection for part in parts for connection in part.connections() if not connection.lost]
    return NodeStatistics(
        connections=len(connections),
        idle=len(dedicated.idle),
        queued=len(engine.backlog) + len(standby.backlog),
        subscribed=subscribed,
        resp3=any(connection.speaks_resp3() for connection in connections),
        tracking=any(connection.tracking for connection in connections),
    )
