"""Locks on a real memcached, on both faces."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.server_memcached import MemcachedServer


@pytest.fixture(scope="session")
def _session_memcached() -> Iterator[MemcachedServer]:
    with MemcachedServer("-m", "64") as server:
        yield server


@pytest.fixture
def memcached(_session_memcached: MemcachedServer) -> Iterator[MemcachedServer]:
    _session_memcached.client().flushall()
    yield _session_memcached
    _session_memcached.resume()


def test_it_excludes_and_lets_the_next_one_in(memcached: MemcachedServer, connect: Any) -> None:
    one, two = connect(memcached.url), connect(memcached.url)
    lease = one.lock("a", ttl=5).acquire()
    assert two.lock("a").acquire(blocking=False) is None
    assert two.lock("a").locked()
    lease.release()
    again = two.lock("a").acquire(timeout=5)
    again.release()
    assert not memcached.client().exists("a")


def test_no_update_is_lost_between_threads_and_clients(memcached: MemcachedServer) -> None:
    counter = [0]

    def add() -> None:
        with holdfast.connect(memcached.url) as client:
            for _ in range(20):
                with client.lock("counter", wait=30):
                    seen = counter[0]
                    time.sleep(0.001)
                    counter[0] = seen + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == [80]


def test_the_recipe_memcached_add_runs_on_a_real_server(memcached: MemcachedServer) -> None:
    with holdfast.connect(memcached.url) as client:
        with pytest.warns(holdfast.UnsafeRecipeWarning, match="memcached_add"):
            lock = client.recipe("memcached_add", "foo", ttl=5)
        with lock:
            added = memcached.client().call("add", "foo", "other", 5, noreply=False)
            assert added is False, "it excludes a plain add"
            assert lock.locked()
            assert client.recipe("memcached_add", "foo", ttl=5).acquire(blocking=False) is None
        assert not memcached.client().exists("foo")
        with pytest.raises(holdfast.Unsupported, match="recipe for redis is not supported by memcached"):
            client.recipe("set_nx", "foo")


def test_the_recipe_memcached_add_runs_under_asyncio(memcached: MemcachedServer) -> None:
    async def main() -> None:
        async with holdfast.aio.connect(memcached.url) as client:
            with pytest.warns(holdfast.UnsafeRecipeWarning, match="memcached_add"):
                lock = client.recipe("memcached_add", "foo", ttl=5)
            async with lock:
                assert await lock.locked()
            assert not await lock.locked()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize("key", ["with space", "snow\u2603", "x" * 251], ids=["space", "snow", "long"])
def test_a_key_of_a_recipe_that_memcached_does_not_allow_is_named(memcached: MemcachedServer, key: str) -> None:
    async def aio() -> None:
        async with holdfast.aio.connect(memcached.url) as client:
            await client.recipe("memcached_add", key, ttl=5).acquire(blocking=False)

    with holdfast.connect(memcached.url) as client:
        lock = client.recipe("memcached_add", key, ttl=5)
        for ask in (lambda: lock.acquire(blocking=False), lock.locked, lambda: asyncio.run(aio())):
            with pytest.raises(holdfast.InvalidName, match="cannot be a name: a key of memcached is") as caught:
                ask()
            assert caught.value.name == key


def test_after_a_restart_a_call_goes_on_without_the_old_locks(connect: Any) -> None:
    with MemcachedServer() as server:
        client = connect(server.url)
        lease = client.lock("a", ttl=30).acquire()
        server.kill()
        with pytest.raises(holdfast.Unavailable, match="nothing listens there"):
            client.lock("b").acquire(blocking=False)
        server.start()
        client.lock("b").acquire(timeout=10).release()
        with pytest.raises(holdfast.LeaseLost, match="expired or was deleted"):
            lease.release()


@pytest.fixture(autouse=True)
def _each_test_warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.face._warned", set())


def test_an_evicted_lock_is_noticed_at_the_next_renewal(memcached: MemcachedServer, connect: Any) -> None:
    lease = connect(memcached.url).lock("a", ttl=1.5).acquire()
    memcached.client().call("delete", "a", noreply=False)  # as eviction does
    assert lease.lost.wait(10)
    with pytest.raises(holdfast.LeaseLost, match="expired or was deleted") as caught:
        lease.release()
    assert caught.value.fence is None


def test_a_holder_whose_item_is_anothers_does_not_touch_it(memcached: MemcachedServer, connect: Any) -> None:
    lease = connect(memcached.url).lock("a", ttl=30).acquire()
    memcached.client().call("set", "a", "thief", 30, noreply=False)
    with pytest.raises(holdfast.LeaseLost, match="another holder"):
        lease.release()
    assert memcached.client().call("get", "a") == b"thief"


def test_a_renewal_beside_a_release_takes_no_lease_away(memcached: MemcachedServer) -> None:
    """A renewal writes the item, between the look and the delete of the release."""
    with holdfast.connect(memcached.url) as client:
        for _ in range(30):
            lock = client.lock("a", ttl=5)
            lease = lock.acquire()
            renewing = threading.Thread(target=_extend_often, args=(lease,))
            renewing.start()
            time.sleep(0.002)
            lease.release()
            renewing.join()


def _extend_often(lease: holdfast.Lease) -> None:
    try:
        for _ in range(20):
            lease.extend(6)
    except holdfast.HoldfastError:
        pass  # released meanwhile


def test_there_is_no_fence(memcached: MemcachedServer, connect: Any) -> None:
    lease = connect(memcached.url).lock("a").acquire()
    assert lease.fence is None
    assert "fence" not in repr(lease)
    lease.release()


def test_it_is_renewed_and_extended(memcached: MemcachedServer, connect: Any) -> None:
    lease = connect(memcached.url).lock("a", ttl=1).acquire()
    time.sleep(3.5)
    lease.check()
    lease.extend(30)
    assert lease.remaining() > 25
    lease.release()


@pytest.mark.parametrize("name", ["with spaces", "snow ☃", "x" * 400])
def test_a_name_that_is_no_key_of_memcached_has_a_digest(memcached: MemcachedServer, connect: Any, name: str) -> None:
    one, two = connect(memcached.url), connect(memcached.url)
    lease = one.lock(name).acquire()
    assert two.lock(name).acquire(blocking=False) is None
    beside = two.lock(name + ".").acquire(blocking=False)
    beside.release()
    lease.release()


def test_what_memcached_does_not_offer_says_which_engine_does(memcached: MemcachedServer) -> None:
    client = holdfast.connect(memcached.url)
    for ask in (
        lambda: client.rlock("a"),
        lambda: client.rwlock("a"),
        lambda: client.semaphore("a", 2),
        lambda: client.lock("a", "b"),
        lambda: client.latch("a", 1),
        lambda: client.election("a"),
        lambda: client.adopt("hf1-x"),
        lambda: client.get_or_compute("a", int),
    ):
        with pytest.raises(holdfast.Unsupported, match=r"not supported by memcached://.*: use .*redis://"):
            ask()
    lease = client.lock("a").acquire()
    with pytest.raises(holdfast.Unsupported, match="hand_over"):
        lease.hand_over()
    lease.release()
    with pytest.raises(holdfast.Unsupported, match="30 days"):
        client.lock("a", ttl=40 * 86_400).acquire()
    with client.lock("a") as lease, pytest.raises(holdfast.Unsupported, match="memcached has no fences"):
        holdfast.guard.stamp(lease)
    client.close()


def test_the_longest_ttl_is_a_second_less_than_30_days(memcached: MemcachedServer, connect: Any) -> None:
    client = connect(memcached.url)
    client.lock("a", ttl=30 * 86_400 - 1).acquire().release()
    with pytest.raises(holdfast.Unsupported, match="a ttl of 2592000 s on memcached"):
        client.lock("a", ttl=30 * 86_400).acquire()


def test_a_dead_server_is_unavailable_at_once(connect: Any) -> None:
    with pytest.raises(holdfast.Unavailable, match=r"memcached://127.0.0.1:1: nothing listens there"):
        connect("memcached://127.0.0.1:1").lock("a").acquire(blocking=False)


def test_a_hung_server_does_not_hang_the_caller(memcached: MemcachedServer, connect: Any) -> None:
    client = connect(memcached.url, timeout=0.5)
    with_lock = client.lock("a").acquire()
    with_lock.release()
    memcached.pause()
    with pytest.raises(holdfast.Unavailable, match="did not answer"):
        client.lock("a").acquire(blocking=False)


def test_a_forked_child_holds_nothing_and_can_lock(memcached: MemcachedServer) -> None:
    with holdfast.connect(memcached.url) as client:
        lease = client.lock("a").acquire()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                assert not lease.held
                assert client.lock("a").acquire(blocking=False) is None
                with client.lock("b"):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        lease.check()
        lease.release()


def test_statistics_count_its_connections(memcached: MemcachedServer) -> None:
    with holdfast.connect(memcached.url) as client, client.lock("a"):
        found = client.statistics()
        assert (found.holds, list(found.nodes)) == (1, [memcached.url])
        assert 1 <= found.connections <= 3


def test_the_command_line_runs_under_a_lock_on_memcached(memcached: MemcachedServer) -> None:
    run = [sys.executable, "-m", "holdfast", "run", "nightly", "--", sys.executable, "-c", "print('ran')"]
    environment = {**os.environ, "HOLDFAST_URL": memcached.url}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"
