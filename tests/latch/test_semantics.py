"""What a latch is, wherever it runs: the simulated world, asyncio and threads."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.world import World

pytestmark = pytest.mark.needs("latch")


def test_it_opens_when_counted_down(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        latch = one.latch("a", 3)
        assert await latch.count() == 3
        assert await latch.wait(0) is False
        assert await latch.count_down() == 2
        assert await two.latch("a", count=3).count_down() == 1
        assert await two.latch("a", 3).count() == 1
        assert await two.latch("a", 3).wait(1) is False
        assert await latch.count_down() == 0
        assert await latch.wait() is True
        assert await two.latch("a", 3).wait(0) is True

    play(scenario)


def test_open_it_stays_open(play: Any) -> None:
    async def scenario(api: Any) -> None:
        latch = api.client().latch("a", 1)
        assert await latch.count_down() == 0
        assert await latch.count_down() == 0
        assert await latch.count_down(5) == 0
        assert await latch.count() == 0
        assert await latch.wait(1) is True

    play(scenario)


def test_several_at_once_are_counted_and_never_below_nothing(play: Any) -> None:
    async def scenario(api: Any) -> None:
        latch = api.client().latch("a", 5)
        assert await latch.count_down(3) == 2
        assert await latch.count_down(3) == 0

    play(scenario)


def test_a_latch_of_nothing_is_open(play: Any) -> None:
    async def scenario(api: Any) -> None:
        latch = api.client().latch("a", 0)
        assert await latch.wait(0) is True
        assert await latch.wait() is True
        assert await latch.count() == 0
        assert await latch.count_down() == 0

    play(scenario)


def test_waiters_are_woken(play: Any) -> None:
    async def scenario(api: Any) -> list[bool]:
        clients = [api.client() for _ in range(3)]

        async def waiter(client: Any) -> bool:
            return bool(await client.latch("a", 2).wait(20))

        handles = [api.spawn(lambda client=client: waiter(client)) for client in clients for _ in range(4)]
        await api.sleep(0.1)
        await clients[0].latch("a", 2).count_down()
        await api.sleep(0.1)
        await api.client().latch("a", 2).count_down()
        return [await handle.join() for handle in handles]

    assert play(scenario) == [True] * 12


def test_a_waiter_may_lose_patience_and_the_others_go_on(play: Any) -> None:
    """The first one asks for all of its process; when it leaves, another does."""

    async def scenario(api: Any) -> list[bool]:
        client = api.client()

        async def waiter(patience: float) -> bool:
            return bool(await client.latch("a", 1).wait(patience))

        handles = [api.spawn(lambda patience=patience: waiter(patience)) for patience in (1.0, 20, 1.1, 20)]
        outcomes = [await handle.join() for handle in handles[::2]]
        await api.client().latch("a", 1).count_down()
        return outcomes + [await handle.join() for handle in handles[1::2]]

    assert play(scenario) == [False, False, True, True]


def test_another_count_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        await one.latch("a", 3).count_down()
        for attempt in ("count_down", "count", "wait"):
            with pytest.raises(holdfast.InvalidConfig, match=r"count=4.*began with count=3"):
                await getattr(two.latch("a", 4), attempt)()
        assert await one.latch("a", 3).count() == 2

    play(scenario)


def test_who_waits_says_the_count_too(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()

        async def waiter() -> bool:
            return bool(await one.latch("a", 3).wait(20))

        handle = api.spawn(waiter)
        while not await api.raw("EXISTS", "a:hf1:latch:{a}"):
            await api.sleep(0.01)
        with pytest.raises(holdfast.InvalidConfig, match="began with count=3"):
            await two.latch("a", 2).count_down()
        await two.latch("a", 3).count_down(3)
        assert await handle.join() is True

    play(scenario)


def test_the_name_of_a_lock_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        for kind, lock in (("lock", client.lock("a")), ("semaphore", client.semaphore("b", 2))):
            async with lock:
                for attempt in ("count_down", "count", "wait"):
                    with pytest.raises(holdfast.Unsupported, match=rf"'{lock.name}'.*in use as a {kind}.*another name"):
                        await getattr(client.latch(lock.name, 1), attempt)()
            await client.latch(lock.name, 1).count_down()

    play(scenario)


@pytest.mark.needs("expiry within 2 s")
def test_its_own_name_is_refused_to_locks(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        for left in (1, 0):
            assert await client.latch("a", 2).count_down() == left
            for lock in (
                client.lock("a", wait=1),
                client.election("a", wait=1).lead(),
                client.semaphore("a", 2, wait=1),
            ):
                with pytest.raises(holdfast.Unsupported, match="in use as a latch"):
                    async with lock:
                        raise AssertionError("entered")
        await client.latch("soon over", 1, retention=1).count_down()
        await api.sleep(1.1)
        async with client.lock("soon over", wait=0):
            pass

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_its_keys_are_side_keys_and_end_with_it(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client(namespace="app:")
        latch = client.latch("a", 2, retention=60.0)
        await latch.count_down()
        assert await api.raw("GET", "app:a:hf1:latch:{app:a}") == b"1 2"
        assert await latch.wait(1) is False
        await latch.count_down()
        assert 0 < await api.raw("PTTL", "app:a:hf1:latch:{app:a}") <= 60_000
        keys = await api.raw("KEYS", "*")
        assert all(b":hf1:" in key for key in keys)
        for key in keys:
            assert await api.raw("PTTL", key) > 0, "everything ends by itself"
        latch = client.latch("b", 1, retention=1)
        await latch.count_down()
        await api.sleep(1.1)
        assert await api.raw("EXISTS", "app:b:hf1:latch:{app:b}") == 0
        assert await latch.count() == 1, "a latch that is forgotten begins anew"

    play(scenario)


def test_to_look_leaves_no_key(play: Any) -> None:
    async def scenario(api: Any) -> None:
        latch = api.client().latch("a", 2)
        await latch.count()
        await latch.wait(0)
        assert await api.raw("KEYS", "*") == []

    play(scenario)


def test_whoever_waits_keeps_it_in_mind(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        await one.latch("a", 2, retention=2.0).count_down()

        async def waiter() -> bool:
            return bool(await one.latch("a", 2, retention=2.0).wait(20))

        handle = api.spawn(waiter)
        await api.sleep(3.5)
        assert await two.latch("a", 2, retention=2.0).count_down() == 0
        assert await handle.join() is True

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_it_is_remembered_as_long_as_any_of_them_has_asked_for(play: Any) -> None:
    """Else a late waiter, which should find it open, would wait for another latch that never opens."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        await one.latch("a", 2, retention=60.0).count_down()
        assert await two.latch("a", 2, retention=1.0).count_down() == 0
        for key in ("latch", "queue", "waiters"):
            assert 50_000 < await api.raw("PTTL", f"a:hf1:{key}:{{a}}") <= 60_000
        await api.sleep(1.5)
        assert await one.latch("a", 2).wait(0) is True

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_something_else_in_its_place_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        latch = api.client().latch("a", 2)
        for content in ("", "open", "1", "1 2 3"):
            await api.raw("SET", "a:hf1:latch:{a}", content)
            for ask in (latch.count, latch.count_down, latch.wait):
                with pytest.raises(holdfast.Unsupported, match="latch 'a'"):
                    await ask()
            assert await api.raw("GET", "a:hf1:latch:{a}") == content.encode()

    play(scenario)


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, None, 10**7], ids=str)
def test_a_count_is_a_whole_number(play: Any, count: Any) -> None:
    async def scenario(api: Any) -> None:
        with pytest.raises(holdfast.InvalidConfig, match="count="):
            api.client().latch("a", count)

    play(scenario)


def test_bad_input_is_refused_before_anything_is_sent(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        names: tuple[Any, ...] = ("", 7, [], "a:hf1:b")
        for name in names:
            with pytest.raises(holdfast.InvalidName):
                client.latch(name, 1)
        with pytest.raises(holdfast.InvalidConfig, match="retention=0"):
            client.latch("a", 1, retention=0)
        latch = client.latch("a", 1)
        for n in (0, -1, 1.0, True):
            with pytest.raises(holdfast.InvalidConfig, match="n="):
                await latch.count_down(n)
        for timeout in (-1, "1", float("nan")):
            with pytest.raises(holdfast.InvalidConfig, match="timeout="):
                await latch.wait(timeout)
        assert await api.raw("KEYS", "*") == []

    play(scenario)


def test_it_tells_about_itself_and_cannot_be_pickled(client: holdfast.Client) -> None:
    latch = client.latch("a", 3)
    assert latch.name == "a"
    assert "'a', count 3" in repr(latch)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(latch)


@pytest.mark.needs("the keys of Redis")
def test_a_server_that_is_full_lets_it_be_waited_for(play: Any) -> None:
    """To be told takes memory; to look does not."""

    async def scenario(api: Any) -> None:
        client = api.client()
        if api.kind == "world":
            world: World = api.world
            world.store.oom = True
        else:
            await api.raw("CONFIG", "SET", "maxmemory", "1")
        assert await client.latch("a", 1).wait(0.7) is False
        if api.kind == "world":
            world.store.oom = False
        else:
            await api.raw("CONFIG", "SET", "maxmemory", "0")

    play(scenario)
