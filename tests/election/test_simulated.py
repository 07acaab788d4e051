"""Elections in the simulated world: at every message, what can go wrong does.

After every event the harness sees to it that no two machines believe to lead.
"""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate, Message
from tests.protocol.harness import Play, at

TTL = 10.0
MESSAGES = range(16)


class Campaign(Play):
    """Machines that lead in turn, for a few terms each."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.terms: list[tuple[str, int]] = []  # leaders and their fences, in the order of their terms

    async def leads(self, client: holdfast.aio.Client, terms: int = 3, term: float = 0.01, **options: Any) -> None:
        name = client._driver.name  # type: ignore[attr-defined]
        mine = 0
        async for lease in client.election("a", **{"ttl": TTL, **options}).terms():
            self.terms.append((name, lease.fence))
            mine += 1
            await self.sleep(client, term)
            if mine == terms:
                break

    def candidates(self, count: int = 2, **options: Any) -> list[Process]:
        clients = [self.client(f"c{number}") for number in range(count)]
        return [self.start(client, self.leads(client, **options)) for client in clients]

    @property
    def rising(self) -> bool:
        fences = [fence for _, fence in self.terms]
        return fences == sorted(set(fences))


def test_nothing_goes_wrong() -> None:
    play = Campaign()
    candidates = play.candidates()
    play.run(1)
    for process in candidates:
        process.outcome()
    assert play.rising
    assert [name for name, _ in play.terms] in (["c0", "c1"] * 3, ["c1", "c0"] * 3)
    assert play.world.keys() == []


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_crash_at_any_message_costs_the_ttl_at_most(number: int, when: str) -> None:
    play = Campaign()
    play.doom(at(number, sender_crashes=when))
    candidates = play.candidates(3)
    play.run(TTL + 3)
    alive = [process for process in candidates if not process.machine.crashed]
    assert len(alive) >= 2
    for process in alive:
        process.outcome()
    assert play.rising
    assert play.world.keys() == []


@pytest.mark.parametrize("fault", [{"lost": True}, {"reply_lost": True}, {"reply_late_us": 400_000}], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_lost_message_costs_a_retry(number: int, fault: dict[str, Any]) -> None:
    play = Campaign()
    play.doom(at(number, **fault))
    candidates = play.candidates()
    play.run(30)
    for process in candidates:
        process.outcome()
    assert play.rising
    assert play.world.keys() == []


@pytest.mark.long
@pytest.mark.parametrize("after_us", [0, 50, 100, 150, 199, 200, 250, 5_000, 10_200, 10_250, 10_300, 10_450, 25_000])
@pytest.mark.parametrize("reply_lost", [None, 0, 1, 2], ids=str)
def test_cancelled_at_any_moment_it_leaves_no_key(after_us: int, reply_lost: int | None) -> None:
    play = Campaign()
    if reply_lost is not None:
        play.doom(at(reply_lost, reply_lost=True))
    one = play.client("one")
    process = play.start(one, play.leads(one))
    play.world.at(after_us, process.cancel)
    play.run(10)
    assert process.done
    assert isinstance(process.error, Cancelled)
    process.error = None  # and with it the frames, in which the loop may still be alive
    gc.collect()
    play.run(1)
    assert play.world.keys() == []
    assert all(not machine.registry.holds for machine in play.machines)


def test_another_leads_when_the_leader_is_paused_and_the_leader_knows() -> None:
    play = Campaign()
    one, two = play.client("one"), play.client("two")
    seen: list[Any] = []

    async def stops() -> None:
        rounds = 0
        async for lease in one.election("a", ttl=1.0).terms():
            rounds += 1
            play.terms.append(("one", lease.fence))
            if rounds == 2:
                break
            await play.sleep(one, 0.5)
            seen.append(lease.held)

    process = play.start(one, stops())
    play.world.at(200_000, one._driver.pause)  # type: ignore[attr-defined]
    other = play.start(two, play.leads(two, terms=1, term=1.0))
    play.world.at(5_000_000, one._driver.resume)  # type: ignore[attr-defined]
    play.run(10)
    process.outcome()
    other.outcome()
    assert seen == [False]
    assert [name for name, _ in play.terms] == ["one", "two", "one"]
    assert play.rising


def test_a_loop_outlives_an_outage() -> None:
    """A term that cannot be released, and a campaign without an answer, end when the server is back."""
    play = Campaign()
    one = play.client("one")
    process = play.start(one, play.leads(one, terms=3, term=1.0))
    play.world.at(500_000, lambda: setattr(play.world, "down", True))
    play.run(30)
    assert not process.done
    play.world.down = False
    play.run(5)
    process.outcome()
    assert play.rising
    assert play.world.keys() == []


def test_nobody_leads_longer_than_the_server_knows_of_it() -> None:
    play = Campaign()
    one, two = play.client("one"), play.client("two")
    lost_at: list[float] = []

    async def leads() -> None:
        async for lease in one.election("a", ttl=2.0).terms():
            assert await lease.lost.wait(60)
            lost_at.append(one._driver.now())
            break

    process = play.start(one, leads())
    play.run(0.5)
    play.world.hang()
    play.run(4)
    process.outcome()
    assert lost_at[0] < 0.5 + 2.0
    play.world.resume()
    successor = play.start(two, play.leads(two, terms=1))
    play.run(4)
    successor.outcome()


@pytest.mark.parametrize("seed", range(60))
def test_chance(seed: int) -> None:
    """Three candidates, faults on a tenth of the messages, pauses: the seed is the replay."""
    dice = random.Random(seed)
    play = Campaign(seed=seed)

    def fate(message: Message) -> Fate | None:
        if dice.random() > 0.1 or play.world.now_us > 20_000_000:
            return None
        kind = dice.choice(["lost", "late", "reply", "after"])
        if kind == "after":
            alive = [machine for machine in play.machines if not machine.crashed]
            return Fate(sender_crashes="after") if len(alive) > 2 else None
        return {
            "lost": Fate(lost=True),
            "late": Fate(late_us=dice.randrange(1, 10_000_000)),
            "reply": Fate(reply_lost=True),
        }[kind]

    play.doom(fate)
    candidates = play.candidates(3, terms=4, term=0.7, ttl=3.0)
    for _ in range(3):
        machine = dice.choice(play.machines)
        pause_at = dice.randrange(10_000_000)
        play.world.at(pause_at, machine.pause)
        play.world.at(pause_at + dice.randrange(6_000_000), machine.resume)
    play.run(90)
    for process in candidates:
        if not process.machine.crashed:
            process.outcome()
    assert play.rising, f"replay: pytest -k 'test_chance and {seed}'"
    assert play.world.keys() == []
