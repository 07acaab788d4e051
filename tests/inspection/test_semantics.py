"""``inspect`` and ``locks``, on all stages: each kind of lock, its holders and its waiters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import Scenario

pytestmark = pytest.mark.needs("inspect", "locks")
Play = Callable[[Scenario], Any]
timed = pytest.mark.needs("local waiters in inspect")
# Several names share a hash tag, so that a cluster keeps them in one slot, with one fence and one order of waiters.
LABEL = "中文 a-b.c;%/{x}"

KINDS: dict[str, tuple[str, str, Callable[[Any, str], Any]]] = {  # kind and mode as inspectors see it
    "lock": ("lock", "", lambda client, label: client.lock("{s}:k", label=label)),
    "rlock": ("lock", "", lambda client, label: client.rlock("{s}:k", label=label)),
    "several": ("lock", "", lambda client, label: client.lock("{s}:k", "{s}:other", label=label)),
    "election": ("lock", "", lambda client, label: client.election("{s}:k", label=label).lead()),
    "semaphore": ("semaphore", "", lambda client, label: client.semaphore("{s}:k", 1, label=label)),
    "read": ("rwlock", "read", lambda client, label: client.rwlock("{s}:k", label=label).read),
    "write": ("rwlock", "write", lambda client, label: client.rwlock("{s}:k", label=label).write),
}


async def until(api: Any, condition: Callable[[], Any]) -> Any:
    for _ in range(1000):
        if found := await condition():
            return found
        await api.sleep(0.01)
    raise AssertionError("it did not happen within 10 s")


async def waiters_of(client: Any, name: str, count: int) -> Any:
    info = await client.inspect(name)
    return info if info is not None and len(info.waiters) >= count else None


@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_a_holder_is_seen_with_its_fence(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        assert await other.inspect("{s}:k") is None
        async with make(client, LABEL) as lease:
            info = await other.inspect("{s}:k")
            assert (info.name, info.kind, info.waiters) == ("{s}:k", kind, ())
            (holder,) = info.holders
            assert (holder.label, holder.mode, holder.fence) == (LABEL, mode, lease.fence)
            assert holder.host
            assert holder.remaining > 0
            assert holder.slot == (0 if kind == "semaphore" else None)
            assert lease.token not in repr(info)
        assert await other.inspect("{s}:k") is None

    play(scenario)


@timed
@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_it_is_seen_since_when_a_holder_holds(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with make(client, LABEL) as lease:
            (holder,) = (await client.inspect("{s}:k")).holders
            assert 0 < holder.remaining <= 30
            assert holder.since == pytest.approx(lease.fence / 1e6)

    play(scenario)


@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_a_waiter_is_seen(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        # A reader waits for a writer only.
        async with make(client, "holder") if mode != "read" else client.rwlock("{s}:k").write as lease:

            async def wait() -> None:
                async with make(other, LABEL):
                    pass

            waiter = api.spawn(wait)
            info = await until(api, lambda: waiters_of(client, "{s}:k", 1))
            (first,) = info.waiters
            assert (first.label, first.mode, first.local) == (LABEL, mode, 0)
            assert info.waiter_count == 1
            assert [holder.fence for holder in info.holders] == [lease.fence]
        await waiter.join()

    play(scenario)


@timed
@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_a_waiter_is_seen_and_how_long_it_waits(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        # A reader waits for a writer only.
        async with make(client, "holder") if mode != "read" else client.rwlock("{s}:k").write as lease:

            async def wait() -> None:
                async with make(other, LABEL):
                    pass

            waiter = api.spawn(wait)
            info = await until(api, lambda: waiters_of(client, "{s}:k", 1))
            await api.sleep(0.4)  # a waiter for several names joins the queues of all of them after 0.1 s
            (first,) = (await client.inspect("{s}:k")).waiters
            assert (first.label, first.mode, first.local) == (LABEL, mode, 0)
            assert first.waiting >= 0.2
            assert info.waiter_count == 1
            assert [holder.fence for holder in info.holders] == [lease.fence]
        await waiter.join()

    play(scenario)


@timed
def test_a_process_counts_its_local_waiters(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()

        async def wait() -> None:
            async with other.lock("{s}:k"):
                pass

        async def three_behind() -> Any:
            info = await waiters_of(client, "{s}:k", 1)
            return info if info is not None and info.waiters[0].local == 3 else None

        async with client.lock("{s}:k"):
            waiters = [api.spawn(wait) for _ in range(4)]
            info = await until(api, three_behind)
            assert len(info.waiters) == info.waiter_count == 1
        for waiter in waiters:
            await waiter.join()

    play(scenario)


def test_all_holders_of_a_permit_pool_are_seen(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        permits = [await client.semaphore("s", 3, label=label).acquire() for label in "abc"]
        info = await client.inspect("s")
        assert {(holder.label, holder.slot, holder.fence) for holder in info.holders} == {
            ("abc"[number], number, permit.fence) for number, permit in enumerate(permits)
        }
        assert info.holder_count == 3
        for permit in permits:
            await permit.release()

    play(scenario)


def test_a_latch_shows_what_is_left(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        assert await client.inspect("l") is None
        await client.latch("l", 3).count_down()
        info = await client.inspect("l")
        assert (info.kind, info.left, info.holders) == ("latch", 2, ())
        assert [info.name async for info in client.locks("l*")] == ["l"]
        await client.latch("l", 3).count_down(2)
        assert await client.inspect("l") is None

    play(scenario)


@timed
def test_a_latch_shows_what_is_left_and_its_waiters(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        await client.latch("l", 3).count_down()
        waiter = api.spawn(lambda: other.latch("l", 3).wait())
        info = await until(api, lambda: waiters_of(client, "l", 1))
        assert (info.kind, info.left, info.holders, info.waiter_count) == ("latch", 2, (), 1)
        await client.latch("l", 3).count_down()
        await client.latch("l", 3).count_down()
        assert await client.inspect("l") is None
        await waiter.join()

    play(scenario)


@pytest.mark.needs("get_or_compute")
def test_a_value_that_is_computed_has_a_holder(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        may_end = False

        def compute() -> Any:
            return "value"

        async def slowly() -> str:
            while not may_end:
                await api.sleep(0.01)
            return "value"

        def block() -> str:
            import time

            while not may_end:
                time.sleep(0.01)
            return "value"

        caller = api.spawn(lambda: client.get_or_compute("c", block if api.kind == "blocking" else slowly))

        async def claimed() -> Any:
            return await other.inspect("c")

        info = await until(api, claimed)
        assert info.kind == "cache"
        (holder,) = info.holders
        assert holder.host
        assert holder.fence is None
        waiting = api.spawn(lambda: other.get_or_compute("c", compute))
        info = await until(api, lambda: waiters_of(other, "c", 1))
        assert info.waiter_count == 1
        may_end = True
        assert (await caller.join(), await waiting.join()) == ("value", "value")
        assert await other.inspect("c") is None

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_a_client_of_another_library_has_no_fence(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("{s}:k"):
            pass  # leaves a fence, which is not that of the next holder
        await api.raw("SET", "{s}:k", "a token of another library", "PX", 5000)
        (holder,) = (await client.inspect("{s}:k")).holders
        assert (holder.host, holder.pid, holder.fence, holder.since) == ("", None, None, None)
        assert 0 < holder.remaining <= 5
        assert holder.id

    play(scenario)


def test_a_name_that_is_reserved_for_a_waiter_is_marked(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        held = await client.lock("{s}:b").acquire()
        first = await client.lock("{s}:a").acquire()

        async def both() -> None:
            async with other.lock("{s}:a", "{s}:b", label="both"):
                pass

        waiter = api.spawn(both)
        await until(api, lambda: waiters_of(client, "{s}:a", 1))
        await api.sleep(0.3)  # by now it waits in both queues
        await first.release()

        async def reserved() -> Any:
            info = await client.inspect("{s}:a")
            return [holder for holder in info.holders if holder.mode == "reserved"] if info else None

        (holder,) = await until(api, reserved)
        assert (holder.label, holder.fence) == ("both", None)
        await held.release()
        await waiter.join()

    play(scenario)


def test_locks_lists_what_is_held_or_waited_for_and_nothing_else(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client(namespace="a*b?:")
        other = api.client(namespace="axb?:")
        async with client.lock("released"):
            pass
        await client.latch("open", 1).count_down()
        async with (
            client.lock("order:1"),
            client.lock("order:2"),
            client.lock("{tag}:3"),
            client.semaphore("s", 2),
            client.rwlock("rw").read,
            other.lock("order:7"),
        ):
            found = {info.name: info.kind async for info in client.locks()}
            assert found == {"order:1": "lock", "order:2": "lock", "{tag}:3": "lock", "s": "semaphore", "rw": "rwlock"}
            assert sorted([info.name async for info in client.locks("order:*")]) == ["order:1", "order:2"]
            assert [info.name async for info in client.locks("order:?")] != []
            assert [info.name async for info in client.locks("order")] == []
            everything = sorted([info.name async for info in api.client().locks("*order:*")])
            assert everything == ["a*b?:order:1", "a*b?:order:2", "axb?:order:7"]
        assert [info async for info in client.locks()] == []

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_keys_that_were_damaged_by_hand_stop_no_inspection(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        await api.raw("RPUSH", "k", "a list")
        await api.raw("RPUSH", "k:hf1:fence:{k}", "a list")
        await api.raw("RPUSH", "k:hf1:waiters:{k}", "a list")
        await api.raw("ZADD", "k:hf1:queue:{k}", "1", "no token")
        await api.raw("SET", "k:hf1:latch:{k}", "no latch")
        await api.raw("ZADD", "k:hf1:holders:{k}", "1", "a", "2", "b", "3", "c", "4", "d")
        assert await client.inspect("k") is None
        assert [info async for info in client.locks()] == []

    play(scenario)


@pytest.mark.parametrize("name", ["", "a\n", "x:hf1:y", 7, ["a"]])
def test_a_name_that_cannot_be_one_is_refused(play: Play, name: Any) -> None:
    async def scenario(api: Any) -> None:
        with pytest.raises(holdfast.InvalidName):
            await api.client().inspect(name)

    play(scenario)


@pytest.mark.parametrize("pattern", ["", 7, None])
def test_a_pattern_that_is_none_is_refused(play: Play, pattern: Any) -> None:
    async def scenario(api: Any) -> None:
        with pytest.raises(holdfast.InvalidConfig, match="pattern"):
            api.client().locks(pattern)

    play(scenario)
