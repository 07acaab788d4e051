"""Events in virtual time: long waits, slow renewals, and the pairs on which the gauges of metrics rely."""

from __future__ import annotations

import contextlib
import gc
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


def test_a_wait_that_gives_up_is_not_reported_as_waiting_on() -> None:
    play = Play()
    one, (two, events) = play.client("one"), observed(play, "two")
    play.start(one, play.cycle(one, hold=100.0))
    play.run(0.1)
    play.start(two, two.lock("a", wait=10.0).acquire())
    play.run(20.0)
    assert [type(event) for event in events] == [Waiting, Abandoned]


def test_a_request_without_an_answer_is_not_reported_as_a_wait() -> None:
    play = Play()
    client, events = observed(play, "one")
    play.start(client, play.cycle(client))
    play.run(1.0)
    silent = len(play.world.sent)
    play.doom(lambda message: Fate(lost=True) if message.number == silent else None)
    play.start(client, play.cycle(client, wait=30.0))
    play.run(20.0)
    assert len(play.fences) == 2
    assert of(events, Waiting) == [], "no client holds it"


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


@pytest.mark.parametrize("options", [{"ttl": 300.0}, {"ttl": 30.0}, {"ttl": 60.0, "renew": False}])
def test_callers_of_one_client_that_wait_for_each_other_are_reported_in_time(options: dict[str, Any]) -> None:
    """However seldom their leases are renewed: the first time after 10 s, with the holder and the cycle."""
    play = Play()
    client, events = observed(play, "one")

    async def nested(*names: str) -> None:
        async with client.lock(names[0], **options):
            await play.sleep(client, 1.0)
            async with client.lock(names[1], wait=50.0):
                pass

    for names in ("ab", "bc", "ca"):
        play.start(client, nested(*names))
    play.run(45.0)
    long = [event for event in of(events, Waiting) if event.waited]
    waits = {name: [round(event.waited) for event in long if event.name == name] for name in "abc"}
    assert waits == {name: [10, 20, 40] for name in "abc"}
    said = {event.name: event.deadlock for event in long}
    assert said["b"] == (
        "Possibly a deadlock: that thread or task waits for 'c', whose holder waits for 'a', which this caller holds"
    )
    assert all(event.local and event.holder.fence and event.holder.since for event in long)
    assert all(event.fence is None for event in long)


def test_a_caller_that_waits_for_itself_is_told() -> None:
    play = Play()
    client, events = observed(play, "one")

    async def nested() -> None:
        async with client.lock("a"), client.lock("a", wait=15.0):
            pass

    play.start(client, nested())
    play.run(12.0)
    [long] = [event for event in of(events, Waiting) if event.waited]
    assert long.deadlock == "This thread or task holds it itself, and would wait forever"


def test_a_local_wait_behind_a_holder_that_waits_for_nothing_is_no_deadlock() -> None:
    play = Play()
    client, events = observed(play, "one")

    async def nested() -> None:
        async with client.lock("b"), client.lock("a", wait=30.0):
            pass

    play.start(client, play.cycle(client, hold=60.0))
    play.run(1.0)
    play.start(client, nested())
    play.run(15.0)
    [long] = [event for event in of(events, Waiting) if event.waited]
    assert (long.name, long.deadlock) == ("a", "")


def test_a_lease_that_is_dropped_is_reported_as_lost_once() -> None:
    play = Play()
    client, events = observed(play, "one")

    async def drop() -> None:
        await client.lock("a", ttl=4.0).acquire()

    def go() -> None:
        play.start(client, drop())
        play.run(20.0)
        gc.collect()
        play.run(20.0)

    with pytest.warns(ResourceWarning, match="dropped without release"):
        go()
    assert [type(event) for event in events] == [Acquired, Lost]
    assert "dropped without release()" in of(events, Lost)[0].reason


def test_the_life_of_a_cache_claim_is_reported_whole() -> None:
    play = Play()
    client, events = observed(play, "one")

    def compute(fail: bool) -> Any:
        if fail:
            raise ValueError
        return 1

    async def get(name: str, *, fail: bool = False) -> None:
        with contextlib.suppress(ValueError):
            await client.get_or_compute(name, lambda: compute(fail), ttl=60)

    play.start(client, get("a"))
    play.start(client, get("b", fail=True))
    play.run(5.0)
    assert Counter(type(event) for event in events) == {Acquired: 2, Released: 2}
    assert {event.kind for event in events} == {"cache"}


def test_each_of_many_waiters_reports_a_long_wait_and_one_a_second_asks_why() -> None:
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
    reported = [event for event in of(events, Waiting) if event.waited]
    assert {event.name for event in reported} == {f"x{number}" for number in range(50)}
    assert all(event.holder for event in reported), "the last refusal has named it"
    explained = [event for event in reported if event.holder.since is not None]
    assert 1 <= len(explained) < len(reported), "since when it holds is on the server, and one a second asks"


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


@pytest.mark.parametrize(("paused", "is_slow"), [(0.0, False), (0.25, False), (0.4, True)])
def test_a_renewal_is_slow_if_the_next_delay_of_its_kind_would_lose_the_lease(paused: float, is_slow: bool) -> None:
    """The process is stopped for that part of the ttl, just before a renewal is due."""
    play = Play()
    client, events = observed(play, "one")
    play.start(client, play.cycle(client, hold=5.0, ttl=1.0))
    due_us = play.world.now_us + 420_000  # a tenth of a second, and a third of the ttl
    play.world.at(due_us, client._driver.pause)
    play.world.at(due_us + round(paused * 1e6), client._driver.resume)
    play.run(10.0)
    renewed = of(events, Renewed)
    assert [event.slow for event in renewed if event.late > 0.1] == ([is_slow] if paused else [])
    assert max(event.late for event in renewed) == pytest.approx(paused, abs=0.02)


def test_a_grant_that_is_told_late_is_not_a_slow_renewal() -> None:
    """The waiter is stopped while the lock is granted to it: it begins with little left, and renews as soon as ever."""
    play = Play()
    one, (two, events) = play.client("one"), observed(play, "two")
    play.start(one, play.cycle(one, hold=1.0, ttl=10.0))
    play.start(two, play.cycle(two, hold=5.0, ttl=10.0))
    began_us = play.world.now_us
    play.world.at(began_us + 950_000, two._driver.pause)
    play.world.at(began_us + 7_500_000, two._driver.resume)
    play.run(20.0)
    first, *_ = of(events, Renewed)
    assert first.remaining < first.validity / 2
    assert not any(event.slow or event.late > 0.01 for event in of(events, Renewed))


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
