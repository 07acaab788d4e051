"""Very many waits in one client, on a real server: its leases are kept, and no wait opens a connection of its own."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, eventually

TTL = 3.0


def hold_elsewhere(admin: redis.Redis, names: list[str]) -> None:
    """Let another holder have these locks."""
    pipeline = admin.pipeline(transaction=False)
    for name in names:
        pipeline.set(name, f"elsewhere-1-.{secrets.token_hex(16)}", px=600_000)
    pipeline.execute()


def queued(admin: redis.Redis) -> int:
    return sum(1 for _ in admin.scan_iter("*:queue:*", count=10_000))


@pytest.mark.long
@asyncio_test
async def test_three_thousand_waits_cost_their_client_no_lease(server: Server, admin: redis.Redis) -> None:
    names = [f"crowd{number}" for number in range(3000)]
    hold_elsewhere(admin, names)
    async with holdfast.aio.connect(server.url) as client:
        leases = [await client.lock(f"mine{number}", ttl=TTL, on_lost="ignore").acquire() for number in range(20)]
        waits = [asyncio.create_task(client.lock(name).acquire(timeout=6)) for name in names]
        await async_eventually(lambda: queued(admin) == len(names), 20, "all of them stand in their queues")
        before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
        await asyncio.sleep(2.0)
        asked = admin.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        assert asked < len(names) / 3, "a few steps for all of them, and not four for each"
        assert await asyncio.gather(*waits) == [None] * len(names)
        assert all(lease is not None and lease.held for lease in leases)
        for lease in leases:
            assert lease is not None
            await lease.release()
        await async_eventually(lambda: queued(admin) == 0, 20, "what they left behind was cleaned up")


@pytest.mark.long
def test_threads_that_give_up_together_share_a_few_connections(server: Server, admin: redis.Redis) -> None:
    names = [f"crowd{number}" for number in range(400)]
    hold_elsewhere(admin, names)
    with holdfast.connect(server.url) as client:
        leases = [client.lock(f"mine{number}", ttl=TTL).acquire() for number in range(10)]
        outcomes: list[object] = []
        # The first of them learn how many connections it takes to ask at once.
        before = admin.info("stats")["total_connections_received"]
        threads = [
            threading.Thread(target=lambda name=name: outcomes.append(client.lock(name).acquire(timeout=4)))
            for name in names
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: queued(admin) == len(names), 20, "all of them stand in their queues")
        asked_over = admin.info("stats")["total_connections_received"]
        for thread in threads:
            thread.join()
        assert outcomes == [None] * len(names)
        assert admin.info("stats")["total_connections_received"] <= asked_over + 20, "none of them to give up"
        assert asked_over - before < len(names) / 2
        assert all(lease is not None and lease.held for lease in leases)
        for lease in leases:
            assert lease is not None
            lease.release()
        eventually(lambda: queued(admin) == 0, 20, "what they left behind was cleaned up")


@pytest.mark.long
def test_a_waiter_of_a_crowd_is_woken_at_once(server: Server, admin: redis.Redis) -> None:
    names = [f"crowd{number}" for number in range(100)]
    with holdfast.connect(server.url) as holder, holdfast.connect(server.url) as client:
        held = {name: holder.lock(name, ttl=30).acquire() for name in names}
        got: dict[str, holdfast.Lease | None] = {}

        def wait_for(name: str) -> None:
            got[name] = client.lock(name, ttl=30).acquire(timeout=30)

        threads = [threading.Thread(target=wait_for, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        eventually(lambda: queued(admin) == len(names), 20, "all of them stand in their queues")
        time.sleep(1.5)  # some rounds of the keeper
        for lease in held.values():
            assert lease is not None
            lease.release()
        for thread in threads:
            thread.join()
        assert all(lease is not None and lease.held for lease in got.values())
        for taken in got.values():
            assert taken is not None
            taken.release()
