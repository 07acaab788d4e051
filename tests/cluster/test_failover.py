"""A primary that goes, with its holders and waiters, and slots that move under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio.cluster

import holdfast
import holdfast.aio
import holdfast.guard
from holdfast.names import slot_of
from tests.conformance.stages import APIS
from tests.fleet_cluster import ClusterFleet
from tests.fleets import find_redis
from tests.servers import Server


@pytest.fixture(scope="module", params=["valkey", "redis7"])
def pairs(request: pytest.FixtureRequest) -> Iterator[ClusterFleet]:
    """Three primaries, each with a replica."""
    with ClusterFleet(replicas=1, binary=find_redis() if request.param == "redis7" else "") as fleet:
        yield fleet


@pytest.fixture(params=["asyncio", "blocking"])
def face(request: pytest.FixtureRequest) -> Any:
    return APIS[request.param]


def wait_for_copy(fleet: ClusterFleet, server: Any) -> None:
    """What this primary has written is at its replica, too."""
    assert fleet.admin(server).wait(1, 5000) == 1


def test_a_primary_that_is_replaced_in_order(face: Any, pairs: ClusterFleet) -> None:
    """CLUSTER FAILOVER loses nothing: a holder keeps its lease, and a waiter its turn."""

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        # If the first vote fails it takes 6 s, in which the loop is blocked and the old primary pauses its clients.
        lease = await client.lock("orderly", ttl=10).acquire()

        async def wait() -> int:
            async with other.lock("orderly") as later:
                return int(later.fence)

        waiter = api.spawn(wait)
        await api.sleep(0.3)
        pairs.fail_over(pairs.owner("orderly"))
        left = lease.remaining()
        while 0 < lease.remaining() <= left:  # until it is renewed at the new primary
            await api.sleep(0.05)
        lease.check()
        await lease.release()
        assert await waiter.join() > lease.fence

    face.play(scenario, pairs)
    pairs.settle()


def test_a_primary_that_dies(face: Any, pairs: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client(timeout=20.0)
        lease = await client.lock("dies", ttl=20).acquire()

        async def wait() -> int:
            async with other.lock("dies", wait=60.0) as later:
                return int(later.fence)

        waiter = api.spawn(wait)
        await api.sleep(0.3)
        old = pairs.owner("dies")
        replica = pairs.replica_of(old)
        wait_for_copy(pairs, old)
        old.kill()
        try:
            pairs.wait_for(replica)
            for _ in range(100):  # until the holder's renewal has reached the new primary
                if pairs.admin(replica).pttl("dies") > 0:
                    break
                await api.sleep(0.1)
            lease.check()
            await lease.release()
            assert await waiter.join() > lease.fence
        finally:
            old.restart()
            pairs.settle()

    face.play(scenario, pairs)


def test_no_node_answers(connect: Any) -> None:
    """The error names the cluster, and each of its nodes."""
    fleet = ClusterFleet(primaries=3)
    fleet.stop()
    with pytest.raises(holdfast.Unavailable, match="nothing listens there") as caught:
        connect(fleet.url, timeout=2.0).lock("x", wait=0).acquire()
    assert len(caught.value.causes) == 3
    assert all("redis+cluster://" in node for node in caught.value.causes)


def test_a_server_that_is_no_node_of_a_cluster(connect: Any, server: Any) -> None:
    with pytest.raises(holdfast.Unavailable, match="no node of a cluster"):
        connect(server.url.replace("redis://", "redis+cluster://")).lock("x", wait=0).acquire()


def test_a_node_without_a_cluster_url(connect: Any, pairs: ClusterFleet) -> None:
    client = connect(pairs.servers[0].url)
    with pytest.raises(holdfast.Unavailable, match=rf"Use redis\+cluster://127.0.0.1:{pairs.servers[0].port} in"):
        for name in "abcdef":
            client.lock(name, wait=0).acquire()


def test_a_database_of_a_node(connect: Any) -> None:
    """Redis, unlike Valkey, says that a cluster has one database only."""
    with Server("--cluster-enabled", "yes", binary=find_redis()) as node:
        with pytest.raises(holdfast.Unavailable, match=rf"Use redis\+cluster://127.0.0.1:{node.port} in"):
            connect(f"redis://127.0.0.1:{node.port}/2").lock("x", wait=0).acquire()


def test_resharding_under_load(face: Any, pairs: ClusterFleet) -> None:
    """Slots move back and forth while six workers contend: one holder at a time, and fences rise."""
    names = ["load:1", "load:2", "{load:1}:b"]
    over = threading.Event()
    inside: dict[str, int] = dict.fromkeys(names, 0)
    fences: dict[str, int] = dict.fromkeys(names, 0)
    turns: dict[str, int] = dict.fromkeys(names, 0)
    wrong: list[str] = []

    async def scenario(api: Any) -> None:
        async def work(number: int) -> None:
            client = api.client(timeout=20.0)
            name = names[number % len(names)]
            while not over.is_set():
                async with client.lock(name, ttl=10, wait=60.0) as lease:
                    inside[name] += 1
                    if inside[name] != 1 or lease.fence <= fences[name]:
                        wrong.append(f"{name}: {inside[name]} holders, fence {lease.fence} after {fences[name]}")
                    fences[name] = lease.fence
                    await api.sleep(0.005)
                    inside[name] -= 1
                    turns[name] += 1
                await api.sleep(0.001)

        workers = [api.spawn(lambda number=number: work(number)) for number in range(6)]
        mover = threading.Thread(target=move)
        mover.start()
        while mover.is_alive():
            await api.sleep(0.1)
        before = dict(turns)
        await api.sleep(1.0)
        over.set()
        for worker in workers:
            await worker.join()
        assert not wrong
        assert all(turns[name] > before[name] for name in names), "the work goes on"

    def move() -> None:
        for _ in range(4):
            for name in names[:2]:
                pairs.move_slot(slot_of(name), pairs.other(name))
                time.sleep(0.2)

    face.play(scenario, pairs)


def test_a_client_of_redis_py(face: Any, pairs: ClusterFleet) -> None:
    async def scenario(api: Any) -> None:
        client: Any
        if api.kind == "asyncio":
            theirs = redis.asyncio.cluster.RedisCluster(host="127.0.0.1", port=pairs.servers[0].port)
            async with holdfast.aio.connect(theirs) as client, client.lock("theirs") as lease:
                assert lease.fence
            await theirs.aclose()
        else:
            with holdfast.connect(pairs.client()) as client, client.lock("theirs") as lease:
                assert lease.fence
                guard = holdfast.guard.RedisGuard(pairs.client())
                guard.set("guarded", "1", lease)
                assert pairs.client().get("guarded") == b"1"

    face.play(scenario, pairs)
