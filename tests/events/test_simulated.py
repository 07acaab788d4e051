"""Events in virtual time: long waits, slow renewals, and the pairs on which the gauges of metrics rely."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import holdfast
from holdfast.events import (
    Abandoned,
    Acquired,
    Event,
    Lost,
    PassedOn,
    Released,
    RenewalFailed,
    Renewed,
    Waiting,
)
from holdfast.lab.simulation.world import Fate, Message
from tests.protocol.harness import Play


def observed(play: Play, name: str) -> tuple[Any, list[Event]]:
    """A client whose events of the ordinary course are wanted, too."""
    client: Any = play.client(name)
    client._driver.registry.observed = lambda: True
    return client, client._driver.events


def of(events: list[Event], *kinds: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def test_a_long_wait_is_reported_again_at_growing_intervals() -> None:
    play = Play()
    one, (two, events) = play.client("one"), observed(play, "two")
    play.start(one, play.cycle(one, hold=100.0))
    play.start(two, play.cycle(two, wait=90.0))
    play.run(90.0)
    waits = [round(event.waited) for event in of(events, Waiting)]
    assert waits[0] == 0
    assert 10 <= waits[1] <= 11
    assert all(later >= 2 * waited - 1 for waited, later in pairwise(waits[1:]))
    assert waits[-1] >= 40
    assert all(event.holder.host == "one" for event in of(events, Waiting))


def test_a_long_wait_is_reported_although_no_hook_listens() -> None:
    play = Play()
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, hold=100.0))
    play.start(two, play.cycle(two, wait=30.0))
    play.run(15.0)
    events: list[Event] = two._driver.events  # type: ignore[attr-defined]
    assert [type(event) for event in events] == [Waiting]


def test_a_long_wait_says_since_when_and_whether_it_may_be_a_deadlock() -> None:
    play = Play()
    (one, events), two = observed(play, "one"), play.client("two")

    async def nested(client: Any, outer: str, inner: str) -> None:
        async with client.lock(outer):
            await play.sleep(client, 1.0)
            async with client.lock(inner, wait=30.0):
                pass

    play.start(one, nested(one, "a", "b"))
    play.start(two, nested(two, "b", "a"))
    play.run(15.0)
    long = [event for event in of(events, Waiting) if event.waited]
    assert [event.name for event in long] == ["b"]
    assert long[0].holder.host == "two"
    assert long[0].holder.since == pytest.approx(long[0].holder.fence / 1e6)
    assert long[0].deadlock == "Possibly a deadlock: that process waits for 'a', which this caller holds"


def test_a_long_wait_beside_a_holder_that_waits_for_nothing_is_no_deadlock() -> None:
    play = Play()
    (one, events), two = observed(play, "one"), play.client("two")

    async def nested(client: Any) -> None:
        async with client.lock("b"), client.lock("a", wait=30.0):
            pass

    play.start(two, play.cycle(two, hold=60.0))
    play.run(1.0)
    play.start(one, nested(one))
    play.run(15.0)
    [long] = [event for event in of(events, Waiting) if event.waited]
    assert (long.name, long.deadlock) == ("a", "")


def test_waiters_behind_a_holder_of_their_own_client_are_reported_by_its_keeper() -> None:
    play = Play()
    client, events = observed(play, "one")
    play.start(client, play.cycle(client, hold=100.0))
    play.run(0.1)
    play.start(client, play.cycle(client))
    play.run(60.0)
    first, *later = of(events, Waiting)
    assert (first.waited, first.local) == (0.0, True)
    assert later
    assert all(event.waited >= 10.0 and event.local and event.holder.host == "one" for event in later)


def test_of_many_waiters_of_a_client_one_a_second_reports_a_long_wait() -> None:
    play = Play()
    one, two = play.client("one"), play.client("two")

    async def have(client: Any, name: str, **options: Any) -> None:
        async with client.lock(name, **options):
            await play.sleep(client, 300.0)

    for number in range(50):
        play.start(one, have(one, f"x{number}"))
    play.run(1.0)
    for number in range(50):
        play.start(two, have(two, f"x{number}"))
    play.run(150.0)
    events: list[Event] = two._driver.events  # type: ignore[attr-defined]
    reported = len(of(events, Waiting))
    assert 1 <= reported < 50 * 3, "each of fifty would have reported after 10, 20, 40, 80 s"


def test_a_late_renewal_is_reported_as_slow() -> None:
    """The server does not answer for twelve seconds, of a ttl of thirty."""
    play = Play()
    client, events = observed(play, "one")
    play.start(client, play.cycle(client, hold=60.0))

    def fate(message: Message) -> Fate | None:
        return Fate(lost=True) if 9.0 < play.world.now_us / 1e6 - began < 21.0 else None

    began = play.world.now_us / 1e6
    play.doom(fate)
    play.run(60.0)
    failed, slow = of(events, RenewalFailed), [event for event in of(events, Renewed) if event.slow]
    assert failed
    assert [event.tries for event in failed] == list(range(1, len(failed) + 1))
    assert [event.remaining for event in failed] == sorted((event.remaining for event in failed), reverse=True)
    assert len(slow) == 1
    assert slow[0].remaining < 15.0
    assert slow[0].late > 8.0


def test_a_lease_that_is_not_renewed_is_never_slow() -> None:
    play = Play()
    client, events = observed(play, "one")
    play.start(client, play.cycle(client, hold=20.0, renew=False))
    play.start(client, play.cycle(client, hold=20.0, max_hold=25.0))
    play.run(60.0)
    assert not [event for event in of(events, Renewed) if event.slow]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_wait_and_every_hold_ends_once(seed: int) -> None:
    """Lost messages at random, waits that end, cancellations: no gauge drifts."""
    play = Play(seed)
    chance = random.Random(seed)
    play.doom(lambda message: Fate(lost=chance.random() < 0.04, reply_lost=chance.random() < 0.04))
    clients = [observed(play, name) for name in ("one", "two")]
    processes = []

    async def visit(client: Any) -> None:
        try:
            await play.cycle(client, hold=chance.random() * 3, ttl=4.0, wait=chance.choice([0, 1.0, 10.0]))
        except (holdfast.HoldfastError, TimeoutError):
            pass

    for _ in range(12):
        client, _ = clients[chance.randrange(2)]
        processes.append(play.start(client, visit(client)))
        play.run(chance.random())
        if chance.random() < 0.2:
            chance.choice(processes).cancel()
    play.doom(lambda message: None)
    play.run(200.0)
    for _, events in clients:
        begun = Counter(event.fence for event in of(events, Acquired))
        ended = Counter(event.fence for event in of(events, Released, PassedOn, Lost))
        assert begun == ended
        waits = [event for event in of(events, Waiting) if not event.waited]
        ends = [event for event in of(events, Acquired, Abandoned) if event.queued]
        assert len(waits) == len(ends)
