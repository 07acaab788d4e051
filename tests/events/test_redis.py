"""What ``on_event`` is told, on both faces and a real server."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import redis

import holdfast
from holdfast.events import (
    Abandoned,
    Acquired,
    Broken,
    Event,
    Lost,
    PassedOn,
    Released,
    RenewalFailed,
    Renewed,
    Waiting,
)
from tests.contention.support import Background
from tests.servers import Server
from tests.support import eventually

E = TypeVar("E", bound=Event)


class Told(list[Event]):
    """A hook that keeps what it is told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in list(self) if isinstance(event, kind)]

    def the(self, kind: type[E]) -> E:
        [event] = self.of(kind)
        return event

    def kinds(self) -> list[type[Event]]:
        """In order, without renewals: whether one comes depends on how long the first contact took."""
        return [type(event) for event in list(self) if not isinstance(event, Renewed)]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def face(connect: Any, url: str, told: Told) -> Any:
    return connect(url, on_event=told)


def test_a_hold_is_reported_from_acquire_to_release(face: Any, told: Told) -> None:
    with face.lock("order:42", label="nightly") as lease:
        fence = lease.fence
        acquired = told.the(Acquired)
        assert not told.of(Released)
    assert acquired == Acquired(
        name="order:42", kind="lock", label="nightly", fence=fence, waited=acquired.waited, tries=1
    )
    assert told.the(Released).fence == fence
    assert told.the(Released).held >= 0
    assert not told.of(Waiting)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda client: client.rlock("x"), ("rlock", "", "x")),
        (lambda client: client.rwlock("x").read, ("rwlock", "read", "x")),
        (lambda client: client.rwlock("x").write, ("rwlock", "write", "x")),
        (lambda client: client.semaphore("x", permits=2), ("semaphore", "", "x")),
        (lambda client: client.lock("x", "y"), ("lock", "", "x, y")),
    ],
)
def test_every_kind_says_what_it_is(
    make: Callable[[Any], Any], said: tuple[str, str, str], url: str, told: Told
) -> None:
    with holdfast.connect(url, on_event=told) as client, make(client):
        pass
    for event in (told.the(Acquired), told.the(Released)):
        assert (event.kind, event.mode, event.name) == said


def test_a_waiter_is_told_of_the_holder_at_the_server(connect: Any, url: str, face: Any, told: Told) -> None:
    lease = connect(url).lock("x", label="long job").acquire()
    waiter = Background(face.lock("x", wait=20).acquire)
    waiting = eventually(lambda: told.of(Waiting))[0]
    assert waiting.holder is not None
    assert (waiting.holder.label, waiting.local, waiting.waited) == ("long job", False, 0.0)
    lease.release()
    waiter.outcome().release()
    acquired = told.the(Acquired)
    assert acquired.queued
    assert acquired.waited > 0
    assert len(told.of(Waiting)) == 1


def test_a_pass_within_a_client_is_reported_on_both_sides(face: Any, told: Told) -> None:
    first = face.lock("x").acquire()
    waiter = Background(face.lock("x", wait=20).acquire)
    assert eventually(lambda: told.of(Waiting))[0].local
    first.release()
    second = waiter.outcome()
    ends: list[Event] = [*told.of(PassedOn), *told.of(Released)]
    assert [event.fence for event in ends] == [first.fence]
    got = told.of(Acquired)[-1]
    assert (got.fence, got.passed, got.queued) == (second.fence, bool(told.of(PassedOn)), True)
    second.release()


def test_a_wait_that_is_over_names_the_holder(connect: Any, url: str, face: Any, told: Told) -> None:
    lease = connect(url).lock("x", label="long job").acquire()
    assert face.lock("x", wait=1.0).acquire() is None
    abandoned = told.the(Abandoned)
    assert abandoned.holder is not None
    assert (abandoned.holder.label, abandoned.error, abandoned.queued) == ("long job", None, True)
    assert abandoned.tries >= 1
    assert abandoned.waited >= 1.0
    lease.release()


def test_a_wait_behind_a_holder_of_the_same_client_names_that_holder(face: Any, told: Told) -> None:
    lease = face.lock("x", label="mine").acquire()
    assert face.lock("x", wait=0.05).acquire() is None
    holder = told.the(Abandoned).holder
    assert holder is not None
    assert holder.label == "mine"
    lease.release()


def test_an_outage_is_reported_with_its_error(connect: Any, told: Told) -> None:
    face = connect("redis://127.0.0.1:1/0", on_event=told)
    with pytest.raises(holdfast.Unavailable):
        face.lock("x").acquire()
    assert isinstance(told.the(Abandoned).error, holdfast.Unavailable)


def test_renewals_and_a_loss_are_reported(face: Any, told: Told, admin: redis.Redis) -> None:
    lease = face.lock("x", ttl=2).acquire()
    renewed = eventually(lambda: told.of(Renewed))[0]
    assert 0 < renewed.remaining <= renewed.validity
    assert not renewed.slow
    admin.delete("x")
    lost = eventually(lambda: told.of(Lost))[0]
    assert (lost.fence, lost.reason) == (lease.fence, "its key expired or was deleted")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert len(told.of(Lost)) == 1, "the release raises, and reports no second end"
    assert not told.of(Released)


def test_a_loss_that_the_release_finds_is_reported_as_a_loss(face: Any, told: Told, admin: redis.Redis) -> None:
    lease = face.lock("x").acquire()
    admin.delete("x")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    eventually(lambda: told.of(Lost))
    assert len(told.of(Lost)) == 1
    assert not told.of(Released)


def test_a_failed_renewal_is_reported_with_what_is_left(face: Any, told: Told, server: Server) -> None:
    lease = face.lock("x", ttl=6).acquire()
    eventually(lambda: told.of(Renewed))
    server.pause()
    failed = eventually(lambda: told.of(RenewalFailed), timeout=20.0)[0]
    server.resume()
    assert failed.tries >= 1
    assert 0 <= failed.remaining < 6
    assert isinstance(failed.error, holdfast.Unavailable)
    eventually(lambda: len(told.of(Renewed)) > 1 or told.of(Lost), timeout=20.0)
    if not told.of(Lost):
        lease.release()


def test_several_hooks_are_called_and_an_error_of_one_goes_no_further(
    connect: Any, url: str, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError("in the hook")

    face = connect(url, on_event=[broken, told])
    with face.lock("x"):
        pass
    assert told.kinds() == [Acquired, Released]
    assert "on_event failed for Acquired of lock 'x'" in caplog.text


def test_events_have_no_token_and_are_json(face: Any, told: Told) -> None:
    with face.lock("x") as lease:
        token = lease.token
        assert face.lock("x", wait=0.05).acquire() is None  # Waiting and Abandoned, with the holder
    errors = [Abandoned(name="x", kind="lock", waited=1.0, tries=1, error=KeyboardInterrupt())]
    for event in [*told, *errors]:
        assert token.rpartition(".")[2] not in repr(event)
        assert json.loads(json.dumps(event.as_dict()))["event"] == type(event).__name__
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.name = "y"


@pytest.mark.parametrize("circle", [False, True])
def test_a_long_wait_behind_a_thread_that_has_ended_is_reported(
    url: str, told: Told, circle: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread may have its lease, so it is no deadlock. The keeper goes on."""
    monkeypatch.setattr("holdfast.protocol.reporting.LONG_WAIT", 0.3)
    with holdfast.connect(url, on_event=told) as client:
        leases: list[Any] = []
        thread = threading.Thread(target=lambda: leases.append(client.lock("x").acquire()))
        thread.start()
        thread.join()
        del thread
        gc.collect()
        if circle:  # the waiter holds what nobody waits for
            leases.append(client.lock("y").acquire())
        assert client.lock("x").acquire(timeout=1.5) is None
        long = [event for event in told.of(Waiting) if event.waited]
        assert [event.deadlock for event in long] == [""] * len(long)
        assert long
        for lease in leases:
            lease.release()
    assert "loop failed" not in caplog.text


async def _coroutine(event: Event) -> None:
    """Never awaited."""


def test_ctrl_c_in_a_hook_leaves_no_key(connect: Any, url: str, admin: redis.Redis) -> None:
    def struck(event: Event) -> None:
        if isinstance(event, Acquired):
            raise KeyboardInterrupt

    with holdfast.connect(url, on_event=struck) as client, pytest.raises(KeyboardInterrupt):
        client.lock("x").acquire()
    assert not admin.exists("x")


def test_a_hook_that_hangs_does_not_delay_renewals(url: str, admin: redis.Redis) -> None:
    entered, over, told = threading.Event(), threading.Event(), []

    def hang(event: Event) -> None:
        if isinstance(event, Renewed):
            entered.set()
            over.wait()

    with holdfast.connect(url, on_event=hang, on_lost=lambda lease: told.append(lease.name)) as client:
        lease = client.lock("x", ttl=3).acquire()
        assert entered.wait(10)
        time.sleep(4.0)
        assert lease.held, "the keeper went on"
        admin.delete("x")
        eventually(lambda: told == ["x"], what="on_lost does not wait for the hook either")
        over.set()
        with pytest.raises(holdfast.LeaseLost):
            lease.release()


def test_on_lost_that_exits_does_not_keep_later_losses_secret(
    url: str, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    told = []

    def leave(lease: Any) -> None:
        told.append(lease.name)
        sys.exit("not in this thread")

    with holdfast.connect(url, on_lost=leave) as client:
        leases = [client.lock(name, ttl=1).acquire() for name in ("a", "b")]
        for lease in leases:
            admin.delete(lease.name)
            eventually(lambda name=lease.name: name in told)  # type: ignore[misc]
            with pytest.raises(holdfast.LeaseLost):
                lease.release()
    assert "a function that holdfast-on-lost called has failed" in caplog.text


def test_close_frees_the_keys_before_it_waits_for_a_hook(url: str, admin: redis.Redis) -> None:
    over, entered = threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        if isinstance(event, Renewed):
            entered.set()
            over.wait()

    client = holdfast.connect(url, on_event=hang, timeout=20.0)
    lease = client.lock("x", ttl=2).acquire()
    assert entered.wait(10)
    closing = threading.Thread(target=client.close)
    closing.start()
    eventually(lambda: not admin.exists("x"), timeout=10.0)
    over.set()
    closing.join(20)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_a_hook_that_uses_a_lock_hears_nothing_of_that(url: str) -> None:
    told: list[str] = []

    def nested(event: Event) -> None:
        if isinstance(event, Renewed):  # of a lock that took long on a busy machine
            return
        told.append(event.name)
        with holdfast_client.lock("inner"):
            pass

    with holdfast.connect(url, on_event=nested) as holdfast_client, holdfast_client.lock("outer"):
        pass
    assert told == ["outer", "outer"]


@pytest.mark.parametrize("nonsense", ["text", 3, [print, "x"], _coroutine])
def test_what_cannot_be_called_is_refused_at_once(connect: Any, nonsense: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="on_event="):
        connect("redis://127.0.0.1:1/0", on_event=nonsense)


def test_a_broken_hold_is_reported_by_both_sides(
    connect: Any, url: str, face: Any, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.protocol.mutex.NOTICE_WAIT", 10.0)  # a busy server may take longer to tell the reason
    mine = Told()
    holder = connect(url, on_event=mine)
    lease = holder.lock("x", label="stuck").acquire()
    with holdfast.connect(url, on_event=told) as operator:
        operator.break_lock("x", fence=lease.fence, reason="the job hangs")
    broken = told.the(Broken)
    assert (broken.name, broken.kind, broken.fence, broken.reason) == ("x", "lock", lease.fence, "the job hangs")
    assert broken.holder is not None
    assert broken.holder.label == "stuck"
    lost = eventually(lambda: mine.of(Lost))[0]
    assert "the job hangs" in lost.reason
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_a_handed_over_hold_ends_here_and_begins_there(url: str, told: Told) -> None:
    with holdfast.connect(url, on_event=told) as client:
        ticket = client.lock("x").acquire().hand_over()
        assert told.kinds() == [Acquired, Released]
        client.adopt(ticket).release()
    assert told.kinds() == [Acquired, Released, Acquired, Released]
