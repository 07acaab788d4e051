"""A server at maxclients: what needs a new connection makes do with those that there are, and gets one later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import eventually


@pytest.fixture(scope="module")
def _own_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def full(_own_server: Server) -> Iterator[Server]:
    """A server that a test may fill up; the clients of a test have their connections before that."""
    with _own_server.client() as admin:
        admin.flushall()
        yield _own_server
        admin.config_set("maxclients", 1000)


@pytest.fixture
def boss(full: Server) -> Iterator[redis.Redis]:
    with full.client() as admin:
        admin.ping()
        yield admin


def fill_up(boss: redis.Redis) -> int:
    """Let the server take no more connections; how many it has."""
    boss.config_set("maxclients", count := len(boss.client_list()))
    return count


def make_room(boss: redis.Redis) -> None:
    boss.config_set("maxclients", 1000)


def connect(server: Server) -> holdfast.Client:
    """A client that has one connection, at rest."""
    client = holdfast.connect(server.url)
    with client.lock("warm"):
        pass
    return client


def listeners(boss: redis.Redis) -> list[dict[str, Any]]:
    return [found for found in boss.client_list() if int(found["sub"])]


def test_a_lease_is_renewed_over_a_resting_connection(full: Server, boss: redis.Redis) -> None:
    with connect(full) as client:
        full_at = fill_up(boss)
        with client.lock("x", ttl=3.0) as lease:
            time.sleep(4.0)
            assert lease.held
            assert len(boss.client_list()) == full_at


def test_a_lease_is_renewed_by_the_shared_connection_again_once_there_is_room(full: Server, boss: redis.Redis) -> None:
    with connect(full) as client:
        fill_up(boss)
        with client.lock("x", ttl=3.0) as lease:
            time.sleep(0.8)
            make_room(boss)
            eventually(lambda: any("t" in found["flags"] for found in boss.client_list()), what="keys are tracked")
            boss.delete("x")
            eventually(lambda: lease.lost.is_set(), what="the loss is told")
            with pytest.raises(holdfast.LeaseLost):
                lease.release()


def test_a_lock_is_acquired_over_the_shared_connection(full: Server, boss: redis.Redis) -> None:
    with connect(full) as client, client.lock("x", ttl=3.0):
        eventually(lambda: any("t" in found["flags"] for found in boss.client_list()), what="the key is tracked")
        boss.config_set("maxclients", fill_up(boss) - 1)
        (resting,) = (
            found["id"] for found in boss.client_list() if "eval" in found["cmd"] and "t" not in found["flags"]
        )
        boss.client_kill_filter(_id=resting)
        for name in ("y", "z"):
            with client.lock(name, wait=0) as lease:
                assert lease.held
                assert boss.get(name) is not None


def test_a_waiter_subscribes_once_there_is_room(
    full: Server, boss: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with connect(full) as holder, connect(full) as waiter:
        lease = holder.lock("x", ttl=60.0).acquire()
        assert lease is not None
        fill_up(boss)
        waited = threading.Thread(target=wait_for, args=(waiter,))
        waited.start()
        try:
            eventually(lambda: "poll" in caplog.text, what="it says that it polls")
            time.sleep(0.5)
            assert not listeners(boss)
            make_room(boss)
            eventually(lambda: listeners(boss), timeout=8.0, what="it subscribes again")
            (listener,) = listeners(boss)
            assert listener["resp"] == "3"
        finally:
            make_room(boss)
            lease.release()
            waited.join()
    (warning,) = [record.getMessage() for record in caplog.records if "poll" in record.getMessage()]
    assert "no room for another connection" in warning
    assert "maxclients" in warning
    assert "+subscribe" not in warning


def wait_for(client: holdfast.Client) -> None:
    with client.lock("x", wait=30.0):
        pass


def test_a_client_that_polled_is_notified_in_its_next_wait(full: Server, boss: redis.Redis) -> None:
    with connect(full) as holder, connect(full) as waiter:
        with holder.lock("x", ttl=60.0):
            fill_up(boss)
            assert waiter.lock("x").acquire(timeout=1.0) is None
            make_room(boss)
            assert waiter.lock("x").acquire(timeout=1.0) is None
            assert len(listeners(boss)) == 1
