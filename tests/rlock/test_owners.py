"""An owner is a thread or a task itself. The number of a thread that has ended is soon that of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.support import asyncio_test

THREADS = 30  # started one after the other, so that the number of the first is used again


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What that returned, or the error that it raised, in a thread that has ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_new_thread_does_not_inherit_the_rlock_of_one_that_has_ended(client: holdfast.Client) -> None:
    lock = client.rlock("x")
    lease = in_a_thread(lock.acquire)
    for _ in range(THREADS):
        assert in_a_thread(lambda: client.rlock("x").acquire(blocking=False)) is None
        assert isinstance(in_a_thread(lock.release), holdfast.NotHeld)
        assert isinstance(in_a_thread(lease.release), holdfast.NotHeld)
    assert lease.held, "it was not released"


def test_a_new_thread_may_write_where_one_that_has_ended_reads(client: holdfast.Client) -> None:
    rw = client.rwlock("x")
    lease = in_a_thread(rw.read.acquire)
    for _ in range(THREADS):
        assert in_a_thread(lambda: rw.write.acquire(timeout=0)) is None, "no WouldDeadlock: it does not read"
    lease.release()
    in_a_thread(rw.write.acquire).release()


def test_a_new_thread_may_wait_to_read_where_one_that_has_ended_writes(client: holdfast.Client) -> None:
    rw = client.rwlock("x", ttl=2.0, max_hold=3.5)
    lease = in_a_thread(rw.write.acquire)
    for _ in range(THREADS):
        error = in_a_thread(lambda: client.rwlock("x", wait=0).read.__enter__())
        assert isinstance(error, holdfast.AcquireTimeout)
        assert "this thread" not in str(error)
    in_a_thread(client.rwlock("x").read.acquire).release()
    with pytest.raises(holdfast.LeaseLost, match="max_hold"):
        lease.release()


@pytest.mark.parametrize("kind", ["lock", "rlock"])
def test_a_new_thread_is_not_taken_for_the_holder_that_has_ended(client: holdfast.Client, kind: str) -> None:
    lease = in_a_thread(client.lock("x").acquire)
    for _ in range(THREADS):
        error = in_a_thread(lambda: getattr(client, kind)("x", wait=0).__enter__())
        assert isinstance(error, holdfast.AcquireTimeout)
        assert "another thread or task of this process holds it" in str(error)
    lease.release()


@asyncio_test
async def test_a_new_task_does_not_inherit_the_rlock_of_one_that_has_ended(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x")
        lease = await asyncio.create_task(lock.acquire())
        for _ in range(THREADS):
            assert await asyncio.create_task(client.rlock("x").acquire(blocking=False)) is None
            with pytest.raises(holdfast.NotHeld):
                await asyncio.create_task(lock.release())
        assert lease.held, "no task has given it back"
