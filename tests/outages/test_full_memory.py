"""A server at its maxmemory still lets go of locks, and keeps those that it has."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

import holdfast
from tests.proxy import LOSE_REPLY, Proxy
from tests.support import eventually, lock_keys, took


def fill_up(admin: redis.Redis) -> None:
    """Leave the server no memory for a single new key."""
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 200_000)
    size = 50_000
    for number in range(100_000):
        try:
            admin.set(f"ballast:hf1:{number}", b"x" * size)
        except redis.exceptions.OutOfMemoryError:
            if size == 1:
                break
            size = max(1, size // 10)
    # What the server uses breathes a little with its connections; so close the last gap from above.
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] // 2)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        admin.set("one:more", "x")


def test_release_works(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x").acquire(timeout=5)
    fill_up(admin)
    lease.release()
    assert lock_keys(admin) == []


def test_release_works_although_the_server_has_forgotten_the_script(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x").acquire(timeout=5)
    fill_up(admin)
    admin.script_flush()
    lease.release()
    assert lock_keys(admin) == []


def test_doubtful_release_works(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = connect(proxy.url)
    with face.lock("warm"):
        pass
    proxy.on("acquire", LOSE_REPLY)
    lease = face.lock("x").acquire(timeout=5)
    fill_up(admin)
    lease.release()
    assert proxy.seen("abandon") == 1
    assert lock_keys(admin) == []


def test_release_resent_to_a_full_server_works_and_is_buried_once_there_is_room(
    connect: Any, proxy: Proxy, admin: redis.Redis
) -> None:
    # The first release has freed the key, so the resend frees nothing and finds no room for its tombstone.
    face = connect(proxy.url)
    lease = face.lock("x").acquire(timeout=5)
    fill_up(admin)
    proxy.on("release", LOSE_REPLY)
    with took(less_than=3.0):
        lease.release()
    assert lock_keys(admin) == []
    admin.config_set("maxmemory", 0)
    eventually(lambda: list(admin.scan_iter("x:hf1:gone:*")), what="the keeper has buried it")


def test_lease_is_renewed(face: Any, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=2.4).acquire(timeout=5)
    fill_up(admin)
    time.sleep(2.6)
    assert lease.held
    lease.release()
    assert lock_keys(admin) == []


def test_acquire_waits_for_room_and_says_what_it_waits_for(face: Any, admin: redis.Redis) -> None:
    with face.lock("warm"):
        pass
    fill_up(admin)
    with took(less_than=4.5), pytest.raises(holdfast.Unavailable, match="out of memory.*maxmemory"):
        face.lock("x").acquire(timeout=0.3)
    assert lock_keys(admin) == []
    admin.config_set("maxmemory", 0)
    with face.lock("x", wait=5):
        pass


def test_the_outage_lasts_until_something_can_be_written(face: Any, admin: redis.Redis) -> None:
    with face.lock("warm"):
        pass
    contact = face.client._driver.registry.contacts.only
    lease = face.lock("held", ttl=1).acquire(timeout=5)
    fill_up(admin)
    with pytest.raises(holdfast.Unavailable, match="out of memory"):
        face.lock("x").acquire(timeout=3)
    renewals = face.client.statistics().renewals
    eventually(lambda: face.client.statistics().renewals > renewals + 1, 5.0, "renewals and clean-ups are answered")
    assert contact.lost_at is not None
    admin.config_set("maxmemory", 0)
    eventually(lambda: contact.lost_at is None, 5.0, "the keeper finds out, although nobody asks")
    lease.release()
