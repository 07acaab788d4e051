"""Requests that arrive late or beside other requests, and a server whose clock stood still, on a real memcached."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.engines.memcached import blocking
from holdfast.protocol import memcached as protocol
from holdfast.protocol.memcached import program_of
from tests.etcd.faulty_server import FaultyServer
from tests.server_memcached import MemcachedServer
from tests.support import eventually


def url_of(faulty: FaultyServer) -> str:
    return f"memcached://127.0.0.1:{faulty.port}"


def send_to(server: MemcachedServer, request: bytes) -> bytes:
    """The reply to this request, over a connection of its own."""
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def before(command: bytes, act: Callable[[], None]) -> Callable[[socket.socket, bytes], bool]:
    """Act once, before the first request of this kind is passed on."""
    acts = [act]

    def fault(client: socket.socket, request: bytes) -> bool:
        if request.startswith(command + b" ") and acts:
            acts.pop()()
        return False

    return fault


# A server whose clock stood still.


@pytest.mark.parametrize("known", [True, False], ids=["a client that was there before", "a new client"])
def test_a_lock_granted_when_the_server_resumes_lasts_for_its_ttl(
    connect: Any, memcached: MemcachedServer, known: bool
) -> None:
    other = connect(memcached.url)
    other.lock("warm").acquire().release()
    for _ in range(3):  # in some runs the server reads its clock before the request
        one = connect(memcached.url)
        if known:
            one.lock("warm").acquire().release()
        memcached.pause()
        resuming = threading.Timer(3.6, memcached.resume)
        resuming.start()
        time.sleep(3.55)
        lease = one.lock("a", ttl=2, renew=False).acquire(timeout=10)
        resuming.join()
        while lease.held:
            second = other.lock("a", ttl=2, renew=False).acquire(blocking=False)
            if second is not None:
                second.release()
                assert not lease.held, f"{lease.remaining():.3g} s before the end of the first lease"
            time.sleep(0.005)
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_a_server_that_accepts_no_more_connections_still_renews(
    faulty: FaultyServer, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = connect(url_of(faulty)).lock("a", ttl=1).acquire()
    monkeypatch.setattr(protocol, "_READ_AGAIN", 0.0)
    asked: list[bytes] = []

    def swallow(client: socket.socket, request: bytes) -> bool:
        if request.startswith(b"stats"):
            asked.append(request)
        return request.startswith(b"stats")

    faulty.fault = swallow
    time.sleep(3.0)
    assert asked, "the clock was not read again"
    lease.check()
    lease.release()


# Late requests.


def test_a_late_add_of_an_attempt_that_was_given_up_is_removed(
    faulty: FaultyServer, memcached: MemcachedServer, connect: Any
) -> None:
    client = connect(url_of(faulty), timeout=0.5)
    client.lock("warm").acquire().release()
    late: list[bytes] = []

    def swallow(client: socket.socket, request: bytes) -> bool:
        late.append(request)
        return True

    faulty.fault = lambda client, request: request.startswith(b"add ") and swallow(client, request)
    with pytest.raises(holdfast.Unavailable):
        client.lock("a", ttl=30).acquire(timeout=0.5)
    faulty.heal()
    eventually(lambda: client.lock("a").locked() is False)
    time.sleep(0.5)  # its clean-up has been answered
    assert send_to(memcached, late[-1]) == b"STORED\r\n"
    eventually(lambda: not memcached.client().exists("a"), timeout=5)


def test_a_late_add_stores_nothing_after_the_end_of_its_own_lease(
    faulty: FaultyServer, memcached: MemcachedServer
) -> None:
    sent: list[bytes] = []

    def note(client: socket.socket, request: bytes) -> bool:
        if request.startswith(b"add "):
            sent.append(request)
        return False

    faulty.fault = note
    with holdfast.connect(url_of(faulty)) as client:
        client.lock("a", ttl=0.5).acquire().release()
    eventually(lambda: send_to(memcached, sent[0]) and not memcached.client().exists("a"), timeout=6)


def test_a_keeper_does_not_overwrite_the_item_of_another_holder(connect: Any, memcached: MemcachedServer) -> None:
    lease = connect(memcached.url).lock("b", ttl=1.5).acquire()
    memcached.client().call("set", "b", "thief", 30, noreply=False)
    assert lease.lost.wait(10)
    assert not lease.held
    assert memcached.client().call("get", "b") == b"thief"
    with pytest.raises(holdfast.LeaseLost, match="another holder"):
        lease.release()


@pytest.mark.parametrize("command", [b"md", b"cas"], ids=["a release", "a renewal"])
def test_a_write_does_not_touch_an_item_that_changed_since_it_was_read(
    faulty: FaultyServer, memcached: MemcachedServer, connect: Any, command: bytes
) -> None:
    lease = connect(url_of(faulty)).lock("a", ttl=30).acquire()
    faulty.fault = before(command, lambda: memcached.client().call("set", "a", "thief", 30, noreply=False))
    if command == b"cas":
        with pytest.raises(holdfast.LeaseLost, match="another holder"):
            lease.extend(40)
    with pytest.raises(holdfast.LeaseLost, match="another holder"):
        lease.release()
    assert memcached.client().call("get", "a") == b"thief"


def test_a_cas_number_is_not_used_on_a_server_that_was_restarted_since(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of cas numbers starts again, so the number of our item may be that of another holder's now."""
    with MemcachedServer() as server:

        def restart() -> None:
            server.kill()
            server.start()
            send_to(server, b"add a 0 30 5\r\nthief\r\n")

        def with_restart(items: Any, op: Any, now: float) -> Any:
            program = program_of(items, op, now)
            try:
                command = program.send(None)
                while True:
                    if command.args[0] == "md" and restarts:
                        restarts.pop()()
                    command = program.send((yield command))
            except StopIteration as done:
                return done.value

        restarts = [restart]
        lease = connect(server.url).lock("a", ttl=30).acquire()
        monkeypatch.setattr(blocking, "program_of", with_restart)
        lease.release()  # the lease was ours until then, and its end is what was asked for
        assert not restarts
        assert server.client().call("get", "a") == b"thief"


# asyncio: each request runs in a worker thread.


def test_a_cancelled_acquire_on_a_hung_server_leaves_nothing_to_be_logged(memcached: MemcachedServer) -> None:
    logged: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        async with holdfast.aio.connect(memcached.url, timeout=0.3) as client:
            await (await client.lock("a").acquire()).release()
            memcached.pause()
            try:
                for _ in range(3):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await client.lock("a").acquire()
                await asyncio.sleep(1.0)  # the threads have given up
            finally:
                memcached.resume()
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert not logged
