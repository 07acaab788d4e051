"""A reply has a limit: one that never ends, or that announces more than fits into memory, costs a connection only."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

import holdfast
from holdfast.drivers import clock
from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.blocking.shared_connection import SharedConnection
from holdfast.engines.redis.protocol import LONGEST_REPLY
from holdfast.engines.redis.target import resolve
from holdfast.protocol.effects import Command, StepFailed
from tests.engines.redis.test_shared_connection import Board
from tests.proxy import Proxy, instead
from tests.support import Script, took

PING = Command(("PING",))
ENDLESS = b"$4000000000\r\n" + b"x" * (LONGEST_REPLY + 2**20)
HUGE_ARRAYS = [
    b"*4294967295\r\n",
    b"*1\r\n*4294967295\r\n",
    b"%2\r\n+a\r\n*4294967295\r\n",  # a hiredis before 3.4.2 crashes here
    b"*2\r\n%1\r\n+a\r\n*4294967295\r\n",
]


@pytest.fixture
def shared(proxy: Proxy) -> Iterator[SharedConnection]:
    target = resolve(proxy.url, aio=False)
    shared = SharedConnection(target, Board(), clock.now, Engine(target))  # type: ignore[arg-type]
    yield shared
    shared.close()


def test_a_reply_without_end_is_given_up_at_the_limit(proxy: Proxy) -> None:
    with holdfast.connect(proxy.url, timeout=30.0, outage_wait=None) as client:
        with client.lock("x"):
            pass
        proxy.on("acquire", instead(ENDLESS), times=2)
        with took(less_than=25.0), pytest.raises(holdfast.Unavailable, match="a reply of more than 65 MiB") as caught:
            client.lock("x").acquire(blocking=False)
        assert "Cache smaller values" in str(caught.value)
        with client.lock("y", wait=0):  # over a new connection
            pass


def test_the_shared_connection_gives_up_a_reply_without_end(proxy: Proxy, shared: SharedConnection) -> None:
    proxy.on("ping", instead(ENDLESS))
    with took(less_than=25.0), pytest.raises(StepFailed, match="a reply of more than 65 MiB"):
        shared.call(PING, 30.0)
    assert shared.call(PING, 30.0) == b"PONG"


@pytest.mark.parametrize("data", HUGE_ARRAYS, ids=lambda data: repr(data[:24]))
def test_an_array_that_does_not_fit_into_memory(proxy: Proxy, data: bytes) -> None:
    program = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_AS, ({2 * 2**30}, {2 * 2**30}))
        client = holdfast.connect(url, timeout=2.0)
        with client.lock("x"):
            say("ready")
            sys.stdin.readline()
        for name in "yz":
            try:
                with client.lock(name, wait=0):
                    say("acquired")
            except holdfast.Unavailable as error:
                say(error)
        client.close()
    """
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    with Script(program, proxy.url) as script:
        script.hear("ready")
        proxy.on("acquire", instead(data), times=2)
        script.write("go\n")
        assert "it sent" in script.hear()
        script.hear("acquired")
        script.finish()


def test_a_handshake_without_end_is_given_up(proxy: Proxy, shared: SharedConnection) -> None:
    proxy.on("hello", instead(ENDLESS[: 32 * 2**20]))
    with took(less_than=25.0), pytest.raises(StepFailed, match="InvalidResponse"):
        shared.call(PING, 30.0)
    assert shared.call(PING, 30.0) == b"PONG"
