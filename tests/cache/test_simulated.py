"""The cache storm in the simulated world: crashes, lost and late messages, lost notifications, pauses, cancellations.

Every scenario runs once without a fault to count its messages, and then once for each of them with a fault there. After
every single event: no client believes in a claim that is another's, and the stored value never goes back to an older
computation. In the end every live client soon has a value, and nothing else is left.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate
from tests.protocol.harness import Play, at

CLAIM = 2.0
KEY = "k"
VALUE = b"k:hf1:cache:value:{k}"
SEEDS = range(3)


class Storm(Play):
    """Machines whose tasks all want one value, which takes a while to compute and says which computation it is of."""

    def __init__(self, seed: int, tasks: tuple[int, ...], *, cost: float = 0.002, **options: Any) -> None:
        super().__init__(seed)
        self.begun = 0
        self.stored = 0  # the computation whose value is on the server
        self.cost = cost
        self.options = {"compute_ttl": CLAIM, **options}
        self.clients = [self.client(f"m{number}") for number in range(len(tasks))]
        self.processes: list[Process] = []
        for client, count in zip(self.clients, tasks, strict=True):
            for _ in range(count):
                self.processes.append(self.start(client, self.want(client)))

    async def want(self, client: holdfast.aio.Client) -> int:
        found: int = await client.get_or_compute(KEY, lambda: self.compute(client), **self.options)
        return found

    async def compute(self, client: holdfast.aio.Client) -> int:
        self.begun += 1
        number = self.begun
        await self.sleep(client, self.cost)
        return number

    def look(self) -> None:
        super().look()
        entry: Any = self.world.store.values.get(VALUE)
        if entry is not None:
            stored = json.loads(entry[b"value"])
            assert stored >= self.stored, "an older computation has replaced a newer one"
            self.stored = stored

    def finish(self, within: float) -> None:
        self.run(within)
        for process in self.processes:
            if not process.machine.crashed:
                assert process.done, "a caller still waits"
                assert 1 <= process.outcome() <= self.begun
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """Whatever happened, within a claim's ttl a newcomer has the value, and there is nothing else."""
        self.doom(lambda message: None)
        newcomer = self.client("new")
        late = self.start(newcomer, self.want(newcomer))
        self.run(CLAIM + 1.0)
        assert late.done
        late.outcome()
        self.run(65.0)  # tombstones have passed
        assert {key for key in self.world.store.values if b":cache:" in key} <= {VALUE}
        for machine in self.machines:
            if not machine.crashed:
                assert not machine.router.waiting
                assert not machine.router.searching
                assert not machine.registry.holds
                assert not machine.registry.cleanups
        for client in self.clients:
            assert client._driver.crashed or not client.statistics().cache_callers  # type: ignore[attr-defined]


ONE_EACH = (1, 1, 1)
TOGETHER = (3, 1, 2)
CROWDS = pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "several"])


def every_message(tasks: tuple[int, ...], **options: Any) -> Iterator[tuple[int, int]]:
    for seed in SEEDS:
        storm = Storm(seed, tasks, **options)
        storm.finish(1.0)
        for number in range(len(storm.world.sent)):
            yield seed, number


@CROWDS
def test_without_a_fault_one_computes_and_a_bell_wakes_the_others(tasks: tuple[int, ...]) -> None:
    for seed in SEEDS:
        storm = Storm(seed, tasks, cost=0.2)
        storm.run(0.203)  # by a notification, not by the next look half a second later
        assert [process.outcome() for process in storm.processes] == [1] * sum(tasks)
        assert storm.begun == 1
        looks = [message for message in storm.world.sent if getattr(message.ops[0], "script", "") == "cache_look"]
        assert len(looks) <= 3 * len(tasks), (
            "one asks for its process: once, once more when it can hear, and for the value"
        )


@pytest.mark.long
@CROWDS
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_costs_the_others_no_more_than_the_claim(tasks: tuple[int, ...], when: str) -> None:
    for seed, number in every_message(tasks):
        storm = Storm(seed, tasks)
        storm.doom(at(number, sender_crashes=when))
        storm.finish(CLAIM + 0.6)


@pytest.mark.long
def test_two_crashes_at_any_two_steps() -> None:
    for seed, number in every_message(ONE_EACH):
        for second in range(number + 1, number + 8):
            storm = Storm(seed, ONE_EACH)
            crashes = {number: Fate(sender_crashes="after"), second: Fate(sender_crashes="before")}
            storm.doom(lambda message, crashes=crashes: crashes.get(message.number))  # type: ignore[misc]
            storm.finish(2 * (CLAIM + 0.6))


FAULTS: dict[str, dict[str, Any]] = {
    "request lost": {"lost": True},
    "reply lost": {"reply_lost": True},
    "reply late": {"reply_late_us": 300_000},
    "late": {"late_us": 300_000},
    "later than the claim": {"late_us": 4_000_000},
    "twice": {"again_us": 700},
    "again after the claim": {"again_us": 4_000_000},
}


@pytest.mark.long
@CROWDS
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_gone_wrong_loses_nobody(tasks: tuple[int, ...], fault: str) -> None:
    for seed, number in every_message(tasks):
        storm = Storm(seed, tasks)
        storm.doom(at(number, **FAULTS[fault]))
        # The loss is noticed after a third of the claim, and then no caller has to wait for the rest of it.
        storm.finish(CLAIM - 0.3 if fault.endswith("lost") else 9.0)


@CROWDS
@pytest.mark.parametrize("ttl", [0.05, 1.0])
def test_a_request_that_comes_after_its_value_has_ended_claims_nothing_for_the_dead(
    tasks: tuple[int, ...], ttl: float
) -> None:
    for seed, number in every_message(tasks, ttl=ttl):
        storm = Storm(seed, tasks, ttl=ttl)
        storm.doom(at(number, late_us=3_000_000))
        storm.run(3.2)
        storm.doom(lambda message: None)
        # If the late request had claimed the right to compute, this would have to wait for that claim to end.
        again = storm.start(storm.clients[0], storm.want(storm.clients[0]))
        storm.run(0.1)
        assert again.done
        storm.finish(6.0)


@pytest.mark.parametrize("fault", ["lost", "late", "twice"])
def test_a_bell_gone_wrong_costs_half_a_second(fault: str) -> None:
    fate = {"lost": Fate(lost=True), "late": Fate(late_us=900_000), "twice": Fate(again_us=500)}[fault]
    for seed in SEEDS:
        calm = Storm(seed, TOGETHER, cost=0.05)
        calm.finish(1.0)
        assert calm.world.notifications_sent
        for number in range(calm.world.notifications_sent):
            storm = Storm(seed, TOGETHER, cost=0.05)
            storm.world.fate_of_notification = lambda wakeup, number=number: fate if wakeup == number else Fate()  # type: ignore[misc]
            storm.finish(0.6)
            assert storm.begun == 1


def test_a_server_that_forbids_bells_is_polled() -> None:
    for seed in SEEDS:
        storm = Storm(seed, TOGETHER, cost=0.3)
        storm.world.no_pubsub = True
        storm.run(0.5)
        assert [process.outcome() for process in storm.processes] == [1] * 6


def events_of(storm: Storm, seconds: float) -> int:
    count = 0
    while storm.world._events and storm.world._events[0][0] <= seconds * 1e6:
        storm.world.advance()
        count += 1
    return count


@pytest.mark.long
@CROWDS
def test_a_caller_cancelled_at_any_moment_holds_nobody_up(tasks: tuple[int, ...]) -> None:
    events = events_of(Storm(0, tasks), 0.05)
    assert events > 10
    for victim in range(sum(tasks)):
        for moment in range(events):
            storm = Storm(0, tasks)
            for _ in range(moment):
                storm.step()
            cancelled = storm.processes.pop(victim)
            cancelled.cancel()
            storm.finish(0.55)  # long before the claim would have ended
            assert cancelled.done
            assert cancelled.error is None or isinstance(cancelled.error, Cancelled)


@pytest.mark.long
@CROWDS
@pytest.mark.parametrize("seconds", [0.7, 3.0])
def test_a_machine_stopped_at_any_moment_overwrites_nothing(tasks: tuple[int, ...], seconds: float) -> None:
    events = events_of(Storm(0, tasks), 0.05)
    for victim in range(len(tasks)):
        for moment in range(0, events, 2):
            storm = Storm(0, tasks)
            for _ in range(moment):
                storm.step()
            machine = storm.machines[victim]
            machine.pause()
            storm.run(seconds)
            others = [process for process in storm.processes if process.machine is not machine]
            if seconds > CLAIM:
                assert all(process.done for process in others), "the stopped one was not replaced in time"
            machine.resume()
            storm.finish(1.0)


class Shop(Storm):
    """A value that depends on something which changes, and is invalidated after each change."""

    def __init__(self, seed: int, dice: random.Random) -> None:
        super().__init__(seed, ())
        self.dice = dice
        self.version = 0
        self.floor = 0  # the version whose invalidation has been confirmed
        self.slowest = 0.0  # seconds that a get has taken
        self.clients = [self.client(f"m{number}") for number in range(3)]
        self.options |= dice.choice([{}, {"ttl": 0.05}, {"ttl": 0.05, "errors": 0.05}])
        for client in self.clients:
            self.processes.append(self.start(client, self.change(client)))
            self.processes += [self.start(client, self.visit(client)) for _ in range(3)]

    def look(self) -> None:
        """An invalidation takes the claim away from its holder, which learns of that a moment later."""

    async def visit(self, client: holdfast.aio.Client) -> None:
        for _ in range(12):
            floor, began_us = self.floor, self.world.now_us
            try:
                found = await client.get_or_compute(KEY, lambda: self.compute(client), **self.options)
            except holdfast.HoldfastError:
                pass  # the server was not there, for this caller or for its leader
            else:
                assert found >= floor, "a value from before an invalidation"
                self.slowest = max(self.slowest, (self.world.now_us - began_us) / 1e6)
            await self.sleep(client, self.dice.random() * 0.05)

    async def change(self, client: holdfast.aio.Client) -> None:
        for _ in range(4):
            await self.sleep(client, self.dice.random() * 0.2)
            self.version += 1
            version = self.version
            try:
                await client.invalidate(KEY)
            except holdfast.HoldfastError:
                continue
            self.floor = max(self.floor, version)

    async def compute(self, client: holdfast.aio.Client) -> int:
        version = self.version
        await self.sleep(client, self.dice.random() * 0.03)
        return version


def test_without_a_fault_no_get_is_late_by_a_refresh_however_often_the_value_is_invalidated() -> None:
    for seed in range(60):
        shop = Shop(seed, random.Random(seed))
        shop.run(40.0)
        assert all(process.done for process in shop.processes)
        assert shop.slowest < 0.25, f"seed {seed}: a computation takes 0.03 s, and a refresh comes after 0.5 s"


@pytest.mark.long
def test_storms_of_every_fault_at_once_never_bring_back_what_was_invalidated() -> None:
    for seed in range(120):
        dice = random.Random(seed)
        shop = Shop(seed, dice)

        def any_fate(dice: random.Random = dice) -> Fate:
            return Fate() if dice.random() > 0.1 else Fate(**dice.choice(list(FAULTS.values())))

        shop.doom(lambda message, any_fate=any_fate: any_fate())  # type: ignore[misc]
        shop.world.fate_of_notification = lambda number, any_fate=any_fate: any_fate()  # type: ignore[misc]
        for _ in range(6):
            shop.run(dice.random() * 0.3)
            machine = dice.choice(shop.machines)
            machine.pause()
            shop.run(dice.choice([0.01, 0.6, 2.5]))
            machine.resume()
            if dice.random() < 0.2:
                shop.world.cut_listeners()
        shop.doom(lambda message: None)
        shop.world.fate_of_notification = lambda number: Fate()
        shop.run(40.0)
        for process in shop.processes:
            assert process.done, f"seed {seed}"
            process.outcome()
