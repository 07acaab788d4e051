"""A client's life: lazy, closed with leases held, used after that, default, and moved between event loops."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.lua import SCRIPTS
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, connections_of, eventually, lock_keys, took


def test_nothing_is_contacted_until_the_first_lock_is(connect: Any) -> None:
    connect("redis://127.0.0.1:1/0").lock("x")


def test_close_has_both_names_under_asyncio(url: str, admin: redis.Redis) -> None:
    async def main() -> None:
        client = holdfast.aio.connect(url)
        lease = await client.lock("x").acquire()
        await client.close()
        assert not lease.held
        await client.aclose()

    asyncio.run(main())
    assert lock_keys(admin) == []


def test_closing_gives_everything_back_in_one_batch(connect: Any, url: str, admin: redis.Redis) -> None:
    face = connect(url)
    leases = [face.lock(f"x{number}").acquire(timeout=5) for number in range(50)]
    with admin.monitor() as monitor:
        face.client.close() if connect.kind == "blocking" else face._call(face.client.close())
        admin.ping()
        seen = []
        for line in monitor.listen():
            if line["command"].startswith("PING"):
                break
            renews = SCRIPTS["renew"].sha.decode() in line["command"]  # on a busy machine it may be time for that
            if line["client_type"] != "lua" and "x" in line["command"] and not renews:
                seen.append(line)
    assert len({(line["client_address"], line["client_port"]) for line in seen}) == 1
    assert lock_keys(admin) == []
    assert {lease.reason for lease in leases} == {"its client was closed"}


@pytest.mark.parametrize("on_lost", ["cancel", "nonsense", 5])
def test_on_lost_of_a_client_is_checked_as_that_of_a_lock(on_lost: Any) -> None:
    for refused in (holdfast.connect, holdfast.aio.connect):
        if on_lost == "cancel" and refused is holdfast.aio.connect:
            assert refused("redis://127.0.0.1:1", on_lost=on_lost) is not None
            continue
        with pytest.raises(holdfast.InvalidConfig, match="on_lost="):
            refused("redis://127.0.0.1:1", on_lost=on_lost)


@asyncio_test
async def test_on_lost_of_a_client_may_cancel_what_acquire_has_obtained(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url, on_lost="cancel") as client:

        async def work() -> None:
            lease = await client.lock("x").acquire()
            admin.delete("x")
            try:
                await asyncio.sleep(60)
            finally:
                with pytest.raises(holdfast.LeaseLost):
                    await lease.release()

        with took(less_than=20.0), pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(work())


@asyncio_test
async def test_on_lost_of_a_client_is_called_and_the_body_is_cancelled_all_the_same(
    url: str, admin: redis.Redis
) -> None:
    """A callback for all locks, such as one that counts losses, takes the protection away from none of them."""
    told: list[str] = []
    async with holdfast.aio.connect(url, on_lost=lambda lease: told.append(lease.name)) as client:
        with pytest.raises(holdfast.LeaseLost):
            async with client.lock("x"):
                admin.delete("x")
                await asyncio.sleep(30)
        own: list[str] = []
        async with client.lock("y", on_lost=lambda lease: own.append(lease.name)) as lease:
            admin.delete("y")
            await lease.lost.wait(10)
            await asyncio.sleep(0.1)
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()
    assert told == ["x"]
    assert own == ["y"]


def test_a_blocking_client_refuses_a_coroutine_function_as_on_lost(client: holdfast.Client, url: str) -> None:
    async def alarm(_: Any) -> None: ...

    for refused in (lambda: client.lock("x", on_lost=alarm), lambda: holdfast.connect(url, on_lost=alarm)):
        with pytest.raises(holdfast.InvalidConfig, match="coroutine function"):
            refused()


def test_a_client_closed_beside_busy_threads_leaves_no_key(url: str, admin: redis.Redis) -> None:
    for _ in range(15):
        client = holdfast.connect(url)
        lost: list[str] = []

        def work(name: str, client: holdfast.Client = client, lost: list[str] = lost) -> None:
            try:
                while True:
                    lease = client.lock(name, ttl=60).acquire()
                    if not lease.held:
                        lost.append(name)
                    lease.release()
            except holdfast.HoldfastError:
                pass

        threads = [threading.Thread(target=work, args=(name,)) for name in ("x", "x", "y", "z")]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        client.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert lost == []
        eventually(lambda: lock_keys(admin) == [], 10.0, "given back, not left to the ttl of a minute")


@asyncio_test
async def test_a_client_closed_beside_busy_tasks_leaves_no_key(url: str, admin: redis.Redis) -> None:
    for _ in range(15):
        client = holdfast.aio.connect(url)

        async def work(name: str, client: holdfast.aio.Client = client) -> None:
            try:
                while True:
                    async with client.lock(name, ttl=60) as lease:
                        assert lease.held
            except holdfast.HoldfastError:
                pass

        tasks = [asyncio.create_task(work(name)) for name in ("x", "x", "y", "z")]
        await asyncio.sleep(0.02)
        await client.aclose()
        await asyncio.gather(*tasks)
        await async_eventually(lambda: lock_keys(admin) == [], what="given back, not left to the ttl of a minute")


def test_on_lost_may_close_the_client(url: str, admin: redis.Redis) -> None:
    """It runs in the very thread that closing waits for."""
    closed = threading.Event()
    client = holdfast.connect(url)

    def on_lost(_: holdfast.Lease) -> None:
        client.close()
        closed.set()

    lease, other = client.lock("x", on_lost=on_lost).acquire(), client.lock("y").acquire()
    admin.delete("x")
    assert closed.wait(10)
    assert not lease.held
    assert not other.held
    assert lock_keys(admin) == []


def test_a_program_that_just_ends_leaves_its_keys_to_their_ttl(url: str, admin: redis.Redis) -> None:
    code = """
    client = holdfast.connect(url, on_lost=lambda lease: say("lost"))
    locks = [client.lock("x", ttl=30), client.semaphore("y", 2), client.rlock("z")]
    leases = [lock.acquire() for lock in locks]
    say("held")
    """
    with Script(code, url) as script:
        script.hear("held")
        assert script.finish() == ""
    assert admin.pttl("x") > 20_000


def test_closing_in_an_atexit_handler_gives_back_without_a_word(url: str, admin: redis.Redis) -> None:
    """By then no thread can be started, in which on_lost could be called."""
    code = """
    import atexit
    client = holdfast.connect(url, on_lost=lambda lease: None)
    lease = client.lock("x", ttl=30).acquire()
    atexit.register(client.close)
    say("held")
    """
    with Script(code, url) as script:
        script.hear("held")
        assert script.finish() == ""
    assert lock_keys(admin) == []


def test_closed_client_says_so(connect: Any, url: str) -> None:
    face = connect(url)
    lock = face.lock("x")
    with lock:
        pass
    close = face.client.close if connect.kind == "blocking" else lambda: face._call(face.client.aclose())
    close()
    close()  # once more does no harm
    for ask in (lambda: lock.acquire(timeout=60), lock.locked, lambda: enter(face.lock("y"))):
        with took(less_than=4.0), pytest.raises(holdfast.Unavailable, match="client was closed"):
            ask()


def enter(lock: Any) -> None:
    with lock:
        pass


def has_renewed(client: holdfast.Client | holdfast.aio.Client) -> bool:
    return client.statistics().renewals > 0


def test_closing_ends_connections_and_threads(url: str, admin: redis.Redis) -> None:
    before, threads = connections_of(admin), threading.active_count()
    for _ in range(5):
        with holdfast.connect(url) as client, client.lock("x"):
            eventually(partial(has_renewed, client), what="the keeper has a connection")
    eventually(lambda: connections_of(admin) <= before)
    eventually(lambda: threading.active_count() <= threads)


@asyncio_test
async def test_asyncio_closing_ends_connections_and_tasks(url: str, admin: redis.Redis) -> None:
    before = connections_of(admin)
    for _ in range(5):
        async with holdfast.aio.connect(url) as client, client.lock("x"):
            await async_eventually(partial(has_renewed, client), what="the keeper has a connection")
    assert len(asyncio.all_tasks()) == 1
    await async_eventually(lambda: connections_of(admin) <= before)


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
    lock = client.lock("x", ttl=2.0)

    async def first() -> Any:
        async with lock:
            pass
        return await client.lock("kept", ttl=0.6).acquire()

    async def second(kept: Any) -> None:
        with pytest.raises(holdfast.LeaseLost, match="event loop"):
            await kept.release()
        assert not kept.held
        async with lock as lease:
            await asyncio.sleep(2.5)
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


def test_local_only_warning_needs_no_caller_outside_the_library(tmp_path: Path) -> None:
    """In a greenlet, or in a thread of ``_thread``, connect itself may be the first frame."""
    code = """
import _thread, os, sys, time, warnings
import holdfast
def show(message, category, *_):
    os.write(1, category.__name__.encode())
    os._exit(0)
warnings.showwarning = show
warnings.simplefilter("always")
sys.unraisablehook = lambda failed: os._exit(1)
_thread.start_new_thread(holdfast.connect, ())
time.sleep(60)
"""
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=60)
    assert done.stdout == b"LocalOnlyWarning"


def test_naming_a_server_or_local_silences_the_warning(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.connect()
        holdfast.connect("local://")


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
