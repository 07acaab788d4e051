"""A place in a room that is taken away, on a real server: who holds it is told soon, on either face."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.kinds.membership import AT_ONCE
from tests.contention.support import SOON
from tests.pools.harness import MODES
from tests.servers import Server
from tests.support import Script, _AioLock, async_eventually, asyncio_test, eventually, took

ROOM = "x:hf1:holders:{x}"
THEFTS = {
    "deleted": lambda admin: admin.delete(ROOM),
    "overwritten": lambda admin: admin.set(ROOM, "another's"),
    "flushed": lambda admin: admin.flushall(),
    "renamed": lambda admin: admin.rename(ROOM, "y"),
}


def room(face: Any, mode: str, *, permits: int = 3, **options: Any) -> Any:
    client = face.client
    lock = (
        client.semaphore("x", permits, **options) if mode == "permit" else getattr(client.rwlock("x", **options), mode)
    )
    return lock if face.kind == "blocking" else _AioLock(face, lock)


@contextmanager
def requests(server: Server) -> Iterator[list[str]]:
    """What clients have asked of the server meanwhile, as MONITOR shows it; known when the block is over."""
    asked: list[str] = []
    with server.client() as eye, server.client() as admin, eye.monitor() as monitor:
        yield asked
        admin.echo("over")
        for entry in monitor.listen():
            if entry["command"] == "ECHO over":
                break
            if entry["client_type"] != "lua":
                asked.append(entry["command"].split()[0].upper())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("theft", THEFTS)
def test_holder_whose_place_is_taken_away_is_told_soon(face: Any, admin: redis.Redis, mode: str, theft: str) -> None:
    """Its next renewal would come after 20 s."""
    told: list[Any] = []
    lease = room(face, mode, ttl=60, on_lost=told.append).acquire(timeout=5)
    time.sleep(0.3)
    assert lease.held
    THEFTS[theft](admin)
    assert lease.lost.wait(SOON)
    assert not lease.held
    eventually(lambda: told, SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.check()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("renew", [True, False])
def test_theft_right_after_the_grant_is_noticed_too(face: Any, admin: redis.Redis, mode: str, renew: bool) -> None:
    lease = room(face, mode, ttl=60, renew=renew).acquire(timeout=5)
    admin.delete(ROOM)
    assert lease.lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_theft_after_a_renewal(face: Any, admin: redis.Redis) -> None:
    """A renewal is a write of our own, which ends the watch without a word."""
    lease = room(face, "permit", ttl=15).acquire(timeout=5)
    ends = admin.zscore(ROOM, lease.token)
    eventually(lambda: admin.zscore(ROOM, lease.token) != ends, 10.0, "it is renewed")
    lease.extend(60)
    time.sleep(0.3)
    admin.delete(ROOM)
    assert lease.lost.wait(SOON), "it is not just the renewal, seconds later, that would know"
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_theft_from_one_who_was_let_in_by_another(connect: Any, url: str, admin: redis.Redis) -> None:
    first, second = connect(url), connect(url)
    held = room(first, "write", ttl=60).acquire(timeout=5)
    leases: list[Any] = []
    waiter = threading.Thread(target=lambda: leases.append(room(second, "write", ttl=60).acquire(timeout=10)))
    waiter.start()
    eventually(lambda: admin.zcard("x:hf1:queue:{x}") == 2)
    held.release()
    waiter.join()
    time.sleep(0.3)
    assert leases[0].held
    admin.delete(ROOM)
    assert leases[0].lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        leases[0].release()


def test_theft_from_many_holders_of_one_client(face: Any, server: Server, admin: redis.Redis) -> None:
    """Some lose their place and the others keep it; and one look has seen both."""
    leases = [room(face, "permit", permits=60, ttl=60).acquire(timeout=5) for _ in range(50)]
    time.sleep(2.5)  # until a few looks may come at once
    with requests(server) as asked:
        admin.zrem(ROOM, *(lease.token for lease in leases[::2]))
        for lease in leases[::2]:
            assert lease.lost.wait(SOON)
    assert asked.count("EVALSHA") + asked.count("EVAL") <= AT_ONCE
    for lease in leases[1::2]:
        assert lease.held
        lease.release()
    for lease in leases[::2]:
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


@asyncio_test
async def test_theft_after_a_downgrade_that_let_others_in(url: str, admin: redis.Redis) -> None:
    """That is a write of our own, too."""
    async with holdfast.aio.connect(url) as client, holdfast.aio.connect(url) as other:
        lease = await client.rwlock("x", ttl=60, renew=False, on_lost="ignore").write.acquire()
        assert lease
        await asyncio.sleep(0.3)
        waiter = asyncio.create_task(other.rwlock("x", ttl=60).read.acquire())
        await async_eventually(lambda: admin.zcard("x:hf1:queue:{x}") == 2)
        await lease.downgrade()
        neighbour = await waiter
        assert neighbour
        await asyncio.sleep(0.3)
        admin.zrem(ROOM, lease.token)
        assert await lease.lost.wait(SOON)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        await neighbour.release()


def test_theft_in_a_second_event_loop(url: str, admin: redis.Redis) -> None:
    client = holdfast.aio.connect(url)

    async def lose_a_permit() -> None:
        lease = await client.semaphore("x", 3, ttl=60).acquire()
        assert lease
        await asyncio.sleep(0.3)
        admin.delete(ROOM)
        assert await lease.lost.wait(SOON)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    with warnings.catch_warnings():
        # What was left open in a loop that has ended can only be closed by the garbage collector, which says so.
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(lose_a_permit())
        asyncio.run(lose_a_permit())
        asyncio.run(client.aclose())
        gc.collect()


def test_theft_in_a_forked_child(url: str, admin: redis.Redis) -> None:
    code = """
        client = holdfast.connect(url)
        client.semaphore("x", 3).acquire().release()
        if os.fork() == 0:
            lease = client.semaphore("x", 3, ttl=60).acquire()
            time.sleep(0.3)
            say("inside")
            say("told" if lease.lost.wait(20) else "not told")
            os._exit(0)
        os.wait()
    """
    with Script(code, url) as process:
        process.hear("inside")
        admin.delete(ROOM)
        process.hear("told", timeout=SOON)


class Crowd:
    """Others come and go all the time, in a thread, until the block is over."""

    def __init__(self, face: Any, mode: str) -> None:
        self._face, self._mode = face, mode
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._visit)
        self.visits = 0

    def _visit(self) -> None:
        while not self._stop.is_set():
            try:
                with room(self._face, self._mode, ttl=60):
                    self.visits += 1
                    self._stop.wait(0.005)
            except holdfast.LeaseLost:
                pass  # it was inside when the whole room was taken away

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("own", [False, True], ids=["of others", "of the same client"])
def test_in_a_busy_room_looks_are_rationed_and_the_loss_is_told(
    connect: Any, server: Server, admin: redis.Redis, own: bool
) -> None:
    holder = connect(server.url)
    told: list[Any] = []
    with Crowd(holder if own else connect(server.url), "permit") as crowd:
        leases = [room(holder, "permit", ttl=60, on_lost=told.append).acquire(timeout=5) for _ in range(2)]
        started, visits = time.monotonic(), crowd.visits
        with requests(server) as asked:
            time.sleep(3.0)
        passed, visits = time.monotonic() - started, crowd.visits - visits
        assert visits > 10
        extra = asked.count("EVALSHA") + asked.count("EVAL") - 2 * visits
        assert extra <= passed + AT_ONCE + 4, "visits may be half over at either end"
        assert told == []
        admin.zrem(ROOM, leases[0].token)
        assert leases[0].lost.wait(1.0 + SOON)
        assert leases[1].held
        admin.delete(ROOM)
        assert leases[1].lost.wait(1.0 + SOON)
    for lease in leases:
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


@pytest.mark.parametrize("mode", MODES)
def test_short_holds_pay_nothing(face: Any, server: Server, mode: str) -> None:
    room(face, mode, ttl=60).acquire(timeout=5).release()  # with all that comes but once
    with requests(server) as asked:
        for _ in range(20):
            lease = room(face, mode, ttl=60).acquire(timeout=5)
            time.sleep(0.02)
            lease.release()
    # A machine that stands still makes a short hold long, but hardly each of them.
    assert asked.count("EVALSHA") <= 40 + 5
    assert asked.count("CLIENT") <= 5


def test_nothing_is_told_to_whom_nothing_was_taken(connect: Any, url: str, admin: redis.Redis) -> None:
    """Its own renewals and extensions, neighbours that come and go, and writes that change nothing."""
    told: list[Any] = []
    holder = connect(url)
    leases = [room(holder, "read", ttl=6, on_lost=told.append).acquire(timeout=5) for _ in range(3)]
    with Crowd(connect(url), "read"), Crowd(holder, "read"):
        until = time.monotonic() + 3.0  # a renewal is due after two
        while time.monotonic() < until:
            time.sleep(0.13)
            leases[0].extend(5)
            admin.zadd(ROOM, {"nobody": 0})
            assert all(lease.held for lease in leases)
    for lease in leases:
        lease.release()
    assert told == []


@asyncio_test
async def test_body_that_was_robbed_of_its_permit_is_cancelled_soon(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with took(less_than=0.3 + SOON), pytest.raises(holdfast.LeaseLost):
            async with client.semaphore("x", 2, ttl=60):
                await asyncio.sleep(0.3)
                admin.delete(ROOM)
                await asyncio.sleep(30)


def test_waiters_of_a_room_that_was_emptied_by_hand_come_in_at_their_next_refresh(
    connect: Any, url: str, admin: redis.Redis
) -> None:
    robbed = room(connect(url), "write", ttl=60).acquire(timeout=5)
    leases: list[Any] = []
    waiter = threading.Thread(target=lambda: leases.append(room(connect(url), "write", ttl=60).acquire(timeout=10)))
    waiter.start()
    eventually(lambda: admin.zcard("x:hf1:queue:{x}") == 2)
    admin.delete(ROOM)
    assert robbed.lost.wait(SOON)
    waiter.join(0.5 + SOON)
    assert not waiter.is_alive()
    with pytest.raises(holdfast.LeaseLost):
        robbed.release()
    leases[0].release()
