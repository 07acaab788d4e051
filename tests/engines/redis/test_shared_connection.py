"""The shared connection on a real server, without locks: requests of many threads, notifications, tracked keys."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from holdfast.drivers import clock
from holdfast.engines.redis.blocking.engine import Engine
from holdfast.engines.redis.blocking.pipelined_connection import Request
from holdfast.engines.redis.blocking.shared_connection import SharedConnection
from holdfast.engines.redis.target import Target, resolve
from holdfast.protocol.effects import Command, Step, StepFailed
from tests.proxy import HOLD, MUTE_REPLY, SWALLOW_REPLY, Proxy, delay, instead
from tests.servers import Server
from tests.support import Script, eventually, later

LONG = 10.0
Make = Callable[[str], SharedConnection]
SHORT = 0.1
OVERDUE_AFTER = "holdfast.engines.redis.blocking.pipelined_connection.OVERDUE_AFTER"


class Board:
    """A notification router that notes what it is told."""

    def __init__(self) -> None:
        self.channel = "holdfast:bell:test"
        self.armed = False
        self.shards = None
        self.needed = True
        self.delivered: list[tuple[bytes, float]] = []
        self.written: list[str] = []
        self.looks = 0

    def deliver(self, message: bytes, now: float) -> None:
        self.delivered.append((message, now))

    def touched(self, key: str) -> None:
        self.written.append(key)

    def look_again(self) -> None:
        self.looks += 1

    def is_needed(self) -> bool:
        return self.needed


@pytest.fixture
def router() -> Board:
    return Board()


@pytest.fixture
def make(router: Board) -> Iterator[Make]:
    made: list[SharedConnection] = []

    def make(url: str) -> SharedConnection:
        named = url + ("&" if "?" in url else "?") + "client_name=shared"
        target = resolve(named, aio=False)
        made.append(SharedConnection(target, router, clock.now, Engine(target)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for shared in made:
        shared.close()


@pytest.fixture
def shared(url: str, make: Make) -> SharedConnection:
    return make(url)


def echo(word: object) -> Command:
    return Command(("ECHO", str(word)))


def late(seconds: float) -> Command:
    """A request whose reply, None, comes so much later, and holds up those behind it on its connection alone."""
    return Command(("BLPOP", "nothing is ever put here", str(seconds)))


def renewal(key: str, token: str, *, watch: bool = True) -> Step:
    return Step("renew", (key,), (token, "30000"), watch)


def connections_of(admin: redis.Redis) -> list[dict[str, str]]:
    """The connections of the SharedConnection."""
    return [client for client in admin.client_list() if client["name"] == "shared"]


def kill_all(admin: redis.Redis, **which: str) -> None:
    for client in connections_of(admin):
        if which.items() <= client.items():
            admin.client_kill_filter(_id=client["id"])


def connection_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-connection"]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run it in so many threads; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


# Requests


def test_nothing_is_opened_until_it_is_needed(make: Make, url: str, admin: redis.Redis) -> None:
    before = set(connection_threads())  # one of an earlier test may still be ending
    shared = make(url)
    assert connections_of(admin) == []
    assert set(connection_threads()) <= before
    shared.close()
    with pytest.raises(StepFailed, match="closed"):
        shared.call(echo(1), LONG)
    assert set(connection_threads()) <= before


def test_every_thread_gets_its_own_replies_over_one_connection(shared: SharedConnection, admin: redis.Redis) -> None:
    def work(number: int) -> None:
        for turn in range(50):
            word = f"{number}.{turn}"
            assert shared.call(echo(word), LONG) == word.encode()
            words = [f"{word}.{place}" for place in range(turn % 5)]
            assert shared.call_each([echo(word) for word in words], LONG) == [word.encode() for word in words]

    in_threads(16, work)
    assert len(connections_of(admin)) == 1


def test_batch_larger_than_any_buffer(shared: SharedConnection) -> None:
    words = [str(place) * 500 for place in range(10_000)]
    assert shared.call_each([echo(word) for word in words], LONG) == [word.encode() for word in words]


def test_reply_larger_than_any_buffer(shared: SharedConnection, admin: redis.Redis) -> None:
    admin.set("big", b"x" * 3_000_000)
    assert len(shared.call(Command(("GET", "big")), LONG)) == 3_000_000


def test_script_that_the_server_does_not_know_is_sent_along(shared: SharedConnection, admin: redis.Redis) -> None:
    for watch in (False, True):
        admin.set("x", "me")
        admin.script_flush()
        assert shared.call(renewal("x", "me", watch=watch), LONG) == 1
        admin.script_flush()
        replies = shared.call_each([renewal("x", "me", watch=watch), renewal("x", "other", watch=watch)] * 3, LONG)
        assert replies[::2] == [1, 1, 1]
        assert replies[1::2] == [replies[1]] * 3 != [1, 1, 1]


def test_error_of_one_does_not_touch_the_others(shared: SharedConnection) -> None:
    one, wrong, other = shared.call_each([echo("a"), Command(("NO-SUCH-COMMAND",)), echo("b")], LONG)
    assert (one, other) == (b"a", b"b")
    assert isinstance(wrong, StepFailed)
    with pytest.raises(StepFailed):
        shared.call(Command(("NO-SUCH-COMMAND",)), LONG)
    assert shared.call(echo("c"), LONG) == b"c"


def test_what_cannot_be_packed_is_its_callers_problem(shared: SharedConnection) -> None:
    with pytest.raises(UnicodeEncodeError):
        shared.call(echo("\ud800"), LONG)
    assert shared.call(echo("fine"), LONG) == b"fine"


# Timeouts


def test_late_replies_are_dropped_and_never_mixed_up(
    shared: SharedConnection, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 20.0)  # replies are late, but not overdue, also on a busy machine
    assert shared.call(echo("warm"), LONG) == b"warm"
    (before,) = connections_of(admin)

    def work(number: int) -> None:
        for turn in range(6):
            word = f"{number}.{turn}"
            try:
                op = late(0.05) if number == 0 else echo(word)
                reply = shared.call(op, 0.02 if (number + turn) % 2 else LONG)
                assert reply == (None if number == 0 else word.encode())
            except StepFailed as failed:
                assert failed.retry
                assert not failed.connection_broke

    in_threads(8, work)
    (after,) = connections_of(admin)
    assert after["id"] == before["id"], "a little lateness is no reason to give up the connection"


def test_timeout_ends_in_time_and_says_so(shared: SharedConnection) -> None:
    assert shared.call(echo("warm"), LONG) == b"warm"
    started = time.monotonic()
    with pytest.raises(StepFailed, match="did not answer") as caught:
        shared.call(late(8), SHORT)
    assert time.monotonic() - started < 6.0
    assert caught.value.sent
    assert caught.value.retry


def test_nobody_is_asked_who_the_primary_is_if_no_reply_came(
    shared: SharedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Target, "has_moved", lambda _self, _primary, asked_at: asked.append(asked_at))
    with pytest.raises(StepFailed):
        shared.call(late(8), SHORT)
    assert asked == []
    assert shared.call(echo("a"), LONG) == b"a"
    assert len(asked) == 1


@contextlib.contextmanager
def one_thread_at_a_time() -> Iterator[None]:
    """A thread that runs keeps the interpreter to itself until it waits for something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_timeout_that_passed_while_the_process_was_busy_is_not_the_servers_silence(
    shared: SharedConnection, admin: redis.Redis
) -> None:
    shared.call(echo("there"), LONG)
    (before,) = connections_of(admin)
    replies: list[Any] = []
    for _ in range(16):  # the thread that waits and the thread that reads wake up in any order
        asking = threading.Thread(target=lambda: replies.extend(shared.call_each([late(0.1)], 0.3)))
        asking.start()
        while asking.is_alive() and "b" not in connections_of(admin)[0]["flags"]:
            time.sleep(0.005)  # until it was sent
        with one_thread_at_a_time():
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                pass
        asking.join()
    assert replies == [None] * 16
    (after,) = connections_of(admin)
    assert after["id"] == before["id"]


def test_silent_connection_is_given_up_and_those_behind_it_are_told(shared: SharedConnection, server: Server) -> None:
    assert shared.call(echo("warm"), LONG) == b"warm"
    failures: list[StepFailed] = []
    server.pause()

    def work(number: int) -> None:
        try:
            shared.call(echo(number), 0.2 if number == 0 else 30.0)
        except StepFailed as failed:
            failures.append(failed)

    started = time.monotonic()
    in_threads(4, work)
    assert time.monotonic() - started < 10.0
    assert len(failures) == 4
    assert len({id(failed) for failed in failures}) == 4
    assert all(failed.sent and failed.retry for failed in failures)
    assert sum(failed.connection_broke for failed in failures) == 3
    server.resume()
    assert shared.call(echo("again"), LONG) == b"again"


def test_half_open_connection_is_replaced(proxy: Proxy, make: Make, admin: redis.Redis) -> None:
    admin.set("x", "me")
    shared = make(proxy.url)
    assert shared.call(renewal("x", "me"), LONG) == 1
    proxy.on("renew", MUTE_REPLY)
    with pytest.raises(StepFailed, match="did not answer"):
        shared.call(renewal("x", "me"), 0.5)
    assert shared.call(renewal("x", "me"), LONG) == 1


def test_batch_that_makes_progress_is_not_late(shared: SharedConnection) -> None:
    assert shared.call(echo("warm"), LONG) == b"warm"
    replies = shared.call_each([late(0.8), late(0.8), late(0.8), echo("end")], 2.0)
    assert replies == [None, None, None, b"end"]


def test_batch_keeps_the_replies_that_came(shared: SharedConnection) -> None:
    assert shared.call(echo("warm"), LONG) == b"warm"
    replies = shared.call_each([echo("first"), late(8), echo("last")], 2.0)
    assert replies[0] == b"first"
    assert [type(reply) for reply in replies[1:]] == [StepFailed, StepFailed]
    assert all(reply.sent for reply in replies[1:])


def test_request_that_was_not_sent_in_time_never_is(proxy: Proxy, make: Make) -> None:
    proxy.blackhole()
    shared = make(proxy.url)
    with pytest.raises(StepFailed, match="did not answer") as caught:
        shared.call(Command(("SET", "x", "late")), 0.3)
    assert not caught.value.sent
    proxy.heal()
    assert shared.call(Command(("EXISTS", "x")), LONG) == 0
    assert proxy.seen("set") == 0


def test_caller_with_more_patience_outlasts_an_attempt_to_connect(server: Server, make: Make) -> None:
    shared = make(server.url)
    server.pause()
    with later(1.5, server.resume):
        assert shared.call(echo("patience"), 20.0) == b"patience"


def test_nobody_there(make: Make) -> None:
    with Server() as server:
        shared = make(server.url)
        assert shared.call(echo("there"), LONG) == b"there"
        server.kill()
        for _ in range(2):
            with pytest.raises(StepFailed) as caught:
                for _ in range(20):  # the first may find that the connection is gone
                    shared.call(echo("gone"), LONG)
            assert caught.value.retry
        eventually(lambda: _fails_unsent(shared), what="nothing listens there")
        server.restart()
        assert eventually(lambda: _try(shared, echo("back"))) == b"back"


def _try(shared: SharedConnection, op: Command) -> Any:
    try:
        return shared.call(op, LONG)
    except StepFailed:
        return None


def _fails_unsent(shared: SharedConnection) -> bool:
    try:
        shared.call(echo("anybody?"), LONG)
    except StepFailed as failed:
        return not failed.sent and "nothing listens there" in str(failed)
    return False


# Loss


def test_killed_with_requests_in_flight(shared: SharedConnection, admin: redis.Redis) -> None:
    assert shared.call(echo("warm"), LONG) == b"warm"
    failures: list[StepFailed] = []

    def work(number: int) -> None:
        if number == 16:
            eventually(lambda: [len(one.in_flight) for one in shared.load()[0]] == [16], what="all have sent")
            kill_all(admin)
            return
        try:
            shared.call_each([late(20)], 40.0) if number == 0 else shared.call(echo(number), 40.0)
        except StepFailed as failed:
            failures.append(failed)

    replies: list[Any] = []

    def first() -> None:
        replies.extend(shared.call_each([late(20)], 40.0))

    blocker = threading.Thread(target=first)
    blocker.start()
    eventually(lambda: any(client["cmd"] == "blpop" for client in connections_of(admin)), what="it blocks the others")
    in_threads(16, lambda number: work(number + 1))
    blocker.join(30.0)
    assert [type(reply) for reply in replies] == [StepFailed]
    assert len(failures) == 15
    assert len({id(failed) for failed in failures}) == 15
    for failed in failures:
        assert failed.sent
        assert failed.retry
        assert failed.connection_broke
    assert shared.call(echo("again"), LONG) == b"again"


def test_replies_stay_with_their_callers_while_connections_keep_dying(
    shared: SharedConnection, admin: redis.Redis
) -> None:
    stop = time.monotonic() + 2.0
    answered = [0] * 8

    def work(number: int) -> None:
        if number == 8:
            while time.monotonic() < stop:
                kill_all(admin)
                time.sleep(0.02)
            return
        turn = 0
        while time.monotonic() < stop:
            turn += 1
            word = f"{number}.{turn}"
            try:
                assert shared.call(echo(word), LONG) == word.encode()
                answered[number] += 1
            except StepFailed as failed:
                assert failed.retry

    in_threads(9, work)
    assert all(answered)


def test_server_that_is_not_the_one_to_ask_any_more(make: Make) -> None:
    with Server() as server, Server() as other, server.client() as admin:
        shared = make(server.url)
        assert shared.call(Command(("SET", "x", "1")), LONG) == b"OK"
        (before,) = connections_of(admin)
        admin.replicaof("127.0.0.1", other.port)
        with pytest.raises(StepFailed, match="read-only"):
            shared.call(Command(("SET", "x", "2")), LONG)
        admin.replicaof("NO", "ONE")
        assert eventually(lambda: _try(shared, Command(("SET", "x", "3")))) == b"OK"
        assert before["id"] not in [client["id"] for client in connections_of(admin)]


# Bells


def test_notification_is_delivered_with_the_time_on_the_right_clock(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    before = clock.now()
    assert shared.listen(LONG) is True
    assert router.armed
    assert router.looks == 0
    assert admin.publish(router.channel, b"a notification") == 1
    eventually(lambda: router.delivered)
    ((message, heard_at),) = router.delivered
    assert message == b"a notification"
    assert before < heard_at < clock.now()
    assert shared.call(echo("beside"), LONG) == b"beside"
    assert len(connections_of(admin)) == 1


def test_notifications_and_replies_share_the_connection(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    assert shared.listen(LONG)

    def work(number: int) -> None:
        for turn in range(100):
            if number == 0:
                admin.publish(router.channel, str(turn))
            else:
                assert shared.call(echo(f"{number}.{turn}"), LONG) == f"{number}.{turn}".encode()

    in_threads(4, work)
    eventually(lambda: len(router.delivered) == 100)
    assert [message for message, _ in router.delivered] == [str(turn).encode() for turn in range(100)]


def test_many_may_ask_to_listen_at_once(shared: SharedConnection, router: Board, admin: redis.Redis) -> None:
    in_threads(16, lambda _: _assert(shared.listen(LONG)))
    assert admin.publish(router.channel, b"once") == 1
    eventually(lambda: len(router.delivered) == 1)
    commands = admin.info("commandstats")
    before = commands["cmdstat_subscribe"]["calls"]
    in_threads(16, lambda _: _assert(shared.listen(LONG)))
    assert admin.info("commandstats")["cmdstat_subscribe"]["calls"] == before


def _assert(truth: bool) -> None:
    assert truth


def test_killed_subscriber_is_noticed_and_comes_back_by_itself(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    assert shared.listen(LONG)
    for looks in (2, 4, 6):
        kill_all(admin)
        eventually(lambda looks=looks: router.looks == looks and router.armed, what="lost and back: two looks")  # type: ignore[misc]
        assert admin.publish(router.channel, b"again") == 1
    eventually(lambda: len(router.delivered) == 3)


def test_lost_subscriber_that_is_not_needed_stays_away_until_asked_for(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    assert shared.listen(LONG)
    router.needed = False
    kill_all(admin)
    eventually(lambda: not router.armed)
    time.sleep(0.3)
    assert connections_of(admin) == []
    assert router.looks == 1
    assert shared.listen(LONG)
    assert router.armed
    assert router.looks == 2


def test_subscriber_comes_back_after_an_outage(make: Make, router: Board) -> None:
    with Server() as server:
        shared = make(server.url)
        assert shared.listen(LONG)
        server.kill()
        eventually(lambda: not router.armed)
        with pytest.raises(StepFailed) as caught:
            shared.listen(LONG)
        assert caught.value.retry
        time.sleep(0.3)
        server.restart()
        eventually(lambda: router.armed and router.looks == 2, what="it is back, and waiters look again")
        with server.client() as admin:
            assert admin.publish(router.channel, b"back") == 1
        eventually(lambda: router.delivered)


def test_hung_server_cannot_keep_the_subscriber_from_coming_back(
    make: Make, server: Server, router: Board, proxy: Proxy, admin: redis.Redis
) -> None:
    shared = make(proxy.url)
    assert shared.listen(LONG)
    proxy.on("subscribe", HOLD)
    kill_all(admin)
    eventually(lambda: not router.armed)
    proxy.on("subscribe", HOLD)
    eventually(lambda: router.armed, 10.0, "the one that got no answer was given up")


def test_user_who_may_not_subscribe_is_told_once(
    make: Make,
    admin: redis.Redis,
    url: str,
    router: Board,
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin.acl_setuser(
        "quiet", enabled=True, passwords=["+x"], keys=["*"], channels=["*"], commands=["+@all", "-subscribe"]
    )
    try:
        shared = make(url.replace("//", "//quiet:x@"))
        with caplog.at_level(logging.WARNING, "holdfast"):
            assert [shared.listen(LONG) for _ in range(3)] == [False] * 3
            kill_all(admin)
            eventually(lambda: _try(shared, echo("again")))
            assert shared.listen(LONG) is False
        assert not router.armed
        (record,) = caplog.records
        assert record.name == "holdfast"
        assert "poll" in record.message
        assert "+subscribe" in record.message
        assert "&holdfast:bell:*" in record.message
        assert shared.call(echo("fine"), LONG) == b"fine"
    finally:
        admin.acl_deluser("quiet")


def test_user_without_the_channel_is_told_too(
    make: Make, admin: redis.Redis, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin.acl_setuser("quiet", enabled=True, passwords=["+x"], keys=["*"], reset_channels=True, commands=["+@all"])
    try:
        assert make(url.replace("//", "//quiet:x@")).listen(LONG) is False
        assert len(caplog.records) == 1
    finally:
        admin.acl_deluser("quiet")


# Watched keys


def test_foreign_write_to_a_watched_key_is_pushed(shared: SharedConnection, router: Board, admin: redis.Redis) -> None:
    admin.set("x", "me")
    admin.set("y", "me")
    for key in ("x", "y", "x"):
        admin.set(key, "me")
        assert shared.call_each([renewal(key, "me"), renewal("z", "me", watch=False)], LONG)[0] == 1
        admin.delete(key)
        eventually(lambda: router.written)
        assert router.written == [key]
        router.written.clear()


def test_what_the_connection_writes_itself_is_not_reported(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    admin.set("x", "me")
    for _ in range(5):
        assert shared.call(renewal("x", "me"), LONG) == 1
    assert shared.call(renewal("x", "me", watch=False), LONG) == 1
    assert shared.call(Command(("SET", "x", "me")), LONG) == b"OK"
    time.sleep(0.1)
    assert router.written == []


def test_key_that_is_not_watched_is_not_pushed(shared: SharedConnection, router: Board, admin: redis.Redis) -> None:
    for key in ("x", "y"):
        admin.set(key, "me")
    assert shared.call_each([renewal("x", "me"), renewal("y", "me", watch=False)], LONG) == [1, 1]
    admin.delete("y")
    admin.delete("x")
    eventually(lambda: router.written)
    assert router.written == ["x"]


def test_flushed_keyspace_makes_all_waiters_look(shared: SharedConnection, router: Board, admin: redis.Redis) -> None:
    admin.set("x", "me")
    assert shared.call(renewal("x", "me"), LONG) == 1
    admin.flushall()
    eventually(lambda: router.looks)


def test_script_that_had_to_be_sent_along_is_watched_too(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    admin.set("x", "me")
    admin.script_flush()
    assert shared.call(renewal("x", "me"), LONG) == 1
    admin.delete("x")
    eventually(lambda: router.written == ["x"])


def test_lost_connection_with_watched_keys_makes_all_waiters_look(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    admin.set("x", "me")
    assert shared.call(renewal("x", "me"), LONG) == 1
    kill_all(admin)
    eventually(lambda: router.looks == 1)
    assert shared.call(renewal("x", "me"), LONG) == 1
    admin.delete("x")
    eventually(lambda: router.written == ["x"])


def test_server_that_refuses_tracking_is_asked_once(make: Make, admin: redis.Redis, url: str, router: Board) -> None:
    admin.acl_setuser("blind", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all", "-client|tracking"])
    try:
        shared = make(url.replace("//", "//blind:x@"))
        admin.set("x", "me")
        admin.execute_command("ACL", "LOG", "RESET")
        for _ in range(5):
            assert shared.call(renewal("x", "me"), LONG) == 1
        counts: list[Any] = [entry["count"] for entry in admin.acl_log()]
        assert sum(counts) == 1
        admin.delete("x")
        time.sleep(0.1)
        assert router.written == []
    finally:
        admin.acl_deluser("blind")


# What was not asked for

CONFIRMATION = b">3\r\n$9\r\nsubscribe\r\n$18\r\nholdfast:bell:test\r\n:1\r\n"


@pytest.mark.parametrize(
    "unasked",
    [
        CONFIRMATION,
        b">1\r\n$7\r\nmessage\r\n",
        b">2\r\n$10\r\ninvalidate\r\n:5\r\n",
        b">0\r\n",
        b"%1\r\n*1\r\n:1\r\n:2\r\n",
    ],
)
def test_a_push_never_answers_a_request_that_it_is_not_for(make: Make, proxy: Proxy, unasked: bytes) -> None:
    shared = make(proxy.url)
    assert shared.call(echo("warm"), LONG) == b"warm"
    proxy.on("echo", HOLD)

    def speak() -> None:
        proxy.await_held()
        proxy.say(unasked)

    with later(0.0, speak), pytest.raises(StepFailed) as caught:
        shared.call(echo("held"), LONG)
    assert caught.value.connection_broke
    assert shared.call(echo("again"), LONG) == b"again"


def test_a_subscription_is_confirmed_by_a_push_alone(make: Make, proxy: Proxy, router: Board) -> None:
    shared = make(proxy.url)
    proxy.on("subscribe", instead(b"+OK\r\n"))
    with pytest.raises(StepFailed) as caught:
        shared.listen(LONG)
    assert caught.value.connection_broke
    assert not router.armed
    assert shared.listen(LONG)


def test_one_swallowed_reply_ends_the_connection_whatever_else_is_heard(make: Make, proxy: Proxy) -> None:
    shared = make(proxy.url)
    assert shared.call(echo("warm"), LONG) == b"warm"
    proxy.on("echo", SWALLOW_REPLY)
    with pytest.raises(StepFailed):
        shared.call(echo("swallowed"), SHORT)
    # Nothing more is sent there, so that no reply can be taken for that of another.
    in_threads(8, lambda number: check_echo(shared, number))


def check_echo(shared: SharedConnection, number: int) -> None:
    assert shared.call(echo(number), LONG) == str(number).encode()


def test_a_late_reply_costs_no_connection(
    make: Make, proxy: Proxy, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 20.0)  # the reply is late, but not overdue, also on a busy machine
    shared = make(proxy.url)
    assert shared.call(echo("warm"), LONG) == b"warm"
    before = [client["id"] for client in connections_of(admin)]
    proxy.on("echo", delay(1.5))
    with pytest.raises(StepFailed):
        shared.call(echo("late"), SHORT)
    assert shared.call(echo("next"), LONG) == b"next"
    assert [client["id"] for client in connections_of(admin)] == before


def test_a_script_that_is_not_kept_is_sent_twice(make: Make, proxy: Proxy) -> None:
    shared = make(proxy.url)
    proxy.on("renew", instead(b"-NOSCRIPT No matching script\r\n"), times=1000)
    with pytest.raises(StepFailed, match="scripts are disabled there, or not kept") as caught:
        shared.call(renewal("x", "me"), LONG)
    assert not caught.value.retry
    assert proxy.seen("renew") == 2


# What stands between


class Relay:
    """Stands between the shared connection and a server: it may speak TLS, or not let HELLO through.

    One thread has both ends of a connection, because a TLS session must not be in two hands.
    """

    def __init__(
        self, port: int, *, tls: ssl.SSLContext | None = None, on_hello: Callable[[socket.socket], None] | None = None
    ) -> None:
        self._port, self._tls, self._on_hello = port, tls, on_hello
        self.hellos = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._welcome, daemon=True).start()

    def _welcome(self) -> None:
        while True:
            try:
                near = self._door.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", self._port))
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))
            stack.enter_context(far)
            near = stack.enter_context(self._tls.wrap_socket(near, server_side=True) if self._tls else near)
            near.setblocking(False)
            while True:
                if not (isinstance(near, ssl.SSLSocket) and near.pending()):
                    select.select([near, far], [], [])
                if (heard := self._recv(near)) == b"":
                    return
                if heard and self._on_hello is not None and b"HELLO" in heard:
                    self.hellos += 1
                    self._on_hello(near)
                elif heard:
                    far.sendall(heard)
                while select.select([far], [], [], 0)[0]:
                    if not (said := far.recv(65536)):
                        return
                    self._send(near, said)

    def _recv(self, near: socket.socket) -> bytes | None:
        try:
            return near.recv(65536)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def _send(self, near: socket.socket, data: bytes) -> None:
        while data:
            try:
                data = data[near.send(data) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                select.select([], [near], [])

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *args: object) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


def refuse(near: socket.socket) -> None:
    near.send(b"-ERR unknown command 'HELLO'\r\n")


def hang_up(near: socket.socket) -> None:
    near.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("on_hello", [refuse, hang_up])
def test_without_resp3_notifications_come_over_a_second_connection(
    make: Make,
    server: Server,
    admin: redis.Redis,
    router: Board,
    on_hello: Callable[[socket.socket], None],
) -> None:
    with Relay(server.port, on_hello=on_hello) as relay:
        shared = make(f"redis://{relay.address}/0")
        admin.set("x", "me")
        assert shared.call(renewal("x", "me"), LONG) == 1  # nothing is tracked, and nobody minds
        assert len(connections_of(admin)) == 1
        assert shared.listen(LONG)
        assert len(connections_of(admin)) == 2
        assert admin.publish(router.channel, b"old but heard") == 1
        assert shared.call(echo("beside"), LONG) == b"beside"
        eventually(lambda: [message for message, _ in router.delivered] == [b"old but heard"])
        kill_all(admin, sub="1")
        eventually(lambda: router.looks == 2 and router.armed, what="lost and back")
        assert admin.publish(router.channel, b"again") == 1
        # The loss of the other connection does not affect the subscriber.
        kill_all(admin, sub="0")
        assert eventually(lambda: _try(shared, echo("again"))) == b"again"
        assert router.looks == 2
        assert router.armed
        if on_hello is refuse:
            assert relay.hellos == 1, "that it was refused is remembered"


@pytest.mark.parametrize(
    "code", ["ERR max number of clients reached", "ERR max number of clients + cluster connections reached"]
)
def test_a_server_without_room_for_a_moment_is_asked_for_resp3_again(
    code: str, make: Make, proxy: Proxy, admin: redis.Redis, router: Board
) -> None:
    shared = make(proxy.url)
    proxy.on("hello", instead(f"-{code}\r\n".encode()))
    with pytest.raises(StepFailed, match="no room for another connection") as caught:
        shared.listen(LONG)
    assert caught.value.retry
    assert shared.listen(LONG)
    assert [found["resp"] for found in connections_of(admin)] == ["3"]
    admin.set("x", "mine")
    assert shared.call(renewal("x", "mine"), LONG)
    admin.delete("x")
    eventually(lambda: router.written == ["x"])


def test_without_resp3_who_may_not_subscribe_is_told_too(
    make: Make, server: Server, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    admin.acl_setuser("quiet", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all", "-subscribe"])
    try:
        with Relay(server.port, on_hello=refuse) as relay:
            shared = make(f"redis://quiet:x@{relay.address}/0")
            assert [shared.listen(LONG) for _ in range(2)] == [False] * 2
            assert len(caplog.records) == 1
            assert shared.call(echo("fine"), LONG) == b"fine"
    finally:
        admin.acl_deluser("quiet")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {folder}/key -out {folder}/crt -days 2"
    try:
        subprocess.run(
            [*command.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl to make a certificate")
    return folder


def test_tls(make: Make, certificate: Path, server: Server, admin: redis.Redis, router: Board) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "crt", certificate / "key")
    with Relay(server.port, tls=context) as relay:
        shared = make(f"rediss://{relay.address}/0?ssl_ca_certs={certificate}/crt")
        assert shared.listen(LONG)

        def work(number: int) -> None:
            for turn in range(20):
                word = f"{number}.{turn}." + "x" * (turn * 3000)
                assert shared.call(echo(word), LONG) == word.encode()
                admin.publish(router.channel, word)

        in_threads(8, work)
        eventually(lambda: len(router.delivered) == 160)
        words = [str(place) * 800 for place in range(3000)]
        assert shared.call_each([echo(word) for word in words], LONG) == [word.encode() for word in words]
        admin.set("x", "me")
        assert shared.call(renewal("x", "me"), LONG) == 1
        admin.delete("x")
        eventually(lambda: router.written == ["x"])
        kill_all(admin)
        eventually(lambda: router.looks == 2, what="lost and back")
        assert shared.call(echo("again"), LONG) == b"again"


# The process


def test_close_ends_the_thread_and_frees_who_waits(make: Make, url: str, admin: redis.Redis) -> None:
    shared = make(url)
    assert shared.listen(LONG)
    errors: list[StepFailed] = []

    def work(number: int) -> None:
        if number == 3:
            time.sleep(0.2)
            shared.close()
            return
        try:
            shared.call(late(20), 40.0)
        except StepFailed as failed:
            errors.append(failed)

    started = time.monotonic()
    in_threads(4, work)
    assert time.monotonic() - started < 10.0
    assert len(errors) == 3
    eventually(lambda: not connection_threads())
    eventually(lambda: not connections_of(admin))
    with pytest.raises(StepFailed, match="closed") as caught:
        shared.call(echo("closed"), LONG)
    assert not caught.value.sent
    assert not caught.value.retry
    with pytest.raises(StepFailed, match="closed"):
        shared.listen(LONG)
    assert isinstance(shared.call_each([echo("closed")], LONG)[0], StepFailed)


def test_close_does_not_wait_for_a_connection_that_does_not_come_about(make: Make, proxy: Proxy) -> None:
    proxy.blackhole()
    shared = make(proxy.url)
    errors: list[StepFailed] = []

    def work(number: int) -> None:
        if number:
            time.sleep(0.3)
            shared.close()
            return
        try:
            shared.call(echo("anybody?"), 40.0)
        except StepFailed as failed:
            errors.append(failed)

    started = time.monotonic()
    in_threads(2, work)
    assert time.monotonic() - started < 5.0
    assert "closed" in str(errors[0])
    eventually(lambda: not connection_threads(), 10.0)


def test_idle_connection_takes_no_time(shared: SharedConnection, router: Board) -> None:
    assert shared.listen(LONG)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.2


def test_forked_child_has_nothing_and_the_parent_goes_on(
    shared: SharedConnection, router: Board, admin: redis.Redis
) -> None:
    assert shared.listen(LONG)
    (before,) = connections_of(admin)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            shared.forget()
            assert not router.armed
            assert not connection_threads()
            assert not [link for link in os.listdir("/proc/self/fd") if _is_connection(link, before)]
            assert shared.call(echo("the child's own"), LONG) == b"the child's own"
            router.channel = "holdfast:bell:child"
            assert shared.listen(LONG)
            shared.close()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert shared.call(echo("the parent's"), LONG) == b"the parent's"
    assert admin.publish(router.channel, b"still heard") == 1
    eventually(lambda: router.delivered)
    assert router.looks == 0
    assert [client["id"] for client in connections_of(admin)] == [before["id"]]


def _is_connection(descriptor: str, client: dict[str, str]) -> bool:
    """Whether it is the socket whose other end the server knows by that address."""
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as sock:
            name = sock.getsockname()
    except (OSError, ValueError):
        return False
    return isinstance(name, tuple) and len(name) >= 2 and f"{name[0]}:{name[1]}" == client["addr"]


def test_no_connection_is_opened_for_a_caller_that_has_left(shared: SharedConnection, admin: redis.Redis) -> None:
    request = Request([echo("x")], LONG, resolve("redis://unused", aio=False).scripts)
    request.left = True  # interrupted before the thread has looked at its request
    shared._thread.queue.append(request)
    shared._thread.start()
    eventually(lambda: not shared._thread.queue)
    assert connections_of(admin) == []


@pytest.mark.long
def test_interrupts_at_any_moment_mix_nothing_up(server: Server) -> None:
    code = """
    import random, threading
    from holdfast.drivers import clock
    from holdfast.engines.redis.blocking.engine import Engine
    from holdfast.engines.redis.blocking.shared_connection import SharedConnection
    from holdfast.engines.redis.target import resolve
    from holdfast.protocol.effects import Command, StepFailed
    from tests.engines.redis.test_shared_connection import Board

    shared = SharedConnection(resolve(url, aio=False), Board(), clock.now, Engine(resolve(url, aio=False)))
    stop = time.monotonic() + 5.0
    wrong, answered = [], [0, 0]

    def work():
        turn = 0
        while time.monotonic() < stop:
            turn += 1
            word = f"other.{turn}"
            if shared.call(Command(("ECHO", word)), 10.0) != word.encode():
                wrong.append(word)
            answered[0] += 1

    def torment():
        dice = random.Random(7)
        while time.monotonic() < stop:
            time.sleep(dice.uniform(0, 0.002))
            os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=work)
    interrupts = 0
    turn = 0
    tormentor = threading.Thread(target=torment)
    while True:
        try:
            if other.ident is None:
                other.start()
            if tormentor.ident is None:
                tormentor.start()
            while time.monotonic() < stop:
                turn += 1
                words = [f"main.{turn}.{place}" for place in range(turn % 4 + 1)]
                replies = shared.call_each([Command(("ECHO", word)) for word in words], 10.0)
                if replies != [word.encode() for word in words]:
                    wrong.append((words, replies))
                answered[1] += 1
            tormentor.join()
            other.join()
            break
        except KeyboardInterrupt:
            interrupts += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say(wrong, interrupts > 50, answered[0] > 50, answered[1] > 50)
    say(len([thread for thread in threading.enumerate() if thread.name == "holdfast-connection"]))
    shared.close()
    """
    with Script(code, server.url) as script:
        assert script.finish(quiet=False) == "[] True True True\n1\n"
