"""The server hangs: stopped by a signal, or behind a network that swallows everything. Every deadline holds.

Deadlines are given half a second and must be met well before 2.5 s, which a busy machine can do.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.engines.redis.blocking import pooled_connection
from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.target import resolve
from holdfast.protocol.effects import Command, StepFailed
from tests.proxy import LOSE_REQUEST, SWALLOW_REPLY, Proxy, delay, dribble
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, eventually, later, lock_keys, took

SOON = 4.5


@pytest.fixture(params=["stopped", "blackhole"])
def hang(request: pytest.FixtureRequest, server: Server, proxy: Proxy) -> Any:
    """``hang.url`` is a server that ``hang()`` makes silent and ``hang.heal()`` makes talk again."""

    class Hang:
        url = proxy.url if request.param == "blackhole" else server.url

        def __call__(self) -> None:
            if request.param == "blackhole":
                proxy.blackhole()
            else:
                server.pause()

        def heal(self) -> None:
            proxy.heal()
            server.resume()

    hang = Hang()
    request.addfinalizer(hang.heal)
    return hang


def warmed(connect: Any, url: str, **options: Any) -> Any:
    face = connect(url, **options)
    with face.lock("warm"):
        pass
    return face


def enter(lock: Any) -> None:
    with lock:
        pass


def run(face: Any, ask: Callable[[Any], Any]) -> Any:
    """Ask its client for something, on either face."""
    return ask(face.client) if face.kind == "blocking" else face._call(_awaited(face.client, ask))


async def _awaited(client: Any, ask: Callable[[Any], Any]) -> Any:
    return await ask(client)


@pytest.mark.parametrize(
    ("ask", "met"),
    [
        (lambda face: enter(face.lock("x", wait=0.5)), True),
        (lambda face: face.lock("x").acquire(timeout=0.5), True),
        (lambda face: face.lock("x").acquire(timeout=0.5), False),
    ],
    ids=["with", "acquire", "first contact"],
)
def test_wait_ends_in_time(connect: Any, hang: Any, admin: redis.Redis, ask: Callable[[Any], Any], met: bool) -> None:
    face = warmed(connect, hang.url) if met else connect(hang.url)
    hang()
    with took(less_than=SOON), pytest.raises(holdfast.Unavailable) as caught:
        ask(face)
    assert "did not answer" in str(caught.value)
    hang.heal()
    eventually(lambda: lock_keys(admin) == [], what="no key is left once the server talks again")


@contextmanager
def not_for_ever(trouble: Any) -> Iterator[None]:
    """Should it wait without end, which it must not, the trouble is over after a while, and the test fails."""
    way_out = threading.Timer(2 * SOON, trouble.heal)
    way_out.start()
    try:
        yield
    finally:
        way_out.cancel()
        way_out.join()


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lock("x").acquire(),
        lambda client: client.lock("x", ttl=0.3).acquire(),
        lambda client: client.lock("x", "y").acquire(),
        lambda client: client.rlock("x").acquire(),
        lambda client: client.semaphore("x", 2).acquire(),
        lambda client: client.rwlock("x").read.acquire(),
        lambda client: client.rwlock("x").write.acquire(),
        lambda client: client.latch("x", 2).wait(),
        lambda client: client.latch("x", 2).count(),
        lambda client: client.election("x").leader(),
        lambda client: client.get_or_compute("x", lambda: 1),
        lambda client: client.recipe("getset", "x").acquire(),
        lambda client: client.recipe("set_nx", "x").acquire(),
        lambda client: client.recipe("watch", "x").acquire(),
        lambda client: client.lock("x").locked(),
    ],
    ids=[
        "lock",
        "short ttl",
        "several",
        "rlock",
        "semaphore",
        "read",
        "write",
        "latch",
        "count",
        "leader",
        "cache",
        "getset",
        "set_nx",
        "watch",
        "locked",
    ],
)
def test_first_contact_is_given_up_after_the_timeout_of_the_client(
    connect: Any, hang: Any, ask: Callable[[Any], Any]
) -> None:
    face = connect(hang.url, timeout=0.5)
    hang()
    with not_for_ever(hang), took(less_than=SOON), pytest.raises(holdfast.Unavailable) as caught:
        run(face, ask)
    assert "did not answer" in str(caught.value)


def test_what_comes_after_the_first_contact_is_waited_for(connect: Any, hang: Any) -> None:
    face = warmed(connect, hang.url, timeout=0.8)
    hang()
    with later(1.0, hang.heal), took(less_than=8.0, at_least=0.9):
        face.lock("x").acquire().release()


def test_server_that_hangs_up_on_everybody_from_the_first_is_given_up(connect: Any, proxy: Proxy) -> None:
    proxy.on("acquire", LOSE_REQUEST, times=1_000_000)
    with not_for_ever(proxy), took(less_than=SOON), pytest.raises(holdfast.Unavailable):
        connect(proxy.url, timeout=0.5).lock("x").acquire()


def test_lease_is_over_at_its_deadline_whatever_the_network_says(connect: Any, hang: Any) -> None:
    told: list[Any] = []
    face = warmed(connect, hang.url)
    before = time.monotonic()
    lease = face.lock("x", ttl=0.9, on_lost=told.append).acquire(timeout=5)
    hang()
    assert lease.lost.wait(SOON)
    assert time.monotonic() - before < SOON
    assert not lease.held
    assert lease.remaining() == 0
    assert lease.lost.is_set()
    with pytest.raises(holdfast.LeaseLost):
        lease.check()
    eventually(lambda: told, SOON, "on_lost was called")
    assert [told_of.token for told_of in told] == [lease.token]
    hang.heal()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_held_is_never_true_after_the_deadline(connect: Any, server: Server) -> None:
    face = warmed(connect, server.url)
    before = time.monotonic()
    lease = face.lock("x", ttl=0.6, renew=False).acquire(timeout=5)
    server.pause()
    while lease.held:
        # The reading comes first: a pause of this thread between the two must not accuse the lease.
        looked_at = time.monotonic()
        assert not (lease.held and looked_at - before > 0.6)
        time.sleep(0.001)
    assert time.monotonic() - before < SOON
    server.resume()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_lease_survives_a_short_hang(connect: Any, server: Server, admin: redis.Redis) -> None:
    face = warmed(connect, server.url, timeout=0.5)
    lease = face.lock("x", ttl=3).acquire(timeout=5)
    server.pause()
    time.sleep(1.3)  # the first renewal falls due, and fails
    server.resume()
    time.sleep(2.0)
    assert lease.held
    assert admin.get("x") == lease.token.encode()
    lease.release()


def test_release_takes_no_longer_than_the_timeout(connect: Any, hang: Any, admin: redis.Redis) -> None:
    face = warmed(connect, hang.url, timeout=1.0)
    lease = face.lock("x").acquire(timeout=5)
    hang()
    with took(less_than=SOON), pytest.raises(holdfast.OutcomeUnknown) as caught:
        lease.release()
    assert "is repeated in the background" in str(caught.value)
    assert not lease.held
    hang.heal()
    eventually(lambda: lock_keys(admin) == [], 8.0, "the keeper has freed it")


def test_extend_and_locked_take_no_longer_than_the_timeout(connect: Any, hang: Any) -> None:
    face = warmed(connect, hang.url, timeout=1.0)
    lease = face.lock("x").acquire(timeout=5)
    hang()
    with took(less_than=SOON), pytest.raises(holdfast.Unavailable):
        lease.extend(60)
    with took(less_than=SOON), pytest.raises(holdfast.Unavailable):
        face.lock("x").locked()
    hang.heal()
    with suppress(holdfast.OutcomeUnknown):  # a busy machine may take longer than this short timeout even now
        lease.release()


def test_close_takes_not_much_longer(connect: Any, hang: Any) -> None:
    face = warmed(connect, hang.url, timeout=0.5)
    lease = face.lock("x").acquire(timeout=5)
    hang()
    with took(less_than=5.0):
        face.client.close() if connect.kind == "blocking" else face._call(face.client.aclose())
    assert not lease.held
    hang.heal()
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_what_is_carried_out_after_its_client_was_closed_lasts_for_the_ttl_at_most(
    connect: Any, hang: Any, admin: redis.Redis
) -> None:
    face = warmed(connect, hang.url, timeout=0.5)
    hang()
    with pytest.raises(holdfast.Unavailable):
        face.lock("x", ttl=1.0).acquire(timeout=0.3)
    run(face, lambda client: client.close() if connect.kind == "blocking" else client.aclose())
    hang.heal()
    admin.ping()  # it has read by now what was sent before
    eventually(lambda: lock_keys(admin) == [], 8.0, "its ttl is over")


def test_reply_that_dribbles_in_does_not_stretch_the_wait(connect: Any, proxy: Proxy, admin: redis.Redis) -> None:
    face = warmed(connect, proxy.url)
    proxy.on("acquire", dribble(0.2), times=10)
    with took(less_than=SOON), pytest.raises(holdfast.Unavailable):
        face.lock("x").acquire(timeout=0.5)
    eventually(lambda: lock_keys(admin) == [])


def test_nor_does_one_that_is_always_there_when_we_look(
    server: Server, proxy: Proxy, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a busy machine, where to look a hundred times takes longer than the next byte.
    monkeypatch.setattr(pooled_connection, "_SPINS", 1_000_000)
    with holdfast.connect(proxy.url) as client:
        with client.lock("warm"):
            pass
        proxy.on("acquire", dribble(0.2), times=10)
        with took(less_than=SOON), pytest.raises(holdfast.Unavailable):
            client.lock("x").acquire(timeout=0.5)
        eventually(lambda: lock_keys(admin) == [])


def test_signals_that_keep_coming_do_not_stretch_the_wait(server: Server) -> None:
    # Each one interrupts the system call that waits for the reply, and must not start its patience anew.
    code = """
    import threading
    client = holdfast.connect(url)
    with client.lock("warm"):
        pass
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    say("ready")
    sys.stdin.readline()
    started = time.monotonic()
    try:
        client.lock("x").acquire(timeout=0.5)
    except holdfast.Unavailable:
        say("unavailable")
    say("soon" if time.monotonic() - started < 2.5 else "late")
    os._exit(0)
    """
    with Script(code, server.url) as script:
        script.hear("ready")
        server.pause()
        way_out = threading.Timer(4.0, server.resume)
        way_out.start()
        script.write("go\n")
        try:
            script.hear("unavailable")
            script.hear("soon")
        finally:
            way_out.cancel()
            way_out.join()


@asyncio_test
async def test_asyncio_timeout_bounds_acquire(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        async with client.lock("warm"):
            pass
        server.pause()
        with took(less_than=SOON), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.lock("x").acquire()
        server.resume()
        await async_eventually(lambda: lock_keys(admin) == [], 8.0, "no key is left once the server talks again")


@asyncio_test
async def test_asyncio_timeout_bounds_release(server: Server, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(server.url) as client:
        with took(less_than=SOON), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                async with client.lock("x"):
                    server.pause()
        server.resume()
        await async_eventually(lambda: lock_keys(admin) == [], 8.0, "the keeper has freed it")


@asyncio_test
async def test_asyncio_timeout_bounds_the_first_contact(proxy: Proxy) -> None:
    proxy.blackhole()
    async with holdfast.aio.connect(proxy.url) as client:
        with took(less_than=SOON), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.lock("x").acquire()


@asyncio_test
async def test_body_is_cancelled_when_the_deadline_passes_on_a_hung_server(server: Server) -> None:
    async with holdfast.aio.connect(server.url, timeout=0.5) as client:
        with took(less_than=4.0), pytest.raises(holdfast.LeaseLost):
            async with client.lock("x", ttl=0.9):
                server.pause()
                await asyncio.sleep(30)
        server.resume()


@asyncio_test
async def test_closing_while_the_connection_is_being_made_frees_who_waits_for_it(proxy: Proxy) -> None:
    proxy.blackhole()
    client = holdfast.aio.connect(proxy.url)
    waiting = asyncio.create_task(client.lock("x").acquire())
    await asyncio.sleep(0.2)
    with took(less_than=SOON):
        await client.aclose()
        with pytest.raises(holdfast.Unavailable):
            await waiting


def test_an_alarm_of_the_callers_is_not_taken_for_the_servers_silence(server: Server) -> None:
    def alarm(number: int, frame: object) -> None:
        raise TimeoutError("the caller's own")

    with holdfast.connect(server.url) as client:
        with client.lock("x"):
            pass
        before = signal.signal(signal.SIGALRM, alarm)
        server.pause()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with took(less_than=3.0), pytest.raises(TimeoutError, match="the caller's own"):
                client.lock("x").acquire(timeout=4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            server.resume()


class StoppedBeforeItSends(Engine):
    """As if the process were stopped between its look at the clock and the send."""

    stopped_for = 0.0

    def _take(self, timeout: float) -> pooled_connection.PooledConnection:
        connection = super()._take(timeout)
        time.sleep(self.stopped_for)
        return connection


def test_a_request_that_was_sent_too_late_still_has_time_for_its_reply(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_connection, "_SPINS", 1)  # else a reply may come while it spins
    engine = StoppedBeforeItSends(resolve(proxy.url, aio=False))
    ping = Command(("PING",))
    try:
        engine.call(ping, 5.0)
        engine.stopped_for = 0.3
        proxy.on("ping", SWALLOW_REPLY)
        with pytest.raises(StepFailed, match="did not answer"):
            engine.call(ping, 0.1)
        monkeypatch.setattr(pooled_connection, "_TIME_AFTER_ALL", 10.0, raising=False)  # for a busy machine
        proxy.on("ping", delay(0.05))
        assert engine.call(ping, 0.1) == b"PONG"
    finally:
        engine.close()


def test_a_timeout_closes_the_connections_that_were_idle_meanwhile(server: Server) -> None:
    """They may be as dead as the one that got no reply."""
    with holdfast.connect(server.url) as client:
        engine: Any = client._driver.engine
        for connection in [engine._take(5.0) for _ in range(3)]:
            engine._put_back(connection)
        assert engine.count_connections() == (3, 3)
        server.pause()
        with pytest.raises(StepFailed):
            engine.call(Command(("PING",)), 0.3)
        assert engine.count_connections() == (0, 0)
        server.resume()
