"""The network loses, cuts and delays: a key on the server always has exactly one who believes in it, or none for long.

The proxy aims each fault at one step, so every test here meets its fault every time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

import holdfast
from tests.proxy import HOLD, LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY, Proxy, cut_at
from tests.support import eventually, lock_keys, took


def warmed(connect: Any, proxy: Proxy, **options: Any) -> Any:
    """A client that has met its server already: at first contact other rules hold."""
    face = connect(proxy.url, **options)
    with face.lock("warm"):
        pass
    return face


def tombstones(admin: redis.Redis, name: str) -> list[bytes]:
    return list(admin.scan_iter(f"{name}:hf1:gone:*"))


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST], ids=lambda fault: fault.kind)
def test_acquire_whose_reply_is_lost_succeeds_at_once(
    connect: Any, proxy: Proxy, admin: redis.Redis, fault: Any
) -> None:
    face = warmed(connect, proxy)
    proxy.on("acquire", fault)
    before = proxy.seen("acquire")
    with took(less_than=4.5):
        lease = face.lock("x").acquire(timeout=10)
    assert lease
    assert proxy.seen("acquire") - before == 2
    assert admin.get("x") == lease.token.encode()
    lease.release()
    assert lock_keys(admin) == []


def test_acquire_whose_reply_never_comes_is_asked_again(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    proxy.on("acquire", MUTE_REPLY)
    with took(less_than=3.0):
        lease = face.lock("x").acquire(timeout=10)
    assert admin.get("x") == lease.token.encode()
    lease.release()
    assert lock_keys(admin) == []


@pytest.mark.parametrize("byte", [0, 1, 7, 20])
def test_acquire_whose_reply_is_cut_in_the_middle_succeeds(
    connect: Any, proxy: Proxy, admin: redis.Redis, byte: int
) -> None:
    face = warmed(connect, proxy)
    proxy.on("acquire", cut_at(byte))
    with face.lock("x", wait=10) as lease:
        assert admin.get("x") == lease.token.encode()
    assert lock_keys(admin) == []


@pytest.mark.parametrize("patience", [0, 0.4])
def test_acquire_that_is_given_up_leaves_no_key(
    connect: Any, proxy: Proxy, admin: redis.Redis, patience: float
) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    proxy.on("acquire", LOSE_REPLY, times=500)
    with took(less_than=3.0), pytest.raises(holdfast.Unavailable):
        face.lock("x").acquire(timeout=patience)
    eventually(lambda: lock_keys(admin) == [], what="the key is abandoned")
    assert tombstones(admin, "x")


def test_abandon_whose_reply_is_lost_is_repeated_until_it_is_confirmed(
    connect: Any, proxy: Proxy, admin: redis.Redis
) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    proxy.on("acquire", MUTE_REPLY, times=500)
    proxy.on("abandon", LOSE_REQUEST, times=1000)
    with pytest.raises(holdfast.Unavailable):
        face.lock("x").acquire(timeout=0.3)
    assert lock_keys(admin) == ["x"]
    proxy.await_request("abandon", 4)
    proxy.heal()
    eventually(lambda: lock_keys(admin) == [], what="the keeper has abandoned the key")
    assert proxy.seen("abandon") > 4, "the lost ones did not free it"


def test_acquire_that_arrives_after_its_own_abandon_is_refused(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.0)
    proxy.on("acquire", HOLD, times=10)
    with pytest.raises(holdfast.Unavailable):
        face.lock("x").acquire(timeout=0.3)
    proxy.heal()
    eventually(lambda: tombstones(admin, "x"), what="the attempt is buried")
    proxy.deliver()
    assert lock_keys(admin) == []
    assert admin.get("x:hf1:fence:{x}") is None


def test_acquire_that_arrives_after_the_release_is_refused(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    proxy.on("acquire", HOLD)
    lease = face.lock("x").acquire(timeout=10)
    assert lease, "the second request went another way, and got through"
    lease.release()
    assert lock_keys(admin) == []
    proxy.deliver()
    assert lock_keys(admin) == []


def test_acquire_that_arrives_while_it_is_held_changes_nothing(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    proxy.on("acquire", HOLD)
    with face.lock("x", wait=10) as lease:
        proxy.deliver()
        assert admin.get("x") == lease.token.encode()
        assert lease.held
    assert lock_keys(admin) == []
    with face.lock("x", wait=10) as later:
        assert later.fence > lease.fence


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST, cut_at(2)], ids=lambda fault: fault.kind)
def test_release_whose_reply_is_lost_succeeds(connect: Any, proxy: Proxy, admin: redis.Redis, fault: Any) -> None:
    face = warmed(connect, proxy)
    lease = face.lock("x").acquire(timeout=10)
    proxy.on("release", fault)
    with took(less_than=4.5):
        lease.release()
    assert lock_keys(admin) == []
    assert not lease.held


def test_release_whose_reply_never_comes_frees_the_lock(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    lease = face.lock("x").acquire(timeout=10)
    proxy.on("release", MUTE_REPLY)
    with took(less_than=3.0):
        try:
            lease.release()
        except holdfast.OutcomeUnknown as unknown:
            assert "in the background" in str(unknown)
    assert not lease.held
    eventually(lambda: lock_keys(admin) == [], what="the key is gone")


def test_resent_release_leaves_the_next_holder_alone(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    lease = face.lock("x").acquire(timeout=10)
    proxy.on("release", LOSE_REPLY)
    proxy.on("abandon", HOLD)
    # Between the first release, which was executed, and its resend, another client takes the lock.
    other = admin.lock("x", timeout=30, thread_local=False)
    taker = threading.Thread(target=lambda: eventually(lambda: other.acquire(blocking=False)))
    taker.start()
    try:
        lease.release()
    except holdfast.HoldfastError as error:
        # Ours was freed before the other's came; whether a resend can know that depends on what it finds.
        assert isinstance(error, holdfast.OutcomeUnknown | holdfast.LeaseLost)
    taker.join()
    proxy.deliver()
    assert other.owned()


def test_release_resent_after_the_deadline_does_not_claim_success(
    connect: Any, proxy: Proxy, admin: redis.Redis
) -> None:
    face = warmed(connect, proxy, timeout=1.5)
    for _ in range(10):
        lease = face.lock("x", ttl=0.6, renew=False).acquire(timeout=10)
        time.sleep(max(0.0, lease.remaining() - 0.08))  # less than the first try will wait for its reply
        if lease.held:
            break
        with pytest.raises(holdfast.LeaseLost):  # a busy machine woke us too late
            lease.release()
    assert lease.held
    proxy.on("release", MUTE_REPLY)
    proxy.on("abandon", LOSE_REQUEST, times=3)
    with pytest.raises((holdfast.OutcomeUnknown, holdfast.LeaseLost)):
        lease.release()
    assert lock_keys(admin) == []


def test_release_that_cannot_be_sent_goes_on_in_the_background(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy, timeout=1.2)
    lease = face.lock("x").acquire(timeout=10)
    proxy.refuse()
    with took(less_than=3.0), pytest.raises((holdfast.OutcomeUnknown, holdfast.Unavailable)) as caught:
        lease.release()
    assert "x" in str(caught.value) or isinstance(caught.value, holdfast.Unavailable)
    assert not lease.held
    assert lock_keys(admin) == ["x"]
    proxy.heal()
    eventually(lambda: lock_keys(admin) == [], what="the keeper has freed it")


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST], ids=lambda fault: fault.kind)
def test_lost_renewals_do_not_cost_the_lease(connect: Any, proxy: Proxy, admin: redis.Redis, fault: Any) -> None:
    face = warmed(connect, proxy)
    lease = face.lock("x", ttl=3).acquire(timeout=10)
    proxy.on("renew", fault)
    proxy.await_request("renew", 3)
    assert lease.held
    assert admin.get("x") == lease.token.encode()
    lease.release()
    assert lock_keys(admin) == []


def test_half_open_connection_of_the_keeper_does_not_cost_the_lease(
    connect: Any, proxy: Proxy, admin: redis.Redis
) -> None:
    face = warmed(connect, proxy)
    lease = face.lock("x", ttl=3).acquire(timeout=10)
    proxy.on("renew", MUTE_REPLY)
    proxy.await_request("renew", 1)
    # Nothing more is heard on that connection, so in time for the deadline another must be tried.
    assert not lease.lost.wait(3.5)
    assert lease.held
    assert admin.get("x") == lease.token.encode()
    lease.release()


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST], ids=lambda fault: fault.kind)
def test_extend_whose_reply_is_lost_succeeds(connect: Any, proxy: Proxy, admin: redis.Redis, fault: Any) -> None:
    face = warmed(connect, proxy)
    lease = face.lock("x", ttl=10, renew=False).acquire(timeout=10)
    proxy.on("renew", fault)
    with took(less_than=4.5):
        lease.extend(60)
    assert admin.pttl("x") > 50_000
    assert lease.remaining() > 50
    lease.release()
    assert lock_keys(admin) == []


def test_every_connection_reset_at_once_costs_nothing(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy)
    for _ in range(20):
        with face.lock("x", ttl=30, wait=10) as lease:
            proxy.cut()
            assert lease.held
        proxy.cut()
    assert lock_keys(admin) == []
