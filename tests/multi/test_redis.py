"""Locks on several names by real threads, tasks and processes."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time

import pytest
import redis

import holdfast
import holdfast.aio
from tests.processes.test_fork import in_child
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, eventually, lock_keys

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what a test here is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NAMES = "abcde"

CROWD = """
import random, threading
seed, threads, cycles = map(int, sys.argv[2:5])
client, counters = holdfast.connect(url), redis.Redis.from_url(url)
wanted = []
def add(dice):
    for _ in range(cycles):
        names = dice.sample("abcde", dice.randint(1, 4))
        with client.lock(*names, wait=90, ttl=5, label="_".join(sorted(names))):
            seen = counters.mget([f"n:{name}" for name in names])
            counters.mset({f"n:{name}": int(value or 0) + 1 for name, value in zip(names, seen)})
        wanted.extend(names)
crowd = [threading.Thread(target=add, args=(random.Random(seed * 100 + number),)) for number in range(threads)]
for thread in crowd:
    thread.start()
for thread in crowd:
    thread.join()
say(*(wanted.count(name) for name in "abcde"))
client.close()
"""


@pytest.mark.long
def test_eight_threads_of_four_processes_with_names_in_any_order(server: Server, admin: redis.Redis) -> None:
    scripts = [Script(CROWD, server.url, number, 8, 6) for number in range(4)]
    totals = [0] * len(NAMES)
    for script in scripts:
        with script:
            for place, count in enumerate(script.hear(timeout=90.0).split()):
                totals[place] += int(count)
            script.finish()
    assert [int(admin.get(f"n:{name}") or 0) for name in NAMES] == totals
    assert [key for key in lock_keys(admin) if not key.startswith("n:")] == []
    assert not admin.keys("*:hf1:queue:*")


SNAPSHOT = """
local seen = {}
for place, key in ipairs(KEYS) do
  seen[place] = {redis.call('GET', key) or '', redis.call('PTTL', key)}
end
return seen
"""


@pytest.mark.long
def test_processes_killed_at_any_moment_hold_all_or_nothing(server: Server, admin: redis.Redis) -> None:
    """What is there in part is kept for a waiter, which does not believe to hold it."""
    look = admin.register_script(SNAPSHOT)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    snapshots = 0

    def check() -> None:
        nonlocal snapshots
        found = dict(zip(NAMES, look(keys=[*NAMES]), strict=True))
        for token in {token for token, _ in found.values() if token}:
            readable = token.decode().rpartition(".")[0]
            names = {*readable.split("-")[-1].split("_")}
            has = {name for name, (owner, _) in found.items() if owner == token}
            if has != names:
                assert has < names
                assert all(found[name][1] <= 1500 for name in has), "a part is held, not kept"
            snapshots += 1

    for round_ in range(2):
        scripts = [Script(CROWD, server.url, 10 * round_ + number, 4, 9999) for number in range(3)]
        try:
            eventually(lambda: [key for key in lock_keys(admin) if not key.startswith("n:")], 30, "no client has begun")
            until = time.monotonic() + 1.0 + dice.random()
            while time.monotonic() < until:
                check()
            for script in scripts[1:]:
                script.send(signal.SIGKILL)
                check()
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                check()
        finally:
            for script in scripts:
                script.send(signal.SIGKILL)
                script.wait()
                script.__exit__(None, None, None)
    assert snapshots > 100
    with holdfast.connect(server.url) as client, client.lock(*NAMES, wait=30):
        pass
    eventually(lambda: not [key for key in lock_keys(admin) if not key.startswith("n:")], 10)


def test_the_dead_cost_others_no_more_than_their_ttl(server: Server, client: holdfast.Client) -> None:
    code = """
    client = holdfast.connect(url)
    lease = client.lock("a", "b", "c", ttl=1).acquire()
    say("held")
    sys.stdin.readline()
    """
    with Script(code, server.url) as script:
        script.hear("held")
        script.send(signal.SIGKILL)
        with client.lock("c", "d", wait=20), client.lock("a", wait=20):
            pass


def test_a_waiter_that_is_killed_holds_nobody_up(server: Server, client: holdfast.Client, admin: redis.Redis) -> None:
    code = """
    client = holdfast.connect(url)
    say("waits")
    client.lock("a", "b").acquire()
    """
    with client.lock("b"), Script(code, server.url) as script:
        script.hear("waits")
        eventually(lambda: admin.exists("b:hf1:queue:{b}"))
        script.send(signal.SIGKILL)
        script.wait()
    with client.lock("a", "b", wait=20):
        pass


@pytest.mark.parametrize("stolen", ["a", "b", "c"])
def test_the_theft_of_any_of_them_is_known_long_before_the_next_renewal(
    client: holdfast.Client, admin: redis.Redis, stolen: str
) -> None:
    lease = client.lock("a", "b", "c", ttl=600).acquire()
    assert lease
    eventually(lambda: client.statistics().tracked == 3, what="the keeper has them watched")
    time.sleep(0.2)
    admin.set(stolen, "thief")
    assert lease.lost.wait(20)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert lock_keys(admin) == [stolen]
    assert client.statistics().tracked == 0


def test_tasks_of_one_loop(url: str, admin: redis.Redis) -> None:
    async def main() -> None:
        async with holdfast.aio.connect(url) as client:
            counters = dict.fromkeys(NAMES, 0)
            wanted = dict.fromkeys(NAMES, 0)

            async def add(dice: random.Random) -> None:
                for _ in range(4):
                    names = dice.sample(NAMES, dice.randint(1, 4))
                    async with client.lock(*names):
                        seen = {name: counters[name] for name in names}
                        await asyncio.sleep(0.001)
                        for name in names:
                            counters[name] = seen[name] + 1
                            wanted[name] += 1

            await asyncio.gather(*(add(random.Random(number)) for number in range(20)))
            assert counters == wanted

    asyncio.run(main())
    assert lock_keys(admin) == []


@asyncio_test
async def test_a_cancelled_waiter_leaves_its_place(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client, holdfast.aio.connect(url) as other:
        async with other.lock("b"):
            waiter = asyncio.create_task(client.lock("a", "b").acquire())
            while not admin.exists("b:hf1:queue:{b}"):
                await asyncio.sleep(0.01)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            await async_eventually(lambda: not admin.exists("b:hf1:queue:{b}"), what="if need be, by the keeper")
        assert lock_keys(admin) == []


def test_it_excludes_a_plain_client_on_any_of_the_names(client: holdfast.Client, admin: redis.Redis) -> None:
    theirs = admin.lock("b", timeout=20, blocking=False)
    with client.lock("a", "b", "c"):
        assert not theirs.acquire()
    assert theirs.acquire()
    assert client.lock("a", "b").acquire(blocking=False) is None
    done = threading.Event()

    def wait() -> None:
        with client.lock("a", "b", wait=20):
            done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: admin.exists("b:hf1:queue:{b}"))
    theirs.release()
    thread.join(20)
    assert done.is_set(), "the client that frees it knows of no queue, so waiters notice by asking"


def test_a_forked_child_holds_none_of_them(client: holdfast.Client, admin: redis.Redis) -> None:
    lock = client.lock("a", "b")

    def work() -> None:
        for attempt in (lease.release, lock.release, lease.check):
            with pytest.raises(holdfast.LeaseLost, match="forked"):
                attempt()
        assert client.lock("b", "c").acquire(blocking=False) is None
        with client.lock("c", "d"):
            pass

    with lock as lease:
        in_child(work)
        lease.check()
    assert lock_keys(admin) == []


def test_a_name_that_is_another_kind_of_lock_is_refused(client: holdfast.Client, admin: redis.Redis) -> None:
    if not hasattr(client, "semaphore"):
        pytest.skip("there is no other kind yet")
    with client.semaphore("b", permits=2), pytest.raises(holdfast.Unsupported, match="semaphore"):
        client.lock("a", "b").acquire(blocking=False)
    assert lock_keys(admin) == []


def test_many_names_at_once(client: holdfast.Client, admin: redis.Redis) -> None:
    names = [f"item:{number}" for number in range(32)]
    with client.lock(*names) as lease:
        assert len(lock_keys(admin)) == 32
        assert len(lease.fences) == 32
    assert lock_keys(admin) == []


def test_it_can_be_released_on_a_full_server(client: holdfast.Client, admin: redis.Redis) -> None:
    lease = client.lock("a", "b").acquire()
    assert lease
    admin.config_set("maxmemory", 1)
    with pytest.raises(holdfast.HoldfastError):
        client.lock("c", "d").acquire(blocking=False)
    lease.release()
    assert lock_keys(admin) == []
