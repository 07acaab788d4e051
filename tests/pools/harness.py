"""Some machines, one room, and something that goes wrong at a chosen message."""

from __future__ import annotations

from typing import Any

import holdfast.aio
from holdfast.protocol.kinds.pool import PoolHold
from tests.protocol.harness import Play

MODES = ("read", "write", "permit")
PERMITS = 2


def place_of(hold: object) -> str:
    """The permit or the side of a hold, which must be that of a pool."""
    assert isinstance(hold, PoolHold)
    return hold.permit


class RoomPlay(Play):
    """A world whose every event is followed by a look at who believes to be inside."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.most = 0  # that were inside at the same time

    def look(self) -> None:
        now = self.world.now_us / 1e6
        inside: list[str] = []
        for machine in self.machines:
            for hold in list(machine.registry.holds.values()) if not machine.crashed else ():
                if hold.valid(now):
                    inside.append(place_of(hold))
        self.most = max(self.most, len(inside))
        self.check_places(inside)

    def check_places(self, inside: list[str]) -> None:
        """Those may hold at the same time."""
        if "write" in inside:
            assert len(inside) == 1, f"a writer is not alone: {inside}"
        permits = [place for place in inside if place.startswith("permit")]
        assert len(permits) <= PERMITS, f"too many: {permits}"
        assert len(set(permits)) == len(permits), f"two have the same: {permits}"
        assert all(0 <= int(place.split()[1]) < PERMITS for place in permits), f"no such permit: {permits}"

    def lock(self, client: holdfast.aio.Client, mode: str, **options: Any) -> Any:
        if mode == "permit":
            return client.semaphore("a", PERMITS, **options)
        return getattr(client.rwlock("a", **options), mode)

    async def visit(self, client: holdfast.aio.Client, mode: str, *, hold: float = 0.01, **options: Any) -> None:
        async with self.lock(client, mode, **options) as lease:
            self.fences.append(lease.fence)
            await self.sleep(client, hold)

    def left(self) -> list[str]:
        """What is on the server of the room, less fences and tombstones."""
        kept = (b":fence:", b":gone:")
        return [key.decode() for key in self.world.store.values if not any(word in key for word in kept)]
