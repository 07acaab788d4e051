"""A lock on several names: the same in the simulated world, under asyncio and with threads."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast

pytestmark = pytest.mark.needs("a lock on several names")


@pytest.mark.needs("the keys of Redis")
def test_it_has_all_of_them(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.lock("b", "a", "c", ttl=60) as lease:
            for name in "abc":
                assert await api.raw("GET", name) == lease.token.encode()
                assert 50_000 < await api.raw("PTTL", name) <= 60_000
                assert await two.lock(name).acquire(blocking=False) is None
            assert await two.lock("c", "d").acquire(blocking=False) is None
            assert await two.lock("c", "d").locked()
            assert lease.name == "b, a, c"
            assert {*lease.fences} == {"a", "b", "c"}
            assert lease.fence == max(lease.fences.values())
            async with two.lock("d", "e", wait=0):
                pass
        for name in "abc":
            assert await api.raw("EXISTS", name) == 0
        async with two.lock("a", "b", wait=0):
            pass
        assert not await two.lock("c", "d").locked()

    play(scenario)


def test_of_one_name_the_fences_are_known_too(play: Any) -> None:
    async def scenario(api: Any) -> None:
        async with api.client().lock("a") as lease:
            assert lease.fences == {"a": lease.fence}

    play(scenario)


def test_refused_it_has_none_of_them(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.lock("b"):
            assert await two.lock("a", "b", "c").acquire(blocking=False) is None
            assert await two.lock("a", "b", "c").acquire(timeout=1) is None
            with pytest.raises(holdfast.AcquireTimeout, match="'a, b'"):
                async with two.lock("a", "b", wait=1):
                    raise AssertionError("entered")
            for name in "ac":
                assert await api.raw("EXISTS", name) == 0
            async with one.lock("a", "c", wait=0):
                pass
        async with two.lock("a", "b", "c", wait=0):
            pass

    play(scenario)


def test_who_waits_in_vain_within_its_own_block_is_told_so(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("a", "b"):
            with pytest.raises(holdfast.AcquireTimeout, match="this thread or task holds it. Nested by mistake"):
                async with client.lock("b", wait=0.05):
                    raise AssertionError("entered")
            with pytest.raises(holdfast.AcquireTimeout, match="this thread or task holds 'b'. Nested by mistake"):
                async with client.lock("b", "c", wait=1):
                    raise AssertionError("entered")
            with pytest.raises(holdfast.AcquireTimeout, match=r"[^ ]+( \(pid \d+\))? holds it"):
                async with api.client().lock("b", wait=1):
                    raise AssertionError("entered")

    play(scenario)


def test_fences_rise_for_each_name(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        seen: dict[str, list[int]] = {name: [] for name in "abc"}
        for names in ("ab", "b", "bc", "a", "cab", "c", "abc") * 2:
            async with (client, other)[len(names) % 2].lock(*names) as lease:
                for name, fence in lease.fences.items():
                    seen[name].append(fence)
        for fences in seen.values():
            assert fences == sorted(set(fences))

    play(scenario)


@pytest.mark.needs("one fence for several names")
@pytest.mark.needs("the keys of Redis")
def test_its_fence_is_above_all_that_any_of_the_names_has_seen(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("a") as lease:
            ahead = lease.fence + 10**9
        await api.raw("SET", "b:hf1:fence:{b}", ahead)
        async with client.lock("a", "b", "c") as lease:
            assert lease.fences == {"a": ahead + 1, "b": ahead + 1, "c": ahead + 1}
        async with client.lock("a") as lease:
            assert lease.fence == ahead + 2
        for name in "abc":
            assert await api.raw("PTTL", f"{name}:hf1:fence:{{{name}}}") > 3600_000

    play(scenario)


def test_a_waiter_gets_them_after_release(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        one, two = api.client(), api.client()
        order: list[str] = []
        first, second = await one.lock("a").acquire(), await one.lock("b").acquire()

        async def waiter() -> None:
            async with two.lock("b", "a", wait=20):
                order.append("waiter")

        handle = api.spawn(waiter)
        await api.sleep(0.05)
        order.append("a")
        await first.release()
        await api.sleep(0.05)
        if api.kind == "world":  # where no client is slow
            assert await api.raw("EXISTS", "a") == 0, "it was granted a, found b held, and has given a back"
        async with one.lock("a", wait=5):
            order.append("a again, while we hold what the waiter needs")
        order.append("b")
        await second.release()
        await handle.join()
        return order

    assert play(scenario) == ["a", "a again, while we hold what the waiter needs", "b", "waiter"]


def test_whoever_waits_for_one_of_them_is_woken(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        one, two = api.client(), api.client()
        served: list[str] = []
        lease = await one.lock("a", "b", "c", ttl=60).acquire()

        async def waiter(*names: str) -> None:
            async with two.lock(*names, wait=20):
                served.append("".join(names))
                await api.sleep(0.01)

        handles = [api.spawn(lambda names=names: waiter(*names)) for names in ("a", "b", "c", "cb", "a")]
        await api.sleep(0.1)
        assert not served
        await lease.release()
        for handle in handles:
            await handle.join()
        return sorted(served)

    assert play(scenario) == ["a", "a", "b", "c", "cb"]


def test_no_update_is_lost_whatever_the_order_of_the_names(play: Any) -> None:
    async def scenario(api: Any) -> dict[str, int]:
        counters = dict.fromkeys("abcd", 0)

        async def add(*names: str) -> None:
            client = api.client()
            for _ in range(5):
                async with client.lock(*names, wait=30):
                    seen = {name: counters[name] for name in names}
                    await api.sleep(0.001)
                    for name in names:
                        counters[name] = seen[name] + 1

        sets = ("ab", "ba", "bc", "cb", "ca", "abcd", "dcba", "d", "a")
        handles = [api.spawn(lambda names=names: add(*names)) for names in sets]
        for handle in handles:
            await handle.join()
        return counters

    assert play(scenario) == {"a": 30, "b": 30, "c": 25, "d": 15}


@pytest.mark.needs("the keys of Redis")
def test_it_is_renewed_and_extended_as_a_whole(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("a", "b", ttl=3) as lease:
            await api.sleep(4.0)
            lease.check()
            await lease.extend(60)
            assert lease.remaining() > 50
            for name in "ab":
                assert await api.raw("PTTL", name) > 50_000

    play(scenario)


@pytest.mark.parametrize("stolen", ["a", "b"])
@pytest.mark.parametrize("how", ["deleted", pytest.param("taken", marks=pytest.mark.needs("the keys of Redis"))])
def test_who_loses_one_has_lost_all(play: Any, stolen: str, how: str) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("a", "b", ttl=0.9, on_lost=lambda lease: None).acquire()
        if how == "deleted":
            await api.raw("DEL", stolen)
        else:
            await api.raw("SET", stolen, "thief")
        assert await lease.lost.wait(5)
        assert not lease.held
        with pytest.raises(holdfast.LeaseLost):
            await lease.extend(9)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        for name in "ab":
            left = await api.raw("GET", name)
            assert left == (b"thief" if name == stolen and how == "taken" else None)

    play(scenario)


def test_it_ends_by_its_ttl(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock("a", "b", ttl=1, renew=False, on_lost=lambda lease: None).acquire()
        async with other.lock("b", "a", wait=5) as later:
            assert not lease.held
            assert later.fence > lease.fence
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    play(scenario)


def test_it_is_a_lock_object_like_any_other(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.lock("a", "b")
        assert lock.name == "a, b"
        with pytest.raises(holdfast.NotHeld):
            await lock.release()
        lease = await lock.acquire()
        assert await lock.acquire(blocking=False) is None
        assert await lock.locked()
        await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await lease.release()
        with pytest.raises(holdfast.NotHeld):
            lease.check()
        assert "'a, b'" in repr(lock)
        async with client.lock("a"):
            with pytest.raises(holdfast.AcquireTimeout, match="holds 'a'"):
                async with client.lock("b", "a", wait=0.01):
                    raise AssertionError("entered")

    play(scenario)


def test_what_cannot_be_asked_for_is_refused_before_anything_is_sent() -> None:
    with holdfast.connect("redis://127.0.0.1:1/0") as client:
        for names in (
            ("a", "a"),
            ("a", "b", "a"),
            ("a", ""),
            ("a", 7),
            ("a", ["b"]),
            ("a", "b{"),
            [*map(str, range(33))],
        ):
            with pytest.raises(holdfast.InvalidName):
                client.lock(*names)
        with pytest.raises(holdfast.InvalidName):
            client.lock()
        with pytest.raises(holdfast.InvalidConfig):
            client.lock("a", "b", ttl=-1)
        with pytest.raises(holdfast.InvalidConfig):
            client.lock("a", "b", cohort="x")  # type: ignore[call-overload]
        client.lock(*map(str, range(32)))


def test_namespaces_are_in_front_of_each_name(play: Any) -> None:
    async def scenario(api: Any) -> None:
        async with api.client(namespace="app:").lock("a", "b") as lease:
            assert await api.raw("GET", "app:b") == lease.token.encode()
            assert {*lease.fences} == {"a", "b"}

    play(scenario)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ((), "no name was given"),
        ((["a", "b"],), r"pass several names as arguments: lock\(\*names\)"),
        (("a", "a"), "it was given twice"),
        (("a", 7), "a name is a str, not int"),
    ],
)
def test_names_that_cannot_be_locked_together_are_refused_at_once(names: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(holdfast.InvalidName, match=problem):
        holdfast.connect("redis://127.0.0.1:1").lock(*names)


def test_an_error_says_which_of_the_names_it_is_about(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        permit = await one.semaphore("s", permits=1).acquire()
        with pytest.raises(holdfast.Unsupported, match="lock 'a, s': 's' is in use as a semaphore"):
            await two.lock("a", "s").acquire()
        await permit.release()
        held = await one.lock("b").acquire()
        with pytest.raises(holdfast.AcquireTimeout, match="holds 'b'") as info:
            async with two.lock("a", "b", wait=0):
                pass
        assert info.value.refused == "b"
        with pytest.raises(holdfast.AcquireTimeout, match="holds 'b'. Nested by mistake.*Lock all names at once"):
            async with one.lock("a", "b", wait=0):
                pass
        await held.release()

    play(scenario)
