"""No thread can be started: what a blocking client does without its own, and that it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

import holdfast
from tests.support import eventually

TOO_LARGE = 1 << 46  # bytes of a stack, which no machine can map: so pthread_create fails as it does at a limit


@contextmanager
def no_new_threads() -> Iterator[None]:
    before = threading.stack_size(TOO_LARGE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def ours(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_lease_that_cannot_be_renewed_is_granted_and_logged(
    client: holdfast.Client, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with no_new_threads():
        with client.lock("x") as lease, client.lock("y"):
            assert lease.held
            assert admin.exists("x")
        assert not admin.exists("x")
    (said,) = errors_in(caplog)  # for a while, once is enough
    for part in ("'x'", "not renewed", "can't start new thread", "ulimit -u", "tries again"):
        assert part in said


def test_the_next_lease_starts_the_renewal_of_all(client: holdfast.Client) -> None:
    with no_new_threads():
        lease = client.lock("x", ttl=2.0).acquire()
    with client.lock("y"):
        time.sleep(3.0)
    assert lease.held
    lease.release()


def test_a_waiter_starts_the_renewal_too(client: holdfast.Client, url: str) -> None:
    with holdfast.connect(url) as other, other.lock("y"):
        with no_new_threads():
            lease = client.lock("x", ttl=2.0).acquire()
        assert client.lock("y").acquire(timeout=3.0) is None
        assert lease.held
        lease.release()


def test_a_wait_at_the_limit_polls(client: holdfast.Client, url: str) -> None:
    with holdfast.connect(url) as other:
        held = other.lock("x").acquire()
        timer = threading.Timer(0.3, held.release)
        timer.start()
        with no_new_threads():
            lease = client.lock("x").acquire(timeout=10)
        assert lease is not None
        lease.release()
        timer.join()
    [node] = client.statistics().nodes.values()
    assert node.queued == 0, "what could not be sent was taken back"


def test_on_lost_is_called_by_the_thread_that_finds_the_loss(
    client: holdfast.Client, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[holdfast.Lease, str]] = []
    lease = client.lock(
        "x", ttl=1.0, on_lost=lambda lost: told.append((lost, threading.current_thread().name))
    ).acquire()
    with no_new_threads():
        admin.delete("x")
        eventually(lambda: told)
    assert told == [(lease, "holdfast-keeper")]
    assert any("on_lost" in text and "'x'" in text for text in errors_in(caplog))
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def fail_to_start(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    start = threading.Thread.start

    def start_unless_named(thread: Any) -> None:
        if thread.name == name:
            raise RuntimeError(why)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_named)


def test_there_is_one_keeper_also_if_the_thread_of_the_connection_cannot_be_started(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(ours("holdfast-keeper"))
    with monkeypatch.context() as limit:
        fail_to_start(limit, "holdfast-connection", "can't start new thread")
        lease = client.lock("x", ttl=2.0).acquire()
        for _ in range(3):
            with client.lock("y"):
                pass
    assert len(set(ours("holdfast-keeper")) - before) == 1
    time.sleep(3.0)
    assert lease.held, "the keeper has started it since"
    lease.release()


def test_at_interpreter_exit_nothing_is_said(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_start(monkeypatch, "holdfast-keeper", "can't create new thread at interpreter shutdown")
    with client.lock("x"):
        pass
    assert not caplog.records
