"""Whatever goes wrong, at whichever message: no writer beside anybody, no permit too many, and nothing is left behind.

The worlds here have no chance in them but for the seed, so a failure repeats.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Command, Step
from tests.pools.harness import RoomPlay
from tests.protocol.harness import at
from tests.support import as_bytes

TTL = 30.0
MESSAGES = range(0, 16)
CASTS = {
    "permits": ("permit", "permit", "permit"),
    "writer between": ("read", "write", "read"),
    "reader between": ("write", "read", "write"),
}


def in_turn(play: RoomPlay, cast: str, hold: float = 0.01) -> list[Any]:
    """They come one after the other, so soon that some have to wait."""

    def start(number: int, mode: str) -> Any:
        client = play.client(f"c{number}")

        async def later() -> None:
            await play.sleep(client, number * 0.002)
            await play.visit(client, mode, ttl=TTL, hold=hold)

        return play.start(client, later())

    return [start(number, mode) for number, mode in enumerate(CASTS[cast])]


def assert_a_newcomer_gets_in(play: RoomPlay, cast: str, within: float) -> None:
    """As whoever wants most: a writer, or all of the permits."""
    play.doom(lambda message: None)
    mode = "permit" if cast == "permits" else "write"
    client = play.client("new")
    late = [play.start(client, play.visit(client, mode, ttl=TTL, wait=within, hold=0.5)) for _ in range(2)]
    play.run(within + 5)
    for process in late:
        process.outcome()
    assert play.left() == []
    assert sorted(play.fences) == sorted(set(play.fences))


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_crash_at_any_step_costs_others_the_ttl_at_most(number: int, when: str, cast: str) -> None:
    play = RoomPlay()
    play.doom(at(number, sender_crashes=when))
    processes = in_turn(play, cast)
    play.run(TTL + 3)
    survivors = [process for process in processes if not process.machine.crashed]
    assert len(survivors) >= 2
    for process in survivors:
        process.outcome()
    assert_a_newcomer_gets_in(play, cast, TTL + 2)


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fault", [{"lost": True}, {"reply_lost": True}, {"reply_late_us": 400_000}], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_lost_message_costs_a_retry(number: int, fault: dict[str, Any], cast: str) -> None:
    play = RoomPlay()
    play.doom(at(number, **fault))
    processes = in_turn(play, cast)
    play.run(25)  # less than the ttl: nobody is saved by a lease that ends
    for process in processes:
        process.outcome()
    assert play.left() == []
    assert_a_newcomer_gets_in(play, cast, 2)


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("late", [0.5, 5.5, 40.0])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_late_message_leaves_nothing_behind(number: int, late: float, cast: str) -> None:
    play = RoomPlay()
    play.doom(at(number, late_us=round(late * 1e6)))
    processes = in_turn(play, cast)
    play.run(late + 15)
    for process in processes:
        process.outcome()
    assert play.left() == []
    assert_a_newcomer_gets_in(play, cast, 2)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("fate", [{"lost": True}, {"late_us": 2_000_000}, {"again_us": 300_000}], ids=str)
@pytest.mark.parametrize("number", range(3))
def test_bells_are_hints(number: int, fate: dict[str, Any], cast: str) -> None:
    play = RoomPlay()
    play.world.fate_of_notification = lambda wakeup: Fate(**fate) if wakeup == number else Fate()
    processes = in_turn(play, cast, hold=0.1)
    play.run(10)
    for process in processes:
        process.outcome()
    assert play.left() == []


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize(
    "after_us", [0, 100, 199, 200, 300, 2_100, 4_100, 4_400, 5_000, 10_250, 12_350, 20_000, 100_000]
)
def test_cancelled_at_any_moment_it_leaves_nothing(after_us: int, victim: int, cast: str) -> None:
    play = RoomPlay()
    processes = in_turn(play, cast, hold=0.02)
    play.world.at(after_us, processes[victim].cancel)
    play.run(10)
    for number, process in enumerate(processes):
        assert process.done
        assert process.error is None or (number == victim and isinstance(process.error, Cancelled))
    assert play.left() == []


def test_a_dead_waiter_lets_others_pass() -> None:
    """A writer that waits, and dies: readers behind it come in though it is first in the queue."""
    play = RoomPlay()
    first, dead, second = play.client("first"), play.client("dead"), play.client("second")
    reading = play.start(first, play.visit(first, "read", ttl=TTL, hold=10))
    play.run(0.1)
    play.start(dead, play.visit(dead, "write", ttl=TTL))
    play.run(0.1)
    behind = play.start(second, play.visit(second, "read", ttl=TTL))
    play.run(0.2)
    assert not behind.done
    dead._driver.crash()  # type: ignore[attr-defined]
    play.run(1.0)
    behind.outcome()
    assert not reading.done


def test_presence_keeps_all_places_and_only_the_first_has_to_ask() -> None:
    """The step that a keeper sends for a crowd."""
    play = RoomPlay()
    for number in range(4):
        client = play.client(f"c{number}")
        play.start(client, play.visit(client, "write", ttl=TTL, hold=20))
        play.run(0.1)
    holder, *tokens = [next(iter(machine.cohorts.active_holds.values())).token for machine in play.machines]
    for _ in range(2):
        for token, code in zip(tokens, (1, 0, 0), strict=True):
            keys = "a", "a:hf1:queue:{a}", "a:hf1:waiters:{a}"
            assert play.world.execute(Step("present", keys, (token, "0")))[1:] == [code]
    queue = play.world.execute(Command(("ZRANGE", "a:hf1:queue:{a}", 1, -1)))
    assert [as_bytes(token).decode() for token in queue] == tokens
    assert holder not in tokens


def test_a_waiter_that_was_stopped_loses_its_turn_and_not_the_lock() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")
    first = play.start(one, play.visit(one, "write", ttl=TTL, hold=1))
    play.run(0.1)
    second = play.start(two, play.visit(two, "write", ttl=TTL, hold=1))
    play.run(0.1)
    two._driver.pause()  # type: ignore[attr-defined]
    play.world.at(play.world.now_us + 4_000_000, two._driver.resume)  # type: ignore[attr-defined]
    play.run(20)
    first.outcome()
    second.outcome()
    assert play.left() == []


def test_release_and_renewal_work_on_a_full_server() -> None:
    play = RoomPlay()
    one = play.client("one")

    async def holder(mode: str, outcome_unknown: bool) -> None:
        lease = await play.lock(one, mode, ttl=0.9).acquire()
        lease._hold.outcome_unknown = outcome_unknown
        play.world.store.oom = True
        await play.sleep(one, 3)
        assert lease.held, "it was not renewed"
        await lease.release()

    for mode in ("permit", "write"):
        for outcome_unknown in (False, True):
            process = play.start(one, holder(mode, outcome_unknown))
            play.run(5)
            process.outcome()
            assert play.left() == []
            play.world.store.oom = False
            play.run(1)


def test_a_full_server_renews_a_hold_whose_fence_was_deleted_by_hand() -> None:
    """To write the fence again needs memory, which a full server gives only to a step that has written before."""
    play = RoomPlay()
    one = play.client("one")

    async def holder() -> None:
        lease = await play.lock(one, "permit", ttl=0.9).acquire()
        (holders,) = [key for key in play.world.store.values if key.endswith(b":holders:{a}")]
        assert play.world.execute(Command(("ZREM", holders.decode(), f"fence {lease.token}"))) == 1
        play.world.store.oom = True
        await play.sleep(one, 3)
        assert lease.held, "it was not renewed"
        await lease.release()

    process = play.start(one, holder())
    play.run(5)
    process.outcome()


def test_a_waiter_that_gives_up_leaves_by_one_step() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")
    play.start(one, play.visit(one, "write", ttl=TTL, hold=20))
    play.run(0.1)
    waiting = play.start(two, play.lock(two, "write", ttl=TTL, wait=1.0).acquire())
    play.run(10)
    assert waiting.outcome() is None
    steps = [op.script for message in play.world.sent for op in message.ops if isinstance(op, Step)]
    assert steps.count("pool_abandon") == 1, "it needs no tombstone, and no second try"


def test_a_downgrade_whose_reply_is_lost_is_asked_for_again() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")
    lost: list[int] = []

    def fate(message: Message) -> Fate | None:
        if message.ops[0].script == "pool_share" and not lost:  # type: ignore[union-attr]
            lost.append(message.number)
            return Fate(reply_lost=True)
        return None

    play.doom(fate)

    async def writer() -> None:
        async with one.rwlock("a", ttl=TTL).write as lease:
            await lease.downgrade()
            await play.sleep(one, 1)

    process = play.start(one, writer())
    play.run(0.1)
    reader = play.start(two, play.visit(two, "read", ttl=TTL))
    play.run(20)
    process.outcome()
    reader.outcome()
    assert lost
    assert play.left() == []


@pytest.mark.parametrize("seed", range(150))
def test_chance(seed: int) -> None:
    """Four machines, random faults on a tenth of the messages, cancellations, pauses: the seed is the replay."""
    dice = random.Random(seed)
    play = RoomPlay(seed=seed)
    clients = [play.client(f"c{number}") for number in range(4)]
    modes = ("permit",) if seed % 2 else ("read", "read", "write")

    def fate(message: Message) -> Fate | None:
        if dice.random() > 0.1 or play.world.now_us > 20_000_000:
            return None
        kind = dice.choice(["lost", "late", "reply", "before", "after"])
        if kind == "lost":
            return Fate(lost=True)
        if kind == "late":
            return Fate(late_us=dice.randrange(1, 10_000_000))
        if kind == "reply":
            return Fate(reply_lost=True)
        alive = [client for client in clients if not client._driver.crashed]  # type: ignore[attr-defined]
        return Fate(sender_crashes=kind) if len(alive) > 1 else None

    play.doom(fate)
    play.world.fate_of_notification = lambda _: Fate(lost=dice.random() < 0.1, late_us=dice.choice([0, 0, 900_000]))

    async def run_client(client: holdfast.aio.Client) -> None:
        for _ in range(4):
            ttl, wait = dice.choice([1.0, 3.0, TTL]), dice.random() * 5
            try:
                await play.visit(client, dice.choice(modes), hold=dice.random(), ttl=ttl, wait=wait)
            except (holdfast.HoldfastError, Cancelled):
                pass
            await play.sleep(client, dice.random())

    processes = [play.start(client, run_client(client)) for client in clients]
    for _ in range(3):
        play.world.at(dice.randrange(20_000_000), dice.choice(processes).cancel)
        machine = dice.choice(clients)._driver
        pause_at = dice.randrange(15_000_000)
        play.world.at(pause_at, machine.pause)  # type: ignore[attr-defined]
        play.world.at(pause_at + dice.randrange(5_000_000), machine.resume)  # type: ignore[attr-defined]
    play.run(60)
    for process in processes:
        assert process.done
    assert len(play.fences) == len(set(play.fences))
    if any(client._driver.crashed for client in clients):  # type: ignore[attr-defined]
        play.run(TTL + 6)
    assert play.left() == [], f"replay: pytest tests/pools -k 'test_chance and {seed}'"


def test_the_look_can_fail() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")
    play.start(one, play.visit(one, "write", ttl=TTL, hold=5))
    play.run(1)
    play.world.restart_empty()
    play.start(two, play.visit(two, "write", ttl=TTL, hold=5))
    with pytest.raises(AssertionError, match="a writer is not alone"):
        play.run(1)


def test_from_writing_to_reading_on_a_full_server() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")

    async def writer() -> None:
        async with one.rwlock("a", ttl=30).write as lease:
            play.world.store.oom = True
            await lease.downgrade()
            play.world.store.oom = False
            await play.sleep(one, 1)

    writing = play.start(one, writer())
    play.run(0.1)
    reading = play.start(two, play.visit(two, "read", ttl=30, wait=0))
    play.run(5)
    writing.outcome()
    reading.outcome()
    assert play.left() == []
