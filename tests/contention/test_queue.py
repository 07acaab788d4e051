"""The queue on a real server: whoever waited longest is next, unless it is dead or has left."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.contention.support import (
    SOON,
    Background,
    Waiter,
    acquire_later,
    check_nobody_queues,
    queue_of,
    queued_pids,
)
from tests.proxy import Proxy
from tests.support import Script, async_eventually, asyncio_test, eventually, lock_keys

# By design it is one and a half seconds, whatever the ttl.
PASSED_OVER_WITHIN = 5.0
CLEANED_UP = "if the server is busy, the keeper cleans up"


def test_processes_are_served_in_the_order_of_their_arrival(
    client: holdfast.Client, url: str, admin: redis.Redis
) -> None:
    held = client.lock("x", ttl=600).acquire()
    assert held
    with ExitStack() as stack:
        waiters = [stack.enter_context(Waiter(kind, url)) for kind in ["blocking", "asyncio"] * 2]
        for waiter in waiters:
            waiter.queue_up(admin)
        assert queued_pids(admin) == [waiter.pid for waiter in waiters]
        time.sleep(1.2)  # they refresh, and keep their places
        assert queued_pids(admin) == [waiter.pid for waiter in waiters]
        held.release()
        served = [waiter.served() for waiter in waiters]
        for waiter in waiters:
            waiter.process.finish()
    fences = [held.fence, *(fence for fence, _ in served)]
    assert fences == sorted(set(fences))
    moments = [at for _, at in served]
    assert moments == sorted(moments)
    assert lock_keys(admin) == []
    check_nobody_queues(admin)


def test_newcomers_do_not_barge_in(connect: Any, url: str, admin: redis.Redis) -> None:
    """Not even one that asks again and again without waiting."""
    holder, patient, pushy = connect(url), connect(url), connect(url)
    held = holder.lock("x", ttl=600).acquire(timeout=5)
    waiter = acquire_later(patient.lock("x", ttl=600), admin)
    over = threading.Event()
    barged: list[Any] = []

    def push() -> None:
        while not over.is_set():
            if lease := pushy.lock("x", ttl=600).acquire(blocking=False):
                barged.append(lease)
                return

    pushing = Background(push)
    time.sleep(0.1)
    held.release()
    lease = waiter.outcome()
    over.set()
    pushing.outcome()
    assert barged == []
    lease.release()


@pytest.mark.parametrize("how", ["killed", "stopped", "cut off"])
def test_dead_head_of_the_queue_is_passed_over_and_a_frozen_one_costs_its_ttl(
    connect: Any, url: str, proxy: Proxy, admin: redis.Redis, how: str
) -> None:
    held = connect(url).lock("x", ttl=600).acquire(timeout=5)
    with Waiter(connect.kind, proxy.url if how == "cut off" else url, ttl=600 if how == "killed" else 1) as head:
        head.queue_up(admin)
        follower = acquire_later(connect(url).lock("x", ttl=600), admin)
        before = subscribers(admin)
        if how == "cut off":
            proxy.blackhole()
        else:
            head.process.send(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "killed":
            eventually(lambda: subscribers(admin) == before - 1, 5.0, "the server sees that its connection is closed")
        released_at = time.monotonic()
        held.release()
        lease = follower.outcome()
        assert follower.ended_at - released_at < PASSED_OVER_WITHIN
        assert lease.fence > held.fence
        lease.release()


def subscribers(admin: redis.Redis) -> int:
    return len(admin.pubsub_channels("*holdfast:bell:*"))


def test_many_frozen_heads_cost_the_ttl_of_one(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    """The first is granted the lock; by the time that its ttl is over the others have lost their places."""
    held = client.lock("x", ttl=600).acquire()
    assert held
    code = """
        import threading
        client = holdfast.connect(url)
        for _ in range(20):
            threading.Thread(target=client.lock("x", ttl=2.5, cohort=0).acquire, daemon=True).start()
        time.sleep(60)
    """
    with Script(code, url) as crowd:
        eventually(lambda: len(queue_of(admin)) == 20, 10.0, "all of them queue")
        with holdfast.connect(url) as another:
            follower = acquire_later(another.lock("x", ttl=600), admin)
            crowd.send(signal.SIGSTOP)
            released_at = time.monotonic()
            held.release()
            lease = follower.outcome()
            assert follower.ended_at - released_at < 4.5, "the ttl of two is 5 s"
            assert lease
            lease.release()


def test_a_killed_process_with_forty_waiters_does_not_delay_the_next(
    client: holdfast.Client, url: str, admin: redis.Redis
) -> None:
    """Nobody waits for a reservation of one of them, which lasts 0.75 s and is written into the lock."""
    held = client.lock("x", ttl=600).acquire()
    assert held
    code = """
        import threading
        client = holdfast.connect(url)
        for _ in range(40):
            threading.Thread(target=client.lock("x", ttl=600, cohort=0).acquire, daemon=True).start()
        time.sleep(60)
    """
    with Script(code, url) as crowd, holdfast.connect(url) as another:
        eventually(lambda: len(queue_of(admin)) == 40, 20.0, "all of them queue")
        follower = acquire_later(another.lock("x", ttl=600), admin)
        token = queue_of(admin)[-1]
        before = subscribers(admin)
        crowd.send(signal.SIGKILL)
        eventually(lambda: subscribers(admin) == before - 1, 5.0, "the server sees that its connection is closed")
        held.release()
        owner = admin.get("x")
        lease = follower.outcome()
        assert owner == token.encode()
        lease.release()


STALE = 200_000
SEARCHED = 500  # as in lua/include/queue.lua


def test_two_hundred_thousand_stale_entries_are_struck_off_a_few_at_a_time(
    client: holdfast.Client, url: str, admin: redis.Redis
) -> None:
    queue, waiters = "x:hf1:queue:{x}", "x:hf1:waiters:{x}"
    for start in range(0, STALE, 10_000):
        tokens = [f"tenant{number}" for number in range(start, start + 10_000)]
        admin.zadd(queue, {token: score for score, token in enumerate(tokens, start)})
        admin.hset(waiters, mapping=dict.fromkeys(tokens, "1 30000 3600000 64 0 no-such-channel"))
    held = client.lock("x", ttl=600).acquire(blocking=False)
    assert held
    assert admin.zcard(queue) == admin.hlen(waiters) == STALE - SEARCHED
    with holdfast.connect(url) as another:
        waiter = Background(lambda: another.lock("x", ttl=600).acquire(timeout=20))
        eventually(lambda: admin.zscore(queue, "tenant1500") is None, 5.0, "its refreshes strike off more")
        before = admin.zcard(queue)
        held.release()
        lease = waiter.outcome()
        assert lease
        assert lease.fence > held.fence
        assert admin.zcard(queue) > before - 10 * SEARCHED
        lease.release()


def test_head_that_died_long_before_costs_nothing(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    held = client.lock("x", ttl=600).acquire()
    assert held
    with Waiter("blocking", url) as head:
        head.queue_up(admin)
        with holdfast.connect(url) as another:
            follower = acquire_later(another.lock("x", ttl=600), admin)
            head.process.send(signal.SIGSTOP)
            eventually(lambda: head.pid not in queued_pids(admin), 5.0, "it loses its place")
            (token,) = queue_of(admin)
            held.release()
            owner = admin.get("x")
            lease = follower.outcome()
            assert owner == token.encode(), "it was granted at once"
            assert lease
            lease.release()


def test_waiter_that_was_stopped_beyond_its_ttl_waits_again(
    client: holdfast.Client, url: str, admin: redis.Redis
) -> None:
    """It was granted the lock while it could not know. When it wakes up the notification is older than its ttl."""
    held = client.lock("x", ttl=600).acquire()
    assert held
    with Waiter("blocking", url, ttl=3) as head:  # its requests have a third of that, also on a busy machine
        head.queue_up(admin)
        with holdfast.connect(url) as another:
            follower = acquire_later(another.lock("x", ttl=600), admin)
            head.process.send(signal.SIGSTOP)
            held.release()
            lease = follower.outcome()
            assert lease
            head.process.send(signal.SIGCONT)
            eventually(lambda: queued_pids(admin) == [head.pid], 5.0, "it queues again")
            assert lease.held
            lease.release()
            fence, _ = head.served()
            assert fence > lease.fence
            head.process.finish()
    assert lock_keys(admin) == []


def test_waiter_that_gives_up_leaves_the_queue(connect: Any, url: str, admin: redis.Redis) -> None:
    holder, first, second = connect(url), connect(url), connect(url)
    held = holder.lock("x", ttl=600).acquire(timeout=5)
    impatient = acquire_later(first.lock("x", ttl=600), admin, timeout=0.7)
    patient = acquire_later(second.lock("x", ttl=600), admin)
    assert impatient.outcome() is None
    eventually(lambda: len(queue_of(admin)) == 1, what=CLEANED_UP)
    held.release()
    patient.outcome().release()
    check_nobody_queues(admin)
    assert lock_keys(admin) == []


def test_waiter_that_gives_up_in_line_is_not_called(face: Any, admin: redis.Redis) -> None:
    """The same within one process."""
    held = face.lock("x", ttl=600).acquire(timeout=5)
    impatient = Background(lambda: face.lock("x", ttl=600).acquire(timeout=1))
    time.sleep(0.1)
    patient = Background(lambda: face.lock("x", ttl=600).acquire(timeout=20))
    assert impatient.outcome() is None
    assert queue_of(admin) == [], "whoever stands in line is not known to the server"
    released_at = time.monotonic()
    held.release()
    lease = patient.outcome()
    assert patient.ended_at - released_at < SOON
    lease.release()
    assert lock_keys(admin) == []


@asyncio_test
async def test_cancelled_waiter_leaves_the_queue(url: str, admin: redis.Redis) -> None:
    async with (
        holdfast.aio.connect(url) as holder,
        holdfast.aio.connect(url) as first,
        holdfast.aio.connect(url) as second,
    ):
        held = await holder.lock("x", ttl=600).acquire()
        assert held
        cancelled = asyncio.create_task(first.lock("x", ttl=600).acquire())
        await async_eventually(lambda: len(queue_of(admin)) == 1)
        patient = asyncio.create_task(second.lock("x", ttl=600).acquire())
        await async_eventually(lambda: len(queue_of(admin)) == 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await async_eventually(lambda: len(queue_of(admin)) == 1, what=CLEANED_UP)
        released_at = time.monotonic()
        await held.release()
        lease = await patient
        assert time.monotonic() - released_at < SOON
        assert lease
        await lease.release()
        check_nobody_queues(admin)
        assert lock_keys(admin) == []


@asyncio_test
async def test_waiter_cancelled_in_its_turn_passes_it_on(url: str, admin: redis.Redis) -> None:
    """The bell that grants the lock, and the cancellation, in every order."""
    async with (
        holdfast.aio.connect(url) as holder,
        holdfast.aio.connect(url) as first,
        holdfast.aio.connect(url) as second,
    ):
        for turns in range(12):
            held = await holder.lock("x", ttl=600).acquire()
            assert held
            cancelled = asyncio.create_task(first.lock("x", ttl=600).acquire())
            await async_eventually(lambda: len(queue_of(admin)) == 1)
            patient = asyncio.create_task(second.lock("x", ttl=600).acquire())
            await async_eventually(lambda: len(queue_of(admin)) == 2)
            releasing = asyncio.create_task(held.release())
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled.cancel()
            got = (await asyncio.gather(cancelled, return_exceptions=True))[0]
            await releasing
            if isinstance(got, holdfast.aio.Lease):
                await got.release()
            started = time.monotonic()
            lease = await patient
            assert time.monotonic() - started < PASSED_OVER_WITHIN
            assert lease
            await lease.release()
            assert lock_keys(admin) == []
            await async_eventually(lambda: queue_of(admin) == [], what=CLEANED_UP)
            check_nobody_queues(admin)


def test_waiter_that_never_had_it_leaves_no_trace(face: Any, admin: redis.Redis) -> None:
    admin.set("x", "another's")
    with face.lock("warm"):
        pass
    for _ in range(3):
        assert face.lock("x").acquire(timeout=0.5) is None
        eventually(lambda: queue_of(admin) == [], what=CLEANED_UP)
        check_nobody_queues(admin)
    with pytest.raises(holdfast.AcquireTimeout):
        with face.lock("x", wait=0.5):
            pass
    eventually(lambda: queue_of(admin) == [], what=CLEANED_UP)
    check_nobody_queues(admin)
    assert lock_keys(admin) == ["x"]


def test_who_does_not_wait_does_not_queue(face: Any, admin: redis.Redis) -> None:
    admin.set("x", "another's")
    assert face.lock("x").acquire(blocking=False) is None
    assert admin.keys("*") == [b"x"]
