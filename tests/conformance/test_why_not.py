"""What AcquireTimeout says: nested by mistake only if this very thread or task holds the lock."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import holdfast

ASK = {
    "lock": lambda client, **options: client.lock("a", **options),
    "several": lambda client, **options: client.lock("a", "b", **options),
    "rlock": lambda client, **options: client.rlock("a", **options),
    "write": lambda client, **options: client.rwlock("a", **options).write,
}


async def refusal_of(lock: Any) -> str:
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        async with lock:
            raise AssertionError("entered")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["lock", "several", "write"])
@pytest.mark.parametrize("way", ["with", "acquire"])
def test_nested_in_itself_it_says_so(play: Any, kind: str, way: str) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        if way == "with":
            async with ASK[kind](client):
                said = await refusal_of(ASK[kind](client, wait=1))
        else:
            lease = await ASK[kind](client).acquire()
            said = await refusal_of(ASK[kind](client, wait=1))
            await lease.release()
        assert "this thread or task" in said
        assert "Nested by mistake?" in said

    play(scenario)


@pytest.mark.parametrize("kind", ["lock", "several", "rlock", "write"])
def test_held_by_another_thread_or_task_it_does_not_ask_that(play: Any, kind: str) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def ask() -> str:
            return await refusal_of(ASK[kind](client, wait=1))

        async with ASK[kind](client):
            said = await api.spawn(ask).join()
        assert "Nested" not in said
        assert kind == "write" or "another thread or task of this process holds" in said
        assert "try again later" in said

    play(scenario)


def test_an_object_that_is_shared_is_not_nested_either(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().lock("a", wait=1)
        async with lock:
            said = await api.spawn(lambda: refusal_of(lock)).join()
        assert "another thread or task of this process holds it" in said

    play(scenario)


@pytest.mark.parametrize("kind", ["lock", "several", "rlock"])
def test_the_task_that_has_acquired_it_may_be_gone(play: Any, kind: str) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        leases: list[Any] = []

        async def take() -> None:
            leases.append(await client.lock("a").acquire())

        await api.spawn(take).join()
        gc.collect()
        said = await refusal_of(ASK[kind](client, wait=1))
        assert "another thread or task of this process holds" in said
        await leases[0].release()

    play(scenario)
