"""Slots that have moved, are moving, or move back and forth: each step runs once, on the node that has its keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import holdfast
from holdfast.names import slot_of
from tests.conformance.stages import Scenario
from tests.fleet_cluster import ClusterFleet

Play = Callable[[Scenario], Any]


@contextmanager
def moving(fleet: ClusterFleet, key: str) -> Iterator[tuple[Any, Any]]:
    """The slot of this key is on its way, and arrives at the end."""
    slot, source, target = slot_of(key), fleet.owner(key), fleet.other(key)
    fleet.begin_move(slot, source, target)
    try:
        yield source, target
    finally:
        fleet.move_keys(slot, source, target)
        fleet.end_move(slot, source, target)


def calls(fleet: ClusterFleet, server: Any, command: str) -> int:
    stats: Any = fleet.admin(server).info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_a_step_follows_a_slot_that_has_moved(play: Play, fleet: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        first = await client.lock("moved").acquire()
        await first.release()
        target = fleet.other("moved")
        fleet.move_slot(slot_of("moved"), target)
        lease = await client.lock("moved").acquire()
        assert lease.fence > first.fence, "the fence moved, too"
        assert fleet.admin(target).exists("moved")
        await lease.release()
        assert not fleet.admin(target).exists("moved")

    play(scenario)


def test_a_holder_keeps_its_lease_while_its_slot_moves(play: Play, fleet: ClusterFleet) -> None:
    """A renewal is one key, so it follows ASK; a release has several keys, and waits until the slot has moved."""

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock("held", ttl=1.5).acquire()
        with moving(fleet, "held") as (source, target):
            fleet.move_keys(slot_of("held"), source, target)
            asked = calls(fleet, target, "asking")
            await api.sleep(2.5)
            lease.check()
            assert calls(fleet, target, "asking") > asked, "it was told to ask elsewhere"
            with pytest.raises(holdfast.Unavailable, match="moving|too busy"):
                await other.lock("held", wait=1.0).acquire()
        assert await other.lock("held", wait=1.0).acquire() is None
        lease.check()
        await lease.release()
        assert not fleet.admin(fleet.owner("held")).exists("held")

    play(scenario)


def test_an_acquire_waits_until_the_slot_has_moved(play: Play, fleet: ClusterFleet) -> None:
    """TRYAGAIN: of its keys some exist and some do not."""

    async def scenario(api: Any) -> None:
        client = api.client()
        first = await client.lock("again").acquire()
        await first.release()  # the fence stays, the other keys are gone

        async def acquire() -> Any:
            async with client.lock("again", wait=20.0) as lease:
                return lease.fence

        with moving(fleet, "again"):
            waiter = api.spawn(acquire)
            await api.sleep(0.5)
        assert await waiter.join() > first.fence

    play(scenario)


def test_a_script_that_the_other_node_does_not_know(play: Play, fleet: ClusterFleet) -> None:
    """After ASKING a node runs one command, so a NOSCRIPT would leave the step without an answer."""

    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("unknown", ttl=5).acquire()
        with moving(fleet, "unknown") as (source, target):
            fleet.move_keys(slot_of("unknown"), source, target)
            fleet.admin(target).script_flush()
            await lease.extend(7)
            assert fleet.admin(target).execute_command("CLUSTER", "COUNTKEYSINSLOT", slot_of("unknown")) > 0
        assert lease.remaining() > 5.5
        await lease.release()

    play(scenario)


def test_two_nodes_that_name_each_other(play: Play, fleet: ClusterFleet) -> None:
    """The other node does not import the slot, so it sends the step back. That has an end, and nothing ran."""

    async def scenario(api: Any) -> None:
        client = api.client(timeout=1.0)
        await (await client.lock("loop").acquire()).release()
        source, target = fleet.owner("loop"), fleet.other("loop")
        fleet.client().flushall()  # of a key that does not exist, a node says that the other one may have it
        fleet.admin(source).execute_command("CLUSTER", "SETSLOT", slot_of("loop"), "MIGRATING", fleet.id_of(target))
        try:
            with pytest.raises(holdfast.Unavailable, match="disagree"):
                await client.lock("loop", wait=0).acquire()
        finally:
            fleet.admin(source).execute_command("CLUSTER", "SETSLOT", slot_of("loop"), "STABLE")
        async with client.lock("loop"):
            pass

    play(scenario)


def test_renewals_of_many_nodes_after_a_move(play: Play, fleet: ClusterFleet) -> None:
    """The keeper renews leases of all nodes in one go; those whose slots have moved are sent again."""

    async def scenario(api: Any) -> None:
        client = api.client()
        leases = {f"many:{number}": await client.lock(f"many:{number}", ttl=1.2).acquire() for number in range(12)}
        for key in list(leases)[::3]:
            fleet.move_slot(slot_of(key), fleet.other(key))
        await api.sleep(2.0)
        for lease in leases.values():
            lease.check()
            await lease.release()

    play(scenario)


def test_a_lock_on_names_of_several_nodes(play: Play, fleet: ClusterFleet) -> None:
    _, second, third = names = tuple(fleet.name_on(server) for server in fleet.primaries)

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock(*names).acquire()
        assert set(lease.fences) == set(names)
        assert await client.lock(*names).locked()
        assert await other.lock(second, wait=0).acquire() is None

        async def wait() -> Any:
            async with other.lock(third, second, wait=10.0) as later:
                return later.fences

        waiter = api.spawn(wait)
        await api.sleep(0.2)
        fleet.move_slot(slot_of(second), fleet.other(second))
        await lease.release()
        fences = await waiter.join()
        assert fences[second] > lease.fences[second]
        assert fences[third] > lease.fences[third]

    play(scenario)


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize("recipe", ["watch", "multi", "getset", "set_nx"])
def test_a_recipe_follows_its_key(play: Play, fleet: ClusterFleet, recipe: str) -> None:
    """Those with WATCH or MULTI need one connection, to the node of their key."""

    async def scenario(api: Any) -> None:
        lock = api.client().recipe(recipe, "recipe", prefix="")
        for _ in range(2):
            for step in (lock.acquire, lock.release):
                done = step()
                if inspect.isawaitable(done):
                    await done
            fleet.move_slot(slot_of("recipe"), fleet.other("recipe"))

    play(scenario)
