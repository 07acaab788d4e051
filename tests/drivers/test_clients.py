"""A client's life: lazy, closed with leases held, used after that, default, and moved between event loops."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import Script, asyncio_test, connections_of, eventually, lock_keys, took


def test_nothing_is_contacted_until_the_first_lock_is(connect: Any) -> None:
    connect("redis://127.0.0.1:1/0").lock("x")


def test_closing_tells_holders_and_leaves_the_key_to_its_ttl(connect: Any, url: str, admin: redis.Redis) -> None:
    told: list[Any] = []
    face = connect(url)
    lease = face.lock("x", ttl=0.5, on_lost=told.append).acquire(timeout=5)
    face.client.close() if connect.kind == "blocking" else face._call(face.client.aclose())
    assert not lease.held
    assert lease.lost.is_set()
    eventually(lambda: told)
    with pytest.raises(holdfast.LeaseLost, match="closed"):
        lease.check()
    with took(less_than=2.0), pytest.raises(holdfast.LeaseLost, match="closed"):
        lease.release()
    eventually(lambda: lock_keys(admin) == [], 3.0, "it is not renewed any more")


def test_closed_client_says_so(connect: Any, url: str) -> None:
    face = connect(url)
    lock = face.lock("x")
    with lock:
        pass
    close = face.client.close if connect.kind == "blocking" else lambda: face._call(face.client.aclose())
    close()
    close()  # once more does no harm
    for ask in (lambda: lock.acquire(timeout=5), lock.locked, lambda: enter(face.lock("y"))):
        with took(less_than=1.0), pytest.raises(holdfast.Unavailable, match="client was closed"):
            ask()


def enter(lock: Any) -> None:
    with lock:
        pass


def test_closing_ends_connections_and_threads(url: str, admin: redis.Redis) -> None:
    before, threads = connections_of(admin), threading.active_count()
    for _ in range(5):
        with holdfast.connect(url) as client, client.lock("x", ttl=0.3):
            time.sleep(0.2)  # the keeper has a connection by now
    eventually(lambda: connections_of(admin) <= before)
    eventually(lambda: threading.active_count() <= threads)


@asyncio_test
async def test_asyncio_closing_ends_connections_and_tasks(url: str, admin: redis.Redis) -> None:
    before = connections_of(admin)
    for _ in range(5):
        async with holdfast.aio.connect(url) as client, client.lock("x", ttl=0.3):
            await asyncio.sleep(0.2)
    assert len(asyncio.all_tasks()) == 1
    await asyncio.sleep(0.05)
    assert connections_of(admin) <= before


def test_waiter_is_freed_by_closing(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    admin.set("x", "another's")
    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock("x").acquire()
        except holdfast.HoldfastError as error:
            outcomes.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    client.close()
    thread.join(5)
    assert [type(error) for error in outcomes] == [holdfast.Unavailable]


@asyncio_test
async def test_asyncio_waiter_is_freed_by_closing(url: str, admin: redis.Redis) -> None:
    admin.set("x", "another's")
    client = holdfast.aio.connect(url)
    waiting = asyncio.create_task(client.lock("x").acquire())
    await asyncio.sleep(0.2)
    await client.aclose()
    with took(less_than=3.0), pytest.raises(holdfast.Unavailable, match="closed"):
        await waiting


def test_unclosed_client_does_not_delay_exit(url: str) -> None:
    code = """
    client = holdfast.connect(url)
    lease = client.lock("x", ttl=30).acquire()
    say("held")
    """
    with took(less_than=10.0), Script(code, url) as script:
        script.hear("held")
        assert script.wait() == 0


def test_two_event_loops_in_a_row(url: str, admin: redis.Redis) -> None:
    client = holdfast.aio.connect(url)
    lock = client.lock("x", ttl=0.6)

    async def first() -> Any:
        async with lock:
            pass
        return await client.lock("kept", ttl=0.6).acquire()

    async def second(kept: Any) -> None:
        with pytest.raises(holdfast.LeaseLost, match="event loop"):
            await kept.release()
        assert not kept.held
        async with lock as lease:
            await asyncio.sleep(1.0)
            assert lease.held, "there is a keeper in this loop, too"
        await client.aclose()

    with warnings.catch_warnings():
        # What was left open in a loop that has ended can only be closed by the garbage collector, which says so.
        warnings.simplefilter("ignore", ResourceWarning)
        kept = asyncio.run(first())
        asyncio.run(second(kept))
        del kept
        gc.collect()
    eventually(lambda: lock_keys(admin) == [], 3.0)


def test_default_client_is_made_on_first_use(server: Server) -> None:
    code = """
    import asyncio
    with holdfast.lock("x", wait=5) as lease:
        say(redis.Redis.from_url(url).get("x").decode() == lease.token)
    with holdfast.lock("x", wait=5):
        pass
    async def main():
        async with holdfast.aio.lock("x", wait=5) as lease:
            say(lease.held)
        await holdfast.aio._default.aclose()
    asyncio.run(main())
    os._exit(0)
    """
    with Script(code, server.url, environment={"HOLDFAST_URL": server.url}) as script:
        script.hear("True")
        script.hear("True")


def test_local_only_warning_is_given_once(tmp_path: Path) -> None:
    # Nothing is contacted, so no embedded server is started either.
    code = """
import warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    import holdfast, holdfast.aio
    holdfast.connect()
    holdfast.connect()
    holdfast.aio.connect()
    holdfast.connect("local://")
print([(warning.category.__name__, warning.filename) for warning in caught])
"""
    place = tmp_path / "script.py"
    place.write_text(code)
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(place)], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout.strip() == str([("LocalOnlyWarning", str(place))]), done.stderr


def test_naming_a_server_or_local_silences_the_warning(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.connect()
        holdfast.connect("local://")
