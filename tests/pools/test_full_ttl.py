"""A permit, a read or a write that was waited for is held for its whole ttl from the first moment."""

from __future__ import annotations

import pytest

import holdfast
from tests.pools.harness import MODES, RoomPlay

TTL = 30.0


def occupy(play: RoomPlay, mode: str) -> None:
    """Let others take all that this mode would have to wait for, for 0.3 s."""
    for number in range(2 if mode == "permit" else 1):
        holder = play.client(f"holder{number}")
        play.start(holder, play.visit(holder, "permit" if mode == "permit" else "write", hold=0.3, ttl=TTL))
    play.run(0.01)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocked_for", [0.0, 1.0, 20.0])
def test_a_body_may_block_its_process_right_from_the_start(mode: str, blocked_for: float) -> None:
    play = RoomPlay(seed=1)
    waiter = play.client("waiter")
    occupy(play, mode)
    seen: list[float] = []

    async def body() -> None:
        async with play.lock(waiter, mode, ttl=TTL) as lease:
            seen.append(lease.remaining())
            if blocked_for:
                machine = waiter._driver
                machine.pause()  # type: ignore[attr-defined]
                play.world.at(play.world.now_us + round(blocked_for * 1e6), machine.resume)  # type: ignore[attr-defined]
            await play.sleep(waiter, 0.001)
            lease.check()
            seen.append(lease.remaining())

    waited = play.start(waiter, body())
    play.run(40)
    waited.outcome()
    first, after = seen
    assert TTL - 1 < first <= TTL
    assert TTL - 1 - blocked_for < after <= TTL - blocked_for


@pytest.mark.parametrize("mode", MODES)
def test_a_waiter_without_a_subscriber_gets_its_whole_ttl_by_its_own_next_step(mode: str) -> None:
    play = RoomPlay(seed=1)
    play.world.no_pubsub = True
    waiter = play.client("waiter")
    occupy(play, mode)
    seen: list[float] = []

    async def body() -> None:
        async with play.lock(waiter, mode, ttl=TTL) as lease:
            seen.append(lease.remaining())

    waited = play.start(waiter, body())
    play.run(5)
    waited.outcome()
    assert TTL - 1 < seen[0] <= TTL
    assert play.left() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_waiter_that_cannot_be_notified_and_died_costs_a_reservation(mode: str) -> None:
    play = RoomPlay(seed=1)
    play.world.no_pubsub = True
    dead, next_one = play.client("dead"), play.client("next")
    occupy(play, mode)
    play.start(dead, play.visit(dead, "write" if mode != "permit" else "permit", ttl=600))
    play.run(0.25)
    dead._driver.crash()  # type: ignore[attr-defined]
    got: list[float] = []

    async def body(client: holdfast.aio.Client) -> None:
        async with play.lock(client, mode, ttl=TTL):
            got.append(play.world.now_us / 1e6)

    waited = play.start(next_one, body(next_one))
    play.run(4)
    waited.outcome()
    assert got[0] < 2.5, "long before the 600 s of the dead one"
