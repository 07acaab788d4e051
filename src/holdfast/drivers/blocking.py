"""Runs protocols with threads.

``run`` is the whole driver: it performs one effect after the other in the calling thread. The keeper is the same loop
in a daemon thread. Its steps, and all steps that watch a key, go over the shared connection, because client tracking
reports to a connection what other connections write.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from secrets import token_hex
from typing import Any, TypeAlias, TypeVar
from weakref import ref

from holdfast.drivers import clock, forks
from holdfast.drivers.background import Background, Lanes, is_exiting
from holdfast.drivers.observing import Observers
from holdfast.drivers.running import is_begun, is_over
from holdfast.drivers.sleeping import Owner, Wakeup, sleep
from holdfast.drivers.traces import cut_short
from holdfast.engines import greenlets
from holdfast.engines.capabilities import require
from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.blocking.shared_connection import SharedConnection, engines
from holdfast.engines.redis.cluster.blocking import ClusterEngine, cluster_engines
from holdfast.engines.redis.target import Target
from holdfast.errors import HoldfastError
from holdfast.events import Event
from holdfast.protocol import effects as fx
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.hold import Hold
from holdfast.protocol.keepalive import LeaseRegistry, keep
from holdfast.protocol.reporting import log_outages, lost_event
from holdfast.protocol.wait.cohort import Cohorts
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.statistics import NodeStatistics

T = TypeVar("T")
AnyEngine: TypeAlias = Engine | SharedConnection | ClusterEngine
log = logging.getLogger("holdfast")

# Waiters' steps in flight: each needs a connection and the interpreter (benchmarks.crowd).
_MOST_ASKING = 32
_SPREAD = 0.3  # seconds over which waiting threads give up one after the other, as tasks of an event loop do anyway
_LOG_EVERY = 60.0  # seconds
_MOST_NAMED = 5  # locks in one log line
_MOST_EVENTS = 10_000  # that wait for slow hooks


class Driver:
    """Runs protocols for one client, with its engine, shared connection, keeper and lease registry."""

    # target: a Target, or that of another engine
    def __init__(self, target: Any, *, namespace: str = "", observers: Observers | None = None) -> None:
        self.address = target.address
        self.require = partial(require, engine=target.engine, address=target.address)  # raises Unsupported
        self.observers = observers or Observers()
        self.registry = LeaseRegistry(Wakeup())
        self.registry.observed = self.observers.listen
        self.router = NotificationRouter(self.registry, Wakeup, _MOST_ASKING)
        self.registry.crowd.spread_over = _SPREAD
        self.cohorts = Cohorts(Wakeup, self.registry.contacts)
        log_outages(self, log.warning)
        self.engine: Any  # an Engine, or a ClusterEngine
        self.shared: Any  # a SharedConnection, or ClusterConnections
        if isinstance(target, Target):
            self.engine, self.shared = (cluster_engines if target.seeds else engines)(target, self.router, clock.now)
        else:
            self.engine, self.shared = target.blocking_engines(self.router, clock.now)
        self.registry.keys_expire = target.keys_expire
        self.now = clock.now
        self.generation = 0  # counts forks
        self._namespace = namespace
        self._keeper: threading.Thread | None = None
        self._on_lost = Background("holdfast-on-lost")
        self._hooks = Background("holdfast-events", _MOST_EVENTS)
        self._beside = Lanes("holdfast-replicas")
        self._starting = threading.Lock()
        self._marks: list[greenlets.Mark] = []
        self._log_at = 0.0  # when to log again that leases are not renewed, or hooks are too slow
        self._here = threading.local()  # made here, because gevent may replace it after our import
        self._name_channel()
        forks.watch(self)

    def _name_channel(self) -> None:
        self.router.channel = f"{self._namespace}holdfast:bell:{token_hex(8)}"

    def caller(self) -> Owner:
        """The owner of the calling thread, or under gevent of the calling greenlet."""
        try:
            owner: Owner = self._here.owner
        except AttributeError:
            owner = self._here.owner = Owner()
        return owner

    def run(self, protocol: fx.Effects[T], engine: AnyEngine | None = None) -> T:
        try:
            return self._drive(protocol, engine, protocol.send, None)
        except BaseException as error:
            # Ctrl-C between two effects can hit the driver itself; the protocol must still clean up.
            if is_over(protocol):
                if isinstance(error, HoldfastError):
                    cut_short(error)
                raise
            if not is_begun(protocol):
                protocol.send(None)  # run to its first effect: a generator that has not begun cannot clean up
            return self._drive(protocol, engine, protocol.throw, error)

    def _drive(  # noqa: PLR0915 (hot path)
        self, protocol: fx.Effects[T], engine: AnyEngine | None, advance: Any, value: Any
    ) -> T:
        call, contacts = (engine or self.engine).call, self.registry.contacts
        interrupt: BaseException | None = None
        send, now = protocol.send, clock.now
        if isinstance(value, BaseException):
            interrupt, value = value, fx.Interrupted()
        try:
            while True:
                try:
                    while True:
                        effect = advance(value)
                        advance = send
                        kind = type(effect)
                        if kind is fx.Now:
                            value = time.time() if effect.wall else now()
                        elif kind is fx.Call:
                            step, sent_at = effect.step, now()
                            try:
                                if type(step) is fx.Step and step.watch:
                                    value = self.shared.call(step, effect.timeout)
                                else:
                                    value = call(step, effect.timeout)
                            except fx.StepFailed as failed:
                                contacts.note_failure(step, sent_at, failed, now())
                                raise
                            if contacts.calm:
                                contacts.only.served_at = max(contacts.only.served_at, sent_at)
                            else:
                                contacts.note_reply(step, value, sent_at, now())
                        elif kind is fx.Caller:
                            value = self.caller()
                        elif kind is fx.NewToken:
                            value = clock.new_token(effect.label)
                        elif kind is fx.Wait:
                            if self._keeper is None and (self.registry.holds or self.registry.cleanups):
                                self.keep()  # an earlier attempt to start it failed
                            if effect.wakeup is not None:
                                effect.wakeup.caller = ref(self.caller())
                            value = sleep(effect.wakeup, effect.until)
                        elif kind is fx.Attach:
                            value = self.caller(), None  # a thread cannot be cancelled; the body can call check()
                        else:
                            value = self._perform(effect, engine)
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
                    advance, value = protocol.throw, error
                    if not isinstance(error, Exception):  # Ctrl-C, or an exception of a signal handler
                        interrupt, value = error, fx.Interrupted()
        finally:
            value = interrupt = None  # the error's traceback refers to this frame: break the cycle

    def _perform(self, effect: fx.Effect, engine: AnyEngine | None) -> Any:
        if isinstance(effect, fx.CallEach):
            sent_at = clock.now()
            replies = (engine or self.engine).call_each(effect.steps, effect.timeout)
            self.registry.contacts.note(effect.steps, replies, sent_at, clock.now())
            return replies
        if isinstance(effect, fx.Scan):
            return self.engine.scan(effect)
        if isinstance(effect, fx.Listen):
            return self.shared.listen(effect.timeout, effect.keys)
        if isinstance(effect, fx.DeferCleanup):
            self.registry.defer_cleanup(effect.hold, clock.now())
            return self.keep()
        if isinstance(effect, fx.ShowPresence):
            self.registry.show_presence(effect.hold, clock.now())
            return self.keep()
        if isinstance(effect, fx.CallOn):
            return self.engine.call_on(effect.connection, effect.commands, effect.timeout)
        if isinstance(effect, fx.OpenConnection):
            return self.engine.open_connection(effect.timeout)
        if isinstance(effect, fx.CloseConnection):
            return self.engine.close_connection(effect.connection)
        if isinstance(effect, fx.Start):
            return self._beside.run(effect.place, partial(self.run, effect.protocol))
        if isinstance(effect, fx.Warn):
            return log.warning("%s", effect.message)
        if isinstance(effect, fx.Report):
            return self._report(effect.event)
        assert isinstance(effect, fx.ReportLoss)
        return self._tell(effect.hold)

    def admit(self, hold: Hold) -> None:
        """Register a hold, so that the keeper renews it."""
        self.registry.enter(hold)
        if self._keeper is None:
            self.keep()

    def keep(self) -> None:
        """Start the keeper, unless it runs."""
        if self._keeper is not None:
            return
        try:
            with self._starting:
                if self._keeper is None and not self.registry.closed:
                    keeper = threading.Thread(target=self._keep, name="holdfast-keeper", daemon=True)
                    keeper.start()
                    self._keeper = keeper
                    self.shared.start()  # the keeper needs it soon; started here, so that both fail or start together
        except RuntimeError as error:
            if not is_exiting(error):  # else the lease ends by its ttl
                self._log_not_renewed(error)

    def _log_not_renewed(self, error: RuntimeError) -> None:
        """Log that leases are not renewed, at most once a minute: each acquire and each wait tries again."""
        if (now := clock.now()) < self._log_at:
            return
        self._log_at = now + _LOG_EVERY
        names = [repr(hold.key) for hold in list(self.registry.holds)[:_MOST_NAMED]]
        log.error(
            "leases of %s are not renewed and end with their ttl (%s), because no thread can be started: %s. Let other "
            "threads end, or raise the limit (ulimit -u, or that of the container); the next acquire tries again",
            self.engine.address,
            ", ".join(names) or "none is held now",
            error,
        )

    def _keep(self) -> None:
        self._marks += greenlets.mark()
        while not self.registry.closed:
            try:
                self.run(keep(self.registry), self.shared)
            except Exception:
                log.exception("renewal loop for %s failed; restarting", self.engine.address)
                time.sleep(1.0)

    def _report(self, event: Event) -> None:
        """Log an event, and call the hooks. If the keeper reports it, another thread calls them, so renewals go on."""
        if threading.current_thread() is not self._keeper or not self.observers.hooks:
            return self.observers.report(event)
        self.observers.log(event)
        try:
            if not self._hooks.run(partial(self.observers.call_hooks, event)) and clock.now() >= self._log_at:
                self._log_at = clock.now() + _LOG_EVERY
                log.warning(
                    "on_event is too slow: %s events wait for it, so %s of %r and perhaps more are not reported to it",
                    f"{_MOST_EVENTS:,}",
                    type(event).__name__,
                    event.key,
                )
        except RuntimeError as error:
            if not is_exiting(error):
                self.observers.call_hooks(event)

    def _tell(self, hold: Hold) -> None:
        """Call on_lost in a thread of its own, so that it cannot delay the renewal of other leases."""
        self._notify(hold)
        self._report(lost_event(hold, clock.now()))

    def _notify(self, hold: Hold) -> None:
        if hold.notify is None:
            return
        try:
            self._on_lost.run(partial(_call_on_lost, hold))
        except RuntimeError as error:
            if not is_exiting(error):  # else on_lost cannot run at all
                log.error(
                    "on_lost of the lock %r runs in the thread that found the loss, because no thread can be started: "
                    "%s. It may delay renewals",
                    hold.key,
                    error,
                )
                _call_on_lost(hold)

    def close(self, timeout: float) -> None:
        """Mark all leases lost and call on_lost, release them on the server, then end connections and threads."""
        until = clock.now() + timeout
        try:
            lost = self.run(lose_all(self.registry))
            self._on_lost.close()
            self._on_lost.join(max(0.0, until - clock.now()))
            if self._keeper is not None and self._keeper is not threading.current_thread():
                self._keeper.join(max(0.0, until - clock.now()))
            self.run(give_back(lost, self.registry, self.cohorts, until))
            self._hooks.close()
            self._hooks.join(max(0.0, until - clock.now()))
        finally:
            for hold in list(self.registry.holds.values()):
                self.cohorts.leave(hold)
            self.engine.close()
            self.shared.close()
            self._beside.close(max(0.0, until - clock.now()))
            self.router.look_again()  # wake all waiters, so that they see that the client is closed

    def nodes(self) -> dict[str, NodeStatistics]:
        """For ``client.statistics()``."""
        if isinstance(self.engine, ClusterEngine):
            return {
                f"{host}:{port}": _count(node.engine, node.shared, bool(node.channels.armed))
                for (host, port), node in list(self.engine.topology.nodes.items())
            }
        return {self.address: _count(self.engine, self.shared, self.router.armed)}

    def servers(self, timeout: float) -> dict[str, Any]:
        """The engine of each server, by address; in a cluster, of each primary."""
        if isinstance(self.engine, ClusterEngine):
            return {f"{node.address[0]}:{node.address[1]}": node.engine for node in self.engine.primaries(timeout)}
        return {self.engine.address: self.engine}

    def forget(self) -> None:
        """In a forked child: begin again. Threads do not exist here; sockets and leases belong to the parent."""
        self.generation += 1
        while self._marks:
            self._marks.pop().end()
        self.engine.forget()
        self.shared.forget()
        self.registry.disown("this process was forked from the holder; the hold stayed with the parent")
        self.registry.wakeup = Wakeup()
        self.router.forget()
        self.cohorts.forget()
        self._name_channel()
        self._keeper = None
        self._on_lost.forget()
        self._hooks.forget()
        self._beside.forget()
        self._starting = threading.Lock()


def _call_on_lost(hold: Hold) -> None:
    try:
        if hold.notify is not None:
            hold.notify()
    except Exception:
        log.exception("on_lost of the lock %r failed", hold.key)


def _count(engine: Any, shared: Any, subscribed: bool) -> NodeStatistics:
    """What a client has at one server."""
    pooled, idle = engine.count_connections()
    connections, queued = shared.load()
    return NodeStatistics(
        connections=pooled + len(connections),
        idle=idle,
        queued=queued,
        subscribed=subscribed,
        resp3=any(connection.resp3 for connection in connections),
        tracking=any(connection.tracking for connection in connections),
    )
