"""Storms on a real server: threads, tasks and processes that all miss at once, and computers that die."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.proxy import LOSE_REPLY, LOSE_REQUEST, Proxy
from tests.servers import Server
from tests.support import Script, asyncio_test, connections_of, eventually

MISSES = 500
VALUE = "k:hf1:cache:value:{k}"
CLAIM = "k:hf1:cache:claim:{k}"


def calls_of(admin: redis.Redis) -> int:
    stats: Any = admin.info("commandstats")
    return sum(stats[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "eval") if f"cmdstat_{name}" in stats)


def test_500_threads_miss_at_once_and_one_computes(client: holdfast.Client, admin: redis.Redis) -> None:
    admin.config_resetstat()
    before = connections_of(admin)
    start = threading.Barrier(MISSES)
    computed: list[int] = []
    values: list[Any] = []
    most = 0

    def compute() -> str:
        nonlocal most
        computed.append(1)
        eventually(lambda: client.statistics().cache_callers[VALUE] == MISSES, timeout=60)
        most = connections_of(admin)
        return "value"

    def miss() -> None:
        start.wait()
        values.append(client.get_or_compute("k", compute))

    threads = [threading.Thread(target=miss) for _ in range(MISSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == ["value"] * MISSES
    assert len(computed) == 1
    assert most - before <= 8, "one asks for all, and the keeper has a connection of its own"
    # A look, a store, and a look for callers that joined meanwhile; and renewals, as 500 threads take long to start.
    assert calls_of(admin) <= 50


@asyncio_test
async def test_500_tasks_miss_at_once_and_one_computes(url: str, admin: redis.Redis) -> None:
    admin.config_resetstat()
    computed: list[int] = []

    async def compute() -> str:
        computed.append(1)
        await asyncio.sleep(0.1)
        return "value"

    async with holdfast.aio.connect(url) as client:
        values = await asyncio.gather(*(client.get_or_compute("k", compute) for _ in range(MISSES)))
    assert values == ["value"] * MISSES
    assert len(computed) == 1
    assert calls_of(admin) <= 50


@asyncio_test
async def test_under_asyncio_the_function_may_be_a_plain_one(url: str) -> None:
    async with holdfast.aio.connect(url) as client:
        assert await client.get_or_compute("k", lambda: 1) == 1

        @client.cached("f:{x}")
        def double(x: int) -> int:
            return 2 * x

        @client.exclusive("e")
        def halve(x: int) -> float:
            return x / 2

        assert await double(4) == 8
        assert await halve(4) == 2
        assert await double.invalidate(4)


CROWD = """
import threading
url, name = sys.argv[1:3]
admin = redis.Redis.from_url(url)
client = holdfast.connect(url)
values = []
def compute():
    admin.incr("computed")
    time.sleep(0.5)
    return "value"
def miss():
    values.append(client.get_or_compute("k", compute))
threads = [threading.Thread(target=miss) for _ in range(125)]
say("ready")
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join()
say(len(values), *set(values))
client.close()
admin.close()
"""


@pytest.mark.long
def test_500_misses_in_4_processes_and_one_computes(url: str, admin: redis.Redis) -> None:
    crowds = [Script(CROWD, url, number) for number in range(4)]
    try:
        for crowd in crowds:
            crowd.hear("ready")
        for crowd in crowds:
            crowd.write("go\n")
        for crowd in crowds:
            crowd.hear("125 value")
            crowd.finish()
    finally:
        for crowd in crowds:
            crowd.__exit__(None, None, None)
    assert admin.get("computed") == b"1"
    assert sorted(admin.keys("*hf1*")) == [VALUE.encode()]


COMPUTER = """
client = holdfast.connect(url)
def compute():
    say("computing")
    sys.stdin.readline()
    return "old"
say(client.get_or_compute("k", compute, compute_ttl=2))
say(client.get_or_compute("k", lambda: "third"))
client.close()
"""


def test_a_killed_computer_is_replaced_when_its_claim_ends(
    client: holdfast.Client, url: str, admin: redis.Redis
) -> None:
    with Script(COMPUTER, url) as computer:
        computer.hear("computing")
        computer.send(signal.SIGKILL)
        computer.wait()
        assert admin.exists(CLAIM)
        assert client.get_or_compute("k", lambda: "new") == "new"


def test_a_stopped_computer_overwrites_nothing_when_it_wakes_up(client: holdfast.Client, url: str) -> None:
    with Script(COMPUTER, url) as computer:
        computer.hear("computing")
        computer.send(signal.SIGSTOP)
        assert client.get_or_compute("k", lambda: "new") == "new"
        computer.write("go\n")
        computer.send(signal.SIGCONT)
        computer.hear("old")  # its own caller gets what it has computed
        computer.hear("new")
        computer.finish()


def test_the_claim_of_a_computation_that_takes_long_is_renewed(client: holdfast.Client, url: str) -> None:
    with Script(COMPUTER, url) as computer:
        computer.hear("computing")
        with pytest.raises(holdfast.ComputeTimeout):
            client.get_or_compute("k", lambda: "new", wait=3)
        computer.write("go\n")
        computer.hear("old")
        assert client.get_or_compute("k", lambda: "new") == "old"
        computer.hear("old")


def test_ctrl_c_in_a_computation_lets_the_next_one_compute(client: holdfast.Client, admin: redis.Redis) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.get_or_compute("k", interrupted)
    assert not admin.keys("*")
    assert client.get_or_compute("k", lambda: 1, wait=0) == 1


@asyncio_test
async def test_a_cancelled_computation_is_taken_over_by_a_waiter(url: str, admin: redis.Redis) -> None:
    began = asyncio.Event()

    async def hang() -> None:
        began.set()
        await asyncio.sleep(60)

    async def compute() -> str:
        return "value"

    async with holdfast.aio.connect(url) as one, holdfast.aio.connect(url) as two:
        computing = asyncio.create_task(one.get_or_compute("k", hang))
        await began.wait()
        waiters = [asyncio.create_task(client.get_or_compute("k", compute)) for client in (one, two)]
        await asyncio.sleep(0.05)
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        assert [await waiter for waiter in waiters] == ["value", "value"]
    assert admin.keys("*") == [VALUE.encode()]


def test_a_dropped_turn_is_not_renewed(client: holdfast.Client, admin: redis.Redis) -> None:
    """Ctrl-C between the claim and the computation: it is never computed, nor given up by its caller."""
    from holdfast.protocol.cache.lookup import ask

    policy = client._policy(60.0, {"compute_ttl": 0.5})
    computation = client._driver.run(ask(client._singleflight, client._entry("k"), policy))
    assert computation.hold is not None
    assert admin.exists(CLAIM)
    del computation
    assert client.statistics().holds == 0
    assert not client.statistics().cache_callers
    assert client.get_or_compute("k", lambda: 1) == 1


def test_a_value_that_cannot_be_stored_is_still_the_callers() -> None:
    """The server went away while it was computed."""
    with Server() as own, holdfast.connect(own.url, timeout=2) as client:

        def compute() -> str:
            own.kill()
            return "value"

        assert client.get_or_compute("k", compute) == "value"
        with pytest.raises(holdfast.Unavailable):
            client.get_or_compute("k", lambda: "other")


def test_a_server_that_is_out_of_memory_says_so_and_values_in_hand_are_kept(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    def compute() -> str:
        admin.config_set("maxmemory", "1mb")
        return "value" * 1000

    assert client.get_or_compute("k", compute) == "value" * 1000
    admin.config_set("maxmemory", 0)
    assert not admin.exists(CLAIM)
    assert not admin.exists(VALUE)


def test_a_server_that_cannot_be_reached_is_unavailable() -> None:
    with holdfast.connect("redis://127.0.0.1:1/0") as client:
        with pytest.raises(holdfast.Unavailable):
            client.get_or_compute("k", lambda: 1)
        with pytest.raises(holdfast.Unavailable):
            client.invalidate("k")


def test_a_closed_client_says_so(url: str) -> None:
    client = holdfast.connect(url)
    client.get_or_compute("k", lambda: 1)
    client.close()
    with pytest.raises(holdfast.Unavailable, match="closed"):
        client.get_or_compute("k", lambda: 1)


@pytest.mark.parametrize("fault", [LOSE_REPLY, LOSE_REQUEST], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("step", ["cache_look", "cache_store", "cache_drop"])
def test_a_broken_connection_costs_nobody_a_computation(proxy: Proxy, step: str, fault: Any) -> None:
    computed: list[int] = []
    with holdfast.connect(proxy.url) as client:
        proxy.on(step, fault)
        for _ in range(2):
            assert client.get_or_compute("k", lambda: computed.append(1)) is None
        assert len(computed) == 1
        client.invalidate("k")
        assert client.get_or_compute("k", lambda: "new") == "new"


FORKS = """
client = holdfast.connect(url)
def compute():
    pid = os.fork()
    if pid == 0:
        return "child"
    _, status = os.waitpid(pid, 0)
    return "parent" if status == 0 else "the child went wrong"
mine = os.getpid()
value = client.get_or_compute("k", compute)
if os.getpid() != mine:
    try:
        client.get_or_compute("k", lambda: "other", wait=0)
    except holdfast.ComputeTimeout:  # for its parent is still computing it
        os._exit(0 if value == "child" else 1)
    os._exit(2)
say(value, client.get_or_compute("k", lambda: "other"))
client.close()
"""


def test_a_forked_child_stores_nothing_in_its_parents_name(url: str) -> None:
    with Script(FORKS, url) as script:
        script.hear("parent parent")
        script.finish()


def test_hits_of_many_threads_are_asked_for_together(client: holdfast.Client, admin: redis.Redis) -> None:
    client.get_or_compute("k", lambda: 1)
    admin.config_resetstat()
    done = [0] * 8

    def work(number: int) -> None:
        for _ in range(200):
            assert client.get_or_compute("k", lambda: 2) == 1
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 1600
    assert calls_of(admin) <= 1600
    assert not client.statistics().cache_callers
