"""A failover while a lock is held, waited for and renewed, on both faces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

import holdfast
from tests.fleets import SERVICE, SentinelFleet
from tests.servers import Server
from tests.support import AioFace, as_bytes, eventually

TTL = 12.0  # longer than a failover takes, also on a busy machine


def crash(fleet: SentinelFleet) -> None:
    old = fleet.primary
    old.kill()
    fleet.wait_for_failover(old)


def hang(fleet: SentinelFleet) -> None:
    """The old primary answers nobody, and its connections stay open."""
    old = fleet.primary
    old.pause()
    fleet.wait_for_failover(old)


def change_over(fleet: SentinelFleet) -> None:
    """By order: the old primary is in order, and becomes a replica."""
    fleet.fail_over()


FAILOVERS = [crash, hang, change_over]


def ports_of(face: Any) -> set[int]:
    """To which servers this client has connections."""
    driver = face.client._driver
    if isinstance(face, AioFace):
        lines = [driver.engine.shared, driver.engine.subscription.connection]
        return {line._connection.port for line in lines if line is not None and not line.lost}
    lines = [*driver.engine._open, *driver.shared._thread.connections.values()]
    return {line.connection.port for line in lines}


def key_on(server: Server, fleet: SentinelFleet, name: str) -> bytes:
    with redis.Redis(port=server.port, password=server.password, db=fleet.database) as admin:
        return as_bytes(admin.get(name) or b"")


def is_in_step(admin: redis.Redis) -> bool:
    """Whether this replica follows its primary, and copies nothing as a whole."""
    state = admin.info("replication")
    return state["master_link_status"] == "up" and not state["master_sync_in_progress"]


def wait_until_replicated(fleet: SentinelFleet, name: str) -> None:
    for server in fleet.replicas:
        with redis.Redis(port=server.port, password=server.password, db=fleet.database) as admin:
            # A replica that copies its primary as a whole has old data until the copy ends.
            eventually(partial(is_in_step, admin), timeout=30.0)
            eventually(partial(admin.exists, name), timeout=30.0)


@pytest.mark.parametrize("fail_over", FAILOVERS)
def test_holders_keep_their_lease_and_waiters_get_it_after_them(
    connect: Any, fleet: SentinelFleet, fail_over: Callable[[SentinelFleet], None]
) -> None:
    holder, waiting = connect(fleet.url), connect(fleet.url)
    lease = holder.lock("x", ttl=TTL).acquire()
    wait_until_replicated(fleet, "x")  # so that the failover does not lose the grant
    with ThreadPoolExecutor() as pool:
        waiter = pool.submit(waiting.lock("x", ttl=TTL).acquire)
        eventually(lambda: waiting.client._driver.router.waiting, what="it is queued, and subscribed")
        fail_over(fleet)
        new = fleet.primary
        # A renewal has reached the new primary, and the waiter has queued there and subscribed.
        eventually(lambda: lease.remaining() > 0.9 * TTL * 2 / 3 and ports_of(holder) == {new.port}, timeout=30.0)
        eventually(lambda: ports_of(waiting) == {new.port} and waiting.client._driver.router.armed, timeout=30.0)
        assert lease.held
        assert not waiter.done()
        assert key_on(new, fleet, "x") == lease.token.encode()
        lease.release()
        following = waiter.result(30.0)
    assert following.fence > lease.fence
    assert key_on(new, fleet, "x") == following.token.encode()
    following.release()


def test_a_client_of_redis_py_fails_over_as_well(connect: Any, fleet: SentinelFleet) -> None:
    flavour: Any
    if connect.kind == "asyncio":
        import redis.asyncio.sentinel as flavour
    else:
        import redis.sentinel as flavour
    face = connect(fleet.manager(flavour.Sentinel).master_for(SERVICE))
    before = face.lock("x", ttl=TTL).acquire()
    before.release()
    crash(fleet)
    after = face.lock("x", ttl=TTL).acquire(timeout=30)
    assert after.fence > before.fence
    assert key_on(fleet.primary, fleet, "x") == after.token.encode()
    after.release()


def test_a_client_whose_connections_are_in_order_learns_of_a_planned_failover(
    connect: Any, fleet: SentinelFleet
) -> None:
    """The old primary goes on answering for seconds, until the Sentinels demote it."""
    face = connect(fleet.url)
    before = face.lock("x", ttl=TTL).acquire()
    before.release()
    change_over(fleet)
    after = face.lock("x", ttl=TTL).acquire(timeout=30)
    assert after.fence > before.fence
    assert key_on(fleet.primary, fleet, "x") == after.token.encode(), "it is held where others look for it"
    after.release()


def test_what_an_old_primary_grants_is_not_a_hold(fleet: SentinelFleet) -> None:
    """A request is under way to a primary that hangs. Another thread learns of the new primary; then the old one wakes
    up, and answers the first request with a grant."""
    with holdfast.connect(fleet.url, timeout=60.0) as client, ThreadPoolExecutor() as pool:
        with client.lock("x"):
            pass  # a connection is open, and the scripts are known
        old = fleet.primary
        old.pause()
        asked = pool.submit(client.lock("x", ttl=60.0).acquire)
        eventually(lambda: not client._driver.engine._idle, timeout=10.0, what="the request is under way")
        fleet.wait_for_failover(old)
        with client.lock("another", ttl=5.0, wait=30):
            assert not asked.done()
        old.resume()
        lease = asked.result(30.0)
        assert lease is not None
        assert key_on(fleet.primary, fleet, "x") == lease.token.encode(), "it is held where others look for it"
        lease.release()


def test_a_waiter_in_one_thread_does_not_keep_another_from_the_new_primary(connect: Any, fleet: SentinelFleet) -> None:
    """Many threads lose their connection at once, and all find the new primary."""
    face = connect(fleet.url)
    stop, done = threading.Event(), [0] * 4

    def work(number: int) -> None:
        while not stop.is_set():
            lease = face.lock(f"job:{number}", ttl=TTL).acquire(timeout=30)
            done[number] += 1
            try:
                lease.release()
            except holdfast.HoldfastError:
                pass  # the failover came between: the lock ends by its ttl, and the next name is another
            time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(work, number) for number in range(len(done))]
        crash(fleet)
        after = list(done)
        try:
            eventually(lambda: all(now > then + 3 for now, then in zip(done, after, strict=True)), timeout=40.0)
        finally:
            stop.set()
        for worker in workers:
            worker.result(40.0)
    assert ports_of(face) == {fleet.primary.port}


def test_a_failover_that_loses_the_lock_is_reported_and_fenced(connect: Any, fleet: SentinelFleet) -> None:
    """The replicas had not got the grant: the documented risk. The first holder is told, and the second one's fence is
    greater."""
    face, other = connect(fleet.url), connect(fleet.url)
    with face.lock("warm"):
        pass
    lease = face.lock("x", ttl=TTL).acquire()
    wait_until_replicated(fleet, "x")  # else it may still arrive after it was deleted
    for server in fleet.replicas:
        with redis.Redis(port=server.port, password=server.password, db=fleet.database) as admin:
            admin.config_set("replica-read-only", "no")
            admin.delete("x")  # as if it had never arrived
            admin.config_set("replica-read-only", "yes")
    crash(fleet)
    second = other.lock("x", ttl=TTL).acquire(timeout=30)
    assert second.fence > lease.fence
    eventually(lambda: lease.lost.is_set(), timeout=2 * TTL)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    second.release()


@pytest.mark.parametrize("connected", [False, True], ids=["new connection", "connection in use"])
def test_what_a_primary_grants_that_was_replaced_while_it_was_paused_is_no_hold(
    connect: Any, fleet: SentinelFleet, connected: bool
) -> None:
    """When it resumes, it executes what was sent to it, and takes itself for a primary until it is demoted."""
    late, quick = connect(fleet.url, timeout=60.0), connect(fleet.url)  # the first waits for an answer for 20 s
    with late.lock("y"):
        pass
    if not connected:
        with fleet.client() as admin:
            admin.client_kill_filter(_type="normal")
    old = fleet.primary
    with ThreadPoolExecutor() as pool:
        old.pause()
        waiting = pool.submit(late.lock("x", ttl=60.0).acquire, timeout=100.0)
        fleet.wait_for_failover(old)
        lease = quick.lock("x", ttl=TTL).acquire(timeout=5.0)  # None if the other one noticed in time, and was first
        old.resume()
        time.sleep(2.0)
        assert waiting.done() is (lease is None), "one of them holds"
        if lease is not None:
            assert lease.held
            lease.release()
        second = waiting.result(60.0)
        assert lease is None or second.fence > lease.fence
        second.release()
