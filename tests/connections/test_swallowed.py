"""A connection that swallows a request or a reply, or that a router has forgotten, does not cost the lock.

The server is well all the time. So a try that gets no answer is sent again, over a new connection, before the patience
of its caller is over. Steps are idempotent by token; the commands of recipes are not, and are never sent again.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

import holdfast
from holdfast.protocol.effects import Command, StepFailed
from tests.proxy import MUTE_REPLY, SWALLOW_REPLY, SWALLOW_REQUEST, Proxy, followed_by, instead
from tests.support import eventually, lock_keys, took

FAULTS = [SWALLOW_REQUEST, SWALLOW_REPLY, MUTE_REPLY]


def warmed(connect: Any, proxy: Proxy, **options: Any) -> Any:
    face = connect(proxy.url, **options)
    with face.lock("warm"):
        pass
    return face


def acquire_with_a_timeout(face: Any) -> Any:
    return face.lock("x").acquire(timeout=2)


def acquire_at_once(face: Any) -> Any:
    return face.lock("x").acquire(blocking=False)


def enter(face: Any) -> Any:
    with face.lock("x", wait=2) as lease:
        assert lease.held
    return face.lock("x").acquire(timeout=2)


WAYS = pytest.mark.parametrize("way", [acquire_with_a_timeout, acquire_at_once, enter], ids=lambda way: way.__name__)


@WAYS
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_one_swallowed_message_does_not_cost_the_lock(
    connect: Any, proxy: Proxy, admin: redis.Redis, fault: Any, way: Callable[[Any], Any]
) -> None:
    face = warmed(connect, proxy)
    proxy.on("acquire", fault)
    with took(less_than=4.5):
        lease = way(face)
    assert lease is not None
    assert admin.get("x") == lease.token.encode()
    lease.release()
    assert lock_keys(admin) == []


@WAYS
def test_forgotten_connections_do_not_cost_the_lock(
    connect: Any, proxy: Proxy, admin: redis.Redis, way: Callable[[Any], Any]
) -> None:
    face = warmed(connect, proxy)
    proxy.forget()
    with took(less_than=4.5):
        lease = way(face)
    assert lease is not None
    lease.release()
    assert lock_keys(admin) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_a_swallowed_message_costs_one_try_and_not_the_later_ones(connect: Any, proxy: Proxy, fault: Any) -> None:
    face = warmed(connect, proxy)
    proxy.on("acquire", fault)
    for _ in range(5):
        lease = face.lock("x").acquire(timeout=6)
        assert lease is not None
        lease.release()
    assert proxy.seen("acquire") == 1 + 5 + 1


def test_resting_connections_that_are_dead_cost_one_silence_together(proxy: Proxy) -> None:
    with holdfast.connect(proxy.url, timeout=6.0) as client:
        begin = threading.Barrier(8)

        def use(number: int) -> None:
            begin.wait()
            for _ in range(20):
                with client.lock(f"warm{number}"):
                    pass

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [node] = client.statistics().nodes.values()
        assert node.idle >= 2, "several connections rest"
        before = proxy.seen("acquire")
        proxy.forget()
        with took(less_than=6.0, at_least=0.6):  # one answer time
            lease = client.lock("x").acquire(blocking=False)
        assert lease is not None
        assert proxy.seen("acquire") == before + 2
        lease.release()


def test_a_silence_drops_what_rested_before_it(proxy: Proxy) -> None:
    with holdfast.connect(proxy.url) as client:
        engine = client._driver.engine
        links = [engine.open_connection(5.0) for _ in range(8)]
        for link in links:
            engine.call_on(link, [Command(("UNWATCH",))], 5.0)
            engine.close_connection(link)
        assert [node.idle for node in client.statistics().nodes.values()] == [8]
        proxy.forget()
        with took(less_than=6.0):
            lease = client.lock("x").acquire(timeout=6)
        assert lease is not None
        assert [node.idle for node in client.statistics().nodes.values()] == [1]
        lease.release()


def test_pushes_do_not_keep_a_connection_that_owes_a_reply(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    """A shared connection that hears notifications all the time, and lost one reply, is given up all the same."""
    face = warmed(connect, proxy)
    with admin.lock("x", timeout=30):
        assert face.lock("x").acquire(timeout=1.0) is None  # so that the client listens
    channel = eventually(lambda: admin.pubsub_channels("holdfast:bell:*"), what="it listens")[0]
    over = threading.Event()

    def wake() -> None:
        while not over.wait(0.02):
            admin.publish(channel, "nobody 0 0 0")

    bells = threading.Thread(target=wake)
    bells.start()
    try:
        proxy.on("acquire", SWALLOW_REPLY)
        with took(less_than=6.0):
            lease = face.lock("y").acquire(timeout=6)
        assert lease is not None
        lease.release()
    finally:
        over.set()
        bells.join()


def test_renewals_survive_a_swallowed_reply(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy)
    lease = face.lock("x", ttl=3.0).acquire(timeout=10)
    for _ in range(2):
        seen = proxy.seen("renew")
        proxy.on("renew", SWALLOW_REPLY)
        proxy.await_request("renew", seen + 2)
    assert lease.held
    assert admin.get("x") == lease.token.encode()
    lease.release()


def test_a_connection_that_the_kernel_gives_up_is_an_error_of_ours(proxy: Proxy) -> None:
    with holdfast.connect(proxy.url) as client:
        engine = client._driver.engine
        line = engine.open_connection(5.0)
        failed = engine._broken(line, TimeoutError(errno.ETIMEDOUT, "Connection timed out"), 5.0)
        assert isinstance(failed, StepFailed)
        assert failed.connection_broke
        of_the_caller = TimeoutError("raised by a signal handler")
        assert engine._broken(engine.open_connection(5.0), of_the_caller, 5.0) is of_the_caller


# What was not asked for.


@pytest.mark.parametrize("surplus", [b":1\r\n", b"+OK\r\n", b"$3\r\nabc", b"-ERR nothing\r\n"])
def test_a_surplus_reply_ends_its_connection(connect: Any, proxy: Proxy, admin: redis.Redis, surplus: bytes) -> None:
    face = warmed(connect, proxy)
    proxy.on("release", followed_by(surplus))
    with face.lock("x", wait=2):
        pass
    other = admin.lock("x", timeout=30, thread_local=False)
    assert other.acquire(blocking=False)
    assert face.lock("x").acquire(blocking=False) is None, "the surplus reply was taken for a grant"
    assert face.lock("x").locked()
    other.release()
    with face.lock("x", wait=2) as lease:
        assert admin.get("x") == lease.token.encode()


def test_a_surplus_reply_that_comes_later_ends_its_connection(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy)
    proxy.say(b":1\r\n")
    time.sleep(0.05)
    other = admin.lock("x", timeout=30, thread_local=False)
    assert other.acquire(blocking=False)
    assert face.lock("x").acquire(blocking=False) is None
    other.release()
    with face.lock("x", wait=2) as lease:
        assert admin.get("x") == lease.token.encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"%1\r\n*1\r\n:1\r\n:2\r\n",
        b"\x15\x03\x03\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b":\r\n",
        b"(x\r\n",
        b"!5\r\nERR a\r\n",
    ],
)
def test_what_cannot_be_parsed_is_an_error_of_ours(connect: Any, proxy: Proxy, garbage: bytes) -> None:
    face = warmed(connect, proxy, timeout=2.0)
    proxy.on("acquire", instead(garbage), times=500)
    with pytest.raises(holdfast.Unavailable, match="no reply of Redis"):
        face.lock("x").acquire(timeout=1.0)
    proxy.heal()
    with face.lock("x", wait=2):
        pass


# Recipes.


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize("recipe", ["setnx", "set_nx", "watch"])
@pytest.mark.parametrize("fault", [SWALLOW_REQUEST, SWALLOW_REPLY], ids=lambda fault: fault.kind)
def test_the_commands_of_a_recipe_are_never_sent_again(connect: Any, proxy: Proxy, recipe: str, fault: Any) -> None:
    face = warmed(connect, proxy, timeout=1.0)
    command = {"setnx": "setnx", "set_nx": "set", "watch": "exec"}[recipe]
    lock = face.client.recipe(recipe, "x")
    proxy.on(command, fault)
    with pytest.raises(holdfast.HoldfastError):
        outcome = lock.acquire(timeout=3)
        if not isinstance(outcome, holdfast.Lease):
            face._call(outcome)
    assert proxy.seen(command) == 1
