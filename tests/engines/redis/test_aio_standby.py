"""Ways to the server that are silent or not to be had: how the asyncio engine, and its renewals, find another."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis

import holdfast
import holdfast.aio
from tests.engines.redis.test_aio_engine import (
    LONG,
    NAME,
    OVERDUE_AFTER,
    OldServer,
    block,
    connections,
    echo,
    engine_of,
    renew,
    standby_of,
    unblock,
)
from tests.proxy import MUTE_REPLY, SWALLOW_REPLY, Proxy
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, is_subscribed


@asyncio_test
async def test_a_renewal_that_got_no_answer_in_its_time_goes_over_a_new_connection(
    proxy: Proxy, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first connection stays open, so that the renewal must find another one by itself.
    monkeypatch.setattr(OVERDUE_AFTER, 60.0)
    admin.set("k", "mine")
    async with engine_of(proxy.url) as (engine, _), standby_of(engine) as standby:
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        proxy.on("renew", MUTE_REPLY)
        (failed,) = await standby.call_each([renew("k", "mine")], 0.11)
        assert failed.silent
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        assert proxy.seen("renew") == 3


@asyncio_test
async def test_a_short_lease_outlives_a_silent_connection(proxy: Proxy) -> None:
    async with holdfast.aio.connect(proxy.url) as client:

        async def is_kept(name: str) -> bool:
            async with client.lock(name, ttl=0.5, on_lost="ignore") as lease:
                await asyncio.sleep(0.5)
                proxy.forget()
                await asyncio.sleep(1.0)
                return lease.held

        for attempt in range(4):  # half a second is less than a busy machine takes now and then
            with contextlib.suppress(holdfast.LeaseLost):
                if await is_kept(f"x{attempt}"):
                    return
    pytest.fail("it was lost each time")


@asyncio_test
async def test_a_connection_that_is_silent_while_it_is_set_up_is_given_up_for_another(proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, _):
        proxy.on("client", SWALLOW_REPLY)  # CLIENT SETNAME, which redis-py sends
        assert await engine.submit(echo("x"), 4.0) == b"x"


@asyncio_test
async def test_renewals_go_over_the_shared_connection_when_no_other_is_to_be_had() -> None:
    with Server() as server, server.client() as admin:
        admin.set("k", "mine")
        async with engine_of(server.url) as (engine, _), standby_of(engine) as standby:
            blocked = await block(engine, admin)
            await asyncio.sleep(standby.PATIENCE + 0.1)
            admin.config_set("maxclients", 1)
            renewals = [asyncio.ensure_future(standby.call_each([renew("k", "mine")], LONG)) for _ in range(3)]
            await async_eventually(lambda: admin.info("stats")["rejected_connections"], what="no second connection")
            await asyncio.sleep(0.1)
            assert not any(renewal.done() for renewal in renewals)
            unblock(admin)
            await blocked
            assert await asyncio.gather(*renewals) == [[1]] * 3
            assert len(connections(admin)) == 1


@asyncio_test
async def test_a_lease_outlives_a_time_without_free_connections() -> None:
    with Server() as server, server.client() as admin, Proxy(server.port) as proxy:
        async with holdfast.aio.connect(proxy.url) as client:
            lease = await client.lock("x", ttl=4.0).acquire()
            assert lease is not None
            admin.config_set("maxclients", 1)
            for _ in range(10):  # each of which is silence for longer than renewals wait for the shared connection
                server.pause()
                await asyncio.sleep(0.3)
                server.resume()
                await asyncio.sleep(0.2)
            assert lease.held
            await lease.release()


@asyncio_test
async def test_a_waiter_that_found_no_free_connection_is_notified_once_there_is_one() -> None:
    with OldServer("--rename-command", "HELLO", "") as server, server.client(protocol=2) as admin:
        async with (
            holdfast.aio.connect(f"{server.url}?client_name={NAME}") as client,
            holdfast.aio.connect(server.url) as other,
        ):
            async with client.lock("warm"):
                held = await other.lock("x").acquire()
            assert held is not None
            admin.config_set("maxclients", 1)
            waiting = asyncio.create_task(client.lock("x").acquire())
            await async_eventually(lambda: admin.info("stats")["rejected_connections"], what="none to listen on")
            admin.config_set("maxclients", 1000)
            await async_eventually(lambda: any(found["sub"] == "1" for found in connections(admin)), what="it listens")
            await async_eventually(lambda: is_subscribed(client), what="it was told so")
            await held.release()
            lease = await waiting
            assert lease is not None
            await lease.release()
