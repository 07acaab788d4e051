"""``break_lock``, on all stages: it ends the hold that was inspected, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import Scenario
from tests.inspection.test_semantics import KINDS, until, waiters_of

pytestmark = pytest.mark.needs("break_lock")
Play = Callable[[Scenario], Any]


async def is_lost(lease: Any) -> bool:
    return bool(lease.lost.is_set())


@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_the_holder_is_told_and_the_lock_is_free(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        lease = await make(client, "stuck").acquire()
        broken = await operator.break_lock("{s}:k", fence=lease.fence, reason="it is stuck", label="ops")
        assert broken.fence > lease.fence == broken.holder.fence
        assert (broken.holder.label, broken.by.label, broken.reason) == ("stuck", "ops", "it is stuck")
        assert await operator.inspect("{s}:k") is None
        await until(api, lambda: is_lost(lease))
        assert not lease.held
        assert "broken by" in lease.reason
        assert lease.reason.endswith(": it is stuck")
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            await lease.release()
        async with make(operator, "next") as later:
            assert later.fence > broken.fence

    play(scenario)


@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_the_lock_goes_to_the_next_waiter(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other, operator = api.client(), api.client(), api.client()
        lease = await (make(client, "stuck") if mode != "read" else client.rwlock("{s}:k").write).acquire()

        async def wait() -> int:
            async with make(other, "waits") as mine:
                return int(mine.fence)

        waiter = api.spawn(wait)
        await until(api, lambda: waiters_of(operator, "{s}:k", 1))
        broken = await operator.break_lock("{s}:k", fence=lease.fence, reason="it is stuck")
        if kind == "lock" and "other" in str(lease.name):
            with pytest.raises(holdfast.LeaseLost):  # the other name is the holder's until it releases it
                await lease.release()
        assert await waiter.join() > broken.fence
        with pytest.raises((holdfast.LeaseLost, holdfast.NotHeld)):
            await lease.release()

    play(scenario)


def test_a_break_with_another_fence_changes_nothing(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        async with client.lock("{s}:k"):
            pass
        async with client.lock("{s}:k", label="innocent") as lease:
            for fence in (lease.fence - 1, lease.fence + 64, 7):
                with pytest.raises(holdfast.NotHeld, match=r"not held with fence .* nothing was changed.*innocent"):
                    await operator.break_lock("{s}:k", fence=fence, reason="too late")
            with pytest.raises(holdfast.NotHeld, match="not held with id"):
                await operator.break_lock("{s}:k", holder_id="0123456789abcdef", reason="too late")
            assert [holder.fence for holder in (await operator.inspect("{s}:k")).holders] == [lease.fence]
            assert await operator.history("{s}:k") == []
            assert lease.held
        with pytest.raises(holdfast.NotHeld, match="any more"):
            await operator.break_lock("{s}:k", fence=lease.fence, reason="too late")

    play(scenario)


def test_one_of_many_permits_is_broken(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        permits = [await client.semaphore("s", 3).acquire() for _ in range(3)]
        broken = await operator.break_lock("s", fence=permits[1].fence, reason="it is stuck")
        await until(api, lambda: is_lost(permits[1]))
        assert [holder.slot for holder in (await operator.inspect("s")).holders] == [0, 2]
        assert permits[0].held
        assert permits[2].held
        async with operator.semaphore("s", 3) as permit:
            assert permit.slot == 1
            assert permit.fence > broken.fence
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            await permits[1].release()
        for permit in (permits[0], permits[2]):
            await permit.release()

    play(scenario)


@pytest.mark.parametrize(("kind", "mode", "make"), KINDS.values(), ids=KINDS)
def test_a_holder_is_broken_by_its_id_alone(play: Play, kind: str, mode: str, make: Any) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        lease = await make(client, "stuck").acquire()
        (holder,) = (await operator.inspect("{s}:k")).holders
        with pytest.raises(holdfast.NotHeld):
            await operator.break_lock("{s}:k", holder_id=f"{holder.id}0", reason="it is stuck")
        broken = await operator.break_lock("{s}:k", holder_id=holder.id, reason="it is stuck")
        assert broken.fence > lease.fence
        assert await operator.inspect("{s}:k") is None
        with pytest.raises(holdfast.LeaseLost, match="it is stuck"):
            await lease.release()

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_a_holder_of_another_library_is_broken_by_its_id(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        await api.raw("SET", "{s}:k", b"\xff\x00 a token of another library", "PX", 60_000)
        (holder,) = (await client.inspect("{s}:k")).holders
        with pytest.raises(holdfast.NotHeld):
            await client.break_lock("{s}:k", fence=1, reason="it is stuck")
        broken = await client.break_lock("{s}:k", holder_id=holder.id, reason="it is stuck")
        assert broken.holder.fence is None
        assert await client.inspect("{s}:k") is None
        (entry,) = await client.history("{s}:k")
        assert (entry.holder.host, entry.holder.fence, entry.reason) == ("", None, "it is stuck")
        async with client.lock("{s}:k", wait=0) as lease:
            assert lease.fence > broken.fence

    play(scenario)


def test_the_history_has_each_break_and_the_latest_first(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        for number in range(103):
            lease = await client.lock("{s}:k", label="stuck").acquire()
            await operator.break_lock("{s}:k", fence=lease.fence, reason=f"number {number}\n  or so", label="ops")
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()
        entries = await operator.history("{s}:k")
        assert [entry.reason for entry in entries] == [f"number {number} or so" for number in range(102, 2, -1)]
        latest = entries[0]
        assert (latest.name, latest.holder.fence, latest.holder.label) == ("{s}:k", lease.fence, "stuck")
        assert latest.by.label == "ops"
        assert await operator.history("another") == []

    play(scenario)


def test_the_history_says_when(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("{s}:k").acquire()
        broken = await client.break_lock("{s}:k", fence=lease.fence, reason="it is stuck")
        (entry,) = await client.history("{s}:k")
        assert entry.at == broken.at > 0
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    play(scenario)


def test_a_lock_that_is_kept_for_a_waiter_cannot_be_broken(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        held = await client.lock("{s}:b").acquire()
        first = await client.lock("{s}:a").acquire()

        async def both() -> None:
            async with other.lock("{s}:a", "{s}:b"):
                pass

        waiter = api.spawn(both)
        await until(api, lambda: waiters_of(client, "{s}:a", 1))
        await api.sleep(0.3)
        await first.release()

        async def reserved() -> Any:
            info = await client.inspect("{s}:a")
            return [holder for holder in info.holders if holder.mode == "reserved"] if info else None

        (holder,) = await until(api, reserved)
        with pytest.raises(holdfast.NotHeld, match="kept for a waiter"):
            await client.break_lock("{s}:a", holder_id=holder.id, reason="why not")
        await held.release()
        await waiter.join()

    play(scenario)


@pytest.mark.needs("get_or_compute")
def test_a_computation_that_is_broken_is_not_stored_and_a_waiter_computes(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, other, operator = api.client(), api.client(), api.client()
        if api.kind == "blocking":
            pytest.skip("the same steps; a blocked computation needs a thread of its own")
        may_end = False

        async def stuck() -> str:
            while not may_end:
                await api.sleep(0.01)
            return "old"

        caller = api.spawn(lambda: client.get_or_compute("c", stuck))

        async def claimed() -> Any:
            return await operator.inspect("c")

        info = await until(api, claimed)
        waiting = api.spawn(lambda: other.get_or_compute("c", lambda: "new"))
        await until(api, lambda: waiters_of(operator, "c", 1))
        await operator.break_lock("c", holder_id=info.holders[0].id, reason="it is stuck")
        assert await waiting.join() == "new"
        may_end = True
        assert await caller.join() == "old"  # its own result, which was not stored
        assert await operator.get_or_compute("c", lambda: "computed again") == "new"

    play(scenario)


@pytest.mark.parametrize(
    "asked",
    [
        {"reason": "x"},
        {"fence": 1},
        {"fence": 0, "reason": "x"},
        {"fence": True, "reason": "x"},
        {"fence": "1", "reason": "x"},
        {"fence": 1, "reason": " "},
        {"fence": 1, "reason": 7},
        {"holder_id": "", "reason": "x"},
        {"fence": 1, "reason": "x", "label": "x" * 65},
    ],
)
def test_what_is_not_said_clearly_is_refused(play: Play, asked: dict[str, Any]) -> None:
    async def scenario(api: Any) -> None:
        with pytest.raises((holdfast.InvalidConfig, TypeError)):
            await api.client().break_lock("{s}:k", **asked)

    play(scenario)


def test_a_hold_that_was_passed_on_within_its_process_can_be_broken_by_its_own_fence(play: Play) -> None:
    async def scenario(api: Any) -> None:
        client, operator = api.client(), api.client()
        first = await client.lock("{s}:k").acquire()
        held: list[Any] = []

        async def wait() -> None:
            held.append(await client.lock("{s}:k").acquire())

        waiter = api.spawn(wait)
        await api.sleep(0.05)
        await first.release()
        await waiter.join()
        (lease,) = held
        broken = await operator.break_lock("{s}:k", fence=lease.fence, reason="it is stuck")
        assert broken.fence > lease.fence
        await until(api, lambda: is_lost(lease))
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    play(scenario)
