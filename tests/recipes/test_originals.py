"""Our recipes and the programs that they were taken from exclude each other, both ways, on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.recipes.originals import ORIGINALS, CppGetSet, SecondsGetSet, Socket
from tests.servers import Server
from tests.support import as_bytes

EXCLUDING = [original for original in ORIGINALS if original.excludes]
[BLIND] = [original for original in ORIGINALS if not original.excludes]
INCREMENTS = 250  # by each of four


@pytest.fixture(params=ORIGINALS, ids=lambda original: original.__name__)
def original(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    client = request.param(server.port, "foo")
    yield client
    client.close()


def ours(face: Any, original: Any, **options: Any) -> Any:
    return face.recipe(original.recipe, "foo", **{**original.options, **options})


def test_theirs_keeps_ours_out(face: Any, original: Any, admin: redis.Redis) -> None:
    recipe = ours(face, original)
    assert original.attempt()
    assert recipe.locked()
    found = recipe.acquire(blocking=False)
    assert (found is None) == original.excludes
    if found:
        return
    before = admin.get(original.key)
    with pytest.raises(holdfast.AcquireTimeout, match="another client holds it"):
        with ours(face, original, wait=0.02):
            pass
    assert admin.get(original.key) == before
    original.unlock()
    with ours(face, original, wait=5):
        assert not original.attempt()


def test_ours_keeps_theirs_out(face: Any, original: Any, admin: redis.Redis) -> None:
    recipe = ours(face, original)
    with recipe as lease:
        assert admin.keys("*") == [original.key.encode()]
        assert recipe.key == original.key
        assert original.attempt() != original.excludes
        assert lease.fence is None
    assert not admin.exists(original.key)
    assert not recipe.locked()
    assert original.attempt()
    original.unlock()
    assert not admin.exists(original.key)


def test_the_keys_look_the_same(face: Any, original: Any, admin: redis.Redis) -> None:
    """The kind of value, how far away its end is, and whose clock it is counted on."""

    def look() -> tuple[int, float]:
        value, left_ms = admin.get(original.key), admin.pttl(original.key)
        assert value is not None
        return len(value) if value.isdigit() else -1, int(value) if value.isdigit() else left_ms // 100_000

    recipe = ours(face, original)
    with recipe:
        our_length, our_number = look()
    assert original.attempt()
    length, number = look()
    assert our_length == length
    assert number == pytest.approx(our_number, rel=1e-8) if length > 1 else number == our_number


def increments(make: Any, server: Server) -> int:
    """A counter after increments by four clients, each of which reads it and writes it a moment later.

    Two clients are theirs, one is ours with threads, and one is ours under asyncio.
    """
    probe = Socket(server.port)
    probe.ask("SET", "counter", 0)
    failures: list[BaseException] = []

    def increment(counter: Socket) -> None:
        value = int(counter.ask("GET", "counter"))
        time.sleep(0)
        counter.ask("SET", "counter", value + 1)

    # Shown by test_at_the_turn_of_a_second_a_waiter_takes_the_lease_of_the_holder.
    tolerated = suppress(*[holdfast.LeaseLost] if make.options.get("release") == "same_value" else [])

    def theirs() -> None:
        client, counter = make(server.port, "foo"), Socket(server.port)
        for _ in range(INCREMENTS):
            client.lock()
            increment(counter)
            client.unlock()
            time.sleep(0.0001)  # give way
        client.close()
        counter.close()

    def with_threads() -> None:
        counter = Socket(server.port)
        with holdfast.connect(server.url) as client:
            for _ in range(INCREMENTS):
                with tolerated, client.recipe(make.recipe, "foo", sleep=0.001, **make.options):
                    increment(counter)
                time.sleep(0.0001)
        counter.close()

    async def with_tasks() -> None:
        counter = Socket(server.port)
        async with holdfast.aio.connect(server.url) as client:
            recipe = client.recipe(make.recipe, "foo", sleep=0.001, **make.options)
            for _ in range(INCREMENTS):
                with tolerated:
                    async with recipe:
                        increment(counter)
                await asyncio.sleep(0.0001)
        counter.close()

    def watched(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return run

    threads = [
        threading.Thread(target=watched(work))
        for work in (theirs, theirs, with_threads, lambda: asyncio.run(with_tasks()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    counted = int(probe.ask("GET", "counter"))
    probe.close()
    return counted


@pytest.mark.long
@pytest.mark.parametrize("make", EXCLUDING, ids=lambda original: original.__name__)
def test_a_thousand_increments_and_none_is_lost(make: Any, server: Server) -> None:
    assert increments(make, server) == 4 * INCREMENTS


def test_at_the_turn_of_a_second_a_waiter_takes_the_lease_of_the_holder(face: Any, admin: redis.Redis) -> None:
    """A waiter whose GET found no key overwrites the holder's value by its GETSET. In the same second that is the same
    value; in the next one it is another, and the holder finds its lease lost. The waiter has not got the lock."""
    lease = face.recipe("getset", "foo", **SecondsGetSet.options).acquire()
    assert lease
    mine = as_bytes(admin.get("lock.foo"))
    assert int(as_bytes(admin.getset("lock.foo", int(mine) + 1))) > time.time(), "so the waiter goes on waiting"
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


@pytest.mark.long
def test_with_the_blind_one_increments_are_lost(server: Server) -> None:
    """Which also shows that the test above could fail."""
    assert increments(BLIND, server) < 4 * INCREMENTS


def test_who_is_dead_is_succeeded_by_the_other_kind(face: Any, server: Server, admin: redis.Redis) -> None:
    """A deadline that has passed is taken over, by ours from theirs and by theirs from ours."""
    theirs = CppGetSet(server.port, "foo")
    admin.set("lock.foo", time.time_ns() // 1000 - 1)
    assert face.recipe("getset", "foo", ttl=0.01).acquire(blocking=False)
    time.sleep(0.02)
    assert theirs.attempt()
    assert face.recipe("getset", "foo").acquire(blocking=False) is None
    theirs.close()
