"""Texts name the whole key, which is what an operator finds on the server; ``.name`` is the name in the program."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast import events, guard
from tests.servers import free_port
from tests.support import eventually

KEY, NAME = "shop:nightly", "nightly"


@pytest.fixture
def shop(url: str) -> Iterator[holdfast.Client]:
    with holdfast.connect(url, namespace="shop:") as client:
        yield client


def told(caught: pytest.ExceptionInfo[BaseException]) -> Any:
    """The error, whose message has the key, and which has the name and the key."""
    error: Any = caught.value
    assert f"'{KEY}'" in str(error), str(error)
    assert (error.name, error.key) == (NAME, KEY)
    return error


def test_what_users_hold_and_ask_for_knows_its_key(shop: holdfast.Client) -> None:
    made: list[Any] = [
        *(shop.lock(NAME), shop.rlock(NAME), shop.rwlock(NAME), shop.rwlock(NAME).read, shop.semaphore(NAME, 2)),
        *(shop.latch(NAME, 2), shop.election(NAME), shop.lock(NAME).acquire()),
    ]
    for each in made:
        assert (each.name, each.key) == (NAME, KEY)
        assert f"'{KEY}'" in repr(each)
    made[-1].release()


def test_several_names(shop: holdfast.Client) -> None:
    lock = shop.lock("a", "b", wait=0)
    assert (lock.name, lock.key) == ("a, b", "shop:a, shop:b")
    with shop.lock("b"), pytest.raises(holdfast.AcquireTimeout) as caught:
        lock.__enter__()
    assert "lock 'shop:a, shop:b' was not acquired at the first try" in str(caught.value)
    assert "'shop:b'" in str(caught.value).partition(":")[2]
    assert caught.value.refused == "b"


def test_a_busy_lock(shop: holdfast.Client) -> None:
    with shop.lock(NAME), pytest.raises(holdfast.AcquireTimeout) as caught:
        shop.lock(NAME, wait=0).__enter__()
    told(caught)


def test_a_lost_lease(shop: holdfast.Client, admin: redis.Redis) -> None:
    lease = shop.lock(NAME, renew=False).acquire()
    admin.delete(KEY)
    with pytest.raises(holdfast.LeaseLost) as caught:
        lease.release()
    told(caught)


def test_what_is_not_held(shop: holdfast.Client) -> None:
    for lock in (shop.lock(NAME), shop.rlock(NAME), shop.semaphore(NAME, 2)):
        with pytest.raises(holdfast.NotHeld) as caught:
            lock.release()
        told(caught)
    with pytest.raises(holdfast.NotHeld) as caught:
        shop.break_lock(NAME, fence=7, reason="stuck")
    told(caught)


def test_another_kind(shop: holdfast.Client) -> None:
    with shop.semaphore(NAME, 2), pytest.raises(holdfast.Unsupported) as caught:
        shop.lock(NAME, wait=0).acquire()
    assert f"lock '{KEY}': it is in use as a semaphore" in str(caught.value)


def test_a_reader_that_wants_to_write(shop: holdfast.Client) -> None:
    sides = shop.rwlock(NAME)
    with sides.read, pytest.raises(holdfast.WouldDeadlock) as caught:
        sides.write.acquire()
    told(caught)


def test_a_computation(shop: holdfast.Client) -> None:
    def fail() -> None:
        raise ValueError("no such report")

    with pytest.raises(ValueError, match="no such report"):
        shop.get_or_compute(NAME, fail, errors=60)
    with pytest.raises(holdfast.ComputeFailed) as caught:
        shop.get_or_compute(NAME, fail)
    told(caught)


def test_a_stale_write(shop: holdfast.Client) -> None:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, left INT, fence BIGINT, holder TEXT)")
    stock = guard.Table("stock", key="item")
    lock = shop.lock(NAME)
    with lock as lease:
        early = guard.stamp(lease)
    with lock as lease:
        stock.put(database, {"item": "tea", "left": 6}, lease)
    with pytest.raises(holdfast.StaleFence) as caught:
        stock.put(database, {"item": "tea", "left": 7}, early)
    told(caught)
    database.close()


def test_a_dead_server() -> None:
    with holdfast.connect(f"redis://127.0.0.1:{free_port()}/0", namespace="shop:") as client:
        with pytest.raises(holdfast.Unavailable, match=f"lock '{KEY}'"):
            client.lock(NAME).acquire()


def test_the_log_and_events(url: str, admin: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="holdfast")
    seen: list[events.Event] = []

    def stumble(lease: Any) -> None:
        raise ValueError(lease.name)

    with holdfast.connect(url, namespace="shop:", on_event=seen.append) as client:
        lease = client.lock(NAME, on_lost=stumble).acquire()
        admin.delete(KEY)
        eventually(lambda: f"on_lost of the lock '{KEY}' failed" in caplog.text, 15)
        with pytest.raises(holdfast.LeaseLost):
            lease.release()
        eventually(lambda: any(isinstance(event, events.Lost) for event in seen))
    assert {(event.name, event.key) for event in seen} == {(NAME, KEY)}
    assert all(event.as_dict()["key"] == KEY for event in seen)
    assert f"lock '{KEY}' lost after" in caplog.text
    assert f"'{NAME}'" not in caplog.text
    caplog.clear()


def test_what_is_inspected(shop: holdfast.Client) -> None:
    with shop.lock(NAME) as lease:
        info = shop.inspect(NAME)
        assert info is not None
        assert info.as_json()["key"] == KEY
        assert [(info.name, info.key) for info in shop.locks()] == [(NAME, KEY)]
        broken = shop.break_lock(NAME, fence=lease.fence, reason="stuck")
        assert (broken.name, broken.key) == (NAME, KEY)
        assert [(one.name, one.key) for one in shop.history(NAME)] == [(NAME, KEY)]
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_without_a_namespace_they_are_the_same(url: str) -> None:
    with holdfast.connect(url) as client:
        lock = client.lock(NAME)
        assert lock.key == lock.name == NAME
        with pytest.raises(holdfast.NotHeld) as caught:
            lock.release()
    assert caught.value.key == caught.value.name
    assert events.Released(name=NAME, kind="lock", held=1.0).key == NAME


def test_the_asyncio_face(url: str) -> None:
    async def scenario() -> None:
        async with holdfast.aio.connect(url, namespace="shop:") as client:
            lease = await client.lock(NAME).acquire()
            assert f"'{KEY}'" in repr(lease.lost)
            await lease.release()

    asyncio.run(scenario())
