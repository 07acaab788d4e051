"""An exception from the body and one from release: both are to be seen, the body's first."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.support import asyncio_test, lock_keys


class Broken(Exception):
    """What the body raises."""


def test_error_of_the_body_is_raised_and_the_lock_freed(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.raises(Broken) as caught:
        with client.lock("x"):
            raise Broken("as expected")
    assert not getattr(caught.value, "__notes__", [])
    assert lock_keys(admin) == []


def test_error_of_the_body_carries_what_release_said(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.raises(Broken) as caught:
        with client.lock("x"):
            admin.delete("x")
            raise Broken("the body's own")
    (note,) = caught.value.__notes__
    assert "LeaseLost" in note
    assert "'x'" in note
    shown = "".join(traceback.format_exception(caught.value))
    assert "the body's own" in shown
    assert "LeaseLost" in shown


def test_error_of_release_alone_is_raised(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.raises(holdfast.LeaseLost):
        with client.lock("x"):
            admin.set("x", "another's")
    assert admin.get("x") == b"another's"


def test_loss_that_the_body_has_noticed_is_not_reported_twice(client: holdfast.Client, admin: redis.Redis) -> None:
    with pytest.raises(holdfast.LeaseLost) as caught:
        with client.lock("x", ttl=3) as lease:
            admin.delete("x")
            assert lease.lost.wait(5)
            lease.check()
    assert not getattr(caught.value, "__notes__", [])


def test_released_in_the_body_leaves_quietly(client: holdfast.Client, admin: redis.Redis) -> None:
    with client.lock("x") as lease:
        lease.release()
        assert lock_keys(admin) == []


@asyncio_test
async def test_asyncio_error_of_the_body_is_raised_and_the_lock_freed(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(Broken) as caught:
            async with client.lock("x"):
                raise Broken("as expected")
        assert not getattr(caught.value, "__notes__", [])
        assert lock_keys(admin) == []


@asyncio_test
async def test_asyncio_error_of_the_body_carries_what_release_said(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(Broken) as caught:
            async with client.lock("x"):
                admin.delete("x")
                raise Broken("the body's own")
        (note,) = caught.value.__notes__
        assert "LeaseLost" in note


@asyncio_test
async def test_asyncio_cancellation_carries_what_release_said(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        notes: list[Any] = []
        inside = asyncio.Event()

        async def work() -> None:
            try:
                async with client.lock("x", on_lost="ignore"):  # else a loss found early would cancel it, not we
                    admin.delete("x")
                    inside.set()
                    await asyncio.sleep(60)
            except asyncio.CancelledError as error:
                notes.extend(getattr(error, "__notes__", []))
                raise

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(notes) == 1
        assert "LeaseLost" in notes[0]


@asyncio_test
async def test_asyncio_error_that_the_body_makes_of_our_cancellation_wins(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(Broken) as caught:
            async with client.lock("x", ttl=0.6):
                admin.delete("x")
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    raise Broken("while cleaning up") from None
        assert "LeaseLost" in "".join(caught.value.__notes__)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation may be left over to hit what comes next
