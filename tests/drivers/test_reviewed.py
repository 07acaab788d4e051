"""What a review found, and only a real process or server can show."""

from __future__ import annotations

import asyncio
import signal
import socketserver
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import asyncio_test, took


@asyncio_test
async def test_a_keeper_that_was_cancelled_is_replaced(server: Server) -> None:
    """Clean-up code that cancels all tasks is common."""
    async with holdfast.aio.connect(server.url) as client:
        async with client.lock("first"):
            pass
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        async with client.lock("x", ttl=0.6) as lease:
            await asyncio.sleep(1.5)
            assert lease.held


@asyncio_test
async def test_somebody_elses_cancellation_on_the_way_out_goes_on(server: Server, admin: redis.Redis) -> None:
    """The lease is lost, and in the very turn in which the body's end meets that, the task is cancelled by another."""
    async with holdfast.aio.connect(server.url) as client:

        async def work() -> str:
            try:
                async with client.lock("x", ttl=30) as lease:
                    block = lease._hold.notify
                    assert block is not None
                    block()  # as the keeper does it on loss
                    loop.call_soon(task.cancel)
            except holdfast.LeaseLost:
                pass
            await asyncio.sleep(0)
            return "went on"

        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())
        with pytest.raises(asyncio.CancelledError):
            await task
    assert admin.exists("x") == 0


def test_no_password_and_no_token_in_the_repr_of_what_locals_hold(client: holdfast.Client) -> None:
    secret = holdfast.connect("redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in repr(secret._driver.engine._target)
    with pytest.raises(holdfast.Unavailable) as caught:
        secret.lock("x").acquire()
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "hunter2" not in "".join(shown.format())
    lease = client.lock("x").acquire()
    assert lease
    from holdfast.protocol.mutex import acquire_step

    assert lease.token not in repr(acquire_step(lease._hold))
    lease.release()
    secret.close()


class Demoted(socketserver.StreamRequestHandler):
    """A server that was a primary when it was connected to."""

    def handle(self) -> None:
        demoted = self.server.connections == 0  # type: ignore[attr-defined]
        self.server.connections += 1  # type: ignore[attr-defined]
        while line := self.rfile.readline():
            if not line.startswith(b"*"):
                continue
            for _ in range(int(line[1:])):
                self.rfile.read(int(self.rfile.readline()[1:]) + 2)
            self.wfile.write(b"-READONLY You can't write\r\n" if demoted else b"$16\r\n1790000000000000\r\n")


@pytest.fixture
def demoted() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Demoted) as server:
        server.daemon_threads = True
        server.connections = 0  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()


def test_a_demoted_primary_is_asked_on_a_new_connection(demoted: str, connect: Any) -> None:
    """An address that moves on to the new primary is of no use to who stays on the old connection."""
    lease = connect(demoted, timeout=1).lock("x").acquire(timeout=3)
    assert lease.fence == 1790000000000000
    with pytest.raises(holdfast.OutcomeUnknown):  # it answers everything with a fence, also a release
        lease.release()


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


@asyncio_test
async def test_every_task_gets_an_error_of_its_own() -> None:
    async with holdfast.aio.connect("redis://127.0.0.1:1") as client:
        locks = [client.lock(f"x{number}") for number in range(20)]
        errors = await asyncio.gather(*(lock.acquire() for lock in locks), return_exceptions=True)
    assert all(isinstance(error, holdfast.Unavailable) for error in errors)
    assert len({id(error) for error in errors}) == 20


def test_a_batch_that_the_server_does_not_read_does_not_hold_up_the_keeper() -> None:
    """A thousand renewals are more than a unix socket's buffer takes from a writer whose reader sleeps."""
    with Server(unix=True) as server, holdfast.connect(f"unix://{server.path}") as client:
        told = threading.Event()
        leases = [client.lock(f"{'long-name' * 40}{number}", ttl=3).acquire() for number in range(1000)]
        small = client.lock("small", ttl=2, on_lost=lambda lease: told.set()).acquire()
        assert small
        server.pause()
        assert told.wait(10), "the keeper was stuck in a write"
        server.resume()
        assert not small.held
        for lease in [*leases, small]:
            with pytest.raises(holdfast.HoldfastError):
                lease.release()  # type: ignore[union-attr]
                raise holdfast.NotHeld("it was renewed in time, which is as good")


def test_a_lock_object_of_a_closed_client_does_not_wait_for_its_own_lease(connect: Any, url: str) -> None:
    face = connect(url)
    lock = face.lock("x")
    lease = lock.acquire()

    def wait() -> None:
        with pytest.raises(holdfast.Unavailable):
            lock.acquire()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    face.client.close() if face.kind == "blocking" else face._call(face.client.aclose())
    with pytest.raises(holdfast.Unavailable, match="closed"):
        lock.acquire()
    waiter.join(10)
    assert not waiter.is_alive()
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lock.release()


def test_who_nests_a_lock_in_itself_is_told_so(face: Any) -> None:
    lock = face.lock("x", wait=0.05)
    with lock, pytest.raises(holdfast.AcquireTimeout, match="th(is|er) thread or task .*holds it"):
        with face.lock("y"), lock:
            pass
    lost = face.lock("z", wait=0.05, ttl=0.05, renew=False)
    lease = lost.acquire()
    time.sleep(0.1)
    with pytest.raises(holdfast.AcquireTimeout, match="was lost"), lost:
        pass
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_a_client_in_two_event_loops_at_once_is_refused(url: str) -> None:
    async def main() -> None:
        async with holdfast.aio.connect(url) as client:
            async with client.lock("x") as lease:

                def elsewhere() -> None:
                    async def work() -> None:
                        await client.lock("y").acquire()

                    with pytest.raises(holdfast.InvalidConfig, match="two event loops"):
                        asyncio.run(work())

                await asyncio.to_thread(elsewhere)
                assert lease.held

    asyncio.run(main())
