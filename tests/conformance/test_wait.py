"""How long ``acquire()`` waits, for every kind of lock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from holdfast import InvalidConfig

KINDS = ["lock", "several", "rlock", "semaphore", "read", "write"]


def kind_of_lock(client: Any, kind: str, **options: Any) -> Any:
    """Two of the same kind exclude each other (of which a reader is kept out by a writer)."""
    if kind in ("read", "write"):
        return getattr(client.rwlock("a", **options), kind)
    if kind == "semaphore":
        return client.semaphore("a", 1, **options)
    return (
        client.rlock("a", **options)
        if kind == "rlock"
        else client.lock(*["a", "b"][: 1 + (kind == "several")], **options)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_acquire_without_a_timeout_waits_as_long_as_the_lock_says(play: Any, kind: str) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await kind_of_lock(one, "write" if kind == "read" else kind).acquire()
        assert await kind_of_lock(two, kind, wait=0).acquire() is None
        assert await kind_of_lock(two, kind, wait=1).acquire() is None
        outcomes: list[Any] = []

        async def waiter(wait: float | None, timeout: float) -> None:
            patient = await kind_of_lock(two, kind, wait=wait).acquire(timeout=timeout)
            outcomes.append(wait)
            await patient.release()

        handles = [
            api.spawn(lambda: waiter(None, -1)),
            api.spawn(lambda: waiter(60, -1)),
            api.spawn(lambda: waiter(0, 60)),
        ]
        await api.sleep(0.2)
        assert outcomes == []
        await lease.release()
        for handle in handles:
            await handle.join()
        assert set(outcomes) == {None, 60, 0}

    play(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_acquire_takes_the_wait_of_one_call(play: Any, kind: str) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await kind_of_lock(one, "write" if kind == "read" else kind).acquire(wait=0)
        lock = kind_of_lock(two, kind, wait=0)
        assert await lock.acquire(wait=0) is None
        assert await lock.acquire(wait=timedelta(seconds=1)) is None
        for unclear in ({"timeout": 1}, {"blocking": False}, {"timeout": timedelta(seconds=1)}):
            with pytest.raises(InvalidConfig, match="give wait alone"):
                await lock.acquire(wait=1, **unclear)
        outcomes: list[Any] = []

        async def waiter() -> None:
            patient = await lock.acquire(wait=None)
            outcomes.append(patient.held)
            await patient.release()

        waiting = api.spawn(waiter)
        await api.sleep(0.2)
        assert outcomes == []
        await lease.release()
        await waiting.join()
        assert outcomes == [True]

    play(scenario)


def test_durations_may_be_timedeltas(play: Any) -> None:
    """Wherever seconds are taken, and with the same limits."""
    second = timedelta(seconds=1)

    async def scenario(api: Any) -> None:
        client = api.client(timeout=5 * second, outage_wait=2 * second, fence_retention=60 * second)
        lock = client.lock("a", ttl=20 * second, wait=second, max_hold=60 * second, outage_wait=second)
        lease = await lock.acquire(timeout=second)
        assert 10 < lease.remaining() <= 20
        await lease.extend(40 * second)
        assert 30 < lease.remaining() <= 40
        assert not await lease.lost.wait(timedelta(milliseconds=10))
        assert not await lease.lost.wait(-0.5), "as threading.Event: a loop that is late goes on"
        assert await client.lock("a", wait=timedelta()).acquire() is None
        await lease.release()
        with pytest.raises(InvalidConfig, match=r"ttl=-1.0: give at least 0.01 seconds"):
            client.lock("a", ttl=-second)
        with pytest.raises(InvalidConfig, match="acquire.timeout=-1.0.: give at least 0 seconds"):
            await lock.acquire(timeout=-second)

    play(scenario)
