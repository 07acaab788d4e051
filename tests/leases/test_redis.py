"""What a lease promises while it lasts, and what happens when it ends: renewed, extended, lost, dropped."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import warnings
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, eventually, lock_keys, took


def test_renewal_keeps_a_short_lease_alive(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=3.0).acquire(timeout=5)
    until = time.monotonic() + 6
    while time.monotonic() < until:
        assert lease.held
        assert admin.get("x") == lease.token.encode()
        assert 0 < lease.remaining() <= 3.0
        time.sleep(0.02)
    lease.release()
    assert lock_keys(admin) == []


def test_many_leases_are_all_renewed(face: Any, admin: redis.Redis) -> None:
    leases = [face.lock(f"x{number}", ttl=2.0).acquire(timeout=5) for number in range(40)]
    time.sleep(3.0)
    assert all(lease.held for lease in leases)
    assert len(lock_keys(admin)) == 40
    for lease in leases:
        lease.release()


def test_without_renewal_it_ends_with_its_ttl(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=0.5, renew=False).acquire(timeout=5)
    assert lease.held
    assert lease.lost.wait(3)
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost, match="renew=False"):
        lease.check()
    eventually(lambda: lock_keys(admin) == [])
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_local_deadline_lies_before_the_servers(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=10, renew=False).acquire(timeout=5)
    started = time.monotonic()
    remaining, on_server = lease.remaining(), admin.pttl("x") / 1000
    passed = time.monotonic() - started  # at most so much less is left on the server than when we looked here
    assert 5 < remaining < on_server + passed
    lease.release()


def test_max_hold_ends_the_lease_and_says_so(face: Any) -> None:
    told: list[Any] = []
    lease = face.lock("x", ttl=3.0, max_hold=5.0, on_lost=told.append).acquire(timeout=5)
    assert not lease.lost.wait(3.5), "it is renewed until then"
    assert lease.lost.wait(12)
    assert not lease.held
    eventually(lambda: told)
    with pytest.raises(holdfast.LeaseLost, match="max_hold"):
        lease.release()


def test_max_hold_shorter_than_the_ttl(face: Any) -> None:
    lease = face.lock("x", ttl=30, max_hold=0.4).acquire(timeout=5)
    assert lease.remaining() <= 0.4
    assert lease.lost.wait(3)
    with pytest.raises(holdfast.LeaseLost, match="max_hold"):
        lease.check()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_extend_never_shortens(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=30, renew=False).acquire(timeout=5)
    lease.extend(1)
    assert lease.remaining() > 25
    assert admin.pttl("x") > 25_000
    lease.extend(100)
    assert 90 < lease.remaining() <= 100
    assert admin.pttl("x") > 95_000
    lease.release()


def test_extend_beyond_max_hold_is_refused(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=10, max_hold=20).acquire(timeout=5)
    with pytest.raises(holdfast.InvalidConfig, match="max_hold"):
        lease.extend(60)
    assert lease.held
    assert admin.pttl("x") <= 10_000
    lease.extend(15)
    assert lease.remaining() > 10
    lease.release()


def test_extend_of_what_is_over(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x").acquire(timeout=5)
    lease.release()
    with pytest.raises(holdfast.NotHeld):
        lease.extend(60)
    lost = face.lock("y").acquire(timeout=5)
    admin.set("y", "another's")
    with pytest.raises(holdfast.LeaseLost):
        lost.extend(60)
    assert not lost.held
    assert lost.lost.is_set()
    assert admin.ttl("y") == -1, "the ttl of another's key is not ours to touch"
    with pytest.raises(holdfast.LeaseLost):
        lost.release()
    assert admin.get("y") == b"another's"


@pytest.mark.parametrize("theft", ["delete", "set"])
def test_theft_is_noticed_told_and_left_alone(face: Any, admin: redis.Redis, theft: str) -> None:
    told: list[Any] = []
    lease = face.lock("x", ttl=0.9, on_lost=told.append).acquire(timeout=5)
    admin.delete("x") if theft == "delete" else admin.set("x", "another's")
    assert lease.lost.wait(3)
    assert not lease.held
    eventually(lambda: told)
    time.sleep(0.35)
    assert len(told) == 1, "the holder is told once"
    with pytest.raises(holdfast.LeaseLost):
        lease.check()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    with pytest.raises(holdfast.NotHeld):
        lease.release()
    assert admin.get("x") == (None if theft == "delete" else b"another's")


def test_on_lost_that_fails_is_logged_and_harms_nobody(
    face: Any, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(_: Any) -> None:
        raise LookupError("in on_lost")

    other = face.lock("y", ttl=3.0).acquire(timeout=5)
    lease = face.lock("x", ttl=0.6, on_lost=explode).acquire(timeout=5)
    with caplog.at_level(logging.ERROR, "holdfast"):
        admin.delete("x")
        assert lease.lost.wait(3)
        eventually(lambda: "on_lost" in caplog.text)
    time.sleep(3.5)
    assert other.held
    other.release()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_on_lost_that_takes_long_does_not_hold_up_other_leases(client: holdfast.Client, admin: redis.Redis) -> None:
    busy = threading.Event()
    lease = client.lock("x", ttl=0.6, on_lost=lambda _: busy.wait(10)).acquire()
    other = client.lock("y", ttl=3.0).acquire()
    assert lease
    assert other
    admin.delete("x")
    assert lease.lost.wait(3)
    time.sleep(3.5)
    assert other.held
    busy.set()
    other.release()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_lost_wait_has_a_timeout_and_ends_with_the_release(face: Any) -> None:
    lease = face.lock("x").acquire(timeout=5)
    with took(less_than=5.0, at_least=0.2):
        assert not lease.lost.wait(0.25)
    lease.release()
    with took(less_than=5.0):
        assert not lease.lost.wait(30)
    assert not lease.lost.is_set()


def test_all_who_wait_for_the_loss_are_woken(client: holdfast.Client, url: str) -> None:
    with holdfast.connect(url) as doomed:
        lease = doomed.lock("x").acquire()
        assert lease
        woken: list[bool] = []
        threads = [threading.Thread(target=lambda: woken.append(lease.lost.wait(20))) for _ in range(40)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        doomed.close()
        eventually(lambda: len(woken) == 40, 5.0, "every one of them")
        assert all(woken)
        for thread in threads:
            thread.join()
        with pytest.raises(holdfast.LeaseLost, match="closed"):
            lease.release()


def test_dropped_lease_warns_and_is_not_renewed(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.warns(ResourceWarning, match="'x' was dropped without release"):  # noqa: PT031
        client.lock("x", ttl=2.0).acquire()
        gc.collect()
    assert lock_keys(admin) == ["x"]
    eventually(lambda: lock_keys(admin) == [], 10.0, "its ttl ends it")


@asyncio_test
async def test_asyncio_dropped_lease_warns_and_is_not_renewed(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.warns(ResourceWarning, match="'x' was dropped without release"):  # noqa: PT031
            await client.lock("x", ttl=0.8).acquire()
            gc.collect()
        await async_eventually(lambda: lock_keys(admin) == [], 3.0, "its ttl ends it")


def test_released_lease_is_dropped_without_a_word(client: holdfast.Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = client.lock("x").acquire()
        assert lease
        lease.release()
        del lease
        gc.collect()


def test_lease_outlives_its_lock_object(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=3.0).acquire(timeout=5)
    gc.collect()
    time.sleep(3.5)
    assert lease.held
    lease.release()
    assert lock_keys(admin) == []


def test_lease_is_always_true(face: Any) -> None:
    lease = face.lock("x").acquire(timeout=5)
    assert bool(getattr(lease, "_real", lease))
    lease.release()
    assert bool(getattr(lease, "_real", lease))
    assert lease.remaining() == 0
    with pytest.raises(holdfast.NotHeld):
        lease.check()


# What "async with" does to its body.


@asyncio_test
async def test_lost_body_is_cancelled_and_lease_lost_raised(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        reached = False
        with took(less_than=4.0), pytest.raises(holdfast.LeaseLost):
            async with client.lock("x", ttl=0.6):
                admin.delete("x")
                await asyncio.sleep(30)
                reached = True
        assert not reached
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)


@asyncio_test
async def test_cancel_can_be_asked_for_by_name(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with took(less_than=4.0), pytest.raises(holdfast.LeaseLost):
            async with client.lock("x", ttl=0.6, on_lost="cancel"):
                admin.delete("x")
                await asyncio.sleep(30)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.parametrize("on_lost", ["ignore", lambda lease: None])
@asyncio_test
async def test_body_goes_on_if_told_to(url: str, admin: redis.Redis, on_lost: Any) -> None:
    async with holdfast.aio.connect(url) as client:
        reached = False
        with pytest.raises(holdfast.LeaseLost):
            async with client.lock("x", ttl=0.6, on_lost=on_lost) as lease:
                admin.delete("x")
                assert await lease.lost.wait(5)
                await asyncio.sleep(0.1)
                reached = True
        assert reached


@asyncio_test
async def test_on_lost_may_be_a_coroutine_function(url: str, admin: redis.Redis) -> None:
    told: list[Any] = []

    async def tell(lease: Any) -> None:
        await asyncio.sleep(0)
        told.append(lease)

    async with holdfast.aio.connect(url) as client:
        lease = await client.lock("x", ttl=0.6, on_lost=tell).acquire()
        assert lease
        admin.delete("x")
        await async_eventually(lambda: told == [lease])
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()


@asyncio_test
async def test_cancellation_from_outside_at_the_same_time_wins(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        inside = asyncio.Event()
        hold: list[Any] = []

        async def work() -> None:
            async with client.lock("x", ttl=0.6) as lease:
                hold.append(lease)
                inside.set()
                await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await inside.wait()
        admin.delete("x")

        def cancel_with_it() -> None:
            if hold[0].lost.is_set():
                task.cancel("from outside")
            else:
                asyncio.get_running_loop().call_soon(cancel_with_it)

        cancel_with_it()
        with took(less_than=4.0), pytest.raises(asyncio.CancelledError):
            await task


@asyncio_test
async def test_loss_inside_a_timeout_is_not_mistaken_for_it(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(holdfast.LeaseLost):
            async with asyncio.timeout(20):
                async with client.lock("x", ttl=0.6):
                    admin.delete("x")
                    await asyncio.sleep(30)


@asyncio_test
async def test_loss_in_a_nested_block_ends_the_block_that_relied_on_it(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        after_inner = False
        async with client.lock("outer", ttl=5) as outer:
            with pytest.raises(holdfast.LeaseLost, match="inner"):
                async with client.lock("inner", ttl=0.6):
                    admin.delete("inner")
                    await asyncio.sleep(30)
            after_inner = True
            assert outer.held
        assert after_inner
        with pytest.raises(holdfast.LeaseLost, match="outer"):
            async with client.lock("outer", ttl=0.6):
                async with client.lock("inner", ttl=5):
                    admin.delete("outer")
                    await asyncio.sleep(30)
        assert lock_keys(admin) == []


@asyncio_test
async def test_both_nested_leases_lost_at_once(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(holdfast.LeaseLost):
            async with client.lock("outer", ttl=0.6):
                async with client.lock("inner", ttl=0.6):
                    admin.delete("outer", "inner")
                    await asyncio.sleep(30)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)


@asyncio_test
async def test_body_that_ends_as_the_lease_is_lost_is_left_in_order(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        for _ in range(5):
            with pytest.raises(holdfast.LeaseLost):
                async with client.lock("x", ttl=0.3, on_lost=None) as lease:
                    admin.delete("x")
                    while not lease.lost.is_set():
                        time.sleep(0.01)  # the loop cannot deliver a cancellation meanwhile
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)


@asyncio_test
async def test_a_lease_collected_in_another_thread_lets_the_next_in_line_go_on(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        kept = [await client.lock("x", ttl=1.0).acquire()]
        waiting = asyncio.create_task(client.lock("x", ttl=1.0).acquire())
        await asyncio.sleep(0.1)

        def drop() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                kept.clear()

        loop = asyncio.get_running_loop()
        loop.set_debug(True)  # then asyncio itself minds being touched from another thread
        await loop.run_in_executor(None, drop)
        await async_eventually(lambda: client.statistics().active and not client.statistics().local_queues, timeout=3.0)
        lease = await waiting
        assert lease is not None
        await lease.release()


def test_a_batch_that_the_server_does_not_read_does_not_hold_up_the_keeper() -> None:
    """A thousand renewals are more than a unix socket's buffer takes from a writer whose reader sleeps."""
    with Server(unix=True) as server, holdfast.connect(f"unix://{server.path}") as client:
        told = threading.Event()
        leases = [client.lock(f"{'long-name' * 40}{number}", ttl=3).acquire() for number in range(1000)]
        small = client.lock("small", ttl=2, on_lost=lambda lease: told.set()).acquire()
        assert small
        server.pause()
        assert told.wait(10), "the keeper was stuck in a write"
        server.resume()
        assert not small.held
        for lease in [*leases, small]:
            with pytest.raises(holdfast.HoldfastError):
                lease.release()
                raise holdfast.NotHeld("it was renewed in time, which is as good")
