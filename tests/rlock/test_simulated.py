"""Nested blocks in the simulated world: cancelled, crashed or cut off at any moment, no level is left behind."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast.aio
from holdfast.lab.simulation.process import Cancelled
from tests.protocol.harness import Play, at

TTL = 30.0


async def nested(play: Play, client: holdfast.aio.Client) -> None:
    lock = client.rlock("a", ttl=TTL)
    async with lock as lease:
        play.fences.append(lease.fence)
        await play.sleep(client, 0.002)
        async with lock:
            await play.sleep(client, 0.002)
            async with client.rlock("a"):
                await play.sleep(client, 0.002)
        await play.sleep(client, 0.002)


def two_in_turn(play: Play) -> tuple[Any, Any]:
    one, two = play.client("one"), play.client("two")
    return play.start(one, nested(play, one)), play.start(two, nested(play, two))


@pytest.mark.long
@pytest.mark.parametrize("after_us", [0, 100, 199, 201, 300, 1_000, 2_250, 3_000, 5_000, 7_000, 8_300, 8_400, 8_600])
@pytest.mark.parametrize("which", [0, 1])
def test_cancelled_at_any_moment_it_gives_back_what_it_has(after_us: int, which: int) -> None:
    play = Play()
    processes = two_in_turn(play)
    play.world.at(after_us, processes[which].cancel)
    play.run(5)
    for number, process in enumerate(processes):
        assert process.done
        if number != which or not isinstance(process.error, Cancelled):
            process.outcome()
    assert play.world.keys() == []
    assert play.fences == sorted(set(play.fences))


@pytest.mark.parametrize(
    "fault", [{"lost": True}, {"reply_lost": True}, {"reply_late_us": 500_000}, {"late_us": 500_000}], ids=str
)
@pytest.mark.parametrize("number", range(8))
def test_a_message_gone_wrong_changes_no_count(number: int, fault: dict[str, Any]) -> None:
    play = Play()
    play.doom(at(number, **fault))
    processes = two_in_turn(play)
    play.run(25)
    for process in processes:
        process.outcome()
    assert play.world.keys() == []
    assert play.fences == sorted(set(play.fences))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(6))
def test_a_crash_costs_others_the_ttl_at_most(number: int, when: str) -> None:
    play = Play()
    play.doom(at(number, sender_crashes=when))
    processes = two_in_turn(play)
    play.run(TTL + 3)
    for process in processes:
        if not process.machine.crashed:
            process.outcome()
    assert play.world.keys() == []
