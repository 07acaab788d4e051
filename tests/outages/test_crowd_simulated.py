"""A crowd, whose presence the keeper shows, ends in time when contact is lost."""

from __future__ import annotations

import pytest

import holdfast
from tests.outages.test_contact_simulated import contact_of
from tests.outages.test_outage_wait_simulated import (
    FAULTS,
    OUTAGE_WAIT,
    SLACK,
    Timed,
    acquire,
    acquire_and_hold,
    warm_client,
)
from tests.protocol.harness import Play


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("first", ["the crowd", "another caller"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_crowd_ends_when_contact_has_been_lost_for_that_long(fault: str, first: str, after: float) -> None:
    """``first``: whose request fails first. ``after``: at different moments of the keeper's round."""
    play = Play(seed=1)
    client, other = warm_client(play), play.client("two")
    Timed(play, other, acquire_and_hold(play, "hot", ttl=30))
    play.run(1)
    waiting = [Timed(play, client, acquire("hot", wait=15, cohort=0)) for _ in range(50)]
    play.run(3.0 + after)
    assert client._driver.registry.crowd.members
    FAULTS[fault](play)
    if first == "another caller":
        Timed(play, client, acquire("x", wait=5))
        play.run(0.05)
        Timed(play, client, acquire("y", wait=0.3))
    lost_at = []
    for _ in range(400):
        play.run(0.05)
        if (lost := contact_of(client).lost_at) is not None:
            lost_at.append(lost)
    assert all(isinstance(call.result, holdfast.Unavailable) for call in waiting)
    assert max(call.ended for call in waiting) <= min(lost_at) + OUTAGE_WAIT + SLACK
