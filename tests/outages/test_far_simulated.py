"""A server that is far away: its answers take long, and it is neither down nor does it lose leases for that."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.protocol.wait.contact import SHORTEST_CALL
from tests.outages.test_contact_simulated import contact_of
from tests.outages.test_outage_wait_simulated import FAULTS, Timed, acquire, acquire_and_hold, heal, kill, warm_client
from tests.protocol.harness import Play

ROUND_TRIPS = [0.05, 0.12, 0.2, 0.3]


def far_away(round_trip: float) -> Play:
    play = Play(seed=1)
    play.world.latency_us = round(round_trip * 500_000)
    return play


def use(play: Play, client: holdfast.aio.Client) -> None:
    """A first request, which makes a connection and loads a script."""
    call = Timed(play, client, acquire("warm"))
    play.run(3)
    assert isinstance(call.result, holdfast.aio.Lease)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("options", [{}, {"cohort": 0}], ids=str)
@pytest.mark.parametrize("callers", [3, 10, 60])
def test_a_busy_lock_is_busy(round_trip: float, options: dict[str, Any], callers: int) -> None:
    play = far_away(round_trip)
    client, other = warm_client(play), play.client("two")
    use(play, client)
    Timed(play, other, acquire_and_hold(play, "busy", ttl=30))
    play.run(2)
    calls = []
    for _ in range(callers):
        calls.append(Timed(play, client, acquire("busy", wait=3, **options)))
        play.run(2 / callers)
    play.run(6)
    assert {type(call.result) for call in calls} == {holdfast.AcquireTimeout}
    assert all(call.took <= 3 + 3 * round_trip + 0.25 for call in calls)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_begins_half_a_second_after_it_is_back_succeeds(round_trip: float, fault: str) -> None:
    play = far_away(round_trip)
    client = warm_client(play)
    use(play, client)
    FAULTS[fault](play)
    for number in range(60):
        Timed(play, client, acquire(f"x{number}"))
        play.run(0.1)
    heal(play)
    later = []
    for number in range(60):
        call = Timed(play, client, acquire(f"y{number}"))
        play.run(0.1)
        if number >= 5 + 30 * round_trip:
            later.append(call)
    play.run(6)
    assert all(isinstance(call.result, holdfast.aio.Lease) for call in later), [call.result for call in later]


@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("options", [{"ttl": 2, "renew": False}, {"ttl": 10, "max_hold": 2}], ids=str)
def test_leases_are_renewed_beside_many_that_end(round_trip: float, options: dict[str, Any]) -> None:
    play = far_away(round_trip)
    client = warm_client(play)
    use(play, client)
    held = [Timed(play, client, acquire_and_hold(play, f"held{number}", ttl=3)) for number in range(5)]
    ended = []
    for number in range(240):
        ended.append(Timed(play, client, acquire_and_hold(play, f"ends{number}", **options)))
        play.run(0.05)
    assert not any(call.ended for call in held), [call.result for call in held]
    assert {type(call.result) for call in ended[:180]} == {holdfast.LeaseLost}


def test_late_replies_of_a_server_that_hung_do_not_make_it_far_away() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    assert contact_of(client).least == SHORTEST_CALL
    play.world.hang()
    for number in range(8):
        Timed(play, client, acquire(f"x{number}"))
        play.run(0.3)
    heal(play)
    play.run(3)
    for number in range(8):
        Timed(play, client, acquire(f"y{number}"))
        play.run(0.1)
    assert contact_of(client).lost_at is None
    assert contact_of(client).least == SHORTEST_CALL


def test_it_is_found_out_how_far_away_a_server_is_once_it_has_moved() -> None:
    play = far_away(0.002)
    client = warm_client(play)
    play.world.latency_us = 150_000
    for number in range(8):
        Timed(play, client, acquire(f"x{number}", wait=1))
        play.run(1)
    kill(play)
    Timed(play, client, acquire("y", wait=1))
    play.run(1)
    heal(play)
    call = Timed(play, client, acquire("z"))
    play.run(6)
    assert isinstance(call.result, holdfast.aio.Lease)
    assert contact_of(client).least == pytest.approx(0.9)
