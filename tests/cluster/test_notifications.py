"""Waiters are notified by sharded channels: on the node of their slot, wherever that goes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from holdfast.names import slot_of
from tests.conformance.stages import Scenario
from tests.fleet_cluster import ClusterFleet

Play = Callable[[Scenario], Any]


def steps(fleet: ClusterFleet) -> int:
    """Steps that the whole cluster has run."""
    stats: list[Any] = [fleet.admin(server).info("commandstats") for server in fleet.servers]
    return sum(
        int(stat.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for stat in stats for name in ("evalsha", "eval")
    )


def channels(fleet: ClusterFleet, server: Any) -> list[str]:
    said: Any = fleet.admin(server).execute_command("PUBSUB", "SHARDCHANNELS")
    return [channel.decode() for channel in said]


def test_a_contended_lock_is_handed_over_without_polling(play: Play, fleet: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        turns = 30

        async def work() -> None:
            client = api.client(cohort=0)
            for _ in range(turns):
                async with client.lock("contended"):
                    await api.sleep(0.001)

        for server in fleet.servers:
            fleet.admin(server).config_resetstat()
        workers = [api.spawn(work) for _ in range(4)]
        for worker in workers:
            await worker.join()
        # An acquire and a release each; a refusal, a second ask after subscribing, and a refresh now and then.
        assert steps(fleet) < 4 * turns * 4

    play(scenario)


def test_the_locks_of_one_slot_share_a_channel(play: Play, fleet: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        names = ["{shared}:1", "{shared}:2", "{shared}:3"]
        leases = [await client.lock(name).acquire() for name in names]

        async def wait(name: str) -> None:
            async with other.lock(name):
                pass

        waiters = [api.spawn(lambda name=name: wait(name)) for name in names]
        owner = fleet.owner("{shared}")
        await api.sleep(0.6)
        own = [
            channel for channel in channels(fleet, owner) if channel.endswith(":{shared}:1}") or "{shared}" in channel
        ]
        assert len(own) == 1
        assert slot_of(own[0]) == slot_of(names[0])
        for lease in leases:
            await lease.release()
        for waiter in waiters:
            await waiter.join()

    play(scenario)


def test_waiters_are_notified_after_their_slot_has_moved(play: Play, fleet: ClusterFleet) -> None:
    """The server ends the subscription when the slot goes; the client subscribes on the new node by itself."""

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock("sleeper", ttl=30).acquire()

        async def wait() -> float:
            async with other.lock("sleeper"):
                return time.monotonic()

        waiter = api.spawn(wait)
        await api.sleep(0.6)
        source, target = fleet.owner("sleeper"), fleet.other("sleeper")
        assert any("{sleeper}" in channel for channel in channels(fleet, source))
        fleet.move_slot(slot_of("sleeper"), target)
        for _ in range(100):
            if any("{sleeper}" in channel for channel in channels(fleet, target)):
                break
            await api.sleep(0.05)
        assert any("{sleeper}" in channel for channel in channels(fleet, target)), "subscribed on the new node"
        await api.sleep(0.6)  # the waiter has asked there, with its channel
        published = fleet.admin(target).info("commandstats").get("cmdstat_spublish", {"calls": 0})["calls"]
        await lease.release()
        await waiter.join()
        after = fleet.admin(target).info("commandstats")["cmdstat_spublish"]["calls"]
        assert after == published + 1

    play(scenario)


def test_a_lost_subscriber_is_renewed(play: Play, fleet: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock("cut", ttl=30).acquire()

        async def wait() -> int:
            async with other.lock("cut") as later:
                return int(later.fence)

        waiter = api.spawn(wait)
        await api.sleep(0.6)
        owner = fleet.owner("cut")
        fleet.admin(owner).execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        fleet.admin(owner).execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        for _ in range(100):
            if any("{cut}" in channel for channel in channels(fleet, owner)):
                break
            await api.sleep(0.05)
        assert any("{cut}" in channel for channel in channels(fleet, owner))
        await lease.release()
        assert await waiter.join() > lease.fence

    play(scenario)


def test_a_crowd_on_many_slots(play: Play, fleet: ClusterFleet) -> None:
    """The keeper shows the presence of many waiters, slot by slot."""

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        names = [f"crowd:{number % 20}" for number in range(60)]
        leases = {name: await client.lock(name, ttl=30).acquire() for name in set(names)}

        async def wait(name: str) -> None:
            async with other.lock(name):
                pass

        waiters = [api.spawn(lambda name=name: wait(name)) for name in names]
        await api.sleep(2.5)
        for lease in leases.values():
            await lease.release()
        for waiter in waiters:
            await waiter.join()

    play(scenario)


def test_a_latch_and_a_cached_value_notify(play: Play, fleet: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()

        async def wait() -> bool:
            return bool(await client.latch("gate", 1).wait(10.0))

        waiter = api.spawn(wait)
        await api.sleep(0.3)
        await other.latch("gate", 1).count_down()
        assert await waiter.join()

        computed = []

        def compute() -> int:
            computed.append(1)
            time.sleep(0.3)
            return 42

        async def ask(one: Any) -> Any:
            found = one.get_or_compute("value", compute)
            return await found if inspect.isawaitable(found) else found

        both = [api.spawn(lambda one=one: ask(one)) for one in (client, other)]
        assert [await one.join() for one in both] == [42, 42]
        assert len(computed) == 1

    play(scenario)
