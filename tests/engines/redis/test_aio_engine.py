"""The asyncio engine on a real server, without locks: one connection for all tasks, its notifications, and its loss."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from holdfast.drivers import clock
from holdfast.engines.redis.aio.engine import MOST_IN_FLIGHT, Engine
from holdfast.engines.redis.aio.standby import StandbyEngine
from holdfast.engines.redis.target import resolve
from holdfast.protocol.effects import Command, Step, StepFailed
from tests.proxy import HOLD, LOSE_REQUEST, MUTE_REPLY, SWALLOW_REPLY, Proxy, delay, instead
from tests.servers import Server
from tests.support import async_eventually, asyncio_test

LONG = 20.0
NAME = "of-the-test"
OVERDUE_AFTER = "holdfast.engines.redis.aio.pipelined_connection.OVERDUE_AFTER"


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


@asynccontextmanager
async def engine_of(url: str, timeout: float = 5.0) -> AsyncIterator[tuple[Engine, Any]]:
    router: Any = Board()
    engine = Engine(resolve(f"{url}?client_name={NAME}", aio=True), timeout, router, clock.now)
    engine.move_to(asyncio.get_running_loop())
    try:
        yield engine, router
    finally:
        await engine.close()


@asynccontextmanager
async def standby_of(engine: Engine) -> AsyncIterator[StandbyEngine]:
    standby = StandbyEngine(engine)
    standby.move_to(asyncio.get_running_loop())
    try:
        yield standby
    finally:
        await standby.close()


class OldServer(Server):
    """One that knows no HELLO, and so must be talked to by those who do without."""

    def _probe(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2)


def echo(word: object) -> Command:
    return Command(("ECHO", str(word)))


def renew(key: str, token: str) -> Step:
    """A step that reads its key last, and has it watched."""
    return Step("renew", (key,), (token, "60000"), watch=True)


def connections(admin: redis.Redis) -> list[dict[str, str]]:
    return [found for found in admin.client_list() if found["name"] == NAME]


def kill_connections(admin: redis.Redis, wanted: Callable[[dict[str, str]], bool] = lambda _: True) -> None:
    for found in connections(admin):
        if wanted(found):
            admin.client_kill_filter(_id=found["id"])


async def block(engine: Engine, admin: redis.Redis) -> asyncio.Future[Any]:
    """Ask for something that the server answers once ``unblock`` was called; until then nobody else is."""
    reply = engine.submit(Command(("BLPOP", "blocked", "0")), LONG)
    await async_eventually(lambda: any("b" in found["flags"] for found in connections(admin)))
    return reply


def unblock(admin: redis.Redis) -> None:
    admin.rpush("blocked", "x")


async def failure_of(reply: asyncio.Future[Any]) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        await reply
    return caught.value


# Replies.


@asyncio_test
async def test_replies_are_never_mixed_up_when_half_the_callers_leave(url: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    async def ask(engine: Engine, number: int) -> None:
        for turn in range(20):
            word = f"{number}-{turn}-{'x' * dice.choice([0, 10, 5000])}"
            assert await engine.submit(echo(word), LONG) == word.encode()

    async with engine_of(url) as (engine, _):
        for _ in range(5):
            tasks = [asyncio.create_task(ask(engine, number)) for number in range(200)]
            leaving = dice.sample(tasks, 100)
            for task in leaving:
                await asyncio.sleep(0)
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for task, outcome in zip(tasks, ended, strict=True):
                assert outcome is None or (task in leaving and isinstance(outcome, asyncio.CancelledError)), seed


@asyncio_test
async def test_replies_to_those_who_ran_out_of_time_are_dropped(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 20.0)  # the server has time to resume before the connection is given up
    async with engine_of(url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        server.pause()
        late = [engine.submit(echo(f"late {number}"), 0.05) for number in range(50)]
        patient = [engine.submit(echo(f"patient {number}"), LONG) for number in range(50)]
        failures = [await failure_of(reply) for reply in late]
        assert all(failed.sent and failed.retry for failed in failures)
        server.resume()
        assert await asyncio.gather(*patient) == [f"patient {number}".encode() for number in range(50)]


@asyncio_test
async def test_timeouts_are_met_in_whatever_order_they_were_asked_for(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 20.0)  # each request ends by its own timeout, not with the connection
    async with engine_of(url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        server.pause()
        ended: list[float] = []

        async def ask(timeout: float) -> None:
            started = time.monotonic()
            failed = await failure_of(engine.submit(echo("x"), timeout))
            passed = time.monotonic() - started
            assert timeout <= passed + 0.001
            assert passed < timeout + 4.0
            assert f"within {timeout:.3g} s" in str(failed.error)
            ended.append(timeout)

        await asyncio.gather(*map(ask, (1.2, 0.2, 1.7, 0.7, 0.2)))
        assert ended == sorted(ended)
        server.resume()


@asyncio_test
async def test_an_overdue_reply_ends_the_connection_for_all_that_is_under_way(server: Server, url: str) -> None:
    async with engine_of(url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        server.pause()
        patient = engine.submit(echo("patient"), LONG)
        late = await failure_of(engine.submit(echo("late"), 0.4))
        assert late.silent
        failed = await failure_of(patient)
        assert failed.connection_broke
        assert failed.retry
        server.resume()
        assert await engine.submit(echo("again"), LONG) == b"again"


@asyncio_test
async def test_error_replies_go_to_who_asked(url: str) -> None:
    async with engine_of(url) as (engine, _):
        replies = [engine.submit(Command(("NONSENSE",)) if n % 2 else echo(n), LONG) for n in range(10)]
        for number, reply in enumerate(replies):
            if number % 2:
                assert not (await failure_of(reply)).retry
            else:
                assert await reply == str(number).encode()


@asyncio_test
async def test_unknown_script_is_sent_again_with_its_source(url: str, admin: redis.Redis) -> None:
    admin.script_flush()
    admin.set("k", "mine", px=20_000)
    async with engine_of(url) as (engine, _):
        steps = [Step("renew", ("k",), ("mine", "60000")), Step("renew", ("k",), ("not mine", "60000"))] * 5
        assert await engine.call_each(steps, LONG) == [1, -1] * 5


@asyncio_test
async def test_lost_connection_fails_each_in_flight_by_itself_and_later_ones_succeed(
    url: str, admin: redis.Redis
) -> None:
    async with engine_of(url) as (engine, _):
        blocked = await block(engine, admin)
        replies = [engine.submit(echo(number), LONG) for number in range(300)]
        left = replies[::3]
        for reply in left:
            reply.cancel()
        await asyncio.sleep(0.05)
        kill_connections(admin)
        failures = [await failure_of(reply) for reply in [blocked, *replies] if reply not in left]
        assert all(failed.sent and failed.retry and failed.connection_broke for failed in failures)
        assert len({id(failed) for failed in failures}) == len(failures) == 201
        assert await asyncio.gather(*(engine.submit(echo(n), LONG) for n in range(100))) == [
            str(n).encode() for n in range(100)
        ]


@asyncio_test
async def test_one_connection_carries_it_all(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, _), standby_of(engine) as standby:
        await asyncio.gather(*(engine.submit(echo(number), LONG) for number in range(100)))
        admin.set("k", "mine")
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        assert await engine.listen(LONG)
        assert await standby.listen(LONG)
        assert len(connections(admin)) == 1
    await async_eventually(lambda: not connections(admin))


@asyncio_test
async def test_closing_ends_whatever_waits(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, _):
        blocked = await block(engine, admin)
        waiting = [engine.submit(echo(number), LONG) for number in range(2 * MOST_IN_FLIGHT)]
        await engine.close()
        assert (await failure_of(blocked)).sent
        failures = [await failure_of(reply) for reply in waiting]
        assert failures[0].sent
        assert not failures[-1].sent
        assert not (await failure_of(engine.submit(echo("x"), LONG))).retry
        with pytest.raises(StepFailed):
            await engine.listen(LONG)


# What was not asked for.

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
@asyncio_test
async def test_a_push_never_answers_a_request_that_it_is_not_for(proxy: Proxy, unasked: bytes) -> None:
    async with engine_of(proxy.url) as (engine, _):
        assert await engine.listen(LONG)
        proxy.on("echo", HOLD)
        reply = engine.submit(echo("held"), LONG)
        await async_eventually(lambda: proxy.seen("echo"))
        await asyncio.to_thread(proxy.await_held)
        proxy.say(unasked)
        assert (await failure_of(reply)).connection_broke
        assert await engine.submit(echo("again"), LONG) == b"again"


@asyncio_test
async def test_a_subscription_is_confirmed_by_a_push_alone(proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, router):
        proxy.on("subscribe", instead(b"+OK\r\n"))
        with pytest.raises(StepFailed) as caught:
            await engine.listen(LONG)
        assert caught.value.connection_broke
        assert not router.armed
        assert await engine.listen(LONG)


@asyncio_test
async def test_one_swallowed_reply_ends_the_connection_whatever_else_is_heard(proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        proxy.on("echo", SWALLOW_REPLY)
        await failure_of(engine.submit(echo("swallowed"), 0.1))
        # Nothing more is sent there, so that no reply can be taken for that of another.
        replies = await engine.call_each([echo(number) for number in range(20)], LONG)
        assert replies == [str(number).encode() for number in range(20)]


@asyncio_test
async def test_a_late_reply_costs_no_connection(
    proxy: Proxy, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 20.0)  # the reply is late, but not overdue, also on a busy machine
    async with engine_of(proxy.url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        before = [client["id"] for client in connections(admin)]
        proxy.on("echo", delay(1.5))
        await failure_of(engine.submit(echo("late"), 0.1))
        assert await engine.submit(echo("next"), LONG) == b"next"
        assert [client["id"] for client in connections(admin)] == before


@asyncio_test
async def test_a_script_that_is_not_kept_is_sent_twice(proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, _):
        proxy.on("renew", instead(b"-NOSCRIPT No matching script\r\n"), times=1000)
        failed = await failure_of(engine.submit(Step("renew", ("k",), ("mine", "60000")), LONG))
        assert "scripts are disabled there, or not kept" in str(failed.error)
        assert not failed.retry
        assert proxy.seen("renew") == 2


# Back-pressure.


@asyncio_test
async def test_requests_in_flight_are_limited(url: str, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OVERDUE_AFTER, 2.0)  # the connection outlasts all requests, even if sending them takes a while
    async with engine_of(url) as (engine, _):
        blocked = await block(engine, admin)
        replies = [engine.submit(echo(number), 0.2) for number in range(3 * MOST_IN_FLIGHT)]
        failures = [await failure_of(reply) for reply in replies]
        sent = [failed.sent for failed in failures]
        assert sum(sent) == MOST_IN_FLIGHT - 1
        assert sent == sorted(sent, reverse=True), "first come, first served"
        assert (await failure_of(blocked)).connection_broke, "that connection owes replies"
        assert await engine.submit(echo("last"), LONG) == b"last"


@asyncio_test
async def test_whatever_waits_for_room_is_sent_in_order(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, _):
        replies = [engine.submit(Command(("INCR", "count")), LONG) for _ in range(5 * MOST_IN_FLIGHT)]
        assert await asyncio.gather(*replies) == list(range(1, 5 * MOST_IN_FLIGHT + 1))


@asyncio_test
async def test_server_that_does_not_read_is_not_sent_ever_more(server: Server, url: str) -> None:
    async with engine_of(url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        server.pause()
        big = "x" * 1_000_000
        replies = [engine.submit(echo(big), 0.5) for _ in range(40)]
        await asyncio.sleep(0)
        failures = [await failure_of(reply) for reply in replies]
        assert 0 < sum(failed.sent for failed in failures) < 40
        server.resume()
        assert await engine.submit(echo("last"), LONG) == b"last"


@asyncio_test
async def test_backlog_outlives_the_connection_that_had_no_room_for_it(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, _):
        blocked = await block(engine, admin)
        replies = [engine.submit(echo(number), LONG) for number in range(2 * MOST_IN_FLIGHT)]
        kill_connections(admin)
        assert (await failure_of(blocked)).connection_broke
        outcomes = await asyncio.gather(*replies, return_exceptions=True)
        assert all(isinstance(outcome, StepFailed) for outcome in outcomes[: MOST_IN_FLIGHT - 1])
        assert outcomes[MOST_IN_FLIGHT - 1 :] == [
            str(n).encode() for n in range(MOST_IN_FLIGHT - 1, 2 * MOST_IN_FLIGHT)
        ]


# Bells.


@asyncio_test
async def test_notification_is_delivered(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, router):
        before = clock.now()
        assert all(await asyncio.gather(*(engine.listen(LONG) for _ in range(20))))
        assert router.armed
        assert admin.publish(router.channel, "to you") == 1
        await async_eventually(lambda: router.delivered)
        ((message, heard_at),) = router.delivered
        assert message == b"to you"
        assert before <= heard_at <= clock.now()
        assert await engine.submit(echo("among notifications"), LONG) == b"among notifications"
        assert router.looks == 0


@asyncio_test
async def test_notifications_among_replies_mix_up_nothing(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, router):
        await engine.listen(LONG)
        for turn in range(20):
            replies = [engine.submit(echo(f"{turn} {number}"), LONG) for number in range(50)]
            for number in range(20):
                admin.publish(router.channel, f"{turn} {number}")
            assert await asyncio.gather(*replies) == [f"{turn} {number}".encode() for number in range(50)]
        await async_eventually(lambda: len(router.delivered) == 400)
        assert [message for message, _ in router.delivered] == [
            f"{turn} {number}".encode() for turn in range(20) for number in range(20)
        ]


@asyncio_test
async def test_foreign_write_to_a_watched_key_is_told_and_our_own_is_not(url: str, admin: redis.Redis) -> None:
    admin.script_flush()  # the step that is sent again with its source must be watched, too
    admin.set("k", "mine", px=20_000)
    async with engine_of(url) as (engine, router):
        assert await engine.submit(renew("k", "mine"), LONG) == 1
        admin.delete("k")
        await async_eventually(lambda: router.written == ["k"])

        await engine.submit(Command(("SET", "k", "mine")), LONG)
        assert await engine.submit(renew("k", "mine"), LONG) == 1
        await engine.submit(Command(("SET", "k", "mine")), LONG)
        assert await engine.submit(renew("k", "mine"), LONG) == 1
        await engine.submit(Command(("SET", "of nobody", "x")), LONG)
        admin.set("of nobody", "y")
        admin.set("k", "another's")
        await async_eventually(lambda: len(router.written) > 1)
        assert router.written == ["k", "k"]
        assert router.looks == 0


@asyncio_test
async def test_many_watched_steps_at_once(url: str, admin: redis.Redis) -> None:
    keys = [f"k{number}" for number in range(200)]
    for key in keys:
        admin.set(key, "mine")
    async with engine_of(url) as (engine, router):
        replies = await engine.call_each([renew(key, "mine") for key in keys], LONG)
        assert replies == [1] * len(keys)
        admin.delete(*keys)
        await async_eventually(lambda: sorted(router.written) == sorted(keys))
        assert await engine.submit(echo("in step"), LONG) == b"in step"


@asyncio_test
async def test_flushed_server_makes_all_waiters_look(url: str, admin: redis.Redis) -> None:
    admin.set("k", "mine")
    async with engine_of(url) as (engine, router):
        await engine.submit(renew("k", "mine"), LONG)
        (before,) = connections(admin)
        admin.flushall()
        await async_eventually(lambda: router.looks == 1)
        (after,) = connections(admin)
        assert after["id"] == before["id"]


@asyncio_test
async def test_lost_subscriber_comes_back_by_itself_and_all_waiters_look(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, router):
        await engine.listen(LONG)
        for turn in range(3):
            kill_connections(admin)
            await async_eventually(lambda: not router.armed, what="it is noticed")
            await async_eventually(lambda: router.armed, what="it listens again")

            def have_looked(times: int = 2 * (turn + 1)) -> bool:
                return bool(router.looks == times)

            await async_eventually(have_looked, what="at the loss, and at the return")
            assert admin.publish(router.channel, str(turn)) == 1
        await async_eventually(lambda: len(router.delivered) == 3)


@asyncio_test
async def test_lost_subscriber_that_is_not_needed_stays_away_until_it_is_asked_for(
    url: str, admin: redis.Redis
) -> None:
    async with engine_of(url) as (engine, router):
        await engine.listen(LONG)
        router.needed = False
        kill_connections(admin)
        await async_eventually(lambda: router.looks == 1)
        await asyncio.sleep(0.3)
        assert not connections(admin)
        assert await engine.listen(LONG)
        assert router.looks == 2
        assert admin.publish(router.channel, "x") == 1


@asyncio_test
async def test_subscriber_comes_back_after_a_restart_of_the_server(url: str) -> None:
    with Server() as server:
        async with engine_of(server.url) as (engine, router):
            await engine.listen(LONG)
            server.kill()
            await async_eventually(lambda: not router.armed)
            await asyncio.sleep(0.3)
            with pytest.raises(StepFailed) as caught:
                await engine.listen(LONG)
            assert caught.value.retry
            server.restart()
            await async_eventually(lambda: router.armed, what="it listens again")
            assert server.client().publish(router.channel, "x") == 1
            await async_eventually(lambda: router.delivered)


@asyncio_test
async def test_lost_connection_with_watched_keys_makes_all_waiters_look(url: str, admin: redis.Redis) -> None:
    admin.set("k", "mine")
    async with engine_of(url) as (engine, router):
        await engine.submit(renew("k", "mine"), LONG)
        kill_connections(admin)
        await async_eventually(lambda: router.looks == 1)


@asyncio_test
async def test_who_gives_up_listening_takes_nobody_along(server: Server, url: str) -> None:
    async with engine_of(url) as (engine, router):
        await engine.submit(echo("warm"), LONG)
        server.pause()
        staying = asyncio.create_task(engine.listen(LONG))
        leaving = asyncio.create_task(engine.listen(LONG))
        with pytest.raises(StepFailed) as caught:
            await engine.listen(0.1)
        assert caught.value.retry
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        server.resume()
        assert await staying
        assert router.armed


# Servers that will not have it.


@asyncio_test
async def test_user_who_may_not_subscribe_is_told_once(
    url: str, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    for number, rule in enumerate(["-subscribe", "resetchannels"]):
        admin.execute_command("ACL", "SETUSER", "quiet", "reset", "on", ">secret", "~*", "&*", "+@all", rule)
        caplog.clear()
        async with engine_of(url.replace("redis://", "redis://quiet:secret@")) as (engine, router):
            assert await asyncio.gather(*(engine.listen(LONG) for _ in range(5))) == [False] * 5
            assert await engine.listen(LONG) is False
            assert not router.armed
            assert await engine.submit(echo(number), LONG) == str(number).encode()
        (record,) = caplog.records
        assert "poll" in record.getMessage()
        assert "+subscribe" in record.getMessage()
        assert "&holdfast:bell:*" in record.getMessage()
    admin.execute_command("ACL", "DELUSER", "quiet")


@asyncio_test
async def test_server_without_hello_rings_on_a_second_connection() -> None:
    with OldServer("--rename-command", "HELLO", "") as server, server.client(protocol=2) as admin:
        async with engine_of(server.url) as (engine, router):
            admin.set("k", "mine")
            assert await engine.submit(renew("k", "mine"), LONG) == 1
            assert await engine.listen(LONG)
            assert len(connections(admin)) == 2
            assert admin.publish(router.channel, "x") == 1
            await async_eventually(lambda: router.delivered)
            assert await engine.submit(renew("k", "mine"), LONG) == 1
            assert await engine.submit(echo("in step"), LONG) == b"in step"

            looks = router.looks
            kill_connections(admin, lambda found: found["sub"] == "1")
            await async_eventually(lambda: router.looks == looks + 2 and router.armed, what="it listens again")
            assert admin.publish(router.channel, "y") == 1
            await async_eventually(lambda: len(router.delivered) == 2)
            assert len(connections(admin)) == 2
            assert admin.info("commandstats").get("cmdstat_client|tracking", {"calls": 1})["calls"] == 1
        await async_eventually(lambda: not connections(admin))


@asyncio_test
async def test_a_proxy_that_hangs_up_on_hello_costs_the_shared_connection_twice_only(
    proxy: Proxy, admin: redis.Redis
) -> None:
    async with engine_of(proxy.url) as (engine, router):
        proxy.on("hello", LOSE_REQUEST, times=10)
        for _ in range(2):
            with pytest.raises(StepFailed) as caught:
                await engine.listen(LONG)
            assert caught.value.retry
        assert await engine.listen(LONG)
        assert proxy.seen("hello") == 2
        assert admin.publish(router.channel, "x") == 1
        await async_eventually(lambda: router.delivered)

        before = engine.connections()
        looks = router.looks
        await async_eventually(lambda: proxy.seen("hello") == 4, what="two probes")
        assert engine.connections() == before, "probes have connections of their own"
        assert not any(connection.lost for connection in before)
        proxy.heal()
        await async_eventually(lambda: router.looks > looks, timeout=10.0, what="HELLO is answered")
        admin.set("k", "mine")
        assert await engine.submit(renew("k", "mine"), LONG) == 1
        admin.delete("k")
        await async_eventually(lambda: router.written == ["k"])


@pytest.mark.parametrize(
    ("command", "answer"), [("hello", b"-NOPROTO sorry\r\n"), ("client", b"-ERR no tracking here\r\n")]
)
@asyncio_test
async def test_a_refusal_of_hello_or_tracking_holds_for_its_connection_only(
    proxy: Proxy, admin: redis.Redis, caplog: pytest.LogCaptureFixture, command: str, answer: bytes
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    admin.set("k", "mine")
    async with engine_of(proxy.url) as (engine, router):
        await engine.submit(echo("warm"), LONG)
        proxy.on(command, instead(answer))
        for _ in range(3):
            assert await engine.submit(renew("k", "mine"), LONG) == 1
        assert len(caplog.records) == 1
        assert "next renewal" in caplog.text
        kill_connections(admin)
        await async_eventually(lambda: not engine.is_up())
        assert await engine.submit(renew("k", "mine"), LONG) == 1
        admin.set("k", "mine")
        await async_eventually(lambda: router.written == ["k"])
        assert "are back" in caplog.text


@asyncio_test
async def test_tracking_that_was_refused_for_a_moment_is_asked_for_again(proxy: Proxy, admin: redis.Redis) -> None:
    admin.set("k", "mine")
    async with engine_of(proxy.url) as (engine, _):
        await engine.submit(echo("warm"), LONG)
        before = proxy.seen("client")
        proxy.on("client", instead(b"-BUSY a script runs\r\n"))
        for _ in range(3):
            assert await engine.submit(renew("k", "mine"), LONG) == 1
        assert proxy.seen("client") - before == 2 + 3, "CLIENT TRACKING, again, and CLIENT CACHING with each step"


@asyncio_test
async def test_a_subscription_that_is_cut_again_and_again_is_no_refusal(admin: redis.Redis) -> None:
    with OldServer("--rename-command", "HELLO", "") as server, Proxy(server.port) as proxy:
        async with engine_of(proxy.url) as (engine, router):
            await engine.submit(echo("warm"), LONG)
            proxy.on("subscribe", LOSE_REQUEST, times=5)
            for _ in range(5):
                with pytest.raises(StepFailed) as caught:
                    await engine.listen(LONG)
                assert caught.value.retry
            assert await engine.listen(LONG)
            assert router.armed


# The keeper's way.


@asyncio_test
async def test_keeper_goes_its_own_way_while_the_connection_is_silent(url: str, admin: redis.Redis) -> None:
    admin.set("k", "mine")
    async with engine_of(url) as (engine, router), standby_of(engine) as standby:
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        assert router.looks == 0
        blocked = await block(engine, admin)
        await asyncio.sleep(0.4)
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        assert len(connections(admin)) == 2
        assert router.looks == 1, "what was watched on the other is to be watched here"
        admin.delete("k")
        await async_eventually(lambda: "k" in router.written)

        unblock(admin)
        await blocked
        await async_eventually(lambda: len(connections(admin)) == 1, what="the second is dropped again")
        assert router.looks == 2
        admin.set("k", "mine")
        assert await standby.call_each([renew("k", "mine")], LONG) == [1]
        assert len(connections(admin)) == 1


@asyncio_test
async def test_keeper_stays_on_the_connection_that_was_idle_before_it_came(url: str, admin: redis.Redis) -> None:
    async with engine_of(url) as (engine, router), standby_of(engine) as standby:
        for key in ("a", "b", "c"):
            admin.set(key, "mine")
        for _ in range(2):
            assert await standby.call_each([renew(key, "mine") for key in ("a", "b", "c")], LONG) == [1, 1, 1]
            await asyncio.sleep(0.4)
        assert await standby.submit(renew("a", "mine"), LONG) == 1
        assert len(connections(admin)) == 1
        assert router.looks == 0


@asyncio_test
async def test_connection_that_is_dead_for_others_too_is_given_up(proxy: Proxy) -> None:
    async with engine_of(proxy.url, timeout=LONG) as (engine, _), standby_of(engine) as standby:
        await engine.submit(echo("warm"), LONG)
        proxy.on("echo", MUTE_REPLY)
        server_silent = engine.submit(echo("x"), LONG)
        await asyncio.sleep(0.4)
        while not server_silent.done():
            assert await standby.call_each([Command(("PING",))], LONG) == [b"PONG"]
            await asyncio.sleep(0.05)
        assert (await failure_of(server_silent)).connection_broke
        assert await engine.submit(echo("heard"), LONG) == b"heard"


@asyncio_test
async def test_a_timeout_that_passed_while_the_loop_was_busy_is_not_the_servers_silence(
    server: Server, admin: redis.Redis
) -> None:
    async with engine_of(server.url) as (engine, _):
        await engine.submit(Command(("PING",)), LONG)
        connections = admin.info("stats")["total_connections_received"]
        for _ in range(4):  # the loop may see a reply before the timer, or after it
            # The first is written at once, the others at the end of this turn of the loop, when their time is over.
            replies = [engine.submit(Command(("PING",)), 0.2) for _ in range(3)]
            time.sleep(1.2)  # the extra time is how late the timer is: 1 s
            assert [await reply for reply in replies] == [b"PONG"] * 3
        assert admin.info("stats")["total_connections_received"] == connections


@asyncio_test
async def test_a_silent_server_is_told_also_after_the_loop_was_busy(server: Server, proxy: Proxy) -> None:
    async with engine_of(proxy.url) as (engine, _):
        await engine.submit(Command(("PING",)), LONG)
        proxy.on("ping", SWALLOW_REPLY)
        reply = engine.submit(Command(("PING",)), 0.3)
        await asyncio.sleep(0.01)
        time.sleep(0.6)
        started = time.monotonic()
        with pytest.raises(StepFailed) as failed:
            await reply
        assert failed.value.silent
        assert time.monotonic() - started < LONG / 4


@asyncio_test
async def test_renewals_go_before_what_waits_for_room_on_the_connection(server: Server, admin: redis.Redis) -> None:
    async with engine_of(server.url) as (engine, _):
        await engine.submit(Command(("PING",)), LONG)
        standby = StandbyEngine(engine)
        standby.move_to(asyncio.get_running_loop())
        order: list[str] = []
        others = [engine.submit(Command(("PING",)), LONG) for _ in range(MOST_IN_FLIGHT + 500)]
        renewal = standby.submit(Command(("PING",)), LONG)
        renewal.add_done_callback(lambda _: order.append("renewal"))
        others[-1].add_done_callback(lambda _: order.append("last"))
        await asyncio.gather(renewal, *others)
        assert order == ["renewal", "last"]
        await standby.close()
