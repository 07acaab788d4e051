"""Rooms on a real server: threads, tasks and processes at once, some of which are killed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from holdfast.protocol.hold import ENDED
from tests.contention.test_acl import BELLS, NEEDED, user
from tests.interrupts.test_interrupts import EVERY_MOMENT, KNOWN_GAP
from tests.processes.test_fork import in_child
from tests.servers import Server
from tests.support import Script, asyncio_test, eventually

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what a test here is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def room(name: str, what: str = "holders") -> str:
    return f"{name}:hf1:{what}:{{{name}}}"


def waiting(admin: redis.Redis, name: str) -> int:
    """How many stand in the queue."""
    return max(0, admin.zcard(room(name, "queue")) - 1)


def assert_forgotten(admin: redis.Redis) -> None:
    eventually(lambda: not [key for key in admin.keys("*") if b":fence:" not in key and b":gone:" not in key])


# Each holder takes a mark of its slot with SET NX, with its fence, and finds it its own when it leaves.
HOLDER = """
import asyncio, random, threading
store = redis.Redis.from_url(url)
permits, rounds, threads, tasks = map(int, sys.argv[2:])
dice = random.Random(os.getpid())

def enter(lease):
    mark = f"mark:{lease.slot}"
    assert 0 <= lease.slot < permits, lease.slot
    before = store.set(mark, lease.fence, get=True, px=30000)
    assert before is None or int(before) < lease.fence, (before, lease.fence)
    inside = store.zadd("inside", {str(lease.fence): lease.slot})
    assert store.zcard("inside") <= permits, store.zrange("inside", 0, -1, withscores=True)

def leave(lease):
    assert int(store.get(f"mark:{lease.slot}")) == lease.fence, "somebody else had the same slot"
    store.zrem("inside", str(lease.fence))

client = holdfast.connect(url)
errors = []

def thread():
    try:
        for _ in range(rounds):
            with client.semaphore("x", permits, ttl=20, wait=60) as lease:
                enter(lease)
                time.sleep(dice.random() * 0.004)
                leave(lease)
    except BaseException as error:
        errors.append(error)
        raise

async def main():
    async with holdfast.aio.connect(url) as client:
        semaphore = client.semaphore("x", permits, ttl=20, wait=60)
        async def task():
            for _ in range(rounds):
                async with semaphore as lease:
                    enter(lease)
                    await asyncio.sleep(dice.random() * 0.004)
                    leave(lease)
        await asyncio.gather(*(task() for _ in range(tasks)))

crowd = [threading.Thread(target=thread) for _ in range(threads)]
for each in crowd:
    each.start()
asyncio.run(main())
for each in crowd:
    each.join()
client.close()
assert not errors, errors
say("done")
"""


def test_threads_tasks_and_processes_never_hold_more_than_there_are_permits(url: str, admin: redis.Redis) -> None:
    scripts = [Script(HOLDER, url, 3, 12, 3, 3) for _ in range(3)]
    try:
        for script in scripts:
            script.hear("done", timeout=90)
            script.finish()
    finally:
        for script in scripts:
            script.__exit__(None, None, None)
    assert admin.zcard("inside") == 0
    admin.delete("inside", *(f"mark:{slot}" for slot in range(3)))
    assert_forgotten(admin)


VICTIM = """
client = holdfast.connect(url)
mode, ttl = sys.argv[2], float(sys.argv[3])
lock = client.semaphore("x", 2, ttl=ttl) if mode == "permit" else getattr(client.rwlock("x", ttl=ttl), mode)
lease = lock.acquire()
say("inside", getattr(lease, "slot", ""))
time.sleep(60)
"""


def test_a_killed_holder_costs_its_ttl_and_its_neighbour_nothing(client: holdfast.Client, url: str) -> None:
    with client.semaphore("x", 2, ttl=20) as mine, Script(VICTIM, url, "permit", 1.5) as victim:
        victim.hear("inside 1")
        victim.send(signal.SIGKILL)
        assert client.semaphore("x", 2).acquire(blocking=False) is None
        with client.semaphore("x", 2, wait=10) as next_one:
            assert next_one.slot == 1
            assert mine.held


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_killed_reader_or_writer_costs_its_ttl(client: holdfast.Client, url: str, mode: str) -> None:
    with Script(VICTIM, url, mode, 1.0) as victim:
        victim.hear()
        victim.send(signal.SIGKILL)
        with client.rwlock("x", wait=10).write:
            pass


def test_a_killed_waiter_costs_nothing(client: holdfast.Client, url: str, admin: redis.Redis) -> None:
    """A writer that waited and is no more: its listener is gone with it, and those behind it are let in."""
    with client.rwlock("x", ttl=20).read, Script(VICTIM, url, "write", 20) as victim:
        eventually(lambda: waiting(admin, "x") == 1, 20.0, "that process has started, and waits")
        victim.send(signal.SIGKILL)
        victim.wait()
        with client.rwlock("x", wait=5).read:
            pass


def test_killed_holders_and_waiters_leave_the_count_right(url: str, admin: redis.Redis) -> None:
    """Processes come and are killed, all the time; whoever is inside finds no more than there are permits."""
    stop = threading.Event()
    problems: list[str] = []
    seen: list[int] = []

    def look() -> None:
        with holdfast.connect(url) as client:
            while not stop.is_set():
                lease = client.semaphore("x", 2, ttl=2).acquire(timeout=0.5)
                if lease is not None:
                    seen.append(lease.slot)
                    time.sleep(0.01)
                    if not lease.held or admin.zscore(room("x"), lease.token) is None:
                        problems.append("a holder is not inside")
                    lease.release()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for each in lookers:
        each.start()
    for _ in range(6):
        with Script(VICTIM, url, "permit", 1.0) as victim:
            victim.hear()
            assert admin.zcard(room("x")) <= 3 * 2
            victim.send(signal.SIGKILL)
    eventually(lambda: {*seen[-20:]} == {0, 1}, 10)
    stop.set()
    for each in lookers:
        each.join()
    assert not problems
    assert_forgotten(admin)


def test_a_writer_is_not_starved_by_a_stream_of_readers(url: str) -> None:
    stop = threading.Event()
    reads: list[float] = []

    def read(client: holdfast.Client) -> None:
        while not stop.is_set():
            with client.rwlock("x", ttl=20).read:
                reads.append(time.monotonic())
                time.sleep(0.01)

    clients = [holdfast.connect(url) for _ in range(4)]
    readers = [threading.Thread(target=read, args=(client,)) for client in clients for _ in range(2)]
    for reader in readers:
        reader.start()
    eventually(lambda: len(reads) > 20)
    with holdfast.connect(url) as client:
        for _ in range(5):
            with client.rwlock("x", ttl=20, wait=10).write:
                before = len(reads)
                time.sleep(0.02)
                assert len(reads) == before, "somebody reads beside the writer"
            eventually(lambda before=before: len(reads) > before)  # type: ignore[misc]
    stop.set()
    for reader in readers:
        reader.join()
    for each in clients:
        each.close()


def test_a_reader_is_not_starved_by_a_stream_of_writers(url: str) -> None:
    stop = threading.Event()
    inside: list[int] = []
    writes = [0]

    def write(client: holdfast.Client) -> None:
        while not stop.is_set():
            with client.rwlock("x", ttl=20).write:
                assert not inside
                inside.append(1)
                writes[0] += 1
                time.sleep(0.005)
                inside.pop()

    clients = [holdfast.connect(url) for _ in range(4)]
    writers = [threading.Thread(target=write, args=(client,)) for client in clients]
    for writer in writers:
        writer.start()
    eventually(lambda: writes[0] > 10)
    with holdfast.connect(url) as client:
        for _ in range(5):
            with client.rwlock("x", ttl=20, wait=10).read:
                assert not inside
    stop.set()
    for writer in writers:
        writer.join()
    for each in clients:
        each.close()


def test_a_batch_of_readers_is_let_in_by_one_release(url: str, admin: redis.Redis) -> None:
    many = 40  # more than one round of one step
    together = threading.Barrier(many + 1)

    def read(client: holdfast.Client) -> None:
        with client.rwlock("x", ttl=20, wait=30).read:
            together.wait(20)

    with holdfast.connect(url) as client, holdfast.connect(url) as other:
        lease = client.rwlock("x", ttl=20).write.acquire()
        assert lease
        readers = [threading.Thread(target=read, args=(other,)) for _ in range(many)]
        for reader in readers:
            reader.start()
        eventually(lambda: waiting(admin, "x") == many, 20)
        lease.release()
        together.wait(20)  # all of them are inside at the same time
        for reader in readers:
            reader.join()
    assert_forgotten(admin)


@asyncio_test
async def test_many_tasks_share_one_object_and_one_connection(url: str) -> None:
    inside: list[int] = []
    slots: set[int] = set()
    async with holdfast.aio.connect(url) as client:
        semaphore = client.semaphore("x", 5, ttl=20)

        async def work() -> None:
            async with semaphore as permit:
                assert permit.slot not in inside
                inside.append(permit.slot)
                slots.add(permit.slot)
                assert len(inside) <= 5
                await asyncio.sleep(0.002)
                inside.remove(permit.slot)

        await asyncio.gather(*(work() for _ in range(200)))
        assert slots == {0, 1, 2, 3, 4}
        with pytest.raises(holdfast.OverRelease):
            await semaphore.release()


@asyncio_test
async def test_cancelled_tasks_leave_no_permit_behind(url: str) -> None:
    async with holdfast.aio.connect(url) as client, holdfast.aio.connect(url) as other:
        semaphore = client.semaphore("x", 2, ttl=20)

        async def work() -> None:
            async with semaphore:
                await asyncio.sleep(0.003)

        for round_ in range(20):
            tasks = [asyncio.ensure_future(work()) for _ in range(12)]
            await asyncio.sleep(round_ * 0.0007)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        both = [await other.semaphore("x", 2).acquire(timeout=5) for _ in range(2)]
        assert all(both)
        for permit in both:
            assert permit is not None
            await permit.release()


def test_a_forked_child_holds_nothing(client: holdfast.Client, admin: redis.Redis) -> None:
    semaphore, rw = client.semaphore("x", 2), client.rwlock("y")
    permit, reading = semaphore.acquire(), rw.read.acquire()
    assert permit
    assert reading

    def work() -> None:
        assert not permit.held
        for attempt in (permit.release, semaphore.release, reading.release):
            with pytest.raises(holdfast.LeaseLost, match="forked"):
                attempt()
        assert client.rwlock("y").write.acquire(blocking=False) is None, "the parent reads, and no error says otherwise"
        with semaphore as other:
            assert other.slot == 1

    in_child(work)
    assert permit.held
    assert admin.zcard(room("x")) == 3, "one holder"
    semaphore.release()
    rw.read.release()
    assert_forgotten(admin)


INTERRUPTED = """
client = holdfast.connect(url)
lock = client.semaphore("x", 1, ttl=20) if sys.argv[2] == "permit" else getattr(client.rwlock("x", ttl=20), sys.argv[2])
say("ready")
done = 0
while True:
    try:
        with lock:
            done += 1
        if done == 30:
            say("warm")
    except KeyboardInterrupt as struck:
        if is_known_gap(struck):
            lock.release()
        left, until = 1, time.monotonic() + 5
        while left and time.monotonic() < until:  # what the caller could not finish in time is left to the keeper
            left = client._driver.run(lock._look())[0]
        say("interrupted", left)
        break
client.close()
"""


@pytest.mark.parametrize("mode", ["permit", "read", "write"])
def test_ctrl_c_leaves_nothing_behind(url: str, admin: redis.Redis, mode: str) -> None:
    for _ in range(4):
        with Script(KNOWN_GAP + INTERRUPTED, url, mode) as script:
            script.hear("ready")
            script.hear("warm")
            script.send(signal.SIGINT)
            script.hear("interrupted 0")
            script.finish()
    assert_forgotten(admin)


def test_what_is_dropped_is_warned_of_and_ends_by_its_ttl(client: holdfast.Client) -> None:
    lease: Any = client.semaphore("x", 1, ttl=1.5).acquire()
    assert lease.held
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del lease
    with client.semaphore("x", 1, wait=10):
        pass


def test_a_room_survives_script_flush(client: holdfast.Client, admin: redis.Redis) -> None:
    with client.semaphore("x", 2), client.rwlock("y").write as lease:
        admin.script_flush()
        lease.downgrade()
        admin.script_flush()
        assert client.rwlock("y").read.locked()
    assert_forgotten(admin)


@pytest.mark.parametrize("rules", [[*BELLS], []], ids=["with bells", "without"])
def test_these_permissions_are_enough(server: Server, admin: redis.Redis, rules: list[str]) -> None:
    """The list of docs/guarantees.md; and without bells those who wait ask again and again."""
    admin.script_flush()
    order: list[str] = []
    with user(server, admin, *NEEDED, "+zcard", "+zcount", *rules) as url, holdfast.connect(url) as client:

        def visit(name: str) -> None:
            rw = client.rwlock("app:x", wait=20)
            with rw.read if name == "R" else rw.write:
                order.append(name)

        with client.semaphore("app:s", 1), client.rwlock("app:x").write as lease:
            assert client.semaphore("app:s", 1).locked()
            visitors = [threading.Thread(target=visit, args=(name,)) for name in ("R", "W")]
            for number, visitor in enumerate(visitors):
                visitor.start()
                eventually(lambda number=number: waiting(admin, "app:x") == number + 1)  # type: ignore[misc]
            lease.downgrade()
            eventually(lambda: order == ["R"])
        for visitor in visitors:
            visitor.join()
        with pytest.raises(holdfast.Unavailable, match="may not use"):
            admin.execute_command("ACL", "SETUSER", "app", "-zcard")
            client.semaphore("app:s", 1).acquire()
    assert order == ["R", "W"]


KINDS = {
    "permit": 'client.semaphore("x", 1)',
    "read": 'client.rwlock("x").read',
    "write": 'client.rwlock("x").write',
}


@pytest.mark.long
@pytest.mark.parametrize("step", ["acquire", "release"])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_after_any_bytecode_it_leaves_no_place(url: str, kind: str, step: str) -> None:
    code = EVERY_MOMENT.replace('client.lock("x")', KINDS[kind])
    for old, new in (
        ('is_free("x", 1.0)', 'is_free("x:hf1:holders:{x}", 1.0)'),
        ('admin.delete("x")', "admin.flushdb()"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    with Script(code, url, step) as script:
        assert script.finish(100.0, quiet=False) == "interrupted True\n"


class _Interleaving:
    """What an object remembers, and while it is looked at another thread acquires."""

    def __init__(self, semaphore: Any) -> None:
        self._semaphore = semaphore
        self._seen = False
        self.acquired: list[Any] = []

    @property
    def phase(self) -> str:
        if not self._seen:
            self._seen = True
            other = threading.Thread(target=lambda: self.acquired.append(self._semaphore.acquire()))
            other.start()
            other.join()
        return ENDED


def test_what_others_acquire_meanwhile_is_not_forgotten_with_what_has_ended(client: holdfast.Client) -> None:
    semaphore = client.semaphore("a", 1000)
    meanwhile: Any = _Interleaving(semaphore)
    semaphore._leases[meanwhile] = meanwhile
    leases = [semaphore.acquire() for _ in range(20)]
    assert len(meanwhile.acquired) == 1, "so it was looked through"
    for _ in leases + meanwhile.acquired:
        semaphore.release()
    assert not any(lease.held for lease in leases + meanwhile.acquired)


def test_more_permits_than_python_is_willing_to_print_are_refused_like_any(client: holdfast.Client) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="permits=.*give a whole number from 1 to 1000000"):
        client.semaphore("a", 10**5000)


def test_a_block_may_be_left_in_another_thread_if_its_object_is_its_own(client: holdfast.Client) -> None:
    """A framework may enter and leave in different threads. Which block it leaves is known by the object alone."""
    mine, theirs = client.semaphore("a", 3), client.semaphore("a", 3)
    lease = mine.__enter__()

    def leave() -> None:
        with theirs as other:
            mine.__exit__(None, None, None)
            assert other.held

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert not lease.held
