"""A latch on a real server: crowds, processes, faults of the network, and Redis users with few permissions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.contention.test_acl import BELLS, NEEDED, user
from tests.proxy import HOLD, LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY, Proxy
from tests.servers import Server
from tests.support import AioFace, Script, _Awaited, async_eventually, asyncio_test, eventually, took


def latch_of(face: Any, *args: Any, **options: Any) -> Any:
    """A latch on either face, its methods plain calls."""
    latch = face.client.latch(*args, **options)
    return _Awaited(face, latch) if isinstance(face, AioFace) else latch


def waiters_of(admin: redis.Redis, name: str) -> int:
    """How many processes are known to wait."""
    return int(admin.zcard(f"{name}:hf1:latch:waiters:{{{name}}}"))


class Waiting:
    """Threads that wait."""

    def __init__(self, latches: list[Any], timeout: float | None = 30.0) -> None:
        self.outcomes: list[Any] = []
        self._threads = [threading.Thread(target=self._wait, args=(latch, timeout)) for latch in latches]
        for thread in self._threads:
            thread.start()

    def _wait(self, latch: Any, timeout: float | None) -> None:
        try:
            self.outcomes.append(latch.wait(timeout))
        except Exception as error:
            self.outcomes.append(error)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        return self.outcomes


@contextmanager
def counted(admin: redis.Redis) -> Iterator[list[int]]:
    """How many scripts the server has run within the block."""

    def scripts() -> int:
        stats = admin.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))

    found: list[int] = []
    before = scripts()
    yield found
    found.append(scripts() - before)


def test_two_hundred_threads_are_woken_by_four_bells(url: str, admin: redis.Redis) -> None:
    clients = [holdfast.connect(url) for _ in range(4)]
    waiting = Waiting([clients[number % 4].latch("a", 2) for number in range(200)])
    eventually(lambda: waiters_of(admin, "a") == 4)
    clients[0].latch("a", 2).count_down()
    assert waiting.outcomes == []
    with counted(admin) as scripts:
        clients[1].latch("a", 2).count_down()
        assert waiting.join() == [True] * 200
    assert scripts[0] < 40, "one looks for all of its process"
    for client in clients:
        client.close()
    assert waiters_of(admin, "a") == 0


@asyncio_test
async def test_two_hundred_tasks_are_woken(url: str) -> None:
    async with holdfast.aio.connect(url) as one, holdfast.aio.connect(url) as two:
        tasks = [asyncio.create_task((one, two)[number % 2].latch("a", 1).wait()) for number in range(200)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        await one.latch("a", 1).count_down()
        assert await asyncio.gather(*tasks) == [True] * 200


def test_waiters_do_not_poll(url: str, admin: redis.Redis) -> None:
    with holdfast.connect(url) as client:
        waiting = Waiting([client.latch("a", 1) for _ in range(50)])
        eventually(lambda: waiters_of(admin, "a") == 1)
        began = time.monotonic()
        with counted(admin) as scripts:
            time.sleep(2)
        assert scripts[0] <= 2 + 2 * (time.monotonic() - began), "one look every half second"
        client.latch("a", 1).count_down()
        waiting.join()


def test_processes_meet(url: str, admin: redis.Redis) -> None:
    worker = """
        latch = holdfast.connect(url).latch("a", 3)
        say("ready")
        sys.stdin.readline()
        say(latch.count_down())
    """
    waiter = """
        say(holdfast.connect(url).latch("a", 3).wait(30))
    """
    with Script(waiter, url) as first, Script(waiter, url) as second:
        eventually(lambda: waiters_of(admin, "a") == 2, timeout=20)
        with Script(worker, url) as one, Script(worker, url) as two, Script(worker, url) as dies:
            for script in (one, two, dies):
                script.hear("ready")
            dies.send(signal.SIGKILL)
            one.write("\n")
            two.write("\n")
            assert {one.hear(), two.hear()} == {"2", "1"}
            eventually(lambda: waiters_of(admin, "a") == 2, what="both wait: the one that died had not counted")
            with Script(worker, url) as replaces:
                replaces.hear("ready")
                replaces.write("\n")
                replaces.hear("0")
                first.hear("True")
                second.hear("True")


def test_a_waiter_that_was_killed_is_soon_forgotten(url: str, admin: redis.Redis) -> None:
    waiter = """
        holdfast.connect(url).latch("a", 1).wait(30)
    """
    with holdfast.connect(url) as client, Script(waiter, url) as script:
        eventually(lambda: waiters_of(admin, "a") == 1, timeout=20)
        waiting = Waiting([client.latch("a", 1)])
        eventually(lambda: waiters_of(admin, "a") == 2)
        script.send(signal.SIGKILL)
        eventually(lambda: waiters_of(admin, "a") == 1)
        client.latch("a", 1).count_down()
        assert waiting.join() == [True]


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY], ids=lambda fault: fault.kind)
def test_a_count_down_whose_reply_is_lost_counts_once(connect: Any, proxy: Proxy, url: str, fault: Any) -> None:
    face = connect(proxy.url, timeout=3.0)
    latch = latch_of(face, "a", 3)
    assert latch.count() == 3
    proxy.on("latch_count_down", fault)
    assert latch.count_down() == 2
    assert proxy.seen("latch_count_down") >= 2
    assert latch_of(connect(url), "a", 3).count() == 2


def test_a_count_down_that_arrives_after_all_is_counted_once(connect: Any, proxy: Proxy, url: str) -> None:
    latch = latch_of(connect(proxy.url, timeout=6.0), "a", 3)
    latch.count()
    proxy.on("latch_count_down", HOLD)
    assert latch.count_down() == 2
    proxy.await_held()
    proxy.deliver()
    assert latch_of(connect(url), "a", 3).count() == 2


def test_no_answer_at_all_is_an_unknown_outcome(connect: Any, proxy: Proxy, url: str) -> None:
    latch = latch_of(connect(proxy.url, timeout=1.5), "a", 3)
    latch.count()
    proxy.on("latch_count_down", MUTE_REPLY, times=100)
    with took(less_than=5), pytest.raises(holdfast.OutcomeUnknown, match=r"count_down of 'a'.*count\(\)") as caught:
        latch.count_down()
    assert isinstance(caught.value.__cause__, holdfast.Unavailable)
    assert latch_of(connect(url), "a", 3).count() == 2


def test_an_idle_connection_that_died_costs_a_resend(connect: Any, proxy: Proxy) -> None:
    latch = latch_of(connect(proxy.url), "a", 3)
    for method, args in (("count", ()), ("count_down", ()), ("wait", (0,))):
        proxy.cut()
        getattr(latch, method)(*args)
    assert latch.count() == 2


def test_a_hung_server_is_not_waited_for_longer_than_asked(connect: Any, server: Server) -> None:
    latch = latch_of(connect(server.url), "a", 1)
    latch.count()
    server.pause()
    with took(less_than=4.5), pytest.raises(holdfast.Unavailable):
        latch.wait(0.5)
    server.resume()


def test_first_contact_with_nobody_fails_at_once(connect: Any) -> None:
    latch = latch_of(connect("redis://127.0.0.1:1/0"), "a", 1)
    for method in ("count", "count_down", "wait"):
        with took(less_than=4.5), pytest.raises(holdfast.Unavailable, match="nothing listens there"):
            getattr(latch, method)()


def test_the_usual_permissions_are_enough(connect: Any, server: Server, admin: redis.Redis) -> None:
    """The list of docs/guarantees.md."""
    admin.script_flush()
    with user(server, admin, *NEEDED, *BELLS) as url:
        latch = latch_of(connect(url), "app:a", 1)
        waiting = Waiting([latch_of(connect(url), "app:a", 1) for _ in range(3)])
        eventually(lambda: waiters_of(admin, "app:a") == 3)
        assert latch.count_down() == 0
        assert waiting.join() == [True] * 3
        assert admin.acl_log() == []


def test_without_pub_sub_waiters_poll(connect: Any, server: Server, admin: redis.Redis) -> None:
    with user(server, admin, *NEEDED) as url:
        latch = latch_of(connect(url), "app:a", 1)
        waiting = Waiting([latch_of(connect(url), "app:a", 1) for _ in range(3)])
        eventually(lambda: admin.exists("app:a:hf1:latch:{app:a}"))
        assert latch.count_down() == 0
        assert waiting.join() == [True] * 3


def test_closing_the_client_ends_a_wait(connect: Any, url: str, admin: redis.Redis) -> None:
    face = connect(url)
    waiting = Waiting([latch_of(face, "a", 1) for _ in range(3)])
    eventually(lambda: waiters_of(admin, "a") == 1)
    if isinstance(face, AioFace):
        face._call(face.client.aclose())
    else:
        face.client.close()
    outcomes = waiting.join()
    assert len(outcomes) == 3
    assert all(isinstance(outcome, holdfast.Unavailable) for outcome in outcomes)


@asyncio_test
async def test_cancelled_tasks_leave_the_others_waiting(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        tasks = [asyncio.create_task(client.latch("a", 1).wait()) for _ in range(10)]
        await async_eventually(lambda: waiters_of(admin, "a") == 1)
        for task in tasks[:9]:
            task.cancel()
            await asyncio.sleep(0.01)
        await client.latch("a", 1).count_down()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[:9]] == [True] * 9
        assert outcomes[9] is True


def test_ctrl_c_ends_a_wait_and_another_thread_goes_on(url: str, admin: redis.Redis) -> None:
    code = """
        import threading
        client = holdfast.connect(url)
        def other():
            say("other", client.latch("a", 1).wait(30))
        try:
            thread = threading.Timer(0.3, other)
            thread.start()
            client.latch("a", 1).wait(30)
        except KeyboardInterrupt:
            say("interrupted")
        thread.join()
    """
    with Script(code, url) as script:
        eventually(lambda: waiters_of(admin, "a") == 1, timeout=20)
        time.sleep(0.5)
        script.send(signal.SIGINT)
        script.hear("interrupted")
        with holdfast.connect(url) as client:
            client.latch("a", 1).count_down()
        script.hear("other True")
        script.finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_waits_for_itself(url: str, admin: redis.Redis) -> None:
    code = """
        import threading
        client = holdfast.connect(url)
        waiter = threading.Thread(target=lambda: client.latch("a", 1).wait(30))
        waiter.start()
        time.sleep(0.3)
        if os.fork() == 0:
            say("child", client.latch("a", 1).wait(30))
            os._exit(0)
        os.wait()
        waiter.join()
        say("parent")
    """
    with Script(code, url) as script:
        eventually(lambda: waiters_of(admin, "a") == 2, timeout=20)
        with holdfast.connect(url) as client:
            client.latch("a", 1).count_down()
        script.hear("child True")
        script.hear("parent")


def test_everything_is_gone_after_the_retention(url: str, admin: redis.Redis) -> None:
    with holdfast.connect(url) as client:
        for number in range(50):
            client.latch(f"a{number}", 1, retention=1).count_down()
        for key in admin.keys("*:gone:*"):
            assert 0 < admin.pttl(key) <= 70_000
            admin.delete(key)  # these stand for a minute, in case a request is late
        eventually(lambda: admin.dbsize() == 0)
