"""Whatever goes wrong at whichever message: nobody holds beside another, and no key outlives belief in it.

The worlds here have no chance in them but for the seed, so a failure repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Step
from tests.protocol.harness import Play, at

TTL = 30.0
MESSAGES = range(8)  # a cycle of two clients in turn has four, with retries and clean-up some more


def two_in_turn(play: Play) -> tuple[Any, Any]:
    """One client has the lock for a moment, and then another wants it."""
    one, two = play.client("one"), play.client("two")
    first = play.start(one, play.cycle(one, ttl=TTL))

    async def second() -> int:
        await play.sleep(two, 0.005)
        return await play.cycle(two, ttl=TTL)

    return first, play.start(two, second())


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_crash_at_any_step_costs_others_the_ttl_at_most(number: int, when: str) -> None:
    play = Play()
    play.doom(at(number, sender_crashes=when))
    processes = two_in_turn(play)
    play.run(TTL + 2)
    for process in processes:
        assert process.done
    survivors = [process for process in processes if not process.machine.crashed]
    assert survivors
    for process in survivors:
        process.outcome()
    play.doom(lambda message: None)
    newcomer = play.client("new")
    late = play.start(newcomer, play.cycle(newcomer, ttl=TTL, wait=TTL + 2))
    play.run(TTL + 3)
    late.outcome()
    assert play.fences == sorted(set(play.fences))
    assert play.world.keys() == []


@pytest.mark.parametrize("fault", [{"lost": True}, {"reply_lost": True}, {"reply_late_us": 400_000}], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_lost_message_costs_a_retry(number: int, fault: dict[str, Any]) -> None:
    play = Play()
    play.doom(at(number, **fault))
    processes = two_in_turn(play)
    play.run(25)  # less than the ttl: nobody is saved by a key that expires
    for process in processes:
        process.outcome()
    assert play.fences == sorted(set(play.fences))
    assert play.world.keys() == []


@pytest.mark.parametrize("late", [0.5, 5.5, 12.0, 40.0])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_late_message_leaves_no_key_behind(number: int, late: float) -> None:
    play = Play()
    play.doom(at(number, late_us=round(late * 1e6)))
    processes = two_in_turn(play)
    play.run(late + 15)
    for process in processes:
        process.outcome()
    assert play.world.keys() == []
    assert play.fences == sorted(set(play.fences))


@pytest.mark.parametrize("late", [0.3, 2.0, 20.0, 59.0])
def test_an_acquire_that_arrives_after_its_own_abandon_is_refused(late: float) -> None:
    play = Play()
    play.doom(lambda message: Fate(late_us=round(late * 1e6)) if play.world.now_us < 250_000 else None)
    one = play.client("one")
    attempt = play.start(one, play.cycle(one, ttl=TTL, wait=0.2))
    play.run(1.0)
    with pytest.raises(holdfast.Unavailable):
        attempt.outcome()
    play.run(late + 1)
    executed = [message for message in play.world.sent if message.ops[0].script == "acquire"]  # type: ignore[union-attr]
    assert executed
    assert play.world.keys() == [], "the late acquire took a lock that nobody believes in"


@pytest.mark.long
@pytest.mark.parametrize("after_us", [0, 50, 100, 150, 199, 200, 201, 250, 300, 5_000, 10_200, 10_300, 10_400, 11_000])
@pytest.mark.parametrize("reply_lost", [None, 0, 1], ids=["", "acquire's reply lost", "release's reply lost"])
def test_cancelled_at_any_moment_it_leaves_no_key(after_us: int, reply_lost: int | None) -> None:
    play = Play()
    if reply_lost is not None:
        play.doom(at(reply_lost, reply_lost=True))
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=TTL))
    play.world.at(after_us, process.cancel)
    play.run(10)
    assert process.done
    assert isinstance(process.error, Cancelled) or process.error is None
    assert play.world.keys() == []


def test_a_lost_reply_to_release_is_success_before_the_deadline() -> None:
    play = Play()
    play.doom(at(1, reply_lost=True))
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=TTL))
    play.run(25)
    process.outcome()
    assert [message.ops[0].script for message in play.world.sent] == ["acquire", "release", "abandon"]  # type: ignore[union-attr]


def test_a_lost_reply_to_release_is_unknown_after_the_deadline() -> None:
    play = Play()

    def fate(message: Message) -> Fate | None:
        return Fate(reply_lost=True) if message.number > 0 and play.world.now_us < 1_300_000 else None

    play.doom(fate)
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=1.2, renew=False))
    play.run(25)
    with pytest.raises(holdfast.OutcomeUnknown):
        process.outcome()


def test_a_grant_that_comes_too_late_is_asked_for_again() -> None:
    play = Play()
    play.doom(at(0, late_us=0))
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=1.0, renew=False))
    play.world.at(50, one._driver.pause)  # type: ignore[attr-defined]
    play.world.at(3_000_000, one._driver.resume)  # type: ignore[attr-defined]
    play.run(10)
    process.outcome()
    scripts = [message.ops[0].script for message in play.world.sent]  # type: ignore[union-attr]
    assert scripts.count("acquire") == 2, "a lease that was over before it began was handed out"


def test_a_holder_that_was_paused_beyond_its_ttl_knows_it_at_once() -> None:
    play = Play()
    one, two = play.client("one"), play.client("two")
    seen: list[Any] = []

    async def holder() -> None:
        lease = await one.lock("a", ttl=1.0).acquire()
        assert lease
        await play.sleep(one, 0.5)
        seen.append(lease.held)
        with pytest.raises(holdfast.LeaseLost):
            lease.check()
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    process = play.start(one, holder())
    play.world.at(200_000, one._driver.pause)  # type: ignore[attr-defined]
    other = play.start(two, play.cycle(two, ttl=TTL, hold=5))
    play.world.at(3_000_000, one._driver.resume)  # type: ignore[attr-defined]
    play.run(10)
    process.outcome()
    other.outcome()
    assert seen == [False]


@pytest.mark.parametrize("step", ["acquire", "renew"])
def test_a_deadline_is_counted_from_before_the_send(step: str) -> None:
    """Replies take 0.8 s: what the holder believes never goes beyond what the server keeps."""
    play = Play()
    one = play.client("one")
    play.doom(lambda message: Fate(reply_late_us=800_000) if message.ops[0].script == step else None)  # type: ignore[union-attr]
    process = play.start(one, one.lock("a", ttl=3.0).acquire())
    while not process.done:
        play.run(0.01)
    lease = process.outcome()
    for _ in range(300):
        play.run(0.01)
        left_ms: Any = play.world.store.execute("PTTL", "a")
        assert 0 < lease.remaining() <= left_ms / 1000


def test_a_lease_is_renewed_once_a_third_of_its_ttl_is_over() -> None:
    play = Play()
    one = play.client("one")
    process = play.start(one, one.lock("a", ttl=TTL).acquire())
    play.run(0.1)
    lease = process.outcome()
    for _ in range(1200):
        play.run(0.1)
        assert lease.remaining() >= TTL * 2 / 3 - 0.1, "no time is left for two more tries"
    scripts = [message.ops[0].script for message in play.world.sent]  # type: ignore[union-attr]
    assert scripts.count("renew") <= 2 + 120 / (TTL / 4), "and not much more often"


@pytest.mark.parametrize("seconds", [0.5, 3.0, 20.0])
def test_the_keeper_outlasts_an_outage_shorter_than_the_ttl(seconds: float) -> None:
    play = Play()
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=TTL, hold=60))
    play.world.at(9_000_000, play.world.hang)
    play.world.at(9_000_000 + round(seconds * 1e6), play.world.resume)
    play.run(70)
    process.outcome()


def test_an_outage_longer_than_the_ttl_ends_the_lease_by_its_deadline() -> None:
    play = Play()
    one = play.client("one")
    lost_at: list[float] = []

    async def holder() -> None:
        lease = await one.lock("a", ttl=2.0, on_lost=lambda lease: lost_at.append(one._driver.now())).acquire()
        assert lease
        assert await lease.lost.wait(60)
        assert not lease.held
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    process = play.start(one, holder())
    play.world.at(1_000_000, play.world.hang)
    play.run(15)
    process.outcome()
    renewed_at = 0.0  # the last renewal that was answered left before the outage
    assert len(lost_at) == 1
    assert renewed_at + 2.0 * 0.9 < lost_at[0] <= 1.0 + 2.0


def test_release_works_on_a_full_server() -> None:
    play = Play()
    one = play.client("one")

    async def holder(outcome_unknown: bool) -> None:
        lease = await one.lock("a", ttl=TTL).acquire()
        assert lease
        lease._hold.outcome_unknown = outcome_unknown
        play.world.store.oom = True
        await lease.release()

    for outcome_unknown in (False, True):
        process = play.start(one, holder(outcome_unknown))
        play.run(1)
        process.outcome()
        assert play.world.keys() == []
        play.world.store.oom = False
        play.run(1)
    assert any(b":hf1:gone:" in key for key in play.world.store.values), "the keeper must bury it when there is room"


def test_a_restarted_server_does_not_bring_fences_back() -> None:
    play = Play()
    one, two = play.client("one"), play.client("two")
    for client in (one, two, one):
        process = play.start(client, play.cycle(client, ttl=TTL))
        play.run(1)
        process.outcome()
        play.world.restart_empty()
    assert play.fences == sorted(set(play.fences))


@pytest.mark.parametrize("seed", range(150))
def test_chance(seed: int) -> None:
    """Three machines, random faults on a tenth of the messages, cancellations, pauses: the seed is the replay."""
    import random

    dice = random.Random(seed)
    play = Play(seed=seed)
    clients = [play.client(f"c{number}") for number in range(3)]

    def fate(message: Message) -> Fate | None:
        if dice.random() > 0.1 or play.world.now_us > 20_000_000:
            return None
        kind = dice.choice(["lost", "late", "reply", "before", "after"])
        if kind == "lost":
            return Fate(lost=True)
        if kind == "late":
            return Fate(late_us=dice.randrange(1, 10_000_000))
        if kind == "reply":
            return Fate(reply_lost=True)
        alive = [client for client in clients if not client._driver.crashed]  # type: ignore[attr-defined]
        return Fate(sender_crashes=kind) if len(alive) > 1 else None

    play.doom(fate)

    async def run_client(client: holdfast.aio.Client) -> None:
        for _ in range(4):
            try:
                await play.cycle(client, hold=dice.random(), ttl=dice.choice([1.0, 3.0, TTL]), wait=dice.random() * 5)
            except (holdfast.HoldfastError, Cancelled):
                pass
            await play.sleep(client, dice.random())

    processes = [play.start(client, run_client(client)) for client in clients]
    for _ in range(3):
        victim = dice.choice(processes)
        play.world.at(dice.randrange(20_000_000), victim.cancel)
        machine = dice.choice(clients)._driver
        pause_at = dice.randrange(15_000_000)
        play.world.at(pause_at, machine.pause)  # type: ignore[attr-defined]
        play.world.at(pause_at + dice.randrange(5_000_000), machine.resume)  # type: ignore[attr-defined]
    play.run(60)
    for process in processes:
        assert process.done
    assert play.fences == sorted(set(play.fences))
    crashed = any(client._driver.crashed for client in clients)  # type: ignore[attr-defined]
    if crashed:
        play.run(TTL + 1)
    assert play.world.keys() == [], f"replay: pytest -k 'test_chance and {seed}'"


def test_a_script_that_fails_half_way_leaves_no_key() -> None:
    """What a script has written stays written: so all that can fail must come first."""
    play = Play()
    one = play.client("one")
    play.world.store.execute("RPUSH", "a:hf1:fence:{a}", "no number")
    process = play.start(one, play.cycle(one, ttl=TTL))
    play.run(1)
    with pytest.raises(holdfast.HoldfastError):
        process.outcome()
    assert play.world.keys() == []


def test_a_cancelled_hung_release_does_not_wait_for_its_retries() -> None:
    play = Play()
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=TTL))
    play.world.at(1_000, play.world.hang)
    play.world.at(500_000, process.cancel)
    play.run(1.5)
    assert process.done, "a cancelled release must end within its grace, whatever the server does"
    assert isinstance(process.error, Cancelled)
    play.world.resume()
    play.run(3)
    assert play.world.keys() == []


def test_a_late_acquire_does_not_shorten_a_lease_that_was_extended() -> None:
    """The first request is late, its resend is granted, the holder extends; then the first arrives."""
    play = Play()
    play.doom(at(0, late_us=3_000_000))
    one, two = play.client("one"), play.client("two")

    async def holder() -> None:
        lease = await one.lock("a", ttl=1.5).acquire()
        assert lease
        await lease.extend(30)
        await play.sleep(one, 10)
        assert lease.held
        await lease.release()

    process = play.start(one, holder())
    play.start(two, play.cycle(two, ttl=1.5))
    play.run(20)
    process.outcome()


def test_extend_beside_release_ends() -> None:
    play = Play()
    one = play.client("one")
    play.doom(
        lambda message: (
            Fate(late_us=300_000) if any(isinstance(op, Step) and op.script == "renew" for op in message.ops) else None
        )
    )

    async def holder() -> None:
        lease = await one.lock("a", ttl=TTL).acquire()
        assert lease
        extending = play.start(one, lease.extend(60))
        await play.sleep(one, 0.1)
        await lease.release()
        await play.sleep(one, 2)
        assert extending.done
        with pytest.raises(holdfast.NotHeld):
            extending.outcome()

    process = play.start(one, holder())
    play.run(5)
    process.outcome()
    assert len(play.world.sent) < 10


def test_replies_slower_than_the_ttl_do_not_keep_a_try_lock_trying() -> None:
    play = Play()
    play.world.latency_us = 30_000
    one = play.client("one")

    async def attempt() -> Any:
        return await one.lock("a", ttl=0.05).acquire(blocking=False)

    process = play.start(one, attempt())
    play.run(2)
    with pytest.raises(holdfast.Unavailable, match="after the ttl"):
        process.outcome()
    assert len(play.world.sent) < 6
    assert play.world.keys() == []


def test_an_extended_lease_whose_release_fails_is_abandoned_as_long_as_its_key_can_be_there() -> None:
    play = Play()
    one = play.client("one")

    async def holder() -> None:
        lease = await one.lock("a", ttl=2.0).acquire()
        assert lease
        await lease.extend(600)
        play.world.down = True
        with pytest.raises(holdfast.Unavailable):
            await lease.release()

    process = play.start(one, holder())
    play.run(200)
    process.outcome()
    assert play.world.keys() == ["a"]
    play.world.down = False
    play.run(2)
    assert play.world.keys() == []


def test_leases_that_are_not_renewed_do_not_starve_those_that_are() -> None:
    """With replies that take 15 ms, and short leases ending all the time beside one that is renewed."""
    play = Play()
    play.world.latency_us = 7_500
    one = play.client("one")

    async def short_ones() -> None:
        for number in range(60):
            lease = await one.lock(f"short{number}", ttl=0.1, renew=False).acquire()
            assert lease
            await play.sleep(one, 0.05)
            try:
                await lease.release()
            except holdfast.LeaseLost:
                pass

    process = play.start(one, play.cycle(one, ttl=1.2, hold=4))
    play.start(one, short_ones())
    play.run(6)
    process.outcome()


def test_a_release_has_time_for_a_round_trip_however_short_the_ttl() -> None:
    play = Play()
    play.world.latency_us = 15_000
    one = play.client("one")
    process = play.start(one, play.cycle(one, ttl=0.08, hold=0.001))
    play.run(2)
    process.outcome()


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda client: client.lock("a"),
        lambda client: client.lock("a", "b"),
        lambda client: client.semaphore("a", 2),
        lambda client: client.rwlock("a").read,
        lambda client: client.recipe("set_nx", "a"),
    ],
    ids=["lock", "several", "semaphore", "read", "recipe"],
)
def test_a_question_is_not_asked_again_after_silence(make: Callable[[Any], Any]) -> None:
    play = Play()
    client = play.client("a")
    play.world.hang()
    asked = play.start(client, make(client).locked())
    with pytest.raises(holdfast.Unavailable):
        play.world.run(asked, seconds=30.0)
    assert play.world.now_us == pytest.approx(5e6, rel=0.01)  # which is the client's timeout


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lock("a").acquire(timeout=0.5),
        lambda client: client.lock("a", "b").acquire(timeout=0.5),
        lambda client: client.semaphore("a", 2).acquire(timeout=0.5),
        lambda client: client.rwlock("a").write.acquire(timeout=0.5),
        lambda client: client.get_or_compute("a", lambda: 1, wait=0.5),
    ],
    ids=["lock", "several", "semaphore", "write", "cache"],
)
def test_a_wait_that_ends_in_silence_ends_in_time_and_the_keeper_cleans_up(ask: Callable[[Any], Any]) -> None:
    play = Play()
    client = play.client("a")
    play.world.hang()
    asked = play.start(client, ask(client))
    with pytest.raises(holdfast.Unavailable):
        play.world.run(asked, seconds=30.0)
    assert play.world.now_us == pytest.approx(500_000, rel=0.01)
    play.world.resume()
    play.run(3)
    assert play.world.keys() == []
    left = [key for key in play.world.store.values if b":gone:" not in key and b":fence" not in key]
    assert left == []


@pytest.mark.parametrize(
    ("ttl", "took", "said"),
    [(1.0, 1.0, "has ended by itself"), (0.05, 0.1, "has ended by itself"), (TTL, 5.0, "ends by itself in about 2")],
    ids=["until the lease ends", "one call at least", "the client's timeout"],
)
def test_a_release_in_silence_is_given_up_when_the_lease_has_ended(ttl: float, took: float, said: str) -> None:
    play = Play()
    one = play.client("one")

    async def hold() -> None:
        lease = await one.lock("a", ttl=ttl, renew=False).acquire()
        assert lease is not None
        play.world.hang()
        await lease.release()

    process = play.start(one, hold())
    with pytest.raises(holdfast.OutcomeUnknown) as caught:
        play.world.run(process, seconds=60.0)
    assert said in str(caught.value)
    assert play.world.now_us / 1e6 == pytest.approx(took, rel=0.15)
    play.world.resume()
    play.run(3)
    assert play.world.keys() == []


def test_a_release_in_silence_does_not_call_a_lease_over_that_was_renewed_without_our_knowing() -> None:
    """The server has made it last longer, and only the reply was lost."""
    play = Play()
    one = play.client("one")
    play.doom(lambda message: Fate(reply_lost=any(isinstance(op, Step) and op.script == "renew" for op in message.ops)))

    async def hold() -> None:
        lease = await one.lock("a", ttl=3.0).acquire()
        assert lease is not None
        await play.sleep(one, 2.5)
        play.world.hang()
        await lease.release()

    process = play.start(one, hold())
    with pytest.raises(holdfast.OutcomeUnknown) as caught:
        play.world.run(process, seconds=60.0)
    over = "has ended by itself" in str(caught.value)
    assert over == (play.world.keys() == [])


# Where a key does not expire by itself (etcd), only a clean-up removes it.


def without_expiry(client: holdfast.aio.Client) -> Machine:
    machine: Machine = client._driver  # type: ignore[assignment]
    machine.registry.keys_expire = False
    return machine


def abandoned(play: Play, since: int) -> list[str]:
    """The keys that were abandoned, of the messages from that number on."""
    ops = [op for message in play.world.sent[since:] for op in message.ops]
    return [op.keys[0] for op in ops if isinstance(op, Step) and op.script == "abandon"]


def test_a_key_that_does_not_expire_is_removed_after_any_outage() -> None:
    play = Play(seed=1)
    client = play.client("one")
    machine = without_expiry(client)
    process = play.start(client, play.cycle(client, hold=1000.0, ttl=3.0, on_lost="ignore"))
    play.run(1.0)
    play.world.down = True
    play.run(600.0)
    play.world.down = False
    sent = len(play.world.sent)
    play.run(2.0)
    assert abandoned(play, sent) == ["a"]
    assert not machine.registry.cleanups
    assert not process.done


def test_a_dropped_lease_delays_no_other_clean_up() -> None:
    """Its own key stays until its deadline, as everywhere."""
    play = Play(seed=1)
    client = play.client("one")
    machine = without_expiry(client)
    leases: list[Any] = []

    async def drop() -> None:
        leases.append(await client.lock("dropped", ttl=300).acquire())

    play.start(client, drop())
    play.run(1.0)
    with pytest.warns(ResourceWarning):
        leases.clear()
    play.run(1.0)
    play.world.down = True
    lost = play.start(client, play.cycle(client, hold=0.1, ttl=3.0))
    play.run(0.05)
    play.world.down = False
    play.run(0.1)
    play.doom(lambda message: Fate(reply_lost=True))
    play.run(5.0)
    sent = len(play.world.sent)
    play.doom(lambda message: None)
    play.run(1.0)
    assert abandoned(play, sent) == ["a"]
    assert lost.done
    play.run(285.0)
    assert "dropped" not in abandoned(play, sent)
    play.run(15.0)
    assert "dropped" in abandoned(play, sent)
    assert not machine.registry.cleanups
