"""``client.statistics()``: what a client has and does, on both faces and a real server."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import pytest
import redis

import holdfast
from holdfast.statistics import NodeStatistics, Statistics
from tests.contention.support import Background, OldServer
from tests.servers import Server
from tests.support import eventually


def node_of(face: Any) -> NodeStatistics:
    [node] = face.client.statistics().nodes.values()
    assert isinstance(node, NodeStatistics)
    return node


def close(face: Any) -> None:
    """Close the client alone, so that the fixture can close the face."""
    if face.kind == "blocking":
        face.client.close()
    else:
        face._call(face.client.aclose())


def test_a_new_client_has_nothing_and_contacts_no_server(connect: Any) -> None:
    face = connect("redis://127.0.0.1:1/0")  # no server is there
    assert face.client.statistics() == Statistics(
        holds=0,
        active=0,
        waiters=0,
        local_queues={},
        latch_waiters={},
        cache_callers={},
        tracked=0,
        cleanups=0,
        renewals=0,
        failed_renewals=0,
        nodes={"redis://127.0.0.1:1/0": NodeStatistics()},
    )


def test_holds_waiters_and_local_queues_are_counted(face: Any) -> None:
    first = face.lock("x").acquire()
    assert face.client.statistics().holds == 1
    waiters = [Background(face.lock("x", wait=20).acquire) for _ in range(2)]
    eventually(lambda: sum(face.client.statistics().local_queues.values()) == 2, what="two wait behind the first")
    second = face.lock("y").acquire()
    found = face.client.statistics()
    assert (found.holds, found.active, found.waiters, found.local_queues) == (2, 2, 2, {"x": 2})
    second.release()
    first.release()
    for _ in range(2):
        served = eventually(lambda: next((waiter for waiter in waiters if waiter.is_over()), None))
        assert served is not None
        waiters.remove(served)
        served.outcome().release()
    found = face.client.statistics()
    assert (found.holds, found.active, found.waiters, found.local_queues) == (0, 0, 0, {})


def test_a_waiter_at_the_server_is_subscribed_and_its_key_is_tracked(connect: Any, url: str) -> None:
    holder, face = connect(url), connect(url)
    lease = holder.lock("x").acquire()
    waiter = Background(lambda: face.lock("x", wait=20).acquire())
    eventually(lambda: node_of(face).subscribed, what="it subscribes")
    eventually(lambda: node_of(face).tracking and face.client.statistics().tracked == 1, what="the key is tracked")
    assert node_of(face).resp3
    assert face.client.statistics().waiters == 1
    assert face.client.statistics().local_queues == {}, "it is the first of its process"
    lease.release()
    waiter.outcome().release()
    assert face.client.statistics().waiters == 0


def test_a_server_without_resp3_shows(connect: Any) -> None:
    with OldServer() as server:
        holder, face = connect(server.url), connect(server.url)
        lease = holder.lock("x").acquire()
        waiter = Background(lambda: face.lock("x", wait=20).acquire())
        eventually(lambda: node_of(face).subscribed, what="it subscribes on a second connection")
        assert not node_of(face).resp3
        assert not node_of(face).tracking
        lease.release()
        waiter.outcome().release()


def newer_connections(admin: redis.Redis, number: int) -> list[Any]:
    """The server's connections since that one; an earlier test may leave some that are about to end."""
    return [found for found in admin.client_list() if int(found["id"]) > number]


def test_connections_are_those_that_the_server_has(connect: Any, url: str, admin: redis.Redis) -> None:
    before = admin.client_id()
    face = connect(url)
    with face.lock("x"):
        eventually(lambda: face.client.statistics().renewals == 1, what="the keeper has renewed it")
        assert face.client.statistics().connections == len(newer_connections(admin, before)) > 0
    close(face)
    assert face.client.statistics().connections == 0
    eventually(lambda: not newer_connections(admin, before), what="all are closed")


def test_renewals_are_counted_and_those_that_fail_apart(connect: Any, server: Server) -> None:
    face = connect(server.url)
    lease = face.lock("x", ttl=60.0).acquire()
    eventually(lambda: face.client.statistics().renewals == 1, what="it is renewed after 0.1 s")
    assert face.client.statistics().failed_renewals == 0
    other = face.lock("y", ttl=9.0).acquire()  # renewed every 3 s, if its first renewal came before the pause
    server.pause()
    try:
        eventually(lambda: face.client.statistics().failed_renewals >= 1, 10.0, "a renewal gets no answer")
        before = face.client.statistics().renewals
    finally:
        server.resume()
    eventually(lambda: face.client.statistics().renewals > before, what="it is tried again")
    lease.release()
    other.release()


def test_a_pending_cleanup_is_counted_until_the_server_has_confirmed_it(connect: Any, server: Server) -> None:
    face = connect(server.url, timeout=0.5)
    with face.lock("warm"):
        pass
    server.pause()
    try:
        with pytest.raises(holdfast.Unavailable):
            face.lock("x", wait=0.3).acquire()
        assert face.client.statistics().cleanups == 1
    finally:
        server.resume()
    eventually(lambda: face.client.statistics().cleanups == 0, what="the server has confirmed it")


def test_after_close_it_says_that_nothing_is_left(connect: Any, url: str) -> None:
    face = connect(url)
    lease = face.lock("x").acquire()
    close(face)
    found = face.client.statistics()
    assert (found.active, found.waiters, found.connections) == (0, 0, 0)
    assert not lease.held


def test_any_thread_may_ask_while_others_work(face: Any) -> None:
    over, asked = threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            asked.append(face.client.statistics().waiters)

    asking = Background(ask)
    workers = [Background(lambda: [face.lock("x", wait=20).acquire().release() for _ in range(50)]) for _ in range(4)]
    for worker in workers:
        worker.outcome()
    over.set()
    asking.outcome()
    assert asked
    assert max(asked) <= 4


def test_it_shows_no_password_and_can_be_written_as_json(connect: Any) -> None:
    found = connect("redis://user:hunter2@127.0.0.1:1/3").client.statistics()
    assert "hunter2" not in repr(found)
    data = json.loads(json.dumps(dataclasses.asdict(found)))
    assert data["holds"] == 0
    assert list(data["nodes"]) == list(found.nodes)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.holds = 1
