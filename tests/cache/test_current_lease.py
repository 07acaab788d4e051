"""The lease of a function that runs once at a time, and the result of one that was skipped."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import threading
from typing import Any

import holdfast
import holdfast.aio
from tests.support import asyncio_test


def lease_name() -> str | None:
    lease = holdfast.current_lease()
    return None if lease is None else lease.name


def test_current_lease_is_that_of_the_innermost_function(client: holdfast.Client) -> None:
    seen: list[Any] = []

    @client.exclusive("inner:{number}")
    def inner(number: int) -> None:
        seen.append(lease_name())
        if number == 2:
            raise LookupError

    @client.exclusive("outer")
    def outer() -> None:
        lease = holdfast.current_lease()
        assert isinstance(lease, holdfast.Lease)
        lease.check()
        seen.append(lease_name())
        inner(1)
        seen.append(lease_name())
        try:
            inner(2)
        except LookupError:
            seen.append(lease_name())

    assert holdfast.current_lease() is None
    outer()
    assert holdfast.current_lease() is None
    assert seen == ["outer", "inner:1", "outer", "inner:2", "outer"]
    with client.lock("other"):
        assert holdfast.current_lease() is None, "a block names its own"


def test_a_thread_sees_it_only_in_a_copy_of_the_context(client: holdfast.Client) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(lease_name())

    @client.exclusive("a")
    def start_threads() -> None:
        for context in (contextvars.Context(), contextvars.copy_context()):
            thread = threading.Thread(target=context.run, args=(look,))
            thread.start()
            thread.join()

    start_threads()
    assert seen == [None, "a"]


@asyncio_test
async def test_each_task_has_its_own(url: str) -> None:
    async with holdfast.aio.connect(url) as client:

        @client.exclusive("a:{number}")
        async def work(number: int) -> list[str | None]:
            await asyncio.sleep(0.01)
            assert isinstance(holdfast.current_lease(), holdfast.aio.Lease)
            started = asyncio.create_task(look_later())
            return [lease_name(), await asyncio.to_thread(lease_name), await started]

        @client.exclusive("plain")
        def plain() -> str | None:
            return lease_name()

        results = await asyncio.gather(*(work(number) for number in range(3)), look_later())
        assert results == [*([f"a:{number}"] * 3 for number in range(3)), None]
        assert await plain() == "plain"
        assert holdfast.current_lease() is None


async def look_later() -> str | None:
    await asyncio.sleep(0.02)
    return lease_name()


def test_skipped_is_false_and_one_of_a_kind() -> None:
    skipped = holdfast.SKIPPED
    assert not skipped
    assert skipped is not None
    assert repr(skipped) == str(skipped) == "holdfast.SKIPPED"
    assert copy.deepcopy(skipped) is pickle.loads(pickle.dumps(skipped)) is skipped
