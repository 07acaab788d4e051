"""Waiters for several names, beside waiters for one, in the simulated world.

Each scenario runs once without a fault, to count its messages and moments, and then once for each of them with a fault
there. After every single event the world is searched for two holders of the same name. The result must be the same each
time: every live client gets its names, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast.aio
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate
from tests.protocol.harness import Play, at

TTL = 3.0
SEEDS = range(1)
Wants = tuple[str, ...]  # what each machine wants: a name is a letter

CROSSED: Wants = ("ab", "ba", "b")
CIRCLE: Wants = ("ab", "bc", "ca")
SAME: Wants = ("ab", "ba", "ab", "ba")


class Crowd(Play):
    """Machines that want several names each, and what they got, by name."""

    def __init__(self, seed: int, wants: Wants, *, cycles: int = 2, hold: float = 0.002, **options: Any) -> None:
        super().__init__(seed)
        self.grants: dict[str, list[int]] = defaultdict(list)
        self.processes: list[Process] = []
        self.options = {"ttl": TTL, **options}
        for number, names in enumerate(wants):
            client = self.client(f"m{number}")
            self.processes.append(self.start(client, self.work(client, names, cycles, hold)))

    async def work(self, client: holdfast.aio.Client, names: str, cycles: int, hold: float) -> None:
        for _ in range(cycles):
            async with client.lock(*names, **self.options) as lease:
                for name, fence in lease.fences.items():
                    self.grants[name].append(fence)
                await self.sleep(client, hold)

    def look(self) -> None:
        now = self.world.now_us / 1e6
        seen: dict[str, str] = {}
        for machine in self.machines:
            for hold in machine.registry.holds.values() if not machine.crashed else ():
                for name in hold.names if hold.valid(now) else ():
                    assert name not in seen, f"{seen[name]} and {machine.name} both hold {name!r}"
                    seen[name] = machine.name

    def finish(self, within: float) -> None:
        """Every live client gets its names within that time, and nothing is left."""
        self.run(within)
        for process in self.processes:
            if not process.machine.crashed:
                assert process.done, "a client still waits"
                process.outcome()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        self.doom(lambda message: None)
        newcomer = self.client("new")
        late = self.start(newcomer, self.work(newcomer, "abc", 1, 0.001))
        self.run(TTL + 8)
        late.outcome()
        for fences in self.grants.values():
            assert fences == sorted(set(fences)), "a fence went down, or was given twice"
        assert self.world.keys() == []
        assert [key for key in self.world.store.values if b":queue:" in key or b":waiters:" in key] == []
        for machine in self.machines:
            if not machine.crashed:
                assert not machine.router.waiting
                assert not machine.cohorts.active_holds
                assert not machine.registry.holds


def every_message(wants: Wants, **options: Any) -> Iterator[tuple[int, int]]:
    for seed in SEEDS:
        crowd = Crowd(seed, wants, **options)
        crowd.finish(5)
        yield from ((seed, number) for number in range(len(crowd.world.sent)))
        crowd.end()


@pytest.mark.long
@pytest.mark.parametrize("wants", [CROSSED, CIRCLE, SAME], ids="-".join)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_costs_the_others_no_more_than_the_lease(wants: Wants, when: str) -> None:
    for seed, number in every_message(wants):
        crowd = Crowd(seed, wants)
        crowd.doom(at(number, sender_crashes=when))
        crowd.finish(2 * TTL + 6)
        crowd.end()


FAULTS: dict[str, Callable[[int], Any]] = {
    "request lost": lambda number: at(number, lost=True),
    "reply lost": lambda number: at(number, reply_lost=True),
    "reply late": lambda number: at(number, reply_late_us=300_000),
    "late": lambda number: at(number, late_us=300_000),
    "very late": lambda number: at(number, late_us=4_500_000),
}


@pytest.mark.long
@pytest.mark.parametrize("wants", [CROSSED, CIRCLE, SAME], ids="-".join)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_gone_wrong_loses_nobody(wants: Wants, fault: str) -> None:
    for seed, number in every_message(wants):
        crowd = Crowd(seed, wants)
        crowd.doom(FAULTS[fault](number))
        crowd.finish(20)
        crowd.end()


@pytest.mark.long
@pytest.mark.parametrize("wants", [CROSSED, CIRCLE, SAME], ids="-".join)
def test_cancelled_at_any_moment_nobody_leaves_anything_behind(wants: Wants) -> None:
    for seed in SEEDS:
        crowd = Crowd(seed, wants)
        moments = set()
        while crowd.world._events and crowd.world.now_us < 300_000 and not all(p.done for p in crowd.processes):
            moments.add(crowd.world.now_us)
            crowd.step()
        crowd.end()
        for moment in sorted(moments)[::2]:
            for victim in range(len(wants)):
                crowd = Crowd(seed, wants)
                crowd.world.at(moment, crowd.processes[victim].cancel)
                crowd.run(8)
                for number, process in enumerate(crowd.processes):
                    assert process.done
                    if number != victim or not isinstance(process.error, Cancelled):
                        process.outcome()
                crowd.check_nothing_is_left()
                crowd.end()


@pytest.mark.parametrize("wants", [CROSSED, CIRCLE, SAME], ids="-".join)
def test_without_any_bell_everybody_is_served_all_the_same(wants: Wants) -> None:
    for seed in SEEDS:
        crowd = Crowd(seed, wants)
        crowd.world.fate_of_notification = lambda number: Fate(lost=True)
        crowd.finish(30)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_a_crowd_with_names_by_the_dice_comes_to_its_end(seed: int) -> None:
    """No two clients wait for each other, and there are no longer cycles either."""
    dice = random.Random(seed)
    wants = tuple("".join(dice.sample("abcd", dice.randint(1, 4))) for _ in range(8))
    crowd = Crowd(seed, wants, cycles=5, hold=dice.choice([0.0, 0.0005, 0.003]))
    crowd.finish(20)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_storms_of_every_fault_at_once_never_let_two_hold(seed: int) -> None:
    dice = random.Random(seed)
    wants = tuple("".join(dice.sample("abc", dice.randint(1, 3))) for _ in range(6))
    crowd = Crowd(seed, wants, cycles=4)
    at_once = {"lost": Fate(lost=True), "reply_lost": Fate(reply_lost=True)}

    def choose(message: Any) -> Fate | None:
        if dice.random() > 0.12 or crowd.world.now_us > 20_000_000:
            return None
        fault = dice.choice(["lost", "reply_lost", "late", "late", "crash"])
        if fault == "crash":
            return Fate(sender_crashes=dice.choice(["before", "after"])) if dice.random() < 0.2 else None
        return Fate(late_us=dice.choice([5_000, 200_000, 2_000_000])) if fault == "late" else at_once[fault]

    crowd.doom(choose)
    crowd.run(90)
    for process in crowd.processes:
        assert process.done or process.machine.crashed
        if not process.machine.crashed and process.error is not None:
            assert isinstance(process.error, holdfast.LeaseLost | holdfast.OutcomeUnknown | holdfast.Unavailable)
    crowd.check_nothing_is_left()
