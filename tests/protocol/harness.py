"""Two machines, one lock, and something that goes wrong at a chosen message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import holdfast.aio
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Process
from holdfast.lab.simulation.world import Fate, Message, World
from holdfast.options import client_options
from holdfast.protocol.effects import wait


class Play:
    """A world whose every event is followed by a look at who believes to hold what."""

    made: ClassVar[list[Play]] = []

    def __init__(self, seed: int | None = None) -> None:
        self.world = World(seed=seed)
        self.machines: list[Machine] = []
        self.fences: list[int] = []
        Play.made.append(self)

    def end(self) -> None:
        """Whatever still runs ends without a word, rather than when it is collected as garbage."""
        for machine in self.machines:
            machine.crash()

    def client(self, name: str, *, outage_wait: float | None = 2.0) -> holdfast.aio.Client:
        machine = self.world.machine(name)
        self.machines.append(machine)
        shared = client_options(timeout=5.0, fence_retention=3600.0, cohort=64, outage_wait=outage_wait)
        return holdfast.aio.Client(machine, namespace="", shared=shared)

    def doom(self, choose: Callable[[Message], Fate | None]) -> None:
        self.world.fate = lambda message: choose(message) or Fate()

    async def sleep(self, client: holdfast.aio.Client, seconds: float) -> None:
        machine: Machine = client._driver  # type: ignore[assignment]
        await machine.run(wait(None, machine.now() + seconds))

    async def cycle(self, client: holdfast.aio.Client, *, hold: float = 0.01, **options: Any) -> int:
        async with client.lock("a", **options) as lease:
            self.fences.append(lease.fence)
            await self.sleep(client, hold)
        return lease.fence

    def start(self, client: holdfast.aio.Client, routine: Any) -> Process:
        return self.world.spawn(routine, client._driver)  # type: ignore[arg-type]

    def look(self) -> None:
        """After every event."""
        now = self.world.now_us / 1e6
        seen: dict[str, str] = {}
        for machine in self.machines:
            for hold in machine.registry.holds.values() if not machine.crashed else ():
                if hold.valid(now):
                    assert hold.name not in seen, f"{seen[hold.name]} and {machine.name} both hold {hold.name!r}"
                    seen[hold.name] = machine.name

    def step(self) -> None:
        self.world.advance()
        self.look()

    def run(self, seconds: float) -> None:
        end_us = self.world.now_us + round(seconds * 1e6)
        while self.world._events and self.world._events[0][0] <= end_us:
            self.step()
        self.world.run(seconds=(end_us - self.world.now_us) / 1e6)


def at(number: int, **fate: Any) -> Callable[[Message], Fate | None]:
    """That fate for the message of that number, counted over the world."""
    return lambda message: Fate(**fate) if message.number == number else None
