"""A server that cannot be used is never a busy lock: a replica, a full server, a stopped one."""

from __future__ import annotations

import asyncio
import logging
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.contention.support import Background
from tests.outages.test_full_memory import fill_up
from tests.servers import Server, free_port
from tests.support import asyncio_test, eventually, took


@pytest.fixture
def replica() -> Iterator[Server]:
    """Of a primary that is not there: it answers, and takes no writes."""
    with Server("--replicaof", f"127.0.0.1 {free_port()}", "--replica-serve-stale-data", "yes") as server:
        yield server


PATIENT: dict[str, Callable[[Any], Any]] = {
    "lock": lambda client: client.lock("x").acquire(timeout=1.5),
    "several names": lambda client: client.lock("x", "y").acquire(timeout=1.5),
    "semaphore": lambda client: client.semaphore("x", 2).acquire(timeout=1.5),
    "latch": lambda client: client.latch("x", 2).wait(0.5),
    "value": lambda client: client.get_or_compute("x", lambda: 1, wait=0.5),
}


def ask(face: Any, what: str) -> Any:
    asked = PATIENT[what](face.client)
    return asked if face.kind == "blocking" else face._call(asked)


def test_the_embedded_server_is_offered_only_where_nobody_ever_answered(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Server() as server:
        face, stranger = connect(server.url, outage_wait=0.5), connect(server.url)
        with face.lock("warm"):
            pass
        server.kill()
        with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(holdfast.Unavailable) as later:
            face.lock("x").acquire(timeout=5)
        with pytest.raises(holdfast.Unavailable) as first:
            stranger.lock("x").acquire(timeout=5)
        assert "or use local:// for an embedded one" in str(first.value)
        assert "nothing listens there" in caplog.text
        assert "local://" not in f"{later.value} {caplog.text}"


def test_a_server_that_was_never_there_is_logged(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    face = connect(f"redis://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(20):
            with pytest.raises(holdfast.Unavailable, match="nothing listens there"):
                face.lock("x").acquire(timeout=5)
            time.sleep(0.05)
        first, *later = [record.getMessage() for record in caplog.records if "no contact" in record.getMessage()]
    assert first.startswith("no contact for ")
    assert len(later) <= 3, "and not at every try"
    assert all(line.startswith("still no contact for ") for line in later)
    assert not face.client._driver.registry.pending_cleanups()


@pytest.mark.parametrize("what", PATIENT)
def test_a_replica_is_an_outage_whatever_the_wait(connect: Any, replica: Server, what: str) -> None:
    face = connect(replica.url)
    with took(less_than=5.0), pytest.raises(holdfast.Unavailable, match="read-only replica") as caught:
        ask(face, what)
    assert not isinstance(caught.value, TimeoutError)
    assert "'x" in str(caught.value)


@pytest.mark.parametrize("what", ["lock", "several names", "semaphore"])
def test_a_full_server_is_an_outage_whatever_the_wait(connect: Any, url: str, admin: redis.Redis, what: str) -> None:
    face = connect(url)
    fill_up(admin)
    with took(less_than=5.0), pytest.raises(holdfast.Unavailable, match="out of memory"):
        ask(face, what)


def test_a_wait_without_end_on_a_replica_ends_after_the_timeout_if_no_write_was_ever_answered(
    connect: Any, replica: Server
) -> None:
    face = connect(replica.url, timeout=1.0)
    with took(less_than=6.0), pytest.raises(holdfast.Unavailable, match="read-only replica"):
        face.lock("x").acquire()


@pytest.mark.parametrize("known", [False, True], ids=["new client", "used client"])
def test_a_try_that_does_not_wait_is_told_at_once_what_the_server_says(
    connect: Any, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica, a full server and one that is gone say no at once: there is nothing to wait for."""
    with Server() as server, server.client() as admin:
        face = connect(server.url)
        if known:
            with face.lock("warm"):
                pass
        admin.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        admin.config_resetstat()
        with caplog.at_level(logging.WARNING, "holdfast"):
            with took(less_than=3.0), pytest.raises(holdfast.Unavailable, match="read-only replica"):
                face.lock("x").acquire(blocking=False)
        assert caplog.text == ""
        stats = admin.info("commandstats")
        assert sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha")) <= 6
        server.kill()
        with took(less_than=3.0), pytest.raises(holdfast.Unavailable):
            face.lock("x").acquire(blocking=False)


def test_a_loss_stays_a_loss_after_it_was_reported(connect: Any, url: str, admin: redis.Redis) -> None:
    face = connect(url)
    lease = face.lock("x").acquire(timeout=5)
    admin.delete("x")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lease.lost.is_set(), "a thread that looks at it later must see it, too"
    assert lease.reason
    assert not lease.held


def test_a_wait_without_end_outlasts_a_demotion_and_says_so(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server, server.client() as admin:
        face = connect(server.url, timeout=1.0)
        with face.lock("warm"):
            pass
        with caplog.at_level(logging.WARNING, "holdfast"):
            admin.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            waiter = Background(lambda: face.lock("x").acquire())
            eventually(lambda: "read-only replica" in caplog.text, 5.0, "it says why it waits")
            assert "no service" in caplog.text
            time.sleep(1.5)  # longer than the client's timeout
            admin.execute_command("REPLICAOF", "NO", "ONE")
            waiter.outcome().release()
        assert caplog.text.count("no service") <= 3, "and not at every try"
        assert "is back after" in caplog.text


def test_a_wait_on_a_full_server_says_so_at_once(
    connect: Any, url: str, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    face = connect(url)
    with face.lock("warm"):
        pass
    with caplog.at_level(logging.WARNING, "holdfast"):
        fill_up(admin)
        waiter = Background(lambda: face.lock("x").acquire())
        eventually(lambda: "out of memory" in caplog.text, 5.0, "it says why it waits")
        admin.config_set("maxmemory", 0)
        waiter.outcome().release()


def test_what_is_not_permitted_is_refused_at_once(connect: Any) -> None:
    with Server() as server, server.client() as admin:
        admin.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], commands=["-@all", "+ping", "+hello"])
        face = connect(f"redis://app:pw@127.0.0.1:{server.port}/0")
        with took(less_than=3.0), pytest.raises(holdfast.Unavailable):
            face.lock("x").acquire()


def test_many_threads_on_a_stopped_server_fail_together_and_in_time(server: Server) -> None:
    """They stand in one local queue; none finds the lock busy, and none waits for the timeout of another."""
    with holdfast.connect(server.url) as client:
        with client.lock("warm"):
            pass
        server.pause()
        found: list[BaseException] = []

        def ask() -> None:
            try:
                client.lock("x", wait=0.5).__enter__()
            except BaseException as error:
                found.append(error)

        threads = [threading.Thread(target=ask) for _ in range(20)]
        with took(less_than=5.0):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        server.resume()
        assert [type(error) for error in found] == [holdfast.Unavailable] * 20


def test_the_holder_of_a_busy_lock_is_named(connect: Any, url: str) -> None:
    import os

    lease = connect(url).lock("x", label="nightly-report 中文%").acquire(timeout=5)
    with pytest.raises(holdfast.AcquireTimeout, match=r"\(pid \d+\), label 'nightly-report 中文%' holds it") as caught:
        with connect(url).lock("x", wait=1):
            pass
    holder = caught.value.holder
    assert holder is not None
    assert (holder.pid, holder.label) == (os.getpid(), "nightly-report 中文%")
    assert lease.token.rpartition(".")[2] not in f"{caught.value} {holder!r} {holder}"
    lease.release()


def test_a_holder_of_another_library_is_somebody_unknown(connect: Any, url: str, admin: redis.Redis) -> None:
    admin.set("x", "0123456789abcdef0123456789abcdef", px=60_000)
    with pytest.raises(holdfast.AcquireTimeout, match="another library") as caught:
        with connect(url).lock("x", wait=0):
            pass
    holder = caught.value.holder
    assert holder is not None
    assert (holder.host, holder.pid, holder.label) == ("", None, "")
    assert holder.remaining is not None
    assert 0 < holder.remaining <= 60


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


@asyncio_test
async def test_every_task_gets_an_error_of_its_own() -> None:
    async with holdfast.aio.connect("redis://127.0.0.1:1") as client:
        locks = [client.lock(f"x{number}") for number in range(20)]
        errors = await asyncio.gather(*(lock.acquire() for lock in locks), return_exceptions=True)
    assert all(isinstance(error, holdfast.Unavailable) for error in errors)
    assert len({id(error) for error in errors}) == 20
