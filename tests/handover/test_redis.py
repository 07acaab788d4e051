"""Holds that pass between real processes."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest
import redis

import holdfast
import holdfast.aio
from tests.handover.kinds import KINDS, Kind
from tests.interrupts.test_interrupts import MOMENTS
from tests.outages.test_full_memory import fill_up
from tests.processes.test_fork import in_child
from tests.proxy import LOSE_REPLY, LOSE_REQUEST, MUTE_REPLY, Fault, Proxy
from tests.servers import Server
from tests.support import Script, as_bytes, eventually

# Forking a process that has threads is deprecated since Python 3.12, and yet it is what a test here is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))

ADOPTER = """
client = holdfast.connect(url)
ticket = sys.stdin.readline().strip()
lease = client.adopt(ticket, ttl=float(sys.argv[2]))
say(lease.fence)
sys.stdin.readline()
say(lease.held)
lease.release()
client.close()
"""


def left(admin: redis.Redis) -> list[str]:
    """What is on the server, less what is to be remembered for a while."""
    keys = [as_bytes(key) for key in admin.keys("*")]
    return [key.decode() for key in keys if not any(word in key for word in (b":fence", b":gone:", b"warm"))]


@EVERY_KIND
def test_another_process_goes_on_where_this_one_ends(kind: Kind, server: Server, admin: redis.Redis) -> None:
    with Script(ADOPTER, server.url, 10) as script:
        with holdfast.connect(server.url) as client:
            lease = kind.ask(client, ttl=10).acquire()
            assert lease
            script.write(lease.hand_over() + "\n")
            fence = int(script.hear())
        assert fence > lease.fence
        with holdfast.connect(server.url) as client:
            refused = kind.rival(client).acquire(blocking=False)
            assert refused is None, "that the giver's client was closed changes nothing"
        script.write("\n")
        script.hear("True")
        script.finish()
    assert left(admin) == []


@EVERY_KIND
def test_an_adopter_that_is_killed_leaves_the_lock_to_its_own_ttl(
    kind: Kind, server: Server, client: holdfast.Client
) -> None:
    with Script(ADOPTER, server.url, 1) as script:
        lease = kind.ask(client, ttl=600).acquire()
        assert lease
        script.write(lease.hand_over() + "\n")
        script.hear()
        script.send(signal.SIGKILL)
        with kind.rival(client, wait=30):
            pass


STEPS = {
    "lock": ("hand_over", "adopt"),
    "several": ("multi_hand_over", "multi_adopt"),
    "permit": ("pool_hand_over", "pool_adopt"),
    "write": ("pool_hand_over", "pool_adopt"),
}
FAULTY_STEPS = pytest.mark.parametrize(
    ("kind", "step", "fault"),
    [(kind, step, fault) for kind, steps in STEPS.items() for step in steps for fault in (LOSE_REPLY, LOSE_REQUEST)],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)


@FAULTY_STEPS
def test_a_reply_that_was_lost_is_asked_for_again(
    kind: str, step: str, fault: Fault, proxy: Proxy, admin: redis.Redis
) -> None:
    with holdfast.connect(proxy.url, timeout=2) as client:
        with client.lock("warm"):
            pass
        lease = KINDS[kind].ask(client).acquire()
        assert lease
        proxy.on(step, fault)
        taken = client.adopt(lease.hand_over(), ttl=3)
        assert proxy.seen(step) == 2
        assert taken.fence > lease.fence
        assert taken.held
        taken.release()
    assert left(admin) == []


@FAULTY_STEPS
def test_a_reply_that_was_lost_is_asked_for_again_under_asyncio(
    kind: str, step: str, fault: Fault, proxy: Proxy, admin: redis.Redis
) -> None:
    async def relay() -> None:
        async with holdfast.aio.connect(proxy.url, timeout=2) as client:
            async with client.lock("warm"):
                pass
            lease = await KINDS[kind].ask(client).acquire()
            assert lease
            proxy.on(step, fault)
            taken = await client.adopt(await lease.hand_over(), ttl=3)
            assert proxy.seen(step) == 2
            assert taken.fence > lease.fence
            assert taken.held
            await taken.release()

    asyncio.run(relay())
    assert left(admin) == []


@EVERY_KIND
def test_a_full_server_is_no_hindrance(kind: Kind, client: holdfast.Client, admin: redis.Redis) -> None:
    lease = kind.ask(client).acquire()
    assert lease
    fill_up(admin)
    client.adopt(lease.hand_over()).release()
    admin.config_set("maxmemory", 0)
    for key in admin.scan_iter("ballast:*"):
        admin.delete(key)
    assert left(admin) == []


@EVERY_KIND
def test_threads_that_hand_over_and_release_at_once_do_only_one_of_it(kind: Kind, client: holdfast.Client) -> None:
    for _ in range(15):
        lease = kind.ask(client).acquire()
        assert lease
        tickets: list[str] = []
        ready = threading.Barrier(2)

        def give(lease: holdfast.Lease = lease, tickets: list[str] = tickets, ready: threading.Barrier = ready) -> None:
            ready.wait(10)
            try:
                tickets.append(lease.hand_over())
            except (holdfast.NotHeld, holdfast.LeaseLost):
                pass

        thread = threading.Thread(target=give)
        thread.start()
        ready.wait(10)
        released = True
        try:
            lease.release()
        except holdfast.NotHeld:
            released = False
        thread.join()
        assert released == (not tickets)
        if tickets:
            client.adopt(tickets[0]).release()
        with kind.rival(client, wait=0):
            pass


def test_local_waiters_of_the_giver_do_not_inherit_what_was_handed_over(client: holdfast.Client, url: str) -> None:
    lease = client.lock("x").acquire()
    assert lease
    entered = threading.Event()

    def wait() -> None:
        with client.lock("x", wait=30):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: client.statistics().local_queues, what="it waits in the local queue")
    ticket = lease.hand_over()
    with holdfast.connect(url) as other:
        taken = other.adopt(ticket)
        assert not entered.wait(0.2)
        assert taken.held
        taken.release()
    thread.join(10)
    assert entered.is_set()


@EVERY_KIND
def test_a_forked_child_adopts_what_the_parent_hands_over(
    kind: Kind, client: holdfast.Client, admin: redis.Redis
) -> None:
    lease = kind.ask(client).acquire()
    assert lease
    ticket = lease.hand_over()

    def work() -> None:
        taken = client.adopt(ticket)
        assert taken.fence > lease.fence
        taken.release()

    in_child(work)
    assert left(admin) == []


def test_an_object_adopts_in_a_forked_child(client: holdfast.Client, admin: redis.Redis) -> None:
    permits, lock = client.semaphore("x", 2), client.rwlock("y")
    others = permits.acquire(), lock.read.acquire()
    tickets = [lease.hand_over() for lease in (permits.acquire(), lock.read.acquire()) if lease]

    def work() -> None:
        permit, reading = permits.adopt(tickets[0]), lock.read.adopt(tickets[1])
        assert permit.slot == 1
        permits.release()
        lock.read.release()
        assert not permit.held
        assert not reading.held
        with pytest.raises(holdfast.OverRelease):
            permits.release()

    in_child(work)
    for lease in others:
        assert lease
        lease.release()
    assert left(admin) == []


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_an_interrupt_on_the_way_leaves_nothing_behind(face: str, proxy: Proxy, admin: redis.Redis) -> None:
    """A task is cancelled, or its time is up, while its adoption is under way; what was adopted is given back."""
    with holdfast.connect(proxy.url, timeout=1) as client:
        permits = client.semaphore("x", 1)
        lease = permits.acquire()
        assert lease
        ticket = lease.hand_over()
        if face == "blocking":
            proxy.on("pool_adopt", MUTE_REPLY, times=20)
            with pytest.raises(holdfast.Unavailable):
                client.adopt(ticket, ttl=1)
        else:
            proxy.on("pool_adopt", MUTE_REPLY)

            async def cancelled() -> None:
                async with holdfast.aio.connect(proxy.url) as other:
                    adopting = asyncio.create_task(other.adopt(ticket))
                    await asyncio.to_thread(proxy.await_request, "pool_adopt")
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(adopting, 0.2)

            asyncio.run(cancelled())
        with client.semaphore("x", 1, wait=10) as later:
            assert later.fence > lease.fence
    eventually(lambda: left(admin) == [], what="nothing is left")


def test_a_forked_child_cannot_hand_over_what_the_parent_holds(client: holdfast.Client) -> None:
    def work() -> None:
        with pytest.raises(holdfast.LeaseLost, match="forked"):
            lease.hand_over()

    with client.lock("x") as lease:
        in_child(work)
        lease.check()


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_a_lock_of_history_cannot_be_handed_over(client: holdfast.Client) -> None:
    with client.recipe("set_nx", "x") as lease, pytest.raises(holdfast.Unsupported, match="hand_over"):
        lease.hand_over()


def test_no_ticket_without_a_server(server: Server) -> None:
    with holdfast.connect(server.url, timeout=1.5) as client:
        lease = client.lock("x", ttl=20).acquire()
        assert lease
        server.pause()
        with pytest.raises(holdfast.Unavailable):
            lease.hand_over()
        assert lease.held, "it is as it was"
        server.resume()
        lease.release()


# The tracer of those, and another story.
EVERY_STEP = (
    MOMENTS
    + """
client = holdfast.connect(url)
lock, key = client.lock("x"), "x"
if sys.argv[2] == "permit":
    lock, key = client.semaphore("x", 1), "x:hf1:holders:{x}"
client.adopt(lock.acquire().hand_over()).release()
moment = interrupted = 0
orphans = []
while True:
    moment += 1
    tracer, ticket, taken = Tracer(moment), None, None
    lease = lock.acquire(timeout=3)
    try:
        if sys.argv[3] == "hand_over":
            sys.settrace(tracer)
            ticket = lease.hand_over()
        else:
            ticket = lease.hand_over()
            sys.settrace(tracer)
            taken = client.adopt(ticket)
        sys.settrace(None)
        for _ in range(9):
            pass  # a place to be interrupted, if it has not been before
    except KeyboardInterrupt:
        sys.settrace(None)
        interrupted += 1
    try:
        if taken is not None:
            taken.release()
        elif lease.held:
            lease.release()
        elif ticket is not None:
            client.adopt(ticket).release()
    except holdfast.NotAcquired:
        pass  # the adoption that was interrupted had come far enough
    if tracer.left > 0:
        break
    if not is_free(key, 1.0):
        orphans.append(tracer.where)
        admin.flushdb()
    if client.statistics().holds or client.statistics().active:
        orphans.append("something is left in this process: " + tracer.where)
        break
    if len(orphans) > 5:
        break
enough = 60 if sys.version_info < (3, 12) else 20  # later ones tell a tracer of fewer opcodes
say("interrupted", interrupted > enough and interrupted > 0.9 * (moment - 1))  # some strike where Python swallows them
for orphan in orphans:
    say(orphan.rpartition("/holdfast/")[2], "in", orphan[:40])
client.close()
"""
)


@pytest.mark.long
@pytest.mark.parametrize("step", ["hand_over", "adopt"])
@pytest.mark.parametrize("kind", ["lock", "permit"])
def test_interrupted_after_any_bytecode_it_leaves_nothing_behind(url: str, kind: str, step: str) -> None:
    with Script(EVERY_STEP, url, kind, step) as script:
        assert script.finish(100.0, quiet=False) == "interrupted True\n"
