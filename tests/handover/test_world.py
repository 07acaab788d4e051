"""Whatever goes wrong while a hold is handed over: nobody holds beside another, and no key outlives belief in it."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.machine import Cancelled, Process
from tests.protocol.harness import Play, at

TTL = 8.0
MESSAGES = range(12)


class Relay:
    """One acquires and hands over, one adopts, and a third one waits for the lock."""

    def __init__(self, seed: int | None = None) -> None:
        self.play = Play(seed)
        self.giver, self.taker, self.third = (self.play.client(name) for name in ("giver", "taker", "third"))
        self.ticket = ""
        self.trouble: list[str] = []

    def start(self) -> list[Process]:
        play = self.play
        return [
            play.start(self.giver, self.give()),
            play.start(self.taker, self.take()),
            play.start(self.third, self.wait()),
        ]

    async def give(self) -> None:
        async with self.giver.lock("a", ttl=TTL) as lease:
            self.play.fences.append(lease.fence)
            await self.play.sleep(self.giver, 0.01)
            self.ticket = await lease.hand_over()
            assert not lease.held

    async def take(self) -> None:
        while not self.ticket:
            await self.play.sleep(self.taker, 0.013)
            if self.taker._driver.now() > 3 * TTL:
                return
        try:
            lease = await self.taker.adopt(self.ticket, ttl=TTL)
        except (holdfast.NotAcquired, holdfast.Unavailable) as refused:
            self.trouble.append(str(refused))
            return
        try:
            self.play.fences.append(lease.fence)
            await self.play.sleep(self.taker, 0.01)
        finally:
            await lease.release()

    async def wait(self) -> None:
        await self.play.sleep(self.third, 0.005)
        await self.play.cycle(self.third, ttl=TTL)

    def check(self) -> None:
        fences = self.play.fences
        assert fences == sorted(set(fences))
        assert self.play.world.keys() == []


def test_without_any_fault_it_takes_one_step_each() -> None:
    relay = Relay()
    processes = relay.start()
    relay.play.run(3)
    for process in processes:
        process.outcome()
    assert len(relay.play.fences) == 3
    assert not relay.trouble
    scripts = [op.script for message in relay.play.world.sent for op in message.ops if hasattr(op, "script")]
    assert (scripts.count("hand_over"), scripts.count("adopt")) == (1, 1)
    relay.check()


@pytest.mark.parametrize("fault", [{"lost": True}, {"reply_lost": True}, {"late_us": 300_000}], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_message_gone_wrong_costs_a_retry(number: int, fault: dict[str, Any]) -> None:
    relay = Relay()
    relay.play.doom(at(number, **fault))
    processes = relay.start()
    relay.play.run(TTL - 1)  # nobody is saved by a key that expires
    for process in processes:
        process.outcome()
    assert not relay.trouble
    assert len(relay.play.fences) == 3
    relay.play.run(60)
    relay.check()


@pytest.mark.parametrize("late", [1.0, 6.0, 12.0, 30.0])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_late_message_leaves_no_key_behind(number: int, late: float) -> None:
    relay = Relay()
    relay.play.doom(at(number, late_us=round(late * 1e6)))
    processes = relay.start()
    relay.play.run(late + 3 * TTL)
    for process in processes:
        process.outcome()
    relay.check()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_crash_at_any_step_costs_others_the_ttl_at_most(number: int, when: str) -> None:
    relay = Relay()
    relay.play.doom(at(number, sender_crashes=when))
    processes = relay.start()
    relay.play.run(4 * TTL)
    for process in processes:
        assert process.done
        if not process.machine.crashed:
            process.outcome()
    relay.check()


def moments() -> list[int]:
    """Every moment at which anything happens, in microseconds."""
    relay = Relay()
    relay.start()
    seen: set[int] = set()
    while relay.play.world._events and relay.play.world.now_us < 200_000:
        seen.add(relay.play.world.now_us)
        relay.play.step()
    return sorted(seen)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["giver", "taker", "third"])
def test_cancelled_at_any_moment_it_leaves_no_key(which: int) -> None:
    for moment in moments():
        for reply_lost in (None, 2, 4, 5):
            relay = Relay()
            if reply_lost is not None:
                relay.play.doom(at(reply_lost, reply_lost=True))
            processes = relay.start()
            relay.play.world.at(moment, processes[which].cancel)
            relay.play.run(4 * TTL)
            for number, process in enumerate(processes):
                assert process.done, (moment, reply_lost)
                if number != which or not isinstance(process.error, Cancelled):
                    process.outcome()
            relay.check()
            relay.play.end()


def test_two_who_adopt_the_same_ticket_at_once_are_told_apart() -> None:
    for offset in range(-300, 301, 50):
        play = Play()
        giver, one, two = play.client("giver"), play.client("one"), play.client("two")
        tickets: list[str] = []
        won: list[str] = []

        async def give(client: Any = giver, tickets: Any = tickets) -> None:
            tickets.append(await (await client.lock("a", ttl=TTL).acquire()).hand_over())

        async def take(client: Any, name: str, after: float, play: Any = play, won: Any = won) -> None:
            await play.sleep(client, after)
            try:
                lease = await client.adopt(tickets[0], ttl=TTL)  # noqa: B023 (it is this round's)
            except holdfast.NotAcquired:
                return
            won.append(name)
            await play.sleep(client, 0.01)
            await lease.release()

        play.start(giver, give())
        play.run(0.1)
        takers = [
            play.start(one, take(one, "one", 0.001)),
            play.start(two, take(two, "two", 0.001 + offset / 1e6)),
        ]
        play.run(2)
        for taker in takers:
            taker.outcome()
        assert len(won) == 1
        assert play.world.keys() == []


def test_a_late_acquire_of_the_giver_does_not_come_back_after_the_taker() -> None:
    """Its reply was lost and it was sent again, so the first may still be on its way when all is over."""
    play = Play()
    giver, taker = play.client("giver"), play.client("taker")
    play.doom(at(0, late_us=20_000_000))

    async def relay() -> None:
        lease = await giver.lock("a", ttl=TTL).acquire()
        assert lease
        taken = await taker.adopt(await lease.hand_over(), ttl=TTL)
        await taken.release()

    process = play.start(giver, relay())
    play.run(19)
    process.outcome()
    play.run(2)
    assert play.world.keys() == [], "the late acquire took a lock that nobody believes in"
