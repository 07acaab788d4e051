"""Grants that count once replicas have them, on a real primary and its replica."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import as_bytes, eventually

QUICK = ("--repl-diskless-sync-delay", "0")


def follows(primary: Server) -> bool:
    admin = primary.client()
    admin.set("written", "x")
    return bool(admin.wait(1, 1000))


def confirmed(lock: Any) -> Any:
    """Its lease. On a busy machine a replica may need longer for its confirmation than a third of the ttl."""
    for _ in range(5):
        with contextlib.suppress(holdfast.Unavailable):
            return lock.acquire()
    return lock.acquire()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with Server(*QUICK) as primary, Server(*QUICK, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
        yield primary, replica


@pytest.fixture
def copy(pair: tuple[Server, Server]) -> Iterator[redis.Redis]:
    """A look at the replica."""
    pair[0].client().flushall()
    eventually(lambda: follows(pair[0]), timeout=20.0)
    yield pair[1].client()
    pair[1].resume()


def test_a_grant_is_on_the_replica_when_the_caller_has_it(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    face = connect(pair[0].url, replicas=1)
    for _ in range(20):
        with face.lock("x") as lease:
            assert as_bytes(copy.get("x") or b"") == lease.token.encode()
        with face.lock("y", "z") as lease:
            assert as_bytes(copy.get("z") or b"") == lease.token.encode()


def test_a_grant_by_notification_too(connect: Any, pair: tuple[Server, Server], copy: redis.Redis) -> None:
    face, other = connect(pair[0].url), connect(f"{pair[0].url}?replicas=1")
    with ThreadPoolExecutor() as pool:
        lease = face.lock("x").acquire()
        waiter = pool.submit(other.lock("x").acquire)
        eventually(lambda: other.client._driver.router.waiting)
        lease.release()
        notified = waiter.result(20.0)
        assert as_bytes(copy.get("x") or b"") == notified.token.encode()
        notified.release()


def test_too_few_replicas_are_an_outage_and_leave_nothing(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    face = connect(pair[0].url, replicas=2, timeout=2.5)  # a replica on a busy machine takes a while, too
    with pytest.raises(holdfast.Unavailable, match="1 of 2 replicas confirmed the grant within 2 s") as refused:
        face.lock("x").acquire()
    assert refused.value.subject == "lock 'x'"
    assert not pair[0].client().exists("x")
    face = connect(pair[0].url, replicas=1, timeout=2.5)
    pair[1].pause()
    with pytest.raises(holdfast.Unavailable, match="0 of 1 replicas"):
        face.lock("x").acquire()
    assert not pair[0].client().exists("x")
    pair[1].resume()
    with face.lock("x", wait=5) as lease:
        assert lease.held


def test_the_step_is_known_to_a_server_that_has_forgotten_all_scripts(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    """Sent again after NOSCRIPT, it would come after WAIT, which would then count replicas that have nothing."""
    face = connect(pair[0].url, replicas=1)
    pair[0].client().script_flush()
    with face.lock("x") as lease:
        assert as_bytes(copy.get("x") or b"") == lease.token.encode()


def test_connections_for_confirming_are_used_again(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    face, admin = connect(pair[0].url, replicas=1), pair[0].client()
    with face.lock("x"):
        pass
    before = admin.info("stats")["total_connections_received"]
    for _ in range(10):
        with face.lock("x"):
            pass
    assert admin.info("stats")["total_connections_received"] - before <= 2


def test_an_adopted_hold_is_confirmed(pair: tuple[Server, Server], copy: redis.Redis) -> None:
    with holdfast.connect(pair[0].url, replicas=1) as client:
        ticket = client.lock("x").acquire().hand_over()
        lease = client.adopt(ticket)
        assert as_bytes(copy.get("x") or b"") == lease.token.encode()
        assert lease.remaining() > 20.0
        lease.release()


def test_other_kinds_are_confirmed(pair: tuple[Server, Server], copy: redis.Redis) -> None:
    with holdfast.connect(pair[0].url, replicas=1) as client:
        with client.semaphore("s", permits=2):
            assert copy.keys("s:*holders*")
        with client.rwlock("rw").write:
            assert copy.keys("rw:*holders*")
        with client.rlock("r") as lease, client.rlock("r"):
            assert as_bytes(copy.get("r") or b"") == lease.token.encode()


# Renewals.


@pytest.fixture
def cut_off(pair: tuple[Server, Server], copy: redis.Redis) -> Iterator[Callable[[], Any]]:
    """Let the replica take over, while the old primary goes on serving its clients."""
    yield lambda: copy.replicaof("NO", "ONE")
    copy.replicaof("127.0.0.1", str(pair[0].port))


def test_a_lease_is_renewed_as_long_as_replicas_confirm_it(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    face = connect(pair[0].url, replicas=1)
    lease, several = confirmed(face.lock("x", ttl=3.0)), confirmed(face.lock("y", "z", ttl=3.0))
    time.sleep(7.0)
    # Our own renewal ends the tracking of its key; that must not lead to the next renewal.
    assert face.client._driver.registry.renewals < 100
    for one in (lease, several):
        assert one.held
        one.release()


def test_so_are_permits(pair: tuple[Server, Server], copy: redis.Redis) -> None:
    with holdfast.connect(pair[0].url, replicas=1) as client:
        leases = [confirmed(client.semaphore("s", permits=2, ttl=3.0)), confirmed(client.rwlock("rw", ttl=3.0).write)]
        time.sleep(7.0)
        for lease in leases:
            assert lease is not None
            assert lease.held
            lease.release()


def test_the_holder_at_a_cut_off_primary_is_told_before_another_holds_at_the_new_one(
    connect: Any, pair: tuple[Server, Server], cut_off: Callable[[], Any]
) -> None:
    old, new = connect(pair[0].url, replicas=1), connect(pair[1].url)
    lease = confirmed(old.lock("x", ttl=3.0))
    time.sleep(1.0)
    cut_off()
    second = new.lock("x", ttl=30.0).acquire(timeout=20.0)
    assert second is not None
    assert not lease.held, "the new primary let another in when the confirmed renewals had ended"
    assert lease.lost.wait(10.0)
    assert second.fence > lease.fence
    with pytest.raises(holdfast.LeaseLost, match="before it could be renewed and confirmed by 1 replica"):
        lease.release()
    second.release()


def test_an_extension_counts_once_replicas_have_it(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    lease = connect(pair[0].url, replicas=1, timeout=2.5).lock("x", ttl=10.0).acquire()
    lease.extend(60.0)
    assert lease.remaining() > 50.0
    assert copy.pttl("x") > 50_000
    pair[1].pause()
    with pytest.raises(holdfast.Unavailable, match="0 of 1 replicas confirmed the extension within 2 s"):
        lease.extend(600.0)
    assert 40.0 < lease.remaining() < 70.0, "it lasts as long as before"
    pair[1].resume()
    lease.extend(600.0)
    assert lease.remaining() > 500.0
    lease.release()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lock("x", ttl=6.0),
        lambda client: client.lock("y", "z", ttl=6.0),
        lambda client: client.semaphore("s", permits=1, ttl=6.0),
    ],
    ids=["lock", "several", "semaphore"],
)
def test_an_extension_that_no_replica_has_confirms_no_later_renewal(
    ask: Callable[[Any], Any], pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    """The primary keeps the lease for longer than a renewal asks for, so a renewal need not write; then WAIT counts the
    replica, although that has neither."""
    with holdfast.connect(pair[0].url, replicas=1, timeout=2.5) as client:
        lease = ask(client).acquire()
        pair[1].pause()
        with pytest.raises(holdfast.Unavailable, match="0 of 1 replicas"):
            lease.extend(60.0)
        pair[0].client().client_kill_filter(_type="normal", skipme=True)  # a new connection has written nothing yet
        assert lease.lost.wait(20.0), "its renewals were not confirmed"
        assert not lease.held
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_a_pass_to_a_longer_ttl_is_confirmed(pair: tuple[Server, Server], copy: redis.Redis) -> None:
    with holdfast.connect(pair[0].url, replicas=1) as client, ThreadPoolExecutor() as pool:
        lease = client.lock("x", ttl=5.0).acquire()
        waiter = pool.submit(client.lock("x", ttl=60.0).acquire)
        eventually(lambda: client._driver.cohorts.local_queues)
        lease.release()
        passed = waiter.result(20.0)
        assert passed is not None
        assert passed.token == lease.token, "it was passed on"
        assert copy.pttl("x") > 50_000
        passed.release()


def test_a_pass_that_is_not_confirmed_goes_to_the_server_instead(
    pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    with holdfast.connect(pair[0].url, replicas=1, timeout=2.5) as client, ThreadPoolExecutor() as pool:
        lease = client.lock("x", ttl=5.0).acquire()
        waiter = pool.submit(client.lock("x", ttl=60.0).acquire)
        eventually(lambda: client._driver.cohorts.local_queues)
        pair[1].pause()
        lease.release()
        with pytest.raises(holdfast.Unavailable, match="0 of 1 replicas confirmed the grant"):
            waiter.result(20.0)


def test_a_loss_is_told_while_replicas_do_not_answer(
    connect: Any, pair: tuple[Server, Server], copy: redis.Redis
) -> None:
    """The keeper does not wait for replicas: it follows up a push at once, not when the next renewal is due."""
    face = connect(pair[0].url, replicas=1)
    renewed, deleted = face.lock("x", ttl=9.0).acquire(), face.lock("y", ttl=90.0).acquire()
    registry = face.client._driver.registry
    eventually(lambda: registry.renewals >= 2, what="both are tracked")
    pair[1].pause()
    eventually(lambda: registry.failed_renewals, timeout=10.0)
    pair[0].client().delete("y")
    assert deleted.lost.wait(5.0)
    pair[1].resume()
    eventually(lambda: renewed.remaining() > 8.0, timeout=10.0)
    renewed.release()
    with pytest.raises(holdfast.LeaseLost, match="expired or was deleted"):
        deleted.release()


def test_an_engine_without_replicas_says_which_has_them() -> None:
    with pytest.raises(holdfast.Unsupported, match=r"replicas is not supported by local://: use redis://.* or redis\+"):
        holdfast.connect("local://", replicas=1)
    with pytest.raises(holdfast.InvalidConfig, match="replicas=-1"):
        holdfast.connect("redis://localhost", replicas=-1)
