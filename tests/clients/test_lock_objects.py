"""A Lock object, shared as threading.Lock and asyncio.Lock are."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.support import asyncio_test, eventually, later, lock_keys, took


def test_object_shared_by_threads_excludes_them(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    inside, worst, fences = 0, 0, []

    def work() -> None:
        nonlocal inside, worst
        for _ in range(25):
            with lock as lease:
                inside += 1
                worst = max(worst, inside)
                fences.append(lease.fence)
                time.sleep(0.0002)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1
    assert fences == sorted(set(fences))
    assert len(fences) == 200
    assert lock_keys(admin) == []


@asyncio_test
async def test_object_shared_by_tasks_excludes_them(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.lock("x")
        inside, worst = 0, 0

        async def work() -> None:
            nonlocal inside, worst
            for _ in range(10):
                async with lock:
                    inside += 1
                    worst = max(worst, inside)
                    await asyncio.sleep(0)
                    inside -= 1

        await asyncio.gather(*(work() for _ in range(20)))
        assert worst == 1
        assert lock_keys(admin) == []


def test_another_thread_may_release(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    assert lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    assert lock_keys(admin) == []
    with pytest.raises(holdfast.NotHeld):
        lock.release()


def test_with_releases_its_own_lease_and_not_the_current_one(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    with lock as first:
        # Another thread releases the object and acquires it again while this one is inside.
        def take_over() -> None:
            lock.release()
            taken.append(lock.acquire())

        taken: list[Any] = []
        thread = threading.Thread(target=take_over)
        thread.start()
        thread.join()
        assert not first.held
    (second,) = taken
    assert second.held
    assert admin.get("x") == second.token.encode()
    lock.release()
    assert lock_keys(admin) == []


@asyncio_test
async def test_asyncio_with_releases_its_own_lease_and_not_the_current_one(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.lock("x")
        async with lock:

            async def take_over() -> Any:
                await lock.release()
                return await lock.acquire()

            second = await asyncio.create_task(take_over())
        assert second.held
        assert admin.get("x") == second.token.encode()
        await lock.release()
        assert lock_keys(admin) == []


def test_block_may_be_left_in_another_thread_than_it_was_entered(client: holdfast.Client, admin: redis.Redis) -> None:
    # A generator that holds a lock is resumed by whichever thread of a pool is free.
    def hold() -> Any:
        with client.lock("x"):
            yield

    holding = hold()
    next(holding)
    thread = threading.Thread(target=holding.close)
    thread.start()
    thread.join()
    assert lock_keys(admin) == []


@asyncio_test
async def test_block_may_be_left_in_another_task_than_it_was_entered(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:

        async def hold() -> Any:
            async with client.lock("x"):
                yield

        holding = hold()
        await asyncio.create_task(holding.__anext__())
        await asyncio.create_task(holding.aclose())
        assert lock_keys(admin) == []


def test_object_is_not_reentrant(face: Any) -> None:
    lock = face.lock("x")
    lease = lock.acquire(timeout=5)
    assert lock.acquire(blocking=False) is None
    with took(less_than=5.0, at_least=0.25):
        assert lock.acquire(timeout=0.3) is None
    lease.release()


def test_lost_lease_occupies_its_object_until_release_has_said_so(face: Any, admin: redis.Redis) -> None:
    lock = face.lock("x", ttl=0.6)
    lease = lock.acquire(timeout=5)
    admin.delete("x")
    assert lease.lost.wait(3)
    assert lock.acquire(blocking=False) is None
    with pytest.raises(holdfast.LeaseLost):
        lock.release()
    again = lock.acquire(timeout=5)
    assert again
    again.release()


def test_locked_is_asked_of_the_server(face: Any, admin: redis.Redis) -> None:
    lock = face.lock("x")
    assert lock.locked() is False
    admin.set("x", "another's")
    assert lock.locked() is True


def test_with_that_cannot_get_in_says_how_long_it_waited(face: Any, admin: redis.Redis) -> None:
    admin.set("x", "another's", px=60_000)
    with took(less_than=5.0), pytest.raises(holdfast.AcquireTimeout, match="within 1 s") as caught:
        with face.lock("x", wait=1.0):
            pass
    assert isinstance(caught.value, TimeoutError)
    with took(less_than=5.0), pytest.raises(holdfast.AcquireTimeout, match="first try"):
        with face.lock("x", wait=0):
            pass
    assert admin.get("x") == b"another's"


def test_waiter_gets_in_when_a_foreign_holder_leaves(face: Any, admin: redis.Redis) -> None:
    admin.set("x", "another's")  # one without a ttl, at that
    with took(less_than=3.0), later(0.3, admin.delete, "x"):
        lease = face.lock("x").acquire(timeout=10)
    assert lease
    lease.release()


def test_waiter_gets_in_when_a_dead_holder_expires(face: Any, admin: redis.Redis) -> None:
    admin.set("x", "a dead one's", px=400)
    with took(less_than=3.0):
        lease = face.lock("x").acquire(timeout=10)
    assert lease
    lease.release()


@asyncio_test
async def test_asyncio_try_without_waiting_does_not_wait_behind_a_task_that_does(url: str) -> None:
    # The object was just released and a waiter is about to take it: it is neither locked nor to be had.
    async with holdfast.aio.connect(url) as client:
        lock = client.lock("x")
        assert await lock.acquire()
        over = asyncio.Event()

        async def hold_long() -> None:
            async with lock:
                await over.wait()

        waiter = asyncio.create_task(hold_long())
        await asyncio.sleep(0.05)
        await lock.release()
        try:
            async with asyncio.timeout(3.0):
                lease = await lock.acquire(blocking=False)
                if lease:
                    await lease.release()
            async with asyncio.timeout(3.0):
                lease = await lock.acquire(timeout=0.2)
                if lease:
                    await lease.release()
        finally:
            over.set()
            await waiter


def test_two_releases_at_once_release_once(client: holdfast.Client) -> None:
    for _ in range(30):
        lease = client.lock("x").acquire()
        assert lease
        outcomes: list[str] = []

        def release(lease: Any = lease, outcomes: list[str] = outcomes) -> None:
            try:
                lease.release()
                outcomes.append("released")
            except holdfast.NotHeld:
                outcomes.append("not held")

        threads = [threading.Thread(target=release) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["not held", "not held", "released"]


def test_objects_are_not_kept_alive(client: holdfast.Client) -> None:
    lock = client.lock("x")
    with lock:
        pass
    remembered = weakref.ref(lock)
    del lock
    gc.collect()
    eventually(lambda: remembered() is None)


def test_a_lock_object_of_a_closed_client_does_not_wait_for_its_own_lease(connect: Any, url: str) -> None:
    face = connect(url)
    lock = face.lock("x")
    lease = lock.acquire()

    def wait() -> None:
        with pytest.raises(holdfast.Unavailable):
            lock.acquire()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    face.client.close() if face.kind == "blocking" else face._call(face.client.aclose())
    with pytest.raises(holdfast.Unavailable, match="closed"):
        lock.acquire()
    waiter.join(10)
    assert not waiter.is_alive()
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lock.release()


def test_who_nests_a_lock_in_itself_is_told_so(face: Any) -> None:
    lock = face.lock("x", wait=1.0)
    with lock, pytest.raises(holdfast.AcquireTimeout, match="th(is|er) thread or task .*holds it"):
        with face.lock("y"), lock:
            pass
    lost = face.lock("z", wait=0.05, ttl=0.5, renew=False)
    lease = lost.acquire(timeout=5)
    assert lease.lost.wait(5)
    with pytest.raises(holdfast.AcquireTimeout, match="was lost"), lost:
        pass
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
