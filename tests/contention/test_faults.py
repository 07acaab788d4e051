"""Waiters whose listener, connection, server, process or client goes away under them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.lua import SCRIPTS
from tests.contention.support import (
    SOON,
    Background,
    OldServer,
    acquire_later,
    await_refresh,
    check_nobody_queues,
    next_served,
    queue_of,
    queued_pids,
    wait_in_local_queue,
)
from tests.processes.test_fork import in_child
from tests.proxy import LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY, Fault, Proxy
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, eventually, lock_keys

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def kill_listeners(admin: redis.Redis) -> None:
    admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


def kill_all(admin: redis.Redis) -> None:
    admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize("kill", [kill_listeners, kill_all])
@pytest.mark.parametrize("pause", [0.0, 0.4])
def test_waiters_survive_the_loss_of_their_connections(
    connect: Any, url: str, admin: redis.Redis, kill: Callable[[redis.Redis], None], pause: float
) -> None:
    """Whether the release comes before they listen again, or after. Whoever does so first may be served first."""
    held = connect(url).lock("x", ttl=60).acquire(timeout=5)
    waiters = [acquire_later(connect(url).lock("x", ttl=60), admin) for _ in range(3)]
    kill(admin)
    time.sleep(pause)
    while waiters:
        released_at = time.monotonic()
        held.release()
        waiter = next_served(waiters)
        assert waiter.ended_at - released_at < 0.5 + SOON
        held = waiter.outcome()
    held.release()
    check_nobody_queues(admin)
    assert lock_keys(admin) == []


def test_listener_that_was_lost_comes_back_by_itself(connect: Any, url: str, admin: redis.Redis) -> None:
    """As long as somebody needs it: one who waits, or one who holds and would like to know of a theft."""
    held = connect(url).lock("x", ttl=60).acquire(timeout=5)
    waiter = acquire_later(connect(url).lock("x", ttl=60), admin)
    for _ in range(3):
        kill_listeners(admin)
        eventually(lambda: admin.pubsub_channels("holdfast:bell:*"), 5.0, "somebody listens")
    kill_all(admin)
    time.sleep(0.5)
    admin.delete("x")
    assert held.lost.wait(SOON)
    waiter.outcome().release()
    with pytest.raises(holdfast.LeaseLost):
        held.release()


@pytest.mark.long
@pytest.mark.parametrize("kill", [kill_listeners, kill_all])
def test_hand_overs_go_on_in_a_storm_of_lost_connections(
    connect: Any, url: str, admin: redis.Redis, kill: Callable[[redis.Redis], None]
) -> None:
    until = time.monotonic() + 1.0
    inside = threading.Lock()
    fences: list[int] = []

    def work(face: Any) -> None:
        while time.monotonic() < until:
            lease = face.lock("x", ttl=60).acquire(timeout=20)
            assert lease, "it was not served in 20 s"
            assert inside.acquire(blocking=False), "two hold"
            fences.append(lease.fence)
            inside.release()
            lease.release()

    workers = [Background(partial(work, connect(url))) for _ in range(4)]
    while not all(worker.is_over() for worker in workers):
        time.sleep(0.03)
        if time.monotonic() < until:
            kill(admin)
        assert time.monotonic() < until + 20, "somebody hangs"
    for worker in workers:
        worker.outcome()
    assert fences == sorted(set(fences))
    eventually(lambda: lock_keys(admin) == [], 5.0, "nothing is left")


def test_server_that_is_restarted_empty_while_they_wait(connect: Any) -> None:
    with Server() as server:
        held = connect(server.url).lock("x", ttl=60).acquire(timeout=5)
        waiters = [acquire_later(connect(server.url).lock("x", ttl=60), server.client()) for _ in range(3)]
        server.restart()
        fences = []
        while waiters:
            lease = next_served(waiters).outcome()
            fences.append(lease.fence)
            lease.release()
        assert fences == sorted(set(fences))
        assert fences[0] > held.fence, "although the server has forgotten that one"
        assert held.lost.wait(1.0 + SOON), "long before its renewal is due"
        with pytest.raises(holdfast.LeaseLost):
            held.release()


def test_server_that_hangs_while_they_wait(connect: Any, server: Server, url: str, admin: redis.Redis) -> None:
    held = connect(url).lock("x", ttl=60).acquire(timeout=5)
    waiters = [acquire_later(connect(url).lock("x", ttl=60), admin) for _ in range(2)]
    server.pause()
    time.sleep(0.7)
    server.resume()
    assert held.held
    while waiters:
        released_at = time.monotonic()
        held.release()
        waiter = next_served(waiters)
        assert waiter.ended_at - released_at < 0.5 + SOON
        held = waiter.outcome()
    held.release()


@pytest.mark.parametrize("fault", [LOSE_REQUEST, LOSE_REPLY, MUTE_REPLY], ids=lambda fault: fault.kind)
def test_first_renewal_that_fails_costs_nothing(connect: Any, fault: Fault) -> None:
    """What a notification grants lasts the whole ttl."""
    with OldServer() as server, Proxy(server.port) as proxy, server.client() as admin:  # where nothing else would help
        for script in SCRIPTS.values():
            admin.script_load(script.source)
        held = connect(server.url).lock("x", ttl=60).acquire(timeout=5)
        waiter = acquire_later(connect(proxy.url).lock("x", ttl=60), admin)
        proxy.on("renew", fault)
        held.release()
        lease = waiter.outcome()
        assert admin.pttl("x") > 50_000
        assert 50 < lease.remaining() <= 60
        assert not lease.lost.wait(0.9)
        proxy.cut()  # what is mute would cost the release its time
        lease.release()


# close()


def close(face: Any) -> None:
    """Close its client, in a way that the end of the test may do again."""
    face.client.close() if face.kind == "blocking" else face._call(face.client.aclose())


def check_all_were_told(waiters: list[Background[Any]], closed_at: float) -> None:
    for waiter in waiters:
        error = waiter.error(5.0)
        assert isinstance(error, holdfast.Unavailable), repr(error)
        assert "closed" in str(error)
        assert waiter.ended_at - closed_at < SOON


def test_closing_a_client_ends_its_waiters(connect: Any, url: str, admin: redis.Redis) -> None:
    """One of them stands in the queue of the server, and the others in line behind it."""
    holder, leaving, staying = connect(url), connect(url), connect(url)
    held = holder.lock("x", ttl=60).acquire(timeout=5)
    waiters = [acquire_later(leaving.lock("x", ttl=60), admin)]
    waiters += [wait_in_local_queue(leaving, leaving.lock("x", ttl=60)) for _ in range(5)]
    waiters += [acquire_later(leaving.lock("x", ttl=60, cohort=0), admin) for _ in range(2)]
    patient = acquire_later(staying.lock("x", ttl=60), admin)
    closed_at = time.monotonic()
    closing = Background(lambda: close(leaving))
    check_all_were_told(waiters, closed_at)
    closing.outcome()
    released_at = time.monotonic()
    held.release()
    patient.outcome().release()
    assert patient.ended_at - released_at < 1.5, "whoever is gone does not hold up the next"
    eventually(lambda: lock_keys(admin) == [])


def test_waiter_need_not_ask_to_learn_that_its_client_was_closed(connect: Any, url: str, admin: redis.Redis) -> None:
    admin.set("x", "theirs")

    def end_one() -> float:
        leaving = connect(url)
        waiter = acquire_later(leaving.lock("x", ttl=60), admin)
        await_refresh(admin)
        closed_at = time.monotonic()
        close(leaving)
        assert isinstance(waiter.error(), holdfast.Unavailable)
        return waiter.ended_at - closed_at

    assert any(end_one() < 0.25 for _ in range(3))


def test_closing_a_client_that_holds_ends_those_in_line(connect: Any, url: str, admin: redis.Redis) -> None:
    leaving = connect(url)
    lease = leaving.lock("x", ttl=60).acquire(timeout=5)
    waiters = [wait_in_local_queue(leaving, leaving.lock("x", ttl=60)) for _ in range(6)]
    closed_at = time.monotonic()
    closing = Background(lambda: close(leaving))
    check_all_were_told(waiters, closed_at)
    closing.outcome()
    assert lease.lost.is_set()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


# fork


def test_fork_while_threads_wait(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    """One in the queue, and two in line behind it."""
    with holdfast.connect(url) as holder:
        held = holder.lock("x", ttl=60).acquire()
        assert held
        waiters = [acquire_later(client.lock("x", ttl=60), admin)]
        waiters += [Background(lambda: client.lock("x", ttl=60).acquire(timeout=20)) for _ in range(2)]
        time.sleep(0.1)

        def work() -> None:
            with client.lock("y"):
                pass
            assert client.lock("x").acquire(timeout=1) is None
            assert client.lock("x").acquire(blocking=False) is None
            eventually(lambda: queued_pids(admin) == [os.getppid()], what="that of the parent is where it was")
            client.close()

        in_child(work)
        held.release()
        while waiters:
            next_served(waiters).outcome().release()
        check_nobody_queues(admin)


def test_forked_child_waits_for_what_its_parent_holds(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    held = client.lock("x", ttl=60).acquire()
    assert held
    in_line = Background(lambda: client.lock("x", ttl=60).acquire(timeout=20))
    time.sleep(0.1)

    def work() -> None:
        fences = []
        threads = [threading.Thread(target=lambda: fences.append(_fence(client))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(fences) == 3
        assert min(fences) > held.fence

    child = Background(lambda: in_child(work))
    eventually(lambda: queue_of(admin), 5.0, "the child queues")
    held.release()
    lease = in_line.outcome()
    assert lease
    lease.release()
    child.outcome()
    assert lock_keys(admin) == []


def _fence(client: holdfast.Client) -> int:
    with client.lock("x", ttl=60, wait=15) as lease:
        return lease.fence


@asyncio_test
async def test_fork_while_tasks_wait(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as holder, holdfast.aio.connect(url) as client:
        held = await holder.lock("x", ttl=60).acquire()
        assert held
        waiters = [asyncio.create_task(_take(client)) for _ in range(3)]
        await async_eventually(lambda: queue_of(admin))

        async def use() -> None:
            async with client.lock("y"):
                pass
            assert await client.lock("x").acquire(timeout=1) is None
            await client.aclose()

        in_child(lambda: asyncio.run(use()))
        await async_eventually(lambda: queued_pids(admin) == [os.getpid()])
        await held.release()
        fences = await asyncio.wait_for(asyncio.gather(*waiters), 10)
        assert sorted(set(fences)) == fences
        assert fences[0] > held.fence
        check_nobody_queues(admin)


async def _take(client: holdfast.aio.Client) -> int:
    async with client.lock("x", ttl=60) as lease:
        return lease.fence
