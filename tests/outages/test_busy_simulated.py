"""A busy lock is never reported as an outage: a waiter's deadline at every moment of a hand-over, in virtual time.

The server answers every request after 10 ms. If a wait ends while other callers hold the lock, or are just taking it
over, the lock is busy.
"""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.protocol.harness import Play

LATENCY_US = 5_000  # each way
HOLD = 0.03
# Waits that end at every millisecond of several hand-overs. Shorter ones have an answer time of 0.1 s all the same.
WAITS = [0.12 + step / 1000 for step in range(0, 200, 3)]


def play_with(clients: int) -> tuple[Play, list[holdfast.aio.Client]]:
    play = Play(seed=1)
    play.world.latency_us = LATENCY_US
    made = [play.client(f"c{number}") for number in range(clients)]
    for client in made:  # each has had contact
        warm = play.start(client, play.cycle(client, hold=0.0))
        play.run(1.0)
        warm.outcome()
    return play, made


async def busy(play: Play, client: holdfast.aio.Client, **options: Any) -> None:
    """Hold the lock again and again."""
    for _ in range(60):
        await play.cycle(client, hold=HOLD, **options)


async def outcome(client: holdfast.aio.Client, wait: float, **options: Any) -> str:
    try:
        async with client.lock("a", wait=wait, **options):
            return "held"
    except holdfast.AcquireTimeout:
        return "busy"
    except holdfast.Unavailable as error:
        return f"outage after {wait:.3f} s: {error}"


# Who is busy: (clients, callers of each, options)
CROWDS = {
    "local passes": (1, 6, {}),
    "promotions in one process": (1, 6, {"cohort": 1}),
    "hand-overs between processes": (3, 1, {}),
    "local queues in several processes": (3, 4, {}),
    "without a cohort": (2, 4, {"cohort": 0}),
}


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: f"{wait:.3f}")
def test_a_wait_that_ends_at_any_moment_of_a_hand_over_finds_the_lock_busy(crowd: str, wait: float) -> None:
    count, callers, options = CROWDS[crowd]
    play, clients = play_with(count)
    for client in clients:
        for _ in range(callers):
            play.start(client, busy(play, client, **options))
    play.run(0.5)
    judged = [
        play.start(clients[number % count], outcome(clients[number % count], wait, **options)) for number in range(8)
    ]
    play.run(wait + 1.0)
    found = [process.outcome() for process in judged]
    assert not [one for one in found if one.startswith("outage")], found


@pytest.mark.parametrize("wait", [0.3, 0.5, 1.0, 2.0])
def test_waiters_behind_a_caller_with_another_wait_judge_by_their_own(wait: float) -> None:
    """The server hangs while a caller without a limit asks: the others do not find the lock busy."""
    play, (client,) = play_with(1)
    play.world.hang()
    play.start(client, play.cycle(client))
    play.run(0.001)
    judged = [play.start(client, outcome(client, wait)) for _ in range(4)]
    play.run(wait + 0.3)
    assert all(process.outcome().startswith("outage") for process in judged), [process.outcome() for process in judged]
