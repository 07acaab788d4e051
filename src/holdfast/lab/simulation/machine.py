"""A machine of the simulated world: a driver like the real ones, whose threads are processes of the world.

``Process`` interprets effects with events, as drivers/blocking.py does with threads and drivers/aio.py with asyncio. A
machine can crash (its processes end without clean-up) and be paused (they do nothing for a while; then time has
passed).
"""

from __future__ import annotations

import types
from binascii import crc_hqx
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from holdfast.events import Event
from holdfast.holder import encoded
from holdfast.lab.servers.store import START_US
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.wakeup import Wakeup
from holdfast.protocol import effects as fx
from holdfast.protocol.closing import give_back, lose_all
from holdfast.protocol.hold import Hold
from holdfast.protocol.intents.session import Session
from holdfast.protocol.keepalive import LeaseRegistry, keep
from holdfast.protocol.memcached import Items
from holdfast.protocol.reporting import log_outages
from holdfast.protocol.wait.cohort import Cohorts
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.statistics import NodeStatistics

if TYPE_CHECKING:
    from holdfast.lab.simulation.programs import LabSession
    from holdfast.lab.simulation.world import World

LISTENER_PAUSE_US = 50_000


class Machine:
    """One computer with one client of Holdfast on it. It has the interface of a driver."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.address = f"world://{name}"
        self.generation = 0
        self.require = lambda feature: None  # the world offers all features
        self.crashed = False
        self.paused = False
        self.processes: list[Process] = []
        self._held_up: list[Callable[[], None]] = []
        self.skew_us = 0  # by how much its wall clock is wrong
        self.warnings: list[str] = []  # what was logged
        self.events: list[Event] = []  # reported so far
        self._tokens = 0
        self._links = 0
        self._boot()

    def _boot(self) -> None:
        self.registry = LeaseRegistry(Wakeup())
        self.router = NotificationRouter(self.registry, Wakeup)
        self.router.channel = f"bell:{self.name}"
        self.cohorts = Cohorts(Wakeup, self.registry.contacts)
        log_outages(self, self.warnings.append)
        self.keeper: Process | None = None
        self.session: LabSession | Items | None = None  # of a client of etcd or memcached, whose steps are programs

    def now(self) -> float:
        return self.world.now_us / 1e6

    def wall(self) -> float:
        return (START_US + self.world.now_us + self.skew_us) / 1e6

    def new_link(self) -> str:
        """A name for a new dedicated connection."""
        self._links += 1
        return f"{self.name}/{self._links}"

    def new_token(self, label: str) -> str:
        self._tokens += 1
        # Its last digits tell machines apart, as those of a random token do: see lua/include/fence.lua.
        secret = f"{crc_hqx(self.name.encode(), 0):018x}{self._tokens:04d}"
        return f"{encoded(self.name)}-{encoded(label)}.{secret}"

    def admit(self, hold: Hold) -> None:
        self.registry.enter(hold)
        self.keep()

    def keep(self) -> None:
        if self.keeper is None and not self.registry.closed:
            self.keeper = self.world.spawn(keep(self.registry), self)

    @types.coroutine
    def run(self, protocol: fx.Effects[Any]) -> Generator[fx.Effect, Any, Any]:
        """Run a protocol. Await this in a coroutine of a process of the world, which performs the effects."""
        if self.crashed:  # a closed coroutine still runs the exits of its ``async with`` blocks; they must do nothing
            raise GeneratorExit
        process: Process = yield fx.Caller()
        process.depth += 1
        before, process.acts_for = process.acts_for, self
        try:
            result = yield from protocol
        except fx.Interrupted:
            raise Cancelled from None
        finally:
            process.depth -= 1
            process.acts_for = before
        if process.cancel_noted:
            process.cancel_noted = False
            raise Cancelled
        return result

    def nodes(self) -> dict[str, NodeStatistics]:
        """For ``client.statistics()``. The world has no connections, except dedicated ones."""
        return {self.address: NodeStatistics(subscribed=self.router.armed)}

    async def close(self, timeout: float) -> None:
        await self.run(self._close(self.now() + timeout))

    def _close(self, until: float) -> fx.Effects[None]:
        lost = yield from lose_all(self.registry)
        yield from give_back(lost, self.registry, self.cohorts, until)
        self.router.look_again()

    # Notifications.

    def hear(self, message: bytes) -> None:
        if isinstance(self.session, Session):
            self.session.call(message.split(b" ")[0].decode())
        self.do(lambda: self.router.deliver(message, self.now()))

    def notice(self, key: bytes) -> None:
        self.do(lambda: self.router.touched(key.decode()))

    def lose_listener(self) -> None:
        """The subscriber's connection broke, or its slot has moved. A new one is made if a waiter needs it."""
        self.router.armed = False
        self.do(self.router.look_again)
        self.world.at(self.world.now_us + LISTENER_PAUSE_US, lambda: self.do(self._listen_again))

    def _listen_again(self) -> None:
        if self.router.is_needed() and not self.router.armed:
            self.world.listen(self, lambda heard: self.do(self.router.look_again))

    # Faults.

    def crash(self) -> None:
        """End all processes of this machine at once, without clean-up."""
        self.crashed = True
        self.world.unsubscribe(self)
        self.registry.holds.clear()
        for process in self.processes:
            process.kill()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        held_up, self._held_up = self._held_up, []
        for action in held_up:
            self.world.soon(action)

    def do(self, action: Callable[[], None]) -> None:
        """Run an action on this machine: now, after its pause, or (if it has crashed) never."""
        if self.crashed:
            return
        if self.paused:
            self._held_up.append(action)
        else:
            action()
