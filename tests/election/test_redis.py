"""Elections on a real server: leaders that are killed, stopped and interrupted, and loops that end in every way."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Generator
from contextlib import aclosing, closing
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import redis

import holdfast
import holdfast.aio
from tests.contention.test_acl import BELLS, NEEDED, TRACKING, user
from tests.proxy import LOSE_REPLY, Proxy
from tests.servers import Server
from tests.support import Script, async_eventually, asyncio_test, eventually, lock_keys

TTL = 2.0

CANDIDATE = """
    election = holdfast.connect(url).election("boss", ttl=float(sys.argv[2]), label=sys.argv[3])
    for lease in election.terms():
        say("leads", time.monotonic_ns(), lease.fence)
        while lease.held:
            lease.lost.wait(0.005)
            if sys.argv[4] == "short":
                break
        now = time.monotonic_ns()
        say("ends", now, lease.fence, lease.held)
"""


def test_when_the_leader_is_killed_another_leads(url: str, client: holdfast.Client, admin: redis.Redis) -> None:
    with Script(CANDIDATE, url, TTL, "first", "long") as first:
        killed_fence = int(first.hear().split()[2])
        with Script(CANDIDATE, url, TTL, "second", "long") as second:
            eventually(lambda: admin.zcard("boss:hf1:queue:{boss}"), 20.0, "the second one stands in the queue")
            leader = client.election("boss").leader()
            assert leader
            assert (leader.label, leader.pid, leader.fence) == ("first", first.pid, killed_fence)
            first.send(signal.SIGKILL)
            killed_at = time.monotonic()
            fence = int(second.hear(timeout=TTL + 10).split()[2])
            assert time.monotonic() - killed_at < TTL + 3
            assert fence > killed_fence
            leader = client.election("boss").leader()
            assert leader
            assert (leader.label, leader.pid, leader.fence) == ("second", second.pid, fence)


def test_terms_of_processes_do_not_overlap_and_their_fences_rise(url: str) -> None:
    """By the machine's own clock, which all processes share; some are stopped beyond their ttl, and one is killed."""
    scripts = [Script(CANDIDATE, url, 0.5, name, "short") for name in "abcd"]
    try:
        go_on(scripts)
        for script in scripts[:3]:
            script.send(signal.SIGSTOP)
            time.sleep(0.8)
            go_on([other for other in scripts if other is not script])
            script.send(signal.SIGCONT)
            go_on(scripts)
        scripts[3].send(signal.SIGKILL)
        go_on(scripts[:3])
        for script in scripts[:3]:
            script.send(signal.SIGKILL)
        terms = sorted((term for script in scripts for term in terms_of(script)), key=lambda term: term.began)
    finally:
        for script in scripts:
            script.__exit__(None, None, None)
    assert len(terms) > 40
    fences = [term.fence for term in terms]
    assert fences == sorted(set(fences))
    assert [(one, two) for one, two in pairwise(terms) if two.began < one.held_until] == []


class Term(NamedTuple):
    fence: int
    began: int
    held_until: int  # for certain: it was asked whether it was held after that time


def go_on(scripts: list[Script]) -> None:
    """Let each of them say some more."""
    said = [script._said.qsize() + 8 for script in scripts]
    eventually(lambda: all(script._said.qsize() >= some for script, some in zip(scripts, said, strict=True)), 30)


def terms_of(script: Script) -> list[Term]:
    script.wait()
    script._listener.join(5)
    said = [line.split() for line in iter(script._said.get_nowait, None)]
    ended = {words[2]: int(words[1]) for words in said if words[0] == "ends" and words[3:] == ["True"]}
    return [
        Term(int(words[2]), int(words[1]), ended[words[2]])
        for words in said
        if words[0] == "leads" and words[2] in ended
    ]


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_leader_that_was_stopped_knows_when_it_wakes(
    url: str, client: holdfast.Client, admin: redis.Redis, face: str
) -> None:
    """It steps down before the next leader begins, whatever it was doing; and leads again only after that leader."""
    blocking = """
        for lease in holdfast.connect(url).election("boss", ttl=1).terms():
            say("leads", lease.fence)
            while lease.held:
                time.sleep(0.005)
            say("stepped down")
    """
    aio = """
        async def main():
            async with holdfast.aio.connect(url) as client:
                while True:
                    try:
                        async with client.election("boss", ttl=1).lead() as lease:
                            say("leads", lease.fence)
                            await asyncio.sleep(30)
                    except holdfast.LeaseLost:
                        say("stepped down")
        import asyncio
        asyncio.run(main())
    """
    with Script(blocking if face == "blocking" else aio, url) as script:
        first = int(script.hear().removeprefix("leads "))
        time.sleep(0.05)
        script.send(signal.SIGSTOP)
        eventually(lambda: not admin.exists("boss"))
        with client.election("boss", ttl=60).lead() as lease:
            script.send(signal.SIGCONT)
            script.hear("stepped down")
            assert lease.held
            leader = client.election("boss").leader()
            assert leader is not None
            assert leader.fence == lease.fence > first
        assert int(script.hear().removeprefix("leads ")) > lease.fence


def test_resigning_wakes_the_next_at_once(url: str) -> None:
    with holdfast.connect(url) as one, holdfast.connect(url) as two:
        election = one.election("boss", ttl=60)
        led = threading.Event()

        def campaign() -> None:
            with two.election("boss", ttl=60).lead():
                led.set()

        with election.lead():
            rival = threading.Thread(target=campaign)
            rival.start()
            time.sleep(0.2)
            assert not led.is_set()
            election.resign()
            assert led.wait(5)
        rival.join()


def test_resigning_from_another_thread_ends_the_term(client: holdfast.Client) -> None:
    election = client.election("boss", ttl=60)
    rounds: list[int] = []

    def lead() -> None:
        for lease in election.terms():
            rounds.append(lease.fence)
            if len(rounds) == 3:
                break
            while lease.held:
                lease.lost.wait(30)  # which also ends when it is given back

    thread = threading.Thread(target=lead)
    thread.start()
    for number in (1, 2):

        def has_begun(number: int = number) -> bool:
            return len(rounds) == number

        eventually(has_begun)
        election.resign()
    thread.join(10)
    assert not thread.is_alive()
    assert rounds == sorted(set(rounds))
    assert election.leader() is None


def generate(election: Any) -> Generator[int]:
    for lease in election.terms():
        yield lease.fence


def leave_by_break(election: Any) -> None:
    for _ in election.terms():
        break


def leave_by_error(election: Any) -> None:
    try:
        for _ in election.terms():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def leave_by_exit(election: Any) -> None:
    try:
        for _ in election.terms():
            raise SystemExit
    except SystemExit:
        pass


def leave_by_return(election: Any) -> int:
    for lease in election.terms():
        return int(lease.fence)
    return 0


def leave_by_closing(election: Any) -> None:
    with closing(election.terms()) as terms:
        for _ in terms:
            break


def leave_by_generator_exit(election: Any) -> None:
    generator = generate(election)
    next(generator)
    generator.close()


def leave_by_forgetting_a_generator(election: Any) -> None:
    next(generate(election))


WAYS = [
    leave_by_break,
    leave_by_error,
    leave_by_exit,
    leave_by_return,
    leave_by_closing,
    leave_by_generator_exit,
    leave_by_forgetting_a_generator,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_however_a_loop_is_left_the_term_is_over(client: holdfast.Client, admin: redis.Redis, leave: Any) -> None:
    election = client.election("boss", ttl=60)
    leave(election)
    assert election.leader() is None
    assert lock_keys(admin) == []
    assert client.statistics().holds == 0
    with election.lead():
        pass


def test_terms_that_another_thread_collects_do_not_make_it_wait(client: holdfast.Client, admin: redis.Redis) -> None:
    election = client.election("boss", ttl=60)
    terms = election.terms()
    next(terms)
    circle: list[Any] = [terms]
    circle.append(circle)
    del terms, circle
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    eventually(lambda: lock_keys(admin) == [])
    assert client.statistics().holds == 0


async def leave_by_async_break(election: Any) -> None:
    async for _ in election.terms():
        break


async def leave_by_async_error(election: Any) -> None:
    try:
        async for _ in election.terms():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


async def leave_by_aclosing(election: Any) -> None:
    async with aclosing(election.terms()) as terms:
        async for _ in terms:
            break
    assert await election.leader() is None


async def leave_by_cancel(election: Any) -> None:
    async def lead() -> None:
        async for _ in election.terms():
            await asyncio.sleep(30)

    task = asyncio.create_task(lead())
    while await election.leader() is None:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(election: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            async for _ in election.terms():
                await asyncio.sleep(30)


async def leave_by_async_generator_exit(election: Any) -> None:
    async def generate() -> Any:
        async for lease in election.terms():
            yield lease

    generator = generate()
    await anext(generator)
    await generator.aclose()


ASYNC_WAYS = [
    leave_by_async_break,
    leave_by_async_error,
    leave_by_aclosing,
    leave_by_cancel,
    leave_by_timeout,
    leave_by_async_generator_exit,
]


@pytest.mark.parametrize("leave", ASYNC_WAYS, ids=lambda way: way.__name__)
def test_however_an_async_loop_is_left_the_term_is_over(url: str, admin: redis.Redis, leave: Any) -> None:
    @asyncio_test
    async def main() -> None:
        async with holdfast.aio.connect(url) as client:
            election = client.election("boss", ttl=60)
            await leave(election)
            await async_eventually(lambda: lock_keys(admin) == [])
            assert client.statistics().holds == 0
            async with election.lead():
                pass

    main()


@asyncio_test
async def test_cancelled_while_it_campaigns_it_leaves_the_queue(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:

        async def campaign() -> None:
            async for _ in client.election("boss").terms():
                raise AssertionError("two lead")

        async with client.election("boss").lead():
            task = asyncio.create_task(campaign())
            await async_eventually(lambda: admin.zcard("boss:hf1:queue:{boss}") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await async_eventually(lambda: admin.zcard("boss:hf1:queue:{boss}") == 0)
        assert await client.election("boss").leader() is None


@asyncio_test
async def test_a_leader_that_is_deposed_is_cancelled_in_async_with(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        with pytest.raises(holdfast.LeaseLost):
            async with client.election("boss", ttl=60).lead():
                await asyncio.sleep(0.3)
                await asyncio.to_thread(admin.delete, "boss")
                await asyncio.sleep(30)


@asyncio_test
async def test_a_leader_that_is_deposed_goes_on_with_the_next_term_in_async_for(url: str, admin: redis.Redis) -> None:
    async with holdfast.aio.connect(url) as client:
        rounds = 0
        async for lease in client.election("boss", ttl=60).terms():
            rounds += 1
            if rounds == 2:
                break
            await asyncio.sleep(0.3)
            await asyncio.to_thread(admin.delete, "boss")
            assert await lease.lost.wait(10)
        assert rounds == 2
        await async_eventually(lambda: lock_keys(admin) == [])


def test_ctrl_c_in_the_body_steps_down(url: str, admin: redis.Redis) -> None:
    code = """
        try:
            for lease in holdfast.connect(url).election("boss", ttl=60).terms():
                say("leads")
                time.sleep(30)
        except KeyboardInterrupt:
            say("interrupted")
    """
    with Script(code, url) as script:
        script.hear("leads")
        script.send(signal.SIGINT)
        script.hear("interrupted")
        script.finish()
        assert lock_keys(admin) == []


def test_ctrl_c_at_any_time_leaves_nobody_leading(url: str, admin: redis.Redis) -> None:
    """The signal comes by a timer, ever a little later. What strikes in a __del__ is lost, so the loop has an end."""
    code = """
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        client = holdfast.connect(url)
        with client.lock("warm"):
            pass
        for number in range(150):
            struck_by = time.monotonic() + 0.2
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00005 + number * 0.00002)
                for lease in client.election("boss", ttl=60, wait=30).terms():
                    if time.monotonic() > struck_by:
                        break
                signal.setitimer(signal.ITIMER_REAL, 0)  # it comes late: from here on it does not come at all
            except KeyboardInterrupt:
                pass
            if client.statistics().holds:
                raise SystemExit(f"still held after {number}")
        say("done")
        client.close()
    """
    with Script(code, url) as script:
        script.hear("done", timeout=60)
        script.wait()
    eventually(lambda: lock_keys(admin) == [])


def test_a_forked_child_does_not_lead(url: str, admin: redis.Redis) -> None:
    code = """
        election = holdfast.connect(url).election("boss", ttl=60)
        for lease in election.terms():
            if os.fork() == 0:
                say("child", lease.held)
                break
            os.wait()
            say("parent", lease.held)
            break
        if election.leader() is None:
            say("nobody")
        else:
            say("somebody")
    """
    with Script(code, url) as script:
        assert script.hear() == "child False"
        assert script.hear() == "somebody"
        assert script.hear() == "parent True"
        assert script.hear() == "nobody"


def test_candidates_of_one_process_queue_like_others(client: holdfast.Client, admin: redis.Redis) -> None:
    led: list[int] = []

    def campaign() -> None:
        with client.election("boss", ttl=60).lead() as lease:
            led.append(lease.fence)

    with client.election("boss", ttl=60).lead() as lease:
        threads = [threading.Thread(target=campaign) for _ in range(5)]
        for thread in threads:
            thread.start()
        eventually(lambda: admin.zcard("boss:hf1:queue:{boss}") == 5)
    for thread in threads:
        thread.join(20)
    assert led == sorted(led)
    assert len(led) == 5
    assert led[0] > lease.fence


def test_asking_who_leads_survives_a_lost_reply(connect: Any, proxy: Proxy) -> None:
    face = connect(proxy.url)
    with face.lock("boss"):
        election = face.client.election("boss")

        def ask() -> Any:
            return face._call(election.leader()) if face.kind == "asyncio" else election.leader()

        proxy.on("election_leader", LOSE_REPLY)
        assert ask().host


def test_the_usual_permissions_are_enough(server: Server, admin: redis.Redis) -> None:
    admin.script_flush()
    with user(server, admin, *NEEDED, *BELLS, *TRACKING) as url, holdfast.connect(url) as client:
        election = client.election("app:boss")
        with election.lead() as lease:
            leader = election.leader()
            assert leader
            assert leader.fence == lease.fence
        assert admin.acl_log() == []


def test_asking_who_leads_writes_nothing(client: holdfast.Client, admin: redis.Redis) -> None:
    assert client.election("boss").leader() is None
    assert admin.dbsize() == 0
