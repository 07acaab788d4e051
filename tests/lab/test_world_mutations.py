"""Mistakes that a scenario of the world shows: late replies, clocks that are set back, holds longer than any side key.

Each scenario passes with the code as it is, and fails with each mistake that is listed for it..
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

import holdfast
from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol.effects import Command, Step
from tests.contention import test_crowd_simulated as test_crowd
from tests.contention import test_simulated as test_contention
from tests.lab.mutations import IN_THE_WORLD, MISTAKES, plant
from tests.leases import test_simulated as test_leases
from tests.multi import test_keeping, test_parts
from tests.protocol.harness import Play

SIDE_KEYS_LAST: Final = 5.0  # seconds without a refresh: see lua/lock and lua/pool


@pytest.fixture(autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    while Play.made:
        Play.made.pop().end()


def step_of(message: Message) -> Step:
    step = message.ops[0]
    assert isinstance(step, Step)
    return step


def expect(play: Play, process: Any, seconds: float) -> Any:
    """What the process returns within that time."""
    play.run(seconds)
    assert process.done
    return process.outcome()


def late_reply_to_extend() -> None:
    """After extend(), the holder relies on no more than the server keeps."""
    play = Play()
    one = play.client("one")
    play.doom(lambda message: Fate(reply_late_us=800_000) if "60000" in step_of(message).args else None)

    async def hold() -> tuple[float, Any]:
        async with one.lock("a", ttl=3) as lease:
            await lease.extend(60)
            return lease.remaining(), play.world.store.execute("PTTL", "a")

    remaining, left_ms = expect(play, play.start(one, hold()), 3.0)
    assert 50 < remaining <= left_ms / 1000


def push_before_the_reply_to_a_renewal() -> None:
    """The key is deleted after a renewal was executed; the push arrives before the reply, and the holder is told."""
    play = Play()
    one = play.client("one")
    play.doom(lambda message: Fate(reply_late_us=500_000) if step_of(message).script == "renew" else None)
    lost_at: list[float] = []

    async def hold() -> Any:
        return await one.lock("a", ttl=30, on_lost=lambda lease: lost_at.append(play.world.now_us / 1e6)).acquire()

    play.start(one, hold())
    play.run(0.3)  # the first renewal was sent at 0.1 s, and its reply arrives at 0.6 s
    play.doom(lambda message: None)
    play.world.execute(Command(("DEL", "a")))
    play.run(2.0)
    assert lost_at, "the push was forgotten"
    assert lost_at[0] < 0.7


def push_while_the_keeper_cleans_up() -> None:
    """The keeper waits for the reply to a clean-up when a push arrives: it looks at that hold next."""
    play = Play()
    one, two = play.client("one"), play.client("two")
    cleanups = 0

    def choose(message: Message) -> Fate | None:
        nonlocal cleanups
        if isinstance(message.ops[0], Command) or step_of(message).script != "abandon":
            return None
        cleanups += 1
        return Fate(lost=True) if cleanups == 1 else Fate(reply_late_us=500_000)

    play.doom(choose)
    lost_at: list[float] = []

    async def hold() -> Any:
        return await one.lock("a", ttl=30, on_lost=lambda lease: lost_at.append(play.world.now_us / 1e6)).acquire()

    async def give_up() -> Any:
        return await one.lock("b", ttl=30).acquire(timeout=0.2)

    async def occupy() -> Any:
        return await two.lock("b", ttl=30).acquire()

    play.start(one, hold())
    play.start(two, occupy())
    play.run(1.0)
    attempt = play.start(one, give_up())
    play.run(0.2 + 0.25 + 0.1)  # its patience, the caller's own clean-up, which is lost, and part of the keeper's
    assert attempt.outcome() is None
    assert cleanups == 2
    play.world.execute(Command(("DEL", "a")))
    deleted_at = play.world.now_us / 1e6
    play.run(2.0)
    assert lost_at, "the push was forgotten"
    assert lost_at[0] < deleted_at + 0.6


def mutex_beside_a_long_hold(make: Callable[[Any], Any]) -> None:
    """A holder stays longer than any side key lasts by itself: its name is still no mutex."""
    play = Play()
    one, two = play.client("one"), play.client("two")

    async def hold() -> None:
        async with make(one):
            await play.sleep(one, 3 * SIDE_KEYS_LAST)

    async def intrude() -> Any:
        return await two.lock("a", ttl=3).acquire(blocking=False)

    inside = play.start(one, hold())
    for _ in range(2):
        play.world.run(seconds=SIDE_KEYS_LAST + 2.0)
        with pytest.raises(holdfast.Unsupported, match="in use as a"):
            expect(play, play.start(two, intrude()), 0.1)
    expect(play, inside, 3.0)


def mutex_beside_a_semaphore() -> None:
    mutex_beside_a_long_hold(lambda client: client.semaphore("a", 2, ttl=3))


def mutex_beside_a_reader() -> None:
    mutex_beside_a_long_hold(lambda client: client.rwlock("a", ttl=3).read)


def crashed_waiter_and_a_clock_set_back() -> None:
    """A waiter that crashed before the clock was set back is passed over, as it is without that."""
    play = Play()
    one, two, three = play.client("one"), play.client("two"), play.client("three")

    async def hold() -> None:
        async with one.lock("a", ttl=30):
            await play.sleep(one, 4.0)

    async def wait() -> Any:
        await play.sleep(two, 0.1)
        return await two.lock("a", ttl=30).acquire()

    async def try_once() -> Any:
        return await three.lock("a", ttl=30).acquire(blocking=False)

    holder = play.start(one, hold())
    play.start(two, wait())
    play.run(1.0)
    play.machines[1].crash()
    play.world.set_server_clock(-60.0)
    expect(play, holder, 3.5)
    assert expect(play, play.start(three, try_once()), 0.1) is not None, "the lock went to the crashed waiter"


def crowd_and_holder() -> tuple[Play, Any, Any]:
    """A holder with a ttl of 3 s, and a waiter for which its keeper speaks."""
    play = Play()
    one, two = play.client("one"), play.client("two")
    play.machines[1].router.crowd.most_alone = 0

    async def hold() -> None:
        async with one.lock("a", ttl=3):
            await play.sleep(one, 4.0)

    async def wait() -> Any:
        await play.sleep(two, 0.1)
        return await two.lock("a", ttl=30).acquire(timeout=20)

    return play, play.start(one, hold()), play.start(two, wait())


def lease_that_ends_before_a_crowd() -> None:
    """The holder has crashed: its lease ends, and the waiter has the lock a moment later."""
    play, _, waiter = crowd_and_holder()
    play.run(0.25)  # it was renewed after 0.1 s
    play.machines[0].crash()
    play.run(2.95)
    assert expect(play, waiter, 0.0) is not None


def notification_that_a_crowd_has_lost() -> None:
    """The lock is granted to a waiter after some rounds of the keeper, and the notification is lost."""
    play, _, waiter = crowd_and_holder()
    play.world.fate_of_notification = lambda number: Fate(lost=True)
    play.run(3.9)
    assert not waiter.done
    assert expect(play, waiter, 0.7) is not None


def presence_that_arrives_after_its_waiter_has_left() -> None:
    """A step that shows presence is under way for longer than its waiter waits: the next release frees the lock."""
    play, holder, waiter = crowd_and_holder()
    play.doom(lambda message: Fate(late_us=3_000_000) if step_of(message).script == "present" else None)
    play.run(0.7)
    waiter.cancel()
    play.run(1.7)
    assert waiter.done
    expect(play, holder, 3.0)
    assert play.world.keys() == []


def crowd_at_a_pool(ttl: float = 3.0) -> tuple[Play, list[Any]]:
    """A holder of the only permit, and three waiters in other clients, whose keepers speak for all but the first."""
    play = Play()
    processes = []
    for name in ("one", "two", "three", "four"):
        client = play.client(name)
        play.machines[-1].router.crowd.most_alone = 0

        async def acquire(client: Any = client) -> Any:
            return await client.semaphore("a", 1, ttl=ttl).acquire(timeout=60)

        processes.append(play.start(client, acquire()))
        play.run(0.1)
    return play, processes


def first_waiter_of_a_pool_that_gives_up() -> None:
    """It gives up, and then the holder crashes: when that lease ends, the next waiter has the permit."""
    play, processes = crowd_at_a_pool()
    play.run(1.0)
    processes[1].cancel()
    play.run(0.1)
    play.machines[0].crash()
    assert expect(play, processes[2], 3.8) is not None


def first_waiter_of_a_pool_that_crashes() -> None:
    """It crashes, and so does the holder: when that lease ends, the next waiter has the permit."""
    play, processes = crowd_at_a_pool()
    play.run(1.0)
    play.machines[1].crash()
    play.run(0.1)
    play.machines[0].crash()
    assert expect(play, processes[2], 3.8) is not None


def mutex_beside_a_pool_whose_waiters_have_left() -> None:
    """The queue of a pool lasts as long as its holder, also after the last step for its waiters: it is no mutex."""
    play, processes = crowd_at_a_pool(ttl=30.0)
    play.run(1.0)
    for machine in play.machines[1:]:
        machine.crash()
    play.run(SIDE_KEYS_LAST + 1.0)
    stranger = play.client("stranger")

    async def intrude() -> Any:
        return await stranger.lock("a", ttl=3).acquire(blocking=False)

    with pytest.raises(holdfast.Unsupported, match="in use as a"):
        expect(play, play.start(stranger, intrude()), 0.1)
    assert processes[0].outcome().held


SCENARIOS: Final[dict[str, Callable[[], None]]] = {
    "validity_counted_from_the_reply": partial(test_leases.test_a_deadline_is_counted_from_before_the_send, "acquire"),
    "renewal_counted_from_the_reply": partial(test_leases.test_a_deadline_is_counted_from_before_the_send, "renew"),
    "renewal_when_a_third_is_left": test_leases.test_a_lease_is_renewed_once_a_third_of_its_ttl_is_over,
    "roll_back_of_the_first_slot_only": test_parts.test_who_is_refused_gives_back_what_it_had,
    "kept_name_that_is_given_back_to_nobody": (
        test_keeping.test_a_kept_name_that_is_given_back_goes_to_the_next_waiter_at_once
    ),
    "abandon_that_tells_no_next_waiter": (
        test_contention.test_a_waiter_that_becomes_the_first_because_another_gives_up_watches_the_lock_from_then_on
    ),
    "presence_reply_of_another_length_taken_for_an_answer": (
        test_crowd.test_a_presence_reply_of_another_length_lets_its_waiters_ask
    ),
    "extension_counted_from_the_reply": late_reply_to_extend,
    "renewal_that_forgets_a_push_before_its_reply": push_before_the_reply_to_a_renewal,
    "keeper_that_forgets_a_wakeup_before_its_wait": push_while_the_keeper_cleans_up,
    "present_that_does_not_see_the_end_of_a_lease": lease_that_ends_before_a_crowd,
    "keeper_that_looks_for_waiters_once": notification_that_a_crowd_has_lost,
    "present_that_brings_back_a_waiter_that_has_left": presence_that_arrives_after_its_waiter_has_left,
    "present_that_does_not_see_the_first_in_a_pool": first_waiter_of_a_pool_that_gives_up,
    "present_that_keeps_a_dead_waiter_of_a_pool": first_waiter_of_a_pool_that_crashes,
    "present_that_cuts_the_kind_of_a_room_short": mutex_beside_a_pool_whose_waiters_have_left,
    "kind_of_a_room_that_ends_before_its_holder": mutex_beside_a_semaphore,
    "kind_of_a_room_of_which_half_is_kept": mutex_beside_a_reader,
    "presence_that_ends_with_a_clock_set_back": crashed_waiter_and_a_clock_set_back,
}


@pytest.mark.parametrize("mistake", SCENARIOS)
def test_a_planted_mistake_fails_its_scenario(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({**MISTAKES, **IN_THE_WORLD}[mistake], monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        SCENARIOS[mistake]()


@pytest.mark.parametrize("mistake", SCENARIOS)
def test_the_code_as_it_is_passes_that_scenario(mistake: str) -> None:
    SCENARIOS[mistake]()


def test_every_mistake_of_the_world_has_a_scenario() -> None:
    assert IN_THE_WORLD.keys() <= SCENARIOS.keys()
