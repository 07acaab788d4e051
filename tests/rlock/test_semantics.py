"""What a reentrant lock is: the same in the simulated world, under asyncio and with threads."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast

pytestmark = pytest.mark.needs("rlock")


def test_its_holder_may_take_it_again(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lock = one.rlock("a")
        async with lock as outer:
            async with lock as inner:
                assert inner.fence == outer.fence
                assert inner.token == outer.token
                async with lock:
                    assert outer.held
            assert outer.held
            assert await two.lock("a").acquire(blocking=False) is None
        assert not outer.held
        async with two.lock("a", wait=0):
            pass

    play(scenario)


def test_it_is_known_by_its_name_not_by_its_object(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def inner() -> int:
            async with client.rlock("a", wait=0) as lease:
                return int(lease.fence)

        async with client.rlock("a") as lease:
            assert await inner() == lease.fence
            assert await inner() == lease.fence
            assert lease.held
            again = client.rlock("a")
            assert await again.acquire(blocking=False)
            await again.release()
            assert lease.held
        with pytest.raises(holdfast.NotHeld):
            await client.rlock("a").release()
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


def test_acquire_and_release_are_counted(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lock = client.rlock("a")
        first = await lock.acquire()
        second = await lock.acquire(blocking=False)
        third = await lock.acquire(timeout=0)
        assert first.token == second.token == third.token
        await lock.release()
        await second.release()
        assert first.held
        assert await other.lock("a").acquire(blocking=False) is None
        await lock.release()
        assert not first.held
        assert not first.lost.is_set()
        with pytest.raises(holdfast.NotHeld):
            await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await first.release()
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_one_acquire_and_one_release_are_sent(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.rlock("a")
        async with lock:
            before = await api.raw("GET", "a:hf1:fence:{a}")
            for _ in range(10):
                async with lock:
                    assert await lock.locked()
            assert await api.raw("GET", "a:hf1:fence:{a}") == before
        if api.kind == "world":
            scripts = [op.script for message in api.world.sent for op in message.ops if hasattr(op, "script")]
            assert scripts == ["acquire", "release"]

    play(scenario)


def test_another_owner_can_neither_enter_nor_release(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.rlock("a")
        lease = await lock.acquire()

        async def stranger() -> None:
            assert await lock.acquire(blocking=False) is None
            assert await client.rlock("a").acquire(timeout=0.01) is None
            for release in (lock.release, lease.release):
                with pytest.raises(holdfast.NotHeld, match="'a' belongs to another thread or task"):
                    await release()
            with pytest.raises(holdfast.NotHeld, match="'a' is not held through this object"):
                await client.rlock("a").release()
            with pytest.raises(holdfast.AcquireTimeout):
                async with client.rlock("a", wait=0):
                    raise AssertionError("entered")

        await api.spawn(stranger).join()
        assert lease.held
        await lock.release()
        await api.spawn(lambda: take(client)).join()

    async def take(client: Any) -> None:
        async with client.rlock("a", wait=0):
            pass

    play(scenario)


def test_who_waits_in_vain_within_its_own_block_is_told_so(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def enter() -> None:
            async with client.rlock("a", wait=0.7):
                raise AssertionError("entered")

        async def child() -> None:
            with pytest.raises(holdfast.AcquireTimeout, match="another thread or task of this process holds it"):
                await enter()

        async with client.rlock("a"):
            await api.spawn(child).join()
        async with client.lock("a"):
            with pytest.raises(
                holdfast.AcquireTimeout, match="this thread or task holds it through a Lock object, .*Nested by mistake"
            ):
                await enter()
        async with api.client().lock("a"):
            with pytest.raises(holdfast.AcquireTimeout, match=r"[^ ]+( \(pid \d+\))? holds it"):
                await enter()

    play(scenario)


def test_owners_wait_for_each_other(play: Any) -> None:
    async def scenario(api: Any) -> int:
        client, other = api.client(), api.client()
        counter = [0]

        async def add(lock: Any) -> None:
            for _ in range(5):
                async with lock:
                    seen = counter[0]
                    async with lock:
                        await api.sleep(0.001)
                    async with lock:
                        counter[0] = seen + 1

        shared = client.rlock("a", wait=30)
        locks = [shared, shared, client.rlock("a", wait=30), other.rlock("a", wait=30)]
        handles = [api.spawn(lambda lock=lock: add(lock)) for lock in locks]
        for handle in handles:
            await handle.join()
        return counter[0]

    assert play(scenario) == 20


def test_a_lost_lease_is_reported_by_every_release_and_cannot_be_taken_again(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.rlock("a", ttl=1.5, renew=False, on_lost=lambda lease: None)
        await lock.acquire()
        lease = await lock.acquire()
        assert await lease.lost.wait(10)
        for _ in range(2):
            with pytest.raises(holdfast.LeaseLost):
                await lock.acquire(blocking=False)
            with pytest.raises(holdfast.LeaseLost):
                await client.rlock("a").acquire(blocking=False)
        for _ in range(2):
            with pytest.raises(holdfast.LeaseLost):
                await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await lock.release()
        async with lock as fresh:
            assert fresh.fence > lease.fence

    play(scenario)


def test_leaving_blocks_whose_lease_was_lost_says_so_once(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        client = api.client()
        lock = client.rlock("a", ttl=1.5, renew=False, on_lost=lambda lease: None)
        left: list[str] = []
        try:
            async with lock:
                try:
                    async with lock as lease:
                        assert await lease.lost.wait(10)
                    left.append("inner, well")
                except holdfast.LeaseLost as lost:
                    left.append("inner")
                    assert not getattr(lost, "__notes__", [])
                    raise
        except holdfast.LeaseLost as lost:
            assert not getattr(lost, "__notes__", [])
            left.append("outer")
        async with lock:
            pass
        return left

    assert play(scenario) == ["inner", "outer"]


def test_an_error_of_the_body_goes_through_all_blocks(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.rlock("a")
        with pytest.raises(KeyError):
            async with lock, lock, client.rlock("a"):
                raise KeyError("x")
        assert await api.raw("EXISTS", "a") == 0
        async with api.client().lock("a", wait=0):
            pass

    play(scenario)


def test_what_was_released_in_the_body_is_not_released_again(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lock = client.rlock("a")
        async with lock:
            await lock.release()
            async with other.lock("a", wait=0) as theirs:
                pass
            assert await lock.acquire(blocking=False)
        assert await api.raw("EXISTS", "a") == 1, "with releases the lease that it obtained, not the one after it"
        await lock.release()
        assert theirs.fence

    play(scenario)


def test_a_block_that_is_left_deeper_than_it_was_entered_keeps_the_lock(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.rlock("a")
        async with lock as lease:
            await lock.acquire()
        assert lease.held
        await lock.release()
        assert not lease.held
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


def test_the_terms_are_those_of_the_first(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.rlock("a", ttl=30), client.rlock("a", ttl=2, max_hold=1) as lease:
            assert lease.remaining() > 20

    play(scenario)


def test_other_names_are_other_locks(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.rlock("a") as a, client.rlock("b") as b:
            assert a.name == "a"
            assert b.name == "b"
            await b.extend(60)
            assert b.remaining() > 50
            assert a.remaining() < 40
        with pytest.raises(holdfast.InvalidName):
            client.rlock("")

    play(scenario)


def test_its_repr_says_whether_it_is_locked(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        one, two = client.rlock("a"), client.rlock("a")
        assert repr(one).startswith("<unlocked ")
        async with one:
            assert repr(one).startswith("<locked ")
            async with two:
                assert repr(two).startswith("<locked ")
        assert "unlocked" in repr(one)
        assert "unlocked" in repr(two)
        assert "RLock object 'a'" in repr(one)

    play(scenario)
