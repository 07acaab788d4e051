"""Reentrant locks of real threads, tasks and processes."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.kinds.rlock import ReentrantLease
from tests.interrupts.test_interrupts import MOMENTS
from tests.processes.test_fork import in_child
from tests.servers import Server
from tests.support import Script, asyncio_test, eventually, lock_keys

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what a test here is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_a_forked_child_owns_nothing(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.rlock("x")
    lease = lock.acquire()
    assert lease
    assert lock.acquire()

    def work() -> None:
        assert not lease.held
        for attempt in (lease.release, lock.release, client.rlock("x").release):
            with pytest.raises(holdfast.LeaseLost, match="forked"):
                attempt()
        assert lock.acquire(blocking=False) is None, "the parent has it"
        with client.rlock("y"), client.rlock("y", wait=0):
            pass

    in_child(work)
    assert lease.held
    assert admin.get("x") == lease.token.encode()
    lock.release()
    lock.release()
    assert lock_keys(admin) == []


def test_a_child_forked_within_nested_blocks_leaves_them_without_touching_the_lock(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    def work() -> None:
        with pytest.raises(holdfast.LeaseLost, match="forked"):
            inner.__exit__(None, None, None)
        with pytest.raises(holdfast.LeaseLost, match="forked"):
            outer.__exit__(None, None, None)
        assert admin.exists("x")

    outer = inner = client.rlock("x")
    with outer as lease, inner:
        in_child(work)
        assert lease.held
    assert lock_keys(admin) == []


@asyncio_test
async def test_a_task_is_an_owner_not_the_thread(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x")
        inside: list[str] = []

        async def work(name: str) -> None:
            async with lock, lock, client.rlock("x"):
                inside.append(name)
                assert inside == [name]
                await asyncio.sleep(0.005)
                inside.remove(name)

        await asyncio.gather(*(work(str(number)) for number in range(8)))


@asyncio_test
async def test_a_task_made_in_the_block_is_another_owner(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x")
        async with lock:
            assert await asyncio.create_task(lock.acquire(blocking=False)) is None
            with pytest.raises(holdfast.NotHeld):
                await asyncio.create_task(lock.release())


@asyncio_test
async def test_losing_the_lease_cancels_the_innermost_body_and_ends_in_lease_lost(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x", ttl=5)
        seen: list[str] = []
        with pytest.raises(holdfast.LeaseLost):
            async with lock:
                try:
                    async with lock:
                        try:
                            admin.set("x", "thief")
                            await asyncio.sleep(20)
                        except asyncio.CancelledError:
                            seen.append("cancelled")
                            raise
                finally:
                    seen.append("left")
        assert seen == ["cancelled", "left"]
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        assert admin.get("x") == b"thief"


@asyncio_test
async def test_a_block_within_a_bare_acquire_is_cancelled_too(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x", ttl=5)
        await lock.acquire()
        with pytest.raises(holdfast.LeaseLost):
            async with lock:
                admin.delete("x")
                await asyncio.sleep(20)
        with pytest.raises(holdfast.LeaseLost):
            await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await lock.release()


@asyncio_test
async def test_a_cancelled_task_gives_all_levels_back(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("x")
        ready = asyncio.Event()

        async def work() -> None:
            async with lock, lock:
                ready.set()
                await asyncio.sleep(20)

        task = asyncio.create_task(work())
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lock_keys(admin) == []
        async with client.rlock("x", wait=0):
            pass


def test_a_block_may_be_left_in_another_thread_than_it_was_entered_in(client: holdfast.Client) -> None:
    """As a generator that is closed elsewhere does."""
    lock = client.rlock("x")
    lock.__enter__()
    lock.__enter__()
    for _ in range(2):
        thread = threading.Thread(target=lock.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
    with client.lock("x", wait=0):
        pass


def test_threads_of_many_processes_count_without_a_loss(server: Server, admin: redis.Redis) -> None:
    code = """
    import threading
    client, counter = holdfast.connect(url), redis.Redis.from_url(url)
    def add():
        for _ in range(10):
            with client.rlock("x", wait=60):
                seen = int(counter.get("n") or 0)
                with client.rlock("x", wait=0):
                    counter.set("n", seen + 1)
    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    """
    scripts = [Script(code, server.url) for _ in range(3)]
    for script in scripts:
        with script:
            script.finish()
    assert admin.get("n") == b"120"
    assert lock_keys(admin) == ["n"]


def test_a_dropped_lease_is_noticed_though_it_was_taken_twice(client: holdfast.Client, admin: redis.Redis) -> None:
    def drop() -> None:
        lock = client.rlock("x", ttl=1.5)
        assert lock.acquire()
        assert client.rlock("x").acquire()

    with pytest.warns(ResourceWarning, match="dropped"):
        drop()
    eventually(lambda: not admin.exists("x"))


# As tests/interrupts/test_interrupts.py does it: a SIGINT is met after each single bytecode of the library in turn.
EVERY_MOMENT = (
    MOMENTS
    + """
client = holdfast.connect(url)
lock = client.rlock("x")
with lock, lock:
    pass
moment = interrupted = wrong = 0
while True:
    moment += 1
    tracer = Tracer(moment)
    outer = lock.acquire(timeout=3)
    try:
        if sys.argv[2] == "enter":
            sys.settrace(tracer)
            lock.__enter__()
            sys.settrace(None)
        else:
            lock.__enter__()
            sys.settrace(tracer)
            lock.__exit__(None, None, None)
            sys.settrace(None)
        for _ in range(9):
            pass  # a place to be interrupted, if it has not been before
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    # It may have come right after __enter__ had returned, or before __exit__ had begun: then we are inside.
    if lock._entered:
        lock.__exit__(None, None, None)
    if outer._depth != 1 or lock._entered or not outer.held:
        wrong += 1
        say("wrong after", tracer.where, outer._depth, len(lock._entered))
        break
    lock.release()
    if tracer.left > 0:
        break
    if admin.exists("x"):
        say("a key is left after", tracer.where)
        break
say(interrupted > 30, wrong)
client.close()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("which", ["enter", "exit"])
def test_interrupted_after_any_bytecode_the_count_is_right(server: Server, which: str) -> None:
    with Script(EVERY_MOMENT, server.url, which) as script:
        assert script.finish(90.0, quiet=False) == "True 0\n"


@asyncio_test
async def test_what_gather_has_acquired_is_not_ours_and_the_error_says_so(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        lock = client.rlock("a")
        (lease,) = await asyncio.gather(lock.acquire())
        assert lease is not None
        for release in (lock.release, lease.release):
            with pytest.raises(holdfast.NotHeld, match=r"asyncio.gather, .* use acquire\(timeout=...\)"):
                await release()
        assert isinstance(lease, ReentrantLease)
        lease._owner = asyncio.current_task()  # else no caller could release it
        await lease.release()
        async with asyncio.timeout(5):
            await lock.acquire()
        assert await lock.acquire(timeout=5)
        for _ in range(2):
            await lock.release()
