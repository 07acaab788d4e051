"""Faults while a hold is handed over: there are never two holders, and no key outlives its hold."""

from __future__ import annotations

import random
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Attach, Effects, Step
from holdfast.protocol.kinds.handover import adopt, read_ticket
from tests.handover.kinds import KINDS
from tests.protocol.harness import Play, at

TTL = 8.0
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FAULTS = [
    {"lost": True},
    {"reply_lost": True},
    {"reply_late_us": 300_000},
    {"late_us": 300_000},
    {"again_us": 300},
    {"again_us": 5_000},
]


class AnyPlay(Play):
    """A world in which anything may be held, by name."""

    def look(self) -> None:
        now = self.world.now_us / 1e6
        seen: dict[str, list[str]] = {}
        for machine in self.machines:
            for hold in list(machine.registry.holds.values()) if not machine.crashed else ():
                for name in hold.names if hold.valid(now) else ():
                    seen.setdefault(name, []).append(f"{hold.kind} {hold.mode}")
        for name, holds in seen.items():
            assert len(holds) == 1 or {*holds} == {"rwlock any"}, f"{name!r} is held by {holds}"

    def left(self) -> list[str]:
        """What is on the server, less fences and tombstones."""
        kept = (b":fence:", b":gone:")
        return [key.decode() for key in self.world.store.values if not any(word in key for word in kept)]


class Relay:
    """One acquires and hands over, one adopts, and a third one waits for the lock."""

    def __init__(self, kind: str, play: AnyPlay | None = None) -> None:
        self.kind = KINDS[kind]
        self.play = play or AnyPlay()
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
        async with self.kind.ask(self.giver, ttl=TTL) as lease:
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
        async with self.kind.rival(self.third, ttl=TTL) as lease:
            self.play.fences.append(lease.fence)
            await self.play.sleep(self.third, 0.01)

    def check(self) -> None:
        fences = self.play.fences
        assert fences == sorted(set(fences))
        assert self.play.left() == []


def messages(kind: str) -> range:
    """Of a relay without any fault."""
    relay = Relay(kind)
    relay.start()
    relay.play.run(3)
    relay.play.end()
    return range(len(relay.play.world.sent))


@EVERY_KIND
def test_without_any_fault_it_takes_one_step_each(kind: str) -> None:
    relay = Relay(kind)
    processes = relay.start()
    relay.play.run(3)
    for process in processes:
        process.outcome()
    assert len(relay.play.fences) == 3
    assert not relay.trouble
    scripts = [op.script for message in relay.play.world.sent for op in message.ops if isinstance(op, Step)]
    steps = [script for script in scripts if script.endswith(("hand_over", "adopt"))]
    assert [step.rpartition("pool_")[2].removeprefix("multi_") for step in steps] == ["hand_over", "adopt"]
    relay.play.run(6)
    relay.check()


@pytest.mark.long
@EVERY_KIND
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_gone_wrong_costs_a_retry(kind: str, fault: dict[str, Any]) -> None:
    for number in messages(kind):
        relay = Relay(kind)
        relay.play.doom(at(number, **fault))
        processes = relay.start()
        relay.play.run(TTL - 1)  # nobody is saved by a lease that ends
        for process in processes:
            process.outcome()
        assert not relay.trouble
        assert len(relay.play.fences) == 3
        relay.play.run(60)
        relay.check()
        relay.play.end()


@EVERY_KIND
@pytest.mark.parametrize("late", [1.0, 6.0, 12.0, 30.0])
def test_a_late_message_leaves_no_key_behind(kind: str, late: float) -> None:
    for number in messages(kind):
        relay = Relay(kind)
        relay.play.doom(at(number, late_us=round(late * 1e6)))
        processes = relay.start()
        relay.play.run(late + 3 * TTL)
        for process in processes:
            process.outcome()
        relay.check()
        relay.play.end()


@pytest.mark.long
@EVERY_KIND
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_costs_others_the_ttl_at_most(kind: str, when: str) -> None:
    for number in messages(kind):
        relay = Relay(kind)
        relay.play.doom(at(number, sender_crashes=when))
        processes = relay.start()
        relay.play.run(4 * TTL)
        for process in processes:
            assert process.done
            if not process.machine.crashed:
                process.outcome()
        relay.check()
        relay.play.end()


def moments(kind: str) -> list[int]:
    """Every moment at which anything happens, in microseconds."""
    relay = Relay(kind)
    relay.start()
    seen: set[int] = set()
    while relay.play.world._events and relay.play.world.now_us < 200_000:
        seen.add(relay.play.world.now_us)
        relay.play.step()
    relay.play.end()
    return sorted(seen)


@pytest.mark.long
@EVERY_KIND
@pytest.mark.parametrize("which", [0, 1, 2], ids=["giver", "taker", "third"])
def test_cancelled_at_any_moment_it_leaves_no_key(kind: str, which: int) -> None:
    for moment in moments(kind):
        for reply_lost in (None, 4, 5):
            relay = Relay(kind)
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


@EVERY_KIND
def test_two_who_adopt_the_same_ticket_at_once_are_told_apart(kind: str) -> None:
    for offset in range(-300, 301, 50):
        play = AnyPlay()
        giver, one, two = play.client("giver"), play.client("one"), play.client("two")
        tickets: list[str] = []
        won: list[str] = []

        async def give(client: Any = giver, tickets: Any = tickets) -> None:
            tickets.append(await (await KINDS[kind].ask(client, ttl=TTL).acquire()).hand_over())

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
        assert play.left() == []


@EVERY_KIND
@pytest.mark.parametrize("adopted", [True, False])
def test_a_late_acquire_of_the_giver_does_not_come_back(kind: str, adopted: bool) -> None:
    """Its reply was lost and it was sent again, so the first may still be on its way when all is over."""
    play = AnyPlay()
    giver, taker = play.client("giver"), play.client("taker")
    play.doom(at(0, late_us=20_000_000))

    async def relay() -> None:
        lease = await KINDS[kind].ask(giver, ttl=TTL).acquire()
        ticket = await lease.hand_over()
        if adopted:
            await (await taker.adopt(ticket, ttl=TTL)).release()

    process = play.start(giver, relay())
    play.run(19)
    process.outcome()
    play.run(2)
    assert play.left() == [], "the late acquire took a lock without a holder"


@EVERY_KIND
def test_whoever_gives_up_an_adoption_that_never_arrived_leaves_the_ticket_good(kind: str) -> None:
    play = AnyPlay()
    giver, one, two = play.client("giver"), play.client("one"), play.client("two")
    sent: list[int] = []

    def fate(message: Message) -> Fate | None:
        adopts = message.machine.name == "one" and message.ops[0].script.endswith("adopt")  # type: ignore[union-attr]
        sent.extend([message.number] if adopts else ())
        return Fate(late_us=9_000_000) if adopts else None

    play.doom(fate)

    async def relay() -> int:
        lease = await KINDS[kind].ask(giver, ttl=30).acquire()
        ticket = await lease.hand_over()
        with pytest.raises(holdfast.Unavailable):
            await one.adopt(ticket, ttl=TTL)
        taken = await two.adopt(ticket, ttl=TTL)
        assert taken.fence > lease.fence
        await play.sleep(two, 20)  # the late ones arrive
        assert taken.held
        await taken.release()
        return taken.fence

    process = play.start(giver, relay())
    play.run(40)
    process.outcome()
    assert len(sent) > 1
    assert play.left() == []


def test_an_adoption_that_is_interrupted_once_it_is_held_is_renewed_no_more() -> None:
    """Ctrl-C just before the caller gets its lease: nobody has it, so nobody is told that it is lost."""
    play = AnyPlay()
    giver, taker = play.client("giver"), play.client("taker")
    machine: Any = taker._driver

    def interrupted(adoption: Effects[Any]) -> Effects[Any]:
        effect = next(adoption)
        while not isinstance(effect, Attach):
            effect = adoption.send((yield effect))
        assert [hold.name for hold in machine.registry.holds] == ["a"]
        effect = adoption.throw(KeyboardInterrupt())
        while True:
            effect = adoption.send((yield effect))

    async def relay() -> None:
        lease = await giver.lock("a", ttl=TTL).acquire()
        assert lease is not None
        offer = read_ticket(await lease.hand_over(), "")
        with pytest.raises(KeyboardInterrupt):
            await machine.run(interrupted(adopt(taker.lock("a", ttl=TTL, on_lost="cancel"), offer)))
        assert list(machine.registry.holds) == []

    process = play.start(giver, relay())
    play.run(2 * TTL)
    process.outcome()
    assert play.left() == []
    assert machine.events == []


def test_who_adopts_a_reading_of_unknown_beginning_lets_others_in() -> None:
    """A downgrade was given up, for no server has answered; and then what is left of it is handed over."""
    play = AnyPlay()
    giver, taker, other = play.client("giver"), play.client("taker"), play.client("other")
    play.doom(lambda message: Fate(lost=True) if message.ops[0].script == "pool_share" else None)  # type: ignore[union-attr]

    async def relay() -> None:
        lease = await giver.rwlock("a", ttl=60).write.acquire()
        with pytest.raises(holdfast.Unavailable):
            await lease.downgrade()
        ticket = await lease.hand_over()
        waiting = play.start(other, read())
        await play.sleep(taker, 0.1)
        assert not waiting.done, "for the server, it is a writer that was handed over"
        taken = await taker.rwlock("a").read.adopt(ticket)
        await play.sleep(taker, 0.01)
        waiting.outcome()
        assert taken.held
        await taken.release()

    async def read() -> None:
        async with other.rwlock("a").read:
            pass

    process = play.start(giver, relay())
    play.run(30)
    process.outcome()
    assert play.left() == []


@EVERY_KIND
@pytest.mark.parametrize("outcome_unknown", [False, True])
def test_a_full_server_is_no_hindrance(kind: str, outcome_unknown: bool) -> None:
    play = AnyPlay()
    giver, taker = play.client("giver"), play.client("taker")

    async def relay() -> None:
        lease = await KINDS[kind].ask(giver, ttl=TTL).acquire()
        lease._hold.outcome_unknown = outcome_unknown
        await play.sleep(giver, 1)
        play.world.store.oom = True
        taken = await taker.adopt(await lease.hand_over(), ttl=TTL)
        await taken.release()

    process = play.start(giver, relay())
    play.run(5)
    process.outcome()
    assert play.left() == []


@EVERY_KIND
@pytest.mark.parametrize("seed", range(12))
def test_chance(kind: str, seed: int) -> None:
    """Four machines, tickets in a heap, faults on a tenth of the messages, and pauses: the seed is the replay."""
    dice = random.Random(f"{kind} {seed}")
    play = AnyPlay(seed)
    clients = [play.client(f"c{number}") for number in range(4)]
    tickets: list[str] = []

    def fate(message: Message) -> Fate | None:
        if dice.random() > 0.1 or play.world.now_us > 20_000_000:
            return None
        what = dice.choice(["lost", "late", "reply", "again", "crash"])
        if what == "crash":
            alive = [client for client in clients if not client._driver.crashed]  # type: ignore[attr-defined]
            return Fate(sender_crashes=dice.choice(["before", "after"])) if len(alive) > 2 else None
        late_us = dice.choice([5_000, 200_000, 3_000_000])
        adopts = message.ops[0].script.endswith(("hand_over", "adopt"))  # type: ignore[union-attr]
        return {
            "lost": Fate(lost=True),
            "late": Fate(late_us=late_us),
            "reply": Fate(reply_lost=True),
            # An acquire that is executed twice by itself may come back to life: no promise is made of that.
            "again": Fate(again_us=late_us) if adopts else None,
        }[what]

    play.doom(fate)

    async def run_client(client: holdfast.aio.Client) -> None:
        for _ in range(6):
            ttl, wait = dice.choice([1.0, 3.0, TTL]), dice.random() * 3
            lock = dice.choice([KINDS[kind].ask, KINDS[kind].rival])(client, ttl=ttl, wait=wait)
            try:
                if tickets and dice.random() < 0.7:
                    lease = await client.adopt(dice.choice(tickets), ttl=ttl)
                    play.fences.append(lease.fence)
                    try:
                        await play.sleep(client, dice.random())
                        if dice.random() < 0.5:
                            tickets.append(await lease.hand_over())
                    finally:
                        await lease.release()  # NotHeld if it was handed over
                else:
                    async with lock as lease:
                        play.fences.append(lease.fence)
                        await play.sleep(client, dice.random())
                        if dice.random() < 0.5:
                            tickets.append(await lease.hand_over())
            except (holdfast.HoldfastError, Cancelled):
                pass
            await play.sleep(client, dice.random())

    processes = [play.start(client, run_client(client)) for client in clients]
    for _ in range(3):
        machine = dice.choice(clients)._driver
        pause_at = dice.randrange(15_000_000)
        play.world.at(pause_at, machine.pause)  # type: ignore[attr-defined]
        play.world.at(pause_at + dice.randrange(5_000_000), machine.resume)  # type: ignore[attr-defined]
    play.run(60)
    for process in processes:
        assert process.done
    assert len(play.fences) == len(set(play.fences))
    play.end()
    play.run(TTL + 6)
    assert play.left() == [], f"replay: pytest tests/handover -k 'test_chance and {seed}-{kind}'"
