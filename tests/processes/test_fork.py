"""After a fork the child holds nothing, frees nothing and shares no socket, and what it inherited works afresh."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.proxy import Proxy, delay
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, eventually, lock_keys

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(work: Callable[[], object], patience: float = 20.0) -> None:
    """Run it in a forked child; whatever it raises there, or its hanging, fails the test here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            signal.alarm(int(patience))  # its default action ends a child that hangs
            work()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        complaint = said.read().decode()
    _, status = os.waitpid(child, 0)
    assert not complaint, complaint
    assert status == 0, f"the child ended with {status}: it hung, or was killed"


def await_renewal(client: holdfast.Client) -> None:
    before = client.statistics().renewals
    eventually(lambda: client.statistics().renewals > before, what="the keeper renews")


def sockets() -> set[str]:
    """The sockets that this process has open, by inode."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one with which the directory is read
        if where.startswith("socket:"):
            found.add(where)
    return found


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to tell sockets apart")


def test_child_holds_nothing_and_frees_nothing(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    lease = lock.acquire()
    assert lease

    def work() -> None:
        assert not lease.held
        assert lease.remaining() == 0
        assert lease.lost.is_set()
        assert lease.lost.wait(0)
        for attempt in (lease.check, lease.release, lock.release, lambda: lease.extend(60)):
            with pytest.raises(holdfast.LeaseLost, match="forked"):
                attempt()

    in_child(work)
    assert admin.get("x") == lease.token.encode()
    assert lease.held
    lease.release()
    assert lock_keys(admin) == []


def test_child_that_leaves_the_with_block_frees_nothing(client: holdfast.Client, admin: redis.Redis) -> None:
    def work() -> None:
        with pytest.raises(holdfast.LeaseLost, match="forked"):
            lock.__exit__(None, None, None)
        with pytest.raises(KeyError):  # its own error is what it gets, with ours noted on it
            try:
                raise KeyError("the child's own")
            except KeyError as error:
                other.__exit__(KeyError, error, None)
                assert "forked" in "".join(error.__notes__)
                raise

    lock, other = client.lock("x"), client.lock("y")
    with lock as lease, other:
        in_child(work)
        assert lease.held
        assert lock_keys(admin) == ["x", "y"]
    assert lock_keys(admin) == []


def test_child_that_drops_the_lease_frees_nothing_and_is_not_warned(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    leases = [client.lock("x").acquire()]
    in_child(leases.clear)
    assert lock_keys(admin) == ["x"]
    (lease,) = leases
    assert lease
    lease.release()


def test_child_that_tried_the_lock_in_vain_can_still_leave_the_block(client: holdfast.Client) -> None:
    def work() -> None:
        assert lock.acquire(blocking=False) is None
        with pytest.raises(holdfast.LeaseLost):
            lock.__exit__(None, None, None)

    lock = client.lock("x")
    with lock:
        in_child(work)


def test_inherited_lock_and_client_work_afresh(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x", ttl=6.0)
    lease = lock.acquire()
    assert lease

    def work() -> None:
        assert lock.acquire(blocking=False) is None, "the parent has it"
        with client.lock("y"):
            pass
        lease_of_child = lock.acquire(timeout=15)
        assert lease_of_child
        assert lease_of_child.fence > lease.fence
        assert f"-{os.getpid()}" in lease_of_child.token
        await_renewal(client)
        assert lease_of_child.held, "the child has a keeper of its own"
        lock.release()

    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            work()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    await_renewal(client)
    assert lease.held, "the parent's keeper goes on"
    lease.release()
    assert os.waitpid(child, 0)[1] == 0
    assert lock_keys(admin) == []


@needs_proc
def test_no_socket_is_shared(server: Server, admin: redis.Redis) -> None:
    admin.ping()
    before = sockets()
    with holdfast.connect(server.url) as client, client.lock("x", ttl=6.0) as lease:
        await_renewal(client)  # so the keeper has a connection
        ours = sockets() - before
        assert ours

        def work() -> None:
            assert not sockets() & ours
            with client.lock("y"):
                assert sockets() - before
                assert not sockets() & ours

        in_child(work)
        await_renewal(client)
        assert lease.held


@needs_proc
def test_socket_that_a_thread_is_waiting_on_is_not_shared_either(proxy: Proxy, admin: redis.Redis) -> None:
    with holdfast.connect(proxy.url) as client:
        with client.lock("met"):
            pass
        proxy.on("acquire", delay(1.0), times=2)
        count = proxy.seen("acquire")
        leases: list[Any] = []
        threads = [
            threading.Thread(target=lambda name=name: leases.append(client.lock(name).acquire())) for name in ("x", "y")
        ]
        for thread in threads:
            thread.start()
        proxy.await_request("acquire", count + 2)
        ours = holdfasts_sockets(client)
        assert len(ours) == 2
        assert ours <= sockets()

        def work() -> None:
            assert not sockets() & ours

        in_child(work)
        for thread in threads:
            thread.join()
        assert all(lease.held for lease in leases)
        for lease in leases:
            lease.release()


def holdfasts_sockets(client: holdfast.Client) -> set[str]:
    """The sockets that the client's calls go over, by inode."""
    return {f"socket:[{os.fstat(line._sock.fileno()).st_ino}]" for line in client._driver.engine._open}


def test_fork_amid_threads_that_lock_and_release(server: Server) -> None:
    code = """
    import threading, traceback, warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    client = holdfast.connect(url)
    shared = client.lock("shared")
    stop = threading.Event()
    failures = []
    def cycle(number):
        try:
            while not stop.is_set():
                with client.lock(f"own{number}"):
                    pass
                with shared:
                    pass
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = []
    for number in range(25):
        time.sleep(0.003)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(70)
                for _ in range(3):
                    with client.lock(f"child{number}"):
                        pass
                    with shared:
                        pass
                    with client.lock("own0"):
                        pass
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    stop.set()
    for thread in threads:
        thread.join()
    client.close()
    say(statuses == [0] * 25 or statuses, failures)
    left = [key for key in redis.Redis.from_url(url).keys("*") if b":hf1:" not in key]
    say(left)
    os._exit(0)
    """
    with Script(code, server.url) as script:
        script.hear("True []", timeout=80.0)
        # A child that was forked while a thread had just been granted a lock knows nothing of it; the thread does.
        script.hear("[]")


def _try_inherited(lease: Any, lock: Any, client: Any) -> None:
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    with client.lock("of the child"):
        pass
    assert lock.acquire(blocking=False) is None


def test_multiprocessing_fork(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("x")
    with lock as lease:
        # Forked arguments are inherited, not pickled.
        process = multiprocessing.get_context("fork").Process(target=_try_inherited, args=(lease, lock, client))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert admin.get("x") == lease.token.encode()
        assert lease.held


def _try_afresh(url: str) -> None:
    with holdfast.connect(url) as client:
        if client.lock("x").acquire(blocking=False) is not None:
            sys.exit("the parent's lock was free")
        with client.lock("of the child"):
            pass


def test_multiprocessing_spawn(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    with client.lock("x") as lease:
        process = multiprocessing.get_context("spawn").Process(target=_try_afresh, args=(url,))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        assert admin.get("x") == lease.token.encode()
        assert lease.held


def test_nothing_that_is_held_can_be_pickled(client: holdfast.Client) -> None:
    lock = client.lock("x")
    with lock as lease:
        for thing in (client, lock, lease):
            with pytest.raises(TypeError, match="in the other process"):
                pickle.dumps(thing)


@asyncio_test
async def test_asyncio_child_holds_nothing_and_the_parent_hears_its_server(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.lock("x", ttl=6.0)
        async with lock as lease:

            def work() -> None:
                assert not lease.held
                with pytest.raises(holdfast.LeaseLost, match="forked"):
                    lease.check()

                async def again() -> None:
                    with pytest.raises(holdfast.LeaseLost, match="forked"):
                        await lease.release()
                    assert await lock.acquire(blocking=False) is None
                    async with client.lock("y"):
                        pass

                asyncio.run(again())

            in_child(work)
            assert admin.get("x") == lease.token.encode()
            # Were the parent's socket no longer watched, neither a renewal nor the release would get its reply.
            before = client.statistics().renewals
            await async_eventually(lambda: client.statistics().renewals > before, what="a renewal gets its reply")
            assert lease.held
            async with asyncio.timeout(20.0):
                async with client.lock("z"):
                    pass
        assert lock_keys(admin) == []


@needs_proc
@asyncio_test
async def test_asyncio_child_shares_no_socket(url: str, admin: redis.Redis) -> None:
    admin.ping()
    before = sockets()
    async with holdfast.aio.connect(url) as client, client.lock("x"):
        await async_eventually(lambda: client.statistics().renewals, what="the keeper has a connection")
        ours = sockets() - before
        assert ours
        in_child(lambda: eventually(lambda: not sockets() & ours, 10.0, "the child has let go of them"))
