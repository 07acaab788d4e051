"""Connections of one's own: made with the user's settings, given back, and never left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.effects import Command, StepFailed
from tests.recipes.byhand import ByHand
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, connections_of, eventually

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # by fork

WATCH, GET, UNWATCH = Command(("WATCH", "foo")), Command(("GET", "foo")), Command(("UNWATCH",))


def test_a_link_rests_and_is_used_again(face: Any, admin: redis.Redis) -> None:
    with face.recipe("watch", "foo"), face.recipe("multi", "bar"):
        pass
    count = connections_of(admin)
    for _ in range(20):
        with face.recipe("watch", "foo"), face.recipe("multi", "bar"):
            pass
    assert connections_of(admin) == count


def test_nothing_is_left_of_a_closed_client(connect: Any, url: str, admin: redis.Redis) -> None:
    before = connections_of(admin)
    face = connect(url)
    with face.recipe("watch", "foo"):
        pass
    assert connections_of(admin) > before
    face.client.close() if connect.kind == "blocking" else face._call(face.client.aclose())
    eventually(lambda: connections_of(admin) == before)
    assert [(node.connections, node.idle) for node in face.client.statistics().nodes.values()] == [(0, 0)]


def test_links_are_made_with_the_settings_of_the_user(connect: Any) -> None:
    with Server("--requirepass", "secret") as server:
        face = connect(f"redis://:secret@127.0.0.1:{server.port}/3")
        with (
            redis.Redis(port=server.port, db=3, password="secret") as third,
            face.recipe("watch", "foo"),
            face.recipe("multi", "bar"),
        ):
            assert sorted(third.keys("*")) == [b"bar", b"lock:foo"]
        with pytest.raises(holdfast.Unavailable, match="password"):
            connect(f"redis://127.0.0.1:{server.port}/3").recipe("watch", "foo").acquire()


def test_one_of_which_the_server_remembers_something_is_not_used_again(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    engine = client._driver.engine
    link = engine.open_connection(1.0)
    engine.call_on(link, (WATCH,), 1.0)
    engine.close_connection(link)
    assert engine.open_connection(1.0) is not link
    other = engine.open_connection(1.0)
    engine.call_on(other, (WATCH, UNWATCH), 1.0)
    engine.close_connection(other)
    assert engine.open_connection(1.0) is other


def test_a_lost_link_says_so_at_once_and_for_good(client: holdfast.Client, admin: redis.Redis) -> None:
    engine = client._driver.engine
    link = engine.open_connection(1.0)
    admin.client_kill_filter(_type="normal", skipme=True)
    for _ in range(2):
        with pytest.raises(StepFailed) as caught:
            engine.call_on(link, (GET,), 1.0)
        assert caught.value.connection_broke
    engine.close_connection(link)


def test_an_error_is_the_reply_of_its_command_alone(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.rpush("foo", "a list")
    engine = client._driver.engine
    link = engine.open_connection(1.0)
    watched, got, unwatched = engine.call_on(link, (WATCH, GET, UNWATCH), 1.0)
    assert (watched, unwatched) == (b"OK", b"OK")
    assert isinstance(got, StepFailed)


def test_what_fails_gives_its_link_up(face: Any, admin: redis.Redis) -> None:
    def use(name: str) -> None:
        recipe = face.recipe(name, "foo")
        admin.delete("lock:foo")
        assert recipe.acquire()
        admin.delete("lock:foo")
        admin.rpush("lock:foo", "a list")
        with pytest.raises(holdfast.Unsupported, match="lock 'lock[:.]foo'"):
            recipe.release()
        if name == "watch":
            with pytest.raises(holdfast.Unsupported, match="lock 'lock[:.]foo'"):
                recipe.acquire()

    for name in ("watch", "setnx_repair"):
        use(name)
    before = connections_of(admin)
    for _ in range(5):
        for name in ("watch", "setnx_repair"):
            use(name)
    eventually(lambda: connections_of(admin) <= before)


def test_a_fork_in_the_middle_leaves_the_link_to_the_parent(client: holdfast.Client, admin: redis.Redis) -> None:
    attempt = ByHand(client, client.recipe("watch", "foo")._acquire(0.0)).until("MULTI")
    child = os.fork()
    if child == 0:
        try:
            gc.collect()
            with client.recipe("watch", "bar", wait=0):
                os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease = attempt.finish()
    assert lease
    lease.release()


def test_threads_do_not_share_one(client: holdfast.Client) -> None:
    counter = 0

    def work() -> None:
        nonlocal counter
        for _ in range(20):
            with client.recipe("watch", "foo", sleep=0.001):
                value = counter
                counter = value + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == 80


@asyncio_test
async def test_tasks_do_not_share_one_and_few_rest(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        before = connections_of(admin)

        async def work(number: int) -> None:
            async with client.recipe("watch", f"foo{number}"):
                pass

        await asyncio.gather(*map(work, range(40)))
        await async_eventually(lambda: connections_of(admin) <= before + 16)


@asyncio_test
async def test_who_is_cancelled_takes_its_link_down(server: Server, url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        async with client.recipe("watch", "foo"):
            pass
        before = connections_of(admin)
        server.pause()
        task = asyncio.ensure_future(client.recipe("watch", "foo").acquire())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.resume()
        await async_eventually(lambda: connections_of(admin) == before - 1)
        async with client.recipe("watch", "foo", wait=5):
            assert connections_of(admin) == before


def test_a_new_event_loop_has_links_of_its_own(url: str, admin: redis.Redis) -> None:
    client = holdfast.aio.connect(url)

    async def use() -> None:
        async with client.recipe("watch", "foo", wait=5):
            pass

    before = connections_of(admin)
    with warnings.catch_warnings():
        # What was left open in a loop that has ended can only be closed by the garbage collector, which says so.
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            asyncio.run(use())
            gc.collect()
        asyncio.run(client.aclose())
        gc.collect()
    eventually(lambda: connections_of(admin) == before)
