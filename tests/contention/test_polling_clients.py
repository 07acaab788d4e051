"""Those who know of no queue: plain clients that hold the same lock, that poll for it, or that take it away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import redis
import redis.lock

import holdfast
import holdfast.aio
from tests.contention.support import (
    SOON,
    Background,
    OldServer,
    acquire_later,
    await_refresh,
    check_nobody_queues,
    queue_of,
)
from tests.support import Script, asyncio_test, eventually, lock_keys, took


@pytest.mark.parametrize("after", [0.02, 0.3, 1.2])
def test_foreign_locks_that_are_released_are_had_soon(face: Any, admin: redis.Redis, after: float) -> None:
    theirs = redis.lock.Lock(admin, "redis-py's", timeout=60)
    assert theirs.acquire()
    assert admin.set("by hand", "theirs", nx=True, px=60_000)
    assert admin.set("without a ttl", "theirs", nx=True)
    frees: dict[str, Callable[[], object]] = {
        "redis-py's": theirs.release,
        "by hand": lambda: admin.delete("by hand"),
        "without a ttl": lambda: admin.delete("without a ttl"),
    }

    def acquire(name: str) -> Any:
        return face.lock(name, ttl=60).acquire(timeout=20)

    waiters = {name: Background(partial(acquire, name)) for name in frees}
    time.sleep(after)
    for name, free in frees.items():
        assert not waiters[name].is_over()
        freed_at = time.monotonic()
        free()
        lease = waiters[name].outcome()
        assert waiters[name].ended_at - freed_at < SOON, name
        assert admin.get(name) == lease.token.encode()
        lease.release()
        check_nobody_queues(admin, name)
    assert lock_keys(admin) == []


def acquire_after_a_refresh(face: Any, admin: redis.Redis) -> float:
    """How long the first in the queue takes to have a foreign lock that is freed right after it has asked for it."""
    admin.set("x", "theirs")
    waiter = acquire_later(face.lock("x", ttl=60), admin)
    await_refresh(admin)
    freed_at = time.monotonic()
    admin.delete("x")
    waiter.outcome().release()
    return waiter.ended_at - freed_at


def test_server_tells_the_first_in_the_queue_of_a_foreign_release(face: Any, admin: redis.Redis) -> None:
    """Without that it would ask again after half a second, and not before."""
    assert any(acquire_after_a_refresh(face, admin) < 0.25 for _ in range(3))


def test_without_resp3_a_foreign_release_is_found_by_the_next_refresh(connect: Any) -> None:
    with OldServer() as old, old.client() as admin:
        assert acquire_after_a_refresh(connect(old.url), admin) < 0.5 + SOON


def test_foreign_lock_that_expires_is_had_at_its_end(face: Any, admin: redis.Redis) -> None:
    for ttl_ms in (120, 630):
        with took(at_least=ttl_ms / 1000 - 0.05, less_than=ttl_ms / 1000 + SOON):
            admin.set("x", "theirs", px=ttl_ms)
            lease = face.lock("x").acquire(timeout=20)
        lease.release()


def test_foreign_lock_that_is_taken_over_by_another_is_waited_for(face: Any, admin: redis.Redis) -> None:
    """A push says only that something has changed."""
    admin.set("x", "theirs", px=60_000)
    waiter = acquire_later(face.lock("x", ttl=60), admin)
    for number in range(5):
        time.sleep(0.1)
        admin.set("x", f"of number {number}", px=60_000)
    assert not waiter.is_over()
    assert len(queue_of(admin)) == 1
    freed_at = time.monotonic()
    admin.delete("x")
    waiter.outcome().release()
    assert waiter.ended_at - freed_at < SOON


def test_plain_client_waits_for_a_lock_of_ours(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=60).acquire(timeout=5)
    theirs = redis.lock.Lock(admin, "x", timeout=60, sleep=0.05)
    assert not theirs.acquire(blocking_timeout=0.2)
    lease.release()
    assert theirs.acquire(blocking_timeout=5)
    assert face.lock("x").acquire(blocking=False) is None
    theirs.release()


BUSY = """
    import threading
    client = holdfast.connect(url)

    def work():
        while True:
            with client.lock("x", cohort=int(sys.argv[2])):
                pass

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    say("ready")
    time.sleep(60)
"""
BUSY_ASYNCIO = """
    import asyncio

    async def work(client):
        while True:
            async with client.lock("x", cohort=int(sys.argv[2])):
                await asyncio.sleep(0)

    async def main():
        async with holdfast.aio.connect(url) as client:
            say("ready")
            await asyncio.gather(*(work(client) for _ in range(4)))

    asyncio.run(main())
"""


@contextmanager
def a_busy_crowd(admin: redis.Redis, code: str, url: str, processes: int, cohort: int) -> Iterator[None]:
    """They are so many that there is always somebody who waits, on the server or in line within a process."""
    with ExitStack() as stack:
        busy = [stack.enter_context(Script(code, url, cohort)) for _ in range(processes)]
        for process in busy:
            process.hear("ready")
        eventually(lambda: admin.exists("x"))
        yield


@pytest.mark.long
@pytest.mark.parametrize("code", [BUSY, BUSY_ASYNCIO], ids=["threads", "tasks"])
@pytest.mark.parametrize(("processes", "cohort"), [(3, 0), (2, 64), (1, 64)])
def test_plain_client_that_polls_beside_a_busy_crowd_gets_its_turn(
    url: str, admin: redis.Redis, code: str, processes: int, cohort: int
) -> None:
    with a_busy_crowd(admin, code, url, processes, cohort):
        theirs = redis.lock.Lock(admin, "x", timeout=10, sleep=0.05)
        assert theirs.acquire(blocking_timeout=25), "it polled for 25 s in vain"
        assert theirs.owned()
        theirs.release()


@pytest.mark.long
@pytest.mark.parametrize(("processes", "cohort"), [(3, 0), (1, 64)])
def test_a_try_that_does_not_wait_gets_in_beside_a_busy_crowd_as_any_poll_does(
    url: str, client: holdfast.Client, admin: redis.Redis, processes: int, cohort: int
) -> None:
    with a_busy_crowd(admin, BUSY, url, processes, cohort):
        lease = eventually(lambda: client.lock("x").acquire(blocking=False), 25.0, "it tried for 25 s in vain")
        assert lease is not None
        assert lease.held
        lease.release()


def foreign_seen(admin: redis.Redis) -> bool:
    """Whether the server remembers that a client of another library had the lock."""
    windows = admin.hget("x:hf1:waiters:{x}", "yield") or b"0 0 0 0"
    return int(windows.split()[2]) > 0


def test_a_token_of_another_library_is_remembered_and_ours_is_not(
    face: Any, connect: Any, url: str, admin: redis.Redis
) -> None:
    ours = connect(url).lock("x", label="a.b-c")
    for holder, is_foreign in ((ours, False), (redis.lock.Lock(admin, "x", timeout=60), True)):
        assert holder.acquire()
        waiter = acquire_later(face.lock("x", ttl=60), admin)
        await_refresh(admin)
        assert foreign_seen(admin) == is_foreign
        holder.release()
        waiter.outcome().release()
    assert foreign_seen(admin)
    assert 50_000 < admin.pttl("x:hf1:waiters:{x}") <= 60_000, "it outlasts the queue"


# Theft.

THEFTS = {
    "deleted": lambda admin: admin.delete("x"),
    "overwritten": lambda admin: admin.set("x", "another's"),
    "flushed": lambda admin: admin.flushall(),
    "renamed": lambda admin: admin.rename("x", "y"),
}


@pytest.mark.parametrize("theft", THEFTS)
def test_holder_whose_key_is_taken_away_is_told_soon(face: Any, admin: redis.Redis, theft: str) -> None:
    """Its next renewal would come after 20 s."""
    told: list[Any] = []
    lease = face.lock("x", ttl=60, on_lost=told.append).acquire(timeout=5)
    time.sleep(0.3)
    assert lease.held
    stolen_at = time.monotonic()
    THEFTS[theft](admin)
    assert lease.lost.wait(SOON), f"{time.monotonic() - stolen_at:.2f} s later it does not know"
    assert not lease.held
    eventually(lambda: told, SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.check()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert admin.get("x") == (b"another's" if theft == "overwritten" else None)


@pytest.mark.parametrize("renew", [True, False])
def test_theft_right_after_the_grant_is_noticed_too(face: Any, admin: redis.Redis, renew: bool) -> None:
    lease = face.lock("x", ttl=60, renew=renew).acquire(timeout=5)
    admin.delete("x")
    assert lease.lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_theft_from_one_to_whom_the_lock_was_handed_over(connect: Any, url: str, admin: redis.Redis) -> None:
    held = connect(url).lock("x", ttl=60).acquire(timeout=5)
    waiter = acquire_later(connect(url).lock("x", ttl=60), admin)
    held.release()
    lease = waiter.outcome()
    time.sleep(0.3)
    assert lease.held
    assert admin.pttl("x") > 50_000, "it was claimed for the whole ttl"
    admin.delete("x")
    assert lease.lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_theft_from_many_holders_at_once(face: Any, admin: redis.Redis) -> None:
    leases = [face.lock(f"x{number}", ttl=60).acquire(timeout=5) for number in range(100)]
    time.sleep(0.3)
    admin.delete(*(f"x{number}" for number in range(0, 100, 2)))
    for lease in leases[::2]:
        assert lease.lost.wait(SOON)
    for lease in leases[1::2]:
        assert lease.held
        lease.release()
    for lease in leases[::2]:
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


@asyncio_test
async def test_body_that_was_robbed_is_cancelled_soon(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with took(less_than=0.3 + SOON), pytest.raises(holdfast.LeaseLost):
            async with client.lock("x", ttl=60):
                await asyncio.sleep(0.3)
                admin.delete("x")
                await asyncio.sleep(30)


def test_after_a_theft_the_next_waiter_has_it(connect: Any, url: str, admin: redis.Redis) -> None:
    robbed = connect(url).lock("x", ttl=60).acquire(timeout=5)
    waiter = acquire_later(connect(url).lock("x", ttl=60), admin)
    time.sleep(0.3)
    stolen_at = time.monotonic()
    admin.delete("x")
    lease = waiter.outcome()
    assert waiter.ended_at - stolen_at < SOON
    assert robbed.lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        robbed.release()
    assert admin.get("x") == lease.token.encode(), "the robbed one has not freed it"
    lease.release()


def test_what_we_write_ourselves_is_no_theft(connect: Any, url: str, admin: redis.Redis) -> None:
    """Renewals, extensions and waiters that ask for it beside."""
    told: list[Any] = []
    ttl = 6.0  # a busy machine may stand still for as long as that, and the lease must not be lost for it
    lease = connect(url).lock("x", ttl=ttl, on_lost=told.append).acquire(timeout=5)
    waiter = acquire_later(connect(url).lock("x", ttl=ttl), admin)
    for _ in range(8):
        time.sleep(0.13)
        lease.extend(ttl)
        assert lease.held
    extended = lease.remaining()
    eventually(lambda: lease.remaining() < extended - 0.5)
    eventually(lambda: lease.remaining() > ttl * 0.9, ttl, "it is renewed")
    assert lease.held
    assert not waiter.is_over()
    lease.release()
    waiter.outcome().release()
    assert told == []


def test_foreign_write_that_changes_nothing_is_no_theft(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=60).acquire(timeout=5)
    time.sleep(0.3)
    for _ in range(3):
        admin.pexpire("x", 50_000)
        time.sleep(0.1)
        assert lease.held
    eventually(lambda: admin.pttl("x") > 50_000, what="it has looked, and renewed it")
    admin.delete("x")
    assert lease.lost.wait(SOON), "and it is still watched"
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
