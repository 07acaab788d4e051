"""Waiting on servers that do not allow everything: without pub/sub, without tracking, without RESP3.

Each of them costs time and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

import holdfast
from tests.contention.support import SOON, OldServer, acquire_later, await_refresh, check_nobody_queues, queue_of
from tests.servers import Server
from tests.support import LEASE_LOGGED, lock_keys, took

LOCK = ["+eval", "+evalsha", "+get", "+set", "+del", "+exists", "+pexpire", "+pttl", "+time"]
NEEDED = [*LOCK, "+zadd", "+zrange", "+zrem", "+zscore", "+hget", "+hset", "+hdel"]
BELLS = ["+subscribe", "+publish", "+pubsub|numsub", "&holdfast:bell:*"]
TRACKING = ["+client|tracking", "+client|caching"]


@contextmanager
def user(server: Server, admin: redis.Redis, *rules: str) -> Iterator[str]:
    """The URL of a user who may do nothing but for these rules."""
    admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">pw", "~app:*", *rules)
    admin.acl_log_reset()
    try:
        yield server.url.replace("//", "//app:pw@")
    finally:
        admin.execute_command("ACL", "DELUSER", "app")


def check_hand_over(connect: Callable[[str], Any], url: str, admin: redis.Redis, within: float) -> None:
    """Two who wait are served one after the other, and soon enough."""
    held = connect(url).lock("app:x", ttl=60).acquire(timeout=5)
    first = acquire_later(connect(url).lock("app:x", ttl=60), admin, "app:x")
    second = acquire_later(connect(url).lock("app:x", ttl=60), admin, "app:x")
    fences = [held.fence]
    for waiter in (first, second):
        released_at = time.monotonic()
        held.release()
        held = waiter.outcome()
        assert waiter.ended_at - released_at < within
        fences.append(held.fence)
        if waiter is first:
            assert not second.is_over()
    assert fences == sorted(set(fences))
    held.release()
    assert lock_keys(admin) == []
    check_nobody_queues(admin, "app:x")


def test_these_permissions_are_enough(connect: Any, server: Server, admin: redis.Redis) -> None:
    """The list of docs/guarantees.md."""
    admin.script_flush()
    with user(server, admin, *NEEDED, *BELLS, *TRACKING) as url:
        check_hand_over(connect, url, admin, SOON)
        face = connect(url)
        lease = face.lock("app:x", ttl=60).acquire(timeout=5)
        time.sleep(0.3)
        admin.delete("app:x")
        assert lease.lost.wait(SOON)
        with pytest.raises(holdfast.LeaseLost):
            lease.release()
        assert admin.acl_log() == []


def test_bell_is_enough_to_be_told_at_once(connect: Any, server: Server, admin: redis.Redis) -> None:
    """Without it the waiter would ask again after half a second, and not before."""
    with user(server, admin, *NEEDED, *BELLS) as url:
        one, other = connect(url), connect(url)

        def hand_over() -> float:
            held = one.lock("app:x", ttl=60).acquire(timeout=5)
            waiter = acquire_later(other.lock("app:x", ttl=60), admin, "app:x")
            await_refresh(admin, "app:x")
            released_at = time.monotonic()
            held.release()
            waiter.outcome().release()
            return waiter.ended_at - released_at

        assert any(hand_over() < 0.25 for _ in range(3))


def test_namespace_is_in_front_of_the_channel(connect: Any, server: Server, admin: redis.Redis) -> None:
    with user(server, admin, *NEEDED, *BELLS[:-1], "&app:*") as url:
        held = connect(url, namespace="app:").lock("x", ttl=60).acquire(timeout=5)
        waiter = acquire_later(connect(url, namespace="app:").lock("x", ttl=60), admin, "app:x")
        assert not any(entry["reason"] == "channel" for entry in admin.acl_log())
        held.release()
        waiter.outcome().release()


def test_database_other_than_the_first_takes_select(connect: Any, server: Server, admin: redis.Redis) -> None:
    with (
        user(server, admin, *NEEDED, *BELLS, *TRACKING, "+select") as url,
        redis.Redis(port=server.port, db=1) as there,
    ):
        check_hand_over(connect, url.removesuffix("0") + "1", there, SOON)
        assert admin.acl_log() == []


def test_who_may_not_queue_is_told_at_once_and_leaves_nothing(connect: Any, server: Server, admin: redis.Redis) -> None:
    """With the permissions that a lock without a queue needs, the lock itself works."""
    with user(server, admin, *LOCK, *BELLS, *TRACKING) as url:
        held = connect(url).lock("app:x", ttl=60).acquire(timeout=5)
        with took(less_than=SOON), pytest.raises(holdfast.Unavailable, match="may not"):
            connect(url).lock("app:x", ttl=60).acquire(timeout=20)
        assert connect(url).lock("app:x").acquire(blocking=False) is None
        held.release()
        assert lock_keys(admin) == []


@pytest.mark.parametrize("missing", ["+subscribe", "&holdfast:bell:*"])
def test_without_pubsub_waiters_poll_and_one_warning_says_why(
    connect: Any, server: Server, admin: redis.Redis, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [rule for rule in (*NEEDED, *BELLS, *TRACKING) if rule != missing]
    with user(server, admin, *rules) as url, caplog.at_level(logging.WARNING, "holdfast"):
        check_hand_over(connect, url, admin, SOON)
        assert len(caplog.records) == 2, "one from each of the clients that waited"
        face = connect(url)
        caplog.clear()
        admin.set("app:x", "theirs")
        admin.set("app:y", "theirs")
        for name in ("app:x", "app:y", "app:x"):
            assert face.lock(name).acquire(timeout=0.6) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "subscribe" in caplog.text
        assert "&holdfast:bell:*" in caplog.text
        assert "pw" not in caplog.text.split()


def test_without_publish_waiters_are_served(connect: Any, server: Server, admin: redis.Redis) -> None:
    """The first in the queue sees that the lock was written over to it."""
    with user(server, admin, *NEEDED, *TRACKING, *(rule for rule in BELLS if rule != "+publish")) as url:
        check_hand_over(connect, url, admin, 0.5 + SOON)


def test_without_publish_and_tracking_waiters_are_served_by_their_next_refresh(
    connect: Any, server: Server, admin: redis.Redis
) -> None:
    with user(server, admin, *NEEDED, *(rule for rule in BELLS if rule != "+publish")) as url:
        check_hand_over(connect, url, admin, 0.5 + SOON)


def test_without_client_commands_nothing_is_tracked_and_all_else_works(
    connect: Any, server: Server, admin: redis.Redis
) -> None:
    with user(server, admin, "+@all", "&*", "-client") as url:
        check_hand_over(connect, url, admin, SOON)
        lease = connect(url).lock("app:x", ttl=1.5).acquire(timeout=5)
        time.sleep(0.3)
        assert lease.held
        admin.delete("app:x")
        assert lease.lost.wait(0.5 + SOON), "the next renewal finds out"
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_without_anything_that_can_be_missed(connect: Any, server: Server, admin: redis.Redis) -> None:
    with user(server, admin, *NEEDED) as url:
        check_hand_over(connect, url, admin, SOON)


def test_server_without_resp3(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with OldServer() as old, old.client() as admin, caplog.at_level(logging.WARNING, "holdfast"):
        check_hand_over(connect, old.url, admin, SOON)
        held = connect(old.url).lock("app:x", ttl=2.4).acquire(timeout=5)
        time.sleep(2.6)
        assert held.held, "it is renewed"
        held.release()
        assert [text for text in caplog.messages if not LEASE_LOGGED.match(text)] == []


def test_waiter_that_polls_keeps_its_place_among_those_that_listen(
    connect: Any, server: Server, url: str, admin: redis.Redis
) -> None:
    with user(server, admin, *NEEDED) as deaf:
        held = connect(url).lock("app:x", ttl=60).acquire(timeout=5)
        waiters = [
            acquire_later(connect(where).lock("app:x", ttl=60), admin, "app:x") for where in (url, deaf, url, deaf)
        ]
        assert len(queue_of(admin, "app:x")) == 4
        for place, waiter in enumerate(waiters):
            held.release()
            held = waiter.outcome()
            assert not any(later.is_over() for later in waiters[place + 1 :])
        held.release()


def test_a_release_that_is_forbidden_names_its_lock_and_what_is_missing(server: Server, admin: redis.Redis) -> None:
    with user(server, admin, *NEEDED, *BELLS, *TRACKING) as url, holdfast.connect(url, timeout=1.0) as client:
        lease = client.lock("app:x").acquire()
        admin.execute_command("ACL", "SETUSER", "app", "-@all")
        with pytest.raises(holdfast.Unavailable, match="the release of lock 'app:x': cannot use") as refused:
            lease.release()
        admin.execute_command("ACL", "SETUSER", "app", *NEEDED)
    assert "permission" in str(refused.value)
    assert "repeated in the background" not in str(refused.value)
