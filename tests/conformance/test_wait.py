"""How long ``acquire()`` waits, for every kind of lock."""

from __future__ import annotations

from typing import Any

import pytest

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
