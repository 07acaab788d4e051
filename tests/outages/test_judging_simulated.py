"""Which requests decide whether a wait found the lock busy, or the server down, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Step
from tests.outages.test_contact_simulated import contact_of
from tests.outages.test_outage_wait_simulated import (
    FAULTS,
    Timed,
    acquire,
    acquire_and_hold,
    heal,
    kill,
    stop,
    warm_client,
)
from tests.protocol.harness import Play

SILENT = ["stopped", "swallowed"]


def try_once(client: holdfast.aio.Client) -> Any:
    return client.lock("a").acquire(blocking=False)


@pytest.mark.parametrize("wait", [4.15 + step / 500 for step in range(30)], ids=lambda wait: f"{wait:.3f}")
def test_a_failure_before_the_grant_says_nothing_about_a_later_release(wait: float) -> None:
    """The reply to the first acquire is lost; the second is granted; a local wait ends around its release."""
    play = Play(seed=1)
    play.world.latency_us = 5_000
    client = warm_client(play)
    lost: list[Message] = []

    def lose_first(message: Message) -> Fate | None:
        if lost or not any(isinstance(op, Step) and op.script == "acquire" for op in message.ops):
            return None
        lost.append(message)
        return Fate(reply_lost=True)

    async def hold(client: holdfast.aio.Client) -> None:
        async with client.lock("a", wait=None):
            await play.sleep(client, 3.0)

    play.doom(lose_first)
    holder = Timed(play, client, hold)
    play.run(0.5)
    call = Timed(play, client, acquire("a", wait=wait))
    play.run(8)
    assert holder.took > 3.0
    assert lost
    assert not isinstance(call.result, holdfast.Unavailable), call.result


@pytest.mark.parametrize("fault", FAULTS)
def test_a_try_behind_a_release_without_an_answer_is_not_told_that_it_is_busy(fault: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = Timed(play, client, acquire_and_hold(play, "a", 0.3, ttl=30))
    play.run(0.1)
    FAULTS[fault](play)
    expect_no_busy_try(play, client, try_once, lambda: not holder.ended)


def expect_no_busy_try(
    play: Play,
    client: holdfast.aio.Client,
    try_once: Callable[[holdfast.aio.Client], Any],
    counts: Callable[[], bool] = lambda: True,
) -> None:
    """Each try that begins after contact was lost, while ``counts``, reports the outage."""
    tries = []
    for _ in range(24):
        play.run(0.25)
        tries.append((contact_of(client).lost_at is not None and counts(), Timed(play, client, try_once)))
    play.run(5)
    judged = [call.result for in_outage, call in tries if in_outage]
    assert judged
    assert all(isinstance(result, holdfast.Unavailable) for result in judged), judged


@pytest.mark.parametrize("fault", FAULTS)
def test_a_try_on_the_object_of_a_waiter_is_not_told_that_it_is_busy(fault: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    lock = client.lock("a")
    FAULTS[fault](play)
    Timed(play, client, lambda _: lock.acquire())
    expect_no_busy_try(play, client, lambda _: lock.acquire(blocking=False))


@pytest.mark.parametrize("fault", SILENT)
def test_a_request_whose_caller_was_cancelled_counts_for_the_time_that_it_was_under_way(fault: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    FAULTS[fault](play)
    found = []
    for _ in range(6):
        first = Timed(play, client, acquire("a", wait=5))
        play.run(0.001)
        found.append(Timed(play, client, acquire("a", wait=0.6)))  # its answer time is 0.2 s
        play.run(0.55)
        first.process.cancel()
        play.run(0.4)
    assert all(isinstance(call.result, holdfast.Unavailable) for call in found), [call.result for call in found]


def test_a_request_whose_caller_was_cancelled_at_once_makes_no_outage() -> None:
    play = Play(seed=1)
    play.world.latency_us = 20_000
    client, other = warm_client(play), play.client("two")
    Timed(play, other, acquire_and_hold(play, "a"))
    play.run(0.5)
    found = []
    for _ in range(10):
        first = Timed(play, client, acquire("a", wait=5))
        play.run(0.001)
        found.append(Timed(play, client, acquire("a", wait=0.5)))
        play.run(0.01)
        first.process.cancel()
        play.run(0.7)
    assert all(isinstance(call.result, holdfast.AcquireTimeout) for call in found), [call.result for call in found]


def test_a_request_that_was_sent_just_before_the_end_of_its_wait_does_not_make_the_lock_busy() -> None:
    """32 requests are under way on a hung server; others get their turn shortly before their waits end."""
    play = Play(seed=1)
    client = warm_client(play, outage_wait=None)
    client._driver.router.asks.most = 32
    stop(play)
    for number in range(32):
        Timed(play, client, acquire(f"p{number}", wait=None))
    play.run(3.0)
    calls = []
    for number in range(120):
        calls.append(Timed(play, client, acquire(f"free{number}", wait=1.0)))
        play.run(0.05)
    play.run(5)
    assert all(isinstance(call.result, holdfast.Unavailable) for call in calls)


def test_an_extend_that_was_cancelled_is_no_request_under_way() -> None:
    play = Play(seed=1)
    play.world.latency_us = 20_000
    client = warm_client(play)
    lock = client.lock("a", ttl=10)
    held = Timed(play, client, lambda _: lock.acquire())
    play.run(1)
    extension = play.start(client, held.result.extend(12))
    play.run(0.01)
    extension.cancel()
    play.run(5)
    play.world.store.execute("DEL", "a")  # the lease is lost, and its Lock object stays in use
    play.run(12)
    call = Timed(play, client, lambda _: lock.acquire(timeout=1))
    play.run(3)
    assert not isinstance(call.result, holdfast.Unavailable), call.result


def test_a_refusal_for_lack_of_memory_whose_caller_was_cancelled_ends_no_other_wait() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    Timed(play, client, acquire_and_hold(play, "hot"))
    play.run(0.1)
    waiting = [Timed(play, client, acquire("hot", wait=8))]
    play.world.store.oom = True
    refused = play.start(client, client.lock("x").acquire())
    play.run(0.002)
    refused.cancel()
    play.run(0.3)
    play.world.store.oom = False
    waiting.append(Timed(play, client, acquire("hot", wait=8)))
    play.run(6)
    assert not [call.result for call in waiting if call.ended]


@pytest.mark.parametrize("latency_ms", [1, 30, 60, 100])
@pytest.mark.parametrize("what", ["value", "latch"])
def test_a_last_look_that_has_little_time_makes_no_outage(what: str, latency_ms: int) -> None:
    play = Play(seed=1)
    play.world.latency_us = latency_ms * 1000
    client, other = warm_client(play), play.client("two")

    async def compute() -> int:
        await play.sleep(other, 60.0)
        return 1

    def wait(seconds: float) -> Callable[[holdfast.aio.Client], Any]:
        if what == "latch":
            return lambda client: client.latch("l", 3).wait(seconds)
        return lambda client: client.get_or_compute("v", lambda: 1, ttl=90, wait=seconds)

    Timed(play, other, lambda client: client.get_or_compute("v", compute, ttl=90))
    play.run(1)
    found = []
    for number in range(20):
        found.append(Timed(play, client, wait(1.5 + number / 50)))
        play.run(2.5)
    assert not [call.result for call in found if isinstance(call.result, holdfast.Unavailable)]


@pytest.mark.parametrize("latency_ms", [1, 30])
def test_a_last_look_on_a_hung_server_is_an_outage(latency_ms: int) -> None:
    play = Play(seed=1)
    play.world.latency_us = latency_ms * 1000
    client, other = warm_client(play), play.client("two")

    async def compute() -> int:
        await play.sleep(other, 60.0)
        return 1

    Timed(play, other, lambda client: client.get_or_compute("v", compute, ttl=90))
    play.run(1)
    call = Timed(play, client, lambda client: client.get_or_compute("v", lambda: 1, ttl=90, wait=2.0))
    play.run(0.5)
    stop(play)
    play.run(3)
    assert isinstance(call.result, holdfast.Unavailable), call.result


def test_a_probe_whose_caller_was_cancelled_is_followed_by_another_at_once() -> None:
    play = Play(seed=1)
    play.world.latency_us = 20_000
    client = warm_client(play)
    kill(play)
    Timed(play, client, acquire("z"))
    play.run(70)  # the keeper has nothing left to clean up
    heal(play)
    play.run(5)
    probe = Timed(play, client, acquire("a"))
    play.run(0.001)
    others = [Timed(play, client, acquire(f"o{number}")) for number in range(10)]
    play.run(0.005)
    probe.process.cancel()
    play.run(2)
    assert all(isinstance(call.result, holdfast.aio.Lease) for call in others), [call.result for call in others]


def test_a_new_event_loop_or_process_begins_without_the_clean_ups_of_the_one_before() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    stop(play)
    call = Timed(play, client, acquire("x", wait=1))
    play.run(1.6)
    registry = client._driver.registry
    assert isinstance(call.result, holdfast.Unavailable)
    assert registry.cleaning, "sent, and not answered"
    registry.disown("it ended")
    assert not registry.pending_cleanups()


def lose_requests_of(play: Play, token: str) -> None:
    """The acquire steps of that token are lost on their way."""

    def fate(message: Message) -> Fate | None:
        mine = (isinstance(op, Step) and op.script == "acquire" and op.args[0] == token for op in message.ops)
        return Fate(lost=True) if any(mine) else None

    play.doom(fate)


@pytest.mark.parametrize("beside", ["a try", "a probe"])
def test_a_waiter_for_the_lock_object_of_a_call_that_asked_beside_others_is_not_forgotten(beside: str) -> None:
    """``beside``: which call asked the server although another hold of its client did so, too."""
    play = Play(seed=1)
    client, other = warm_client(play), play.client("two")
    if beside == "a try":
        Timed(play, other, acquire_and_hold(play, "a", ttl=1))
        play.run(0.2)
    else:
        kill(play)
    first = Timed(play, client, lambda client: client.lock("a").acquire())
    play.run(0.2 if beside == "a try" else 4)
    lose_requests_of(play, client._driver.cohorts.active_holds["a"].token)
    play.machines[1].crash()
    play.world.down = False
    play.run(1.5 if beside == "a try" else 0)
    lock = client.lock("a")
    asked = Timed(play, client, lambda _: lock.acquire(timeout=0 if beside == "a try" else 5))
    play.run(0.2)
    lease = asked.result
    assert isinstance(lease, holdfast.aio.Lease)
    waiter = Timed(play, client, lambda _: lock.acquire(timeout=60))
    play.run(1)
    first.process.cancel()
    play.run(1)
    released = Timed(play, client, lambda _: lease.release())
    play.run(3)
    assert released.ended
    assert isinstance(waiter.result, holdfast.aio.Lease), "the lock is free"
    play.start(client, waiter.result.release())
    play.run(1)


def test_what_a_lost_lease_could_not_ask_is_no_outage_for_the_callers_after_it() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    lock = client.lock("a", ttl=3)
    held = Timed(play, client, lambda _: lock.acquire())
    play.run(0.5)
    kill(play)
    Timed(play, client, lambda _: held.result.extend(4))
    play.run(6)
    heal(play)
    Timed(play, client, acquire("b", wait=1))
    play.run(2)
    assert contact_of(client).lost_at is None
    assert not held.result.held
    calls = [Timed(play, client, lambda _: lock.acquire(timeout=1)), Timed(play, client, lambda _: lock.acquire(False))]
    play.run(3)
    assert [call.result for call in calls] == [None, None], "it is busy until its lost lease is released"


@pytest.mark.parametrize("before_the_end", [1.4, 1.2, 1.0])
def test_a_crowd_whose_keeper_has_no_answer_is_in_an_outage(before_the_end: float) -> None:
    play = Play(seed=1)
    client, other = warm_client(play), play.client("two")
    Timed(play, other, acquire_and_hold(play, "hot", ttl=30))
    play.run(1)
    waiting = [Timed(play, client, acquire("hot", wait=3.0, cohort=0)) for _ in range(50)]
    play.run(3.0 - before_the_end)
    assert client._driver.registry.crowd.members
    stop(play)
    play.run(5)
    assert {type(call.result) for call in waiting} == {holdfast.Unavailable}
