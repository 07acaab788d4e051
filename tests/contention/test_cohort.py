"""Threads and tasks of one client: one of them speaks for all, and they pass the lock on among themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.contention.support import (
    SOON,
    Background,
    acquire_later,
    check_nobody_queues,
    next_served,
    queue_of,
    wait_in_local_queue,
)
from tests.support import asyncio_test, connections_of, eventually, lock_keys


def steps_sent(admin: redis.Redis) -> int:
    """How many steps the server was asked for since CONFIG RESETSTAT."""
    stats = admin.info("commandstats")
    return sum(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in ("eval", "evalsha"))


class Register:
    """Whoever holds the lock comes by here: alone, or the test fails."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.fences: list[int] = []
        self.leases: list[Any] = []

    def enter(self, lease: Any) -> None:
        assert self._inside.acquire(blocking=False), "two hold"
        self.fences.append(lease.fence)
        self.leases.append(lease)

    def leave(self) -> None:
        self._inside.release()


def work_with_threads(client: holdfast.Client, threads: int, turns: int, **options: Any) -> Register:
    register = Register()
    start = threading.Barrier(threads)

    def work() -> None:
        start.wait()
        for _ in range(turns):
            with client.lock("x", **options) as lease:
                register.enter(lease)
                time.sleep(0)
                register.leave()

    workers = [Background(work) for _ in range(threads)]
    for worker in workers:
        worker.outcome(60)
    return register


async def work_with_tasks(client: holdfast.aio.Client, tasks: int, turns: int, **options: Any) -> Register:
    register = Register()

    async def work() -> None:
        for _ in range(turns):
            async with client.lock("x", **options) as lease:
                register.enter(lease)
                await asyncio.sleep(0)
                register.leave()

    async with asyncio.timeout(60):
        await asyncio.gather(*(work() for _ in range(tasks)))
    return register


def check_passes(register: Register, steps: int) -> None:
    assert len(register.fences) == 208
    assert register.fences == sorted(set(register.fences)), "in the order of holding"
    assert len(set(map(id, register.leases))) == 208, "each has a lease of its own"
    assert all(not lease.held for lease in register.leases)
    assert steps < 104, f"{steps} steps for 208 acquisitions"


def test_threads_pass_the_lock_on_without_the_server(
    client: holdfast.Client, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.protocol.wait.waiter.PASS_WINDOW", 60.0)  # however slowly these threads wake up
    admin.config_resetstat()
    register = work_with_threads(client, 16, 13)
    check_passes(register, steps_sent(admin))
    assert len({lease.token for lease in register.leases}) < 52, "those to whom it was passed on share a token"
    assert lock_keys(admin) == []


@asyncio_test
async def test_tasks_pass_the_lock_on_without_the_server(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        admin.config_resetstat()
        check_passes(await work_with_tasks(client, 16, 13), steps_sent(admin))
        assert lock_keys(admin) == []


def test_cohort_0_sends_each_thread_through_the_server(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.config_resetstat()
    register = work_with_threads(client, 4, 10, cohort=0)
    assert steps_sent(admin) >= 41, "each is granted by a step, of its own or of who releases"
    assert len({lease.token for lease in register.leases}) == 40
    assert register.fences == sorted(set(register.fences))
    check_nobody_queues(admin)


@asyncio_test
async def test_cohort_0_sends_each_task_through_the_server(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url, cohort=0) as client:
        admin.config_resetstat()
        register = await work_with_tasks(client, 4, 10)
        assert steps_sent(admin) >= 41
        assert len({lease.token for lease in register.leases}) == 40
        check_nobody_queues(admin)


def test_each_holder_of_a_cohort_has_its_own_terms(face: Any, admin: redis.Redis) -> None:
    """What was asked for by one does not bind, or tell, the next."""
    told: list[Any] = []
    first = face.lock("x", ttl=30, max_hold=60, on_lost=lambda lease: told.append("first")).acquire(timeout=5)
    waiting = [
        wait_in_local_queue(face, face.lock("x", ttl=40, max_hold=0.5)),
        wait_in_local_queue(face, face.lock("x", ttl=50, on_lost=lambda lease: told.append("third"))),
    ]
    first.release()
    second = waiting[0].outcome()
    assert second.remaining() <= 0.5
    assert second.lost.wait(0.5 + SOON)
    with pytest.raises(holdfast.LeaseLost, match="max_hold"):
        second.release()
    third = waiting[1].outcome()
    eventually(lambda: 39 < third.remaining() <= 50, SOON)  # by the server's bell it has one grace first
    assert admin.pttl("x") > 39_000
    time.sleep(0.3)
    admin.delete("x")
    assert third.lost.wait(SOON)
    eventually(lambda: told, SOON)
    assert told == ["third"]
    with pytest.raises(holdfast.LeaseLost):
        third.release()
    assert first.fence < second.fence < third.fence


def test_lease_that_was_passed_on_is_renewed(face: Any, admin: redis.Redis) -> None:
    for _ in range(10):
        first = face.lock("x", ttl=2.4).acquire(timeout=5)
        waiter = wait_in_local_queue(face, face.lock("x", ttl=2.4))
        first.release()
        second = waiter.outcome()
        if second.token == first.token:
            break
        second.release()  # we were too slow, and it went by the server
    assert second.token == first.token, "it was passed on"
    time.sleep(2.6)
    assert second.held
    assert not first.held
    second.release()
    assert lock_keys(admin) == []


def test_lost_lease_keeps_its_object_shut_and_nobody_else(face: Any, admin: redis.Redis) -> None:
    lock = face.lock("x", ttl=60)
    lease = lock.acquire(timeout=5)
    in_line = wait_in_local_queue(face, face.lock("x", ttl=60))
    time.sleep(0.3)
    assert not in_line.is_over()
    stolen_at = time.monotonic()
    admin.delete("x")
    next_lease = in_line.outcome()
    assert in_line.ended_at - stolen_at < SOON, "it does not wait for whoever was robbed"
    assert lease.lost.is_set()
    assert next_lease.held
    next_lease.release()
    assert lock.acquire(timeout=1) is None, "the object is occupied by the lease that was lost"
    with face.lock("x"):
        pass
    with pytest.raises(holdfast.LeaseLost):
        lock.release()
    with lock:
        pass


def test_lock_object_shared_by_threads(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    register = Register()

    def work() -> None:
        for _ in range(50):
            with lock as lease:
                register.enter(lease)
                register.leave()

    workers = [Background(work) for _ in range(8)]
    for worker in workers:
        worker.outcome(60)
    assert len(register.fences) == 400
    assert register.fences == sorted(set(register.fences))
    assert lock_keys(admin) == []


@asyncio_test
async def test_lock_object_shared_by_tasks(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.lock("x")
        register = Register()

        async def work() -> None:
            for _ in range(50):
                async with lock as lease:
                    register.enter(lease)
                    await asyncio.sleep(0)
                    register.leave()

        async with asyncio.timeout(60):
            await asyncio.gather(*(work() for _ in range(8)))
        assert len(register.fences) == 400
        assert register.fences == sorted(set(register.fences))
        assert lock_keys(admin) == []


def test_two_clients_of_one_process_take_turns(connect: Any, url: str, admin: redis.Redis) -> None:
    """Neither keeps the lock to itself, however many of its own would like to have it."""
    faces = [connect(url), connect(url)]
    began = time.monotonic()
    holders: list[int] = []
    inside = threading.Lock()

    def goes_on() -> bool:
        """For a second, and longer on a busy machine, until each has had it often enough."""
        passed = time.monotonic() - began
        return passed < 1.0 or (passed < 15.0 and min(holders.count(0), holders.count(1)) <= 20)

    def work(number: int) -> None:
        while goes_on():
            lease = faces[number].lock("x", cohort=5).acquire(timeout=20)
            assert inside.acquire(blocking=False), "two hold"
            holders.append(number)
            inside.release()
            lease.release()

    workers = [Background(partial(work, number)) for number in [0] * 6 + [1] * 2]
    for worker in workers:
        worker.outcome()
    counts = [holders.count(number) for number in (0, 1)]
    assert min(counts) > 20, counts
    changes = sum(1 for one, other in pairwise(holders) if one != other)
    assert changes > len(holders) / 30, f"{changes} changes in {len(holders)} turns"
    assert lock_keys(admin) == []


def test_other_client_waits_no_longer_than_a_stint(connect: Any, url: str, admin: redis.Redis) -> None:
    """A client whose threads hold for long gives the lock back after a tenth of a second."""
    busy, other = connect(url), connect(url)
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            lease = busy.lock("x", ttl=60).acquire(timeout=20)
            time.sleep(0.02)
            lease.release()

    workers = [Background(work) for _ in range(4)]
    time.sleep(0.2)
    waits = []
    for _ in range(5):
        asked_at = time.monotonic()
        lease = other.lock("x", ttl=60).acquire(timeout=20)
        waits.append(time.monotonic() - asked_at)
        lease.release()
    over.set()
    for worker in workers:
        worker.outcome()
    assert min(waits) < 1.0, waits
    assert max(waits) < 5, waits


def test_line_stands_behind_those_who_came_before_in_the_queue(connect: Any, url: str, admin: redis.Redis) -> None:
    one, other, third = connect(url), connect(url), connect(url)
    held = one.lock("x", ttl=60).acquire(timeout=5)
    queued = [acquire_later(face.lock("x", ttl=60), admin) for face in (other, third)]
    in_line = [wait_in_local_queue(other, other.lock("x", ttl=60)) for _ in range(3)]
    assert len(queue_of(admin)) == 2, "one speaks for its process"
    held.release()
    lease = queued[0].outcome()
    time.sleep(0.2)  # longer than a stint
    lease.release()
    lease = queued[1].outcome()
    assert not any(waiter.is_over() for waiter in in_line)
    lease.release()
    fences = [lease.fence]
    while in_line:
        lease = next_served(in_line).outcome()
        fences.append(lease.fence)
        lease.release()
    assert fences == sorted(set(fences))


# Crowds.


@pytest.mark.long
def test_300_threads_each_get_it_once(client: holdfast.Client, admin: redis.Redis) -> None:
    register = work_with_threads(client, 300, 1)
    assert len(register.fences) == 300
    assert register.fences == sorted(set(register.fences))
    assert lock_keys(admin) == []
    check_nobody_queues(admin)


@pytest.mark.long
@asyncio_test
async def test_2000_tasks_each_get_it_once_over_one_connection(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        before = connections_of(admin)
        most = 0
        register = Register()

        async def work() -> None:
            nonlocal most
            async with client.lock("x") as lease:
                register.enter(lease)
                register.leave()
                if len(register.fences) % 100 == 0:
                    most = max(most, connections_of(admin))

        async with asyncio.timeout(60):
            await asyncio.gather(*(work() for _ in range(2000)))
        assert len(register.fences) == 2000
        assert register.fences == sorted(set(register.fences))
        assert most == before + 1
        assert lock_keys(admin) == []
        check_nobody_queues(admin)


@pytest.mark.long
@asyncio_test
async def test_2000_tasks_without_a_cohort(url: str, admin: redis.Redis) -> None:
    """All of them stand in the queue of the server, beside another client that wants it too."""
    async with holdfast.aio.connect(url) as client, holdfast.aio.connect(url) as other:
        register = Register()

        async def work(client: holdfast.aio.Client) -> None:
            async with client.lock("x", cohort=0) as lease:
                register.enter(lease)
                register.leave()

        async with asyncio.timeout(60):
            await asyncio.gather(*(work(client) for _ in range(1900)), *(work(other) for _ in range(100)))
        assert len(register.fences) == 2000
        assert register.fences == sorted(set(register.fences))
        check_nobody_queues(admin)
