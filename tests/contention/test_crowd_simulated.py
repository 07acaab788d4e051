"""Very many waiters of one client, in the simulated world: what they send, and what they do not hold up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Step
from holdfast.protocol.wait.presence import LARGE, Crowd
from tests.protocol.harness import Play

WAITERS = 200


def script_of(message: Message) -> str:
    step = message.ops[0]
    return step.script if isinstance(step, Step) else ""


def waiting(play: Play, timeout: float | None, waiters: int = WAITERS) -> tuple[Any, list[Any]]:
    """A client with so many waits, each for a lock that another client holds; that one, and the waits."""
    holder, client = play.client("holder"), play.client("client")

    async def hold(name: str) -> Any:
        return await holder.lock(name, ttl=60).acquire()

    async def wait_for(name: str) -> Any:
        return await client.lock(name, ttl=3).acquire(timeout=-1 if timeout is None else timeout)

    names = [f"name{number}" for number in range(waiters)]
    held = [play.start(holder, hold(name)) for name in names]
    play.run(0.1)
    processes = [play.start(client, wait_for(name)) for name in names]
    play.run(1.0)
    return [process.outcome() for process in held], processes


def sent_since(play: Play, number: int, machine: int = 1) -> Counter[str]:
    """How many messages that client has sent since, by their first step."""
    return Counter(
        script_of(message) for message in play.world.sent[number:] if message.machine is play.machines[machine]
    )


@pytest.mark.long
def test_the_keeper_speaks_for_a_crowd_and_nobody_asks() -> None:
    play = Play()
    waiting(play, None)
    before = len(play.world.sent)
    play.run(10.0)
    sent = sent_since(play, before)
    assert 15 <= sent.pop("present") <= 25, "one batch every half second"
    assert not sent


def test_a_few_waiters_speak_for_themselves() -> None:
    play = Play()
    waiting(play, None, waiters=20)
    before = len(play.world.sent)
    play.run(10.0)
    sent = sent_since(play, before)
    assert sent["acquire"] >= 15 * 20
    assert not sent["present"]


@pytest.mark.long
def test_a_waiter_of_a_crowd_keeps_its_place_and_is_granted_the_lock() -> None:
    play = Play()
    held, processes = waiting(play, None)
    play.run(10.0)
    for number in (0, 150):
        releasing = play.start(play.client("releases"), _release(held[number]))
        play.run(0.1)
        assert releasing.done
        lease = processes[number].outcome()
        assert lease.held
        assert lease.remaining() > 2.85, "the server's time is known from the last round, and not from a minute ago"


async def _release(lease: Any) -> None:
    await lease.release()


@pytest.mark.long
def test_a_crowd_that_gives_up_together_returns_first_and_its_keeper_cleans_up() -> None:
    play = Play()
    waiting_until = 5.0
    _, processes = waiting(play, waiting_until)
    play.run(waiting_until - 1.0 - 0.01)
    before = len(play.world.sent)
    play.run(0.02)
    assert all(process.done and process.outcome() is None for process in processes)
    play.run(0.5)
    sent = sent_since(play, before)
    abandons = [message for message in play.world.sent[before:] if script_of(message) == "abandon"]
    assert sum(len(message.ops) for message in abandons) == WAITERS
    assert sent["abandon"] < WAITERS / 3, "most of them in batches"
    assert not [key for key in play.world.store.values if b":queue:" in key]


@pytest.mark.long
def test_a_crowd_on_a_silent_server_raises_unavailable_and_warns_once_for_all() -> None:
    play = Play()
    _, processes = waiting(play, 9.0)
    play.world.hang()
    play.run(8.5)
    for process in processes:
        with pytest.raises(holdfast.Unavailable, match="did not answer"):
            process.outcome()
    warnings = play.machines[1].warnings
    assert "no contact" in warnings[0]
    assert len(warnings) < 5


@pytest.mark.long
def test_a_crowd_whose_server_was_restarted_asks_again() -> None:
    play = Play()
    _, processes = waiting(play, None)
    play.world.restart_empty()
    play.world.run(seconds=5.0)  # a server that forgets its holders lets two have a lock
    assert all(process.done for process in processes), "the locks are free"


def test_waiters_beyond_the_limit_take_turns_at_asking() -> None:
    play = Play()
    holder, client = play.client("holder"), play.client("client")
    asks = play.machines[1].router.asks
    asks.most = 10
    most = 0

    def note(message: Message) -> Fate | None:
        nonlocal most
        most = max(most, len(asks.under_way))
        return None

    async def hold() -> Any:
        return await holder.lock("a", ttl=60).acquire()

    async def take(number: int) -> Any:
        return await client.lock(f"free{number}", ttl=3).acquire(timeout=5)

    play.start(holder, hold())
    play.doom(note)
    processes = [play.start(client, take(number)) for number in range(WAITERS)]
    play.run(1.0)
    assert all(process.outcome().held for process in processes)
    assert most == 10
    assert not asks.under_way


def test_a_waiter_that_leaves_the_queue_for_its_turn_is_passed_over() -> None:
    play = Play()
    client = play.client("client")
    asks = play.machines[0].router.asks
    asks.most = 1
    play.doom(lambda message: Fate(late_us=300_000))

    async def take(name: str, timeout: float) -> Any:
        return await client.lock(name, ttl=30).acquire(timeout=timeout)

    first = play.start(client, take("a", 10))
    cancelled, hasty = play.start(client, take("b", 10)), play.start(client, take("c", 0.2))
    last = play.start(client, take("d", 10))
    play.run(0.05)
    cancelled.cancel()
    play.run(3.0)
    assert first.outcome()
    assert last.outcome()
    assert cancelled.done
    with pytest.raises(holdfast.Unavailable, match="too busy to ask it within 0.2 s"):
        hasty.outcome()
    assert not asks.under_way


def test_a_waiter_that_an_interrupted_caller_took_out_of_the_queue_comes_back() -> None:
    play = Play()
    client = play.client("client")
    asks = play.machines[0].router.asks
    asks.most = 1
    play.doom(lambda message: Fate(late_us=300_000))

    async def take(name: str) -> Any:
        return await client.lock(name, ttl=30).acquire()

    first, second = play.start(client, take("a")), play.start(client, take("b"))
    play.run(0.05)
    asks._queue.popleft().pop()
    play.run(3.0)
    assert first.outcome()
    assert second.outcome()
    assert not asks.under_way


@pytest.mark.long
def test_renewals_go_before_thousands_of_cleanups() -> None:
    play = Play()
    client, other = play.client("client"), play.client("other")
    machine = play.machines[0]
    # Each message takes a fifth of a second, so that all batches together take longer than the lease lasts.
    play.world.latency_us = 100_000

    async def hold() -> Any:
        return await client.lock("kept", ttl=3).acquire()

    async def make_hold(number: int) -> Any:
        lock = other.lock(f"chore{number}", ttl=30)
        hold = lock._new_hold()
        hold.token = f"other-.{number:022d}"
        return hold

    lease = play.start(client, hold())
    made = [play.start(other, make_hold(number)) for number in range(20_000)]
    play.run(1.0)
    for process in made:
        machine.registry.defer_cleanup(process.outcome(), machine.now())
    play.run(6.0)
    assert not machine.registry.cleanups
    assert lease.outcome().held


class Ends:
    """Waits of a crowd that end when a test says so, and leave their clean-up to the keeper."""

    def __init__(self) -> None:
        self.play = Play()
        self._client = self.play.client("client")
        self._machine = self.play.machines[0]
        self._ended = 0

    def end_one(self) -> None:
        async def make_hold() -> Any:
            return self._client.lock(f"name{self._ended}", ttl=30)._new_hold()

        made = self.play.start(self._client, make_hold())
        self.play.run(0.0)
        hold = made.outcome()
        hold.token = f"client-.{self._ended:022d}"
        hold.wait_at_server().crowded = True
        self._machine.registry.defer_cleanup(hold, self._machine.now())
        self._machine.keep()
        self._ended += 1

    def pending(self) -> int:
        return len(self._machine.registry.cleanups)


def test_clean_ups_of_a_crowd_begin_once_no_wait_has_ended_for_a_moment() -> None:
    ends = Ends()
    for number in range(5):
        ends.end_one()
        ends.play.run(0.2)
        assert ends.pending() == number + 1
    ends.play.run(0.2)
    assert ends.pending() == 0


def test_waits_of_a_crowd_that_go_on_ending_delay_clean_ups_by_three_seconds_at_most() -> None:
    ends = Ends()
    for _ in range(14):
        ends.end_one()
        ends.play.run(0.2)
    assert ends.pending() == 14
    for _ in range(2):
        ends.end_one()
        ends.play.run(0.2)
    assert ends.pending() <= 1


def test_threads_of_a_large_crowd_end_at_their_own_time_unless_others_end_at_that_time_too() -> None:
    crowd = Crowd()
    crowd.spread_over = 0.3
    assert crowd.spread(10.0) == 0.0  # a small crowd needs no spreading
    crowd.members = dict.fromkeys(map(str, range(LARGE + 1)))  # type: ignore[assignment]
    assert [crowd.spread(10.0 + number) for number in range(3)] == [0.0, 0.0, 0.0]
    together = [crowd.spread(20.0) for _ in range(1500)]
    assert len(set(together)) == len(together)
    assert 0.29 < max(together) < 0.3
    assert crowd.spread(float("inf")) == 0.0
    assert crowd.spread(15.0) == 0.0


def test_a_presence_reply_of_another_length_lets_its_waiters_ask() -> None:
    """As by a proxy that mixes replies up: what it says may be about other waiters."""
    play = Play()
    waiting(play, None, waiters=LARGE + 1)
    send = play.world.send
    garbled: list[int] = []  # the number of messages until then

    def garble(machine: Any, ops: Any, answer: Any, link: Any = None) -> None:
        if not garbled and isinstance(ops[0], Step) and ops[0].script == "present":
            garbled.append(len(play.world.sent) + 1)
            send(machine, ops, lambda replies: answer([reply[:-1] for reply in replies]), link)
        else:
            send(machine, ops, answer, link)

    play.world.send = garble  # type: ignore[method-assign]
    while not garbled:
        play.run(0.01)
    play.run(0.02)
    assert sent_since(play, garbled[0])["acquire"] == LARGE + 1, "each waiter asks for itself"
    play.run(1.2)
    assert sent_since(play, garbled[0])["present"] >= 2, "the keeper goes on"
