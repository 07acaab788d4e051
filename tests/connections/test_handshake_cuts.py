"""Connections that are cut while they are being set up: what a client gives up for that, and when it has it back."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import redis

import holdfast
from tests.proxy import LOSE_REQUEST, Proxy
from tests.support import eventually, is_subscribed, later


@pytest.mark.parametrize("cuts", [1, 2])
def test_a_waiter_whose_subscription_was_cut_subscribes_later(connect: Any, proxy: Proxy, cuts: int) -> None:
    holder, waiter = connect(proxy.url), connect(proxy.url)
    lease = holder.lock("x").acquire()
    proxy.on("subscribe", LOSE_REQUEST, times=cuts)
    with later(0.0, _wait_for, waiter):
        proxy.await_request("subscribe")
        try:
            eventually(lambda: is_subscribed(waiter.client), timeout=8.0, what="it subscribes again")
            assert proxy.seen("subscribe") == cuts + 1
        finally:
            lease.release()


def _wait_for(face: Any) -> None:
    with face.lock("x", wait=20.0):
        pass


@pytest.mark.parametrize("cuts", [2, 3])
def test_tracking_comes_back_after_connections_that_were_cut_during_hello(
    connect: Any, proxy: Proxy, admin: redis.Redis, caplog: pytest.LogCaptureFixture, cuts: int
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    proxy.on("hello", LOSE_REQUEST, times=cuts)
    lease = connect(proxy.url).lock("x", ttl=60).acquire()
    eventually(lambda: "are back" in caplog.text, timeout=10.0, what="RESP3 is spoken again")
    eventually(lambda: tracked(admin), what="keys are tracked again")
    admin.delete("x")
    eventually(lambda: lease.lost.is_set(), timeout=3.0, what="the loss is told")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert proxy.seen("hello") <= cuts + 2, "a probe, and then perhaps the shared connection"
    given_up, back = (record for record in caplog.records if "RESP3" in record.getMessage())
    assert given_up.levelno == logging.WARNING
    assert "next renewal" in given_up.getMessage()
    assert back.levelno == logging.INFO


def test_tracking_comes_back_after_two_seconds_in_which_every_request_is_cut(
    connect: Any, proxy: Proxy, admin: redis.Redis
) -> None:
    """As by a load balancer, while the server behind it restarts."""
    lock = connect(proxy.url).lock("x", ttl=60)
    lease = lock.acquire()
    eventually(lambda: tracked(admin), what="keys are tracked")
    proxy.on("*", LOSE_REQUEST, times=1_000_000)
    proxy.cut()
    time.sleep(2.0)
    proxy.heal()
    eventually(lambda: tracked(admin), timeout=5.0, what="keys are tracked again")
    admin.delete("x")
    eventually(lambda: lease.lost.is_set(), timeout=3.0, what="the loss is told")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def tracked(admin: redis.Redis) -> bool:
    return any("t" in found["flags"] for found in admin.client_list())
