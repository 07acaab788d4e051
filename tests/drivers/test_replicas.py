"""Grants that count once replicas have them, on a real primary and its replica."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import as_bytes, eventually

QUICK = ("--repl-diskless-sync-delay", "0")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with Server(*QUICK) as primary, Server(*QUICK, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
        admin = primary.client()
        eventually(lambda: "online" in str(admin.info("replication").get("slave0")), timeout=20.0)
        yield primary, replica


@pytest.fixture
def copy(pair: tuple[Server, Server]) -> Iterator[redis.Redis]:
    """A look at the replica."""
    pair[0].client().flushall()
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
        assert lease.remaining() > 29.0
        lease.release()


def test_other_kinds_are_confirmed(pair: tuple[Server, Server], copy: redis.Redis) -> None:
    with holdfast.connect(pair[0].url, replicas=1) as client:
        with client.semaphore("s", permits=2):
            assert copy.keys("s:*holders*")
        with client.rwlock("rw").write:
            assert copy.keys("rw:*holders*")
        with client.rlock("r") as lease, client.rlock("r"):
            assert as_bytes(copy.get("r") or b"") == lease.token.encode()


def test_an_engine_without_replicas_says_which_has_them() -> None:
    with pytest.raises(holdfast.Unsupported, match=r"replicas is not supported by local://: use redis://.* or redis\+"):
        holdfast.connect("local://", replicas=1)
    with pytest.raises(holdfast.InvalidConfig, match="replicas=-1"):
        holdfast.connect("redis://localhost", replicas=-1)
