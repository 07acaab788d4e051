"""The queue on the server, the line in the process, and the bells: explored in the world.

Every scenario runs once without a fault to count its messages and events, and then once for each of them with a fault
there: a crash before or after it, a message lost or late or doubled, a caller cancelled. After every single event the
world is searched for two holders. What must come out is the same each time: everybody who is still alive gets the lock,
soon, and in the order in which they came; and nothing is left behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast.aio
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate
from holdfast.protocol.effects import Command
from tests.protocol.harness import Play, at
from tests.support import as_bytes

TTL = 3.0
GRACE = 0.75
SEEDS = range(4)


class Crowd(Play):
    """Machines whose tasks all want one lock, and a record of who asked and who got it, by the server's own order."""

    def __init__(
        self, seed: int, tasks: tuple[int, ...], *, cycles: int = 2, hold: float = 0.002, **options: Any
    ) -> None:
        super().__init__(seed)
        self.asked: dict[bytes, float] = {}  # token -> its arrival in the server's queue
        self.owners: list[bytes] = []
        self.processes: list[Process] = []
        self.options = {"ttl": TTL, **options}
        for number, count in enumerate(tasks):
            client = self.client(f"m{number}")
            for _ in range(count):
                self.processes.append(self.start(client, self.work(client, cycles, hold)))

    async def work(self, client: holdfast.aio.Client, cycles: int, hold: float) -> None:
        for _ in range(cycles):
            await self.cycle(client, hold=hold, **self.options)

    def look(self) -> None:
        super().look()
        values = self.world.store.values
        queue: Any = values.get(b"a:hf1:queue:{a}")
        for token, score in queue.items() if queue is not None else ():
            self.asked.setdefault(token, score)
        owner = values.get(b"a")
        if isinstance(owner, bytes) and (not self.owners or self.owners[-1] != owner):
            self.owners.append(owner)

    def finish(self, within: float) -> None:
        """Everybody who lives has got what it wanted, in that time, and nothing is left."""
        self.run(within)
        for process in self.processes:
            if not process.machine.crashed:
                assert process.done, "somebody still waits"
                process.outcome()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        self.doom(lambda message: None)
        newcomer = self.client("new")
        late = self.start(newcomer, self.cycle(newcomer, ttl=TTL, wait=TTL + 2))
        self.run(TTL + 8)
        late.outcome()
        assert self.fences == sorted(set(self.fences)), "a fence went down, or was given twice"
        assert self.world.keys() == []
        left = [key for key in self.world.store.values if b":queue:" in key or b":waiters:" in key]
        assert left == []
        for machine in self.machines:
            if not machine.crashed:
                assert not machine.router.waiting
                assert not machine.cohorts.active_holds
                assert not machine.cohorts.local_queues
                assert not machine.registry.holds

    def check_fifo(self) -> None:
        """Of those who live and got it from the queue, the earlier always got it before the later."""
        dead = tuple(f"{machine.name}-".encode() for machine in self.machines if machine.crashed)
        granted = [token for token in dict.fromkeys(self.owners) if token in self.asked and not token.startswith(dead)]
        assert granted == sorted(granted, key=self.asked.__getitem__)


def messages_of(seed: int, tasks: tuple[int, ...], **options: Any) -> int:
    crowd = Crowd(seed, tasks, **options)
    crowd.finish(5)
    crowd.check_fifo()
    return len(crowd.world.sent)


def every_message(tasks: tuple[int, ...], **options: Any) -> Iterator[tuple[int, int]]:
    for seed in SEEDS:
        for number in range(messages_of(seed, tasks, **options)):
            yield seed, number


ONE_EACH = (1, 1, 1)
TOGETHER = (3, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_costs_the_others_no_more_than_the_lease(tasks: tuple[int, ...], when: str) -> None:
    for seed, number in every_message(tasks):
        crowd = Crowd(seed, tasks)
        crowd.doom(at(number, sender_crashes=when))
        crowd.finish(TTL + GRACE + 2.0)
        crowd.check_fifo()


@pytest.mark.long
def test_two_crashes_at_any_two_steps() -> None:
    for number in range(messages_of(0, ONE_EACH)):
        for second in range(number + 1, number + 12):
            crowd = Crowd(0, ONE_EACH)
            crashes = {number: Fate(sender_crashes="after"), second: Fate(sender_crashes="before")}
            crowd.doom(lambda message, crashes=crashes: crashes.get(message.number))  # type: ignore[misc]
            crowd.finish(2 * (TTL + GRACE + 2.0))
            crowd.check_fifo()


FAULTS: dict[str, dict[str, Any]] = {
    "request lost": {"lost": True},
    "reply lost": {"reply_lost": True},
    "reply late": {"reply_late_us": 300_000},
    "reply later than the grace": {"reply_late_us": 900_000},
    "late": {"late_us": 300_000},
    "later than the grace": {"late_us": 1_700_000},
    "later than the lease": {"late_us": 6_000_000},
    "twice": {"again_us": 700},
    "again after the lease": {"again_us": 4_000_000},
}


@pytest.mark.long
@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_gone_wrong_loses_nobody(tasks: tuple[int, ...], fault: str) -> None:
    for seed, number in every_message(tasks):
        crowd = Crowd(seed, tasks)
        crowd.doom(at(number, **FAULTS[fault]))
        crowd.run(9.0)
        for process in crowd.processes:
            assert process.done
            # A release that was unanswered for longer than its lease says so; everything else succeeds.
            assert process.error is None or isinstance(process.error, holdfast.OutcomeUnknown | holdfast.LeaseLost)
        crowd.check_nothing_is_left()


BELLS: dict[str, Fate] = {
    "lost": Fate(lost=True),
    "late": Fate(late_us=300_000),
    "later than its grace": Fate(late_us=900_000),
    "later than the lease": Fate(late_us=5_000_000),
    "twice": Fate(again_us=500),
    "again much later": Fate(again_us=2_000_000),
}


@pytest.mark.long
@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
@pytest.mark.parametrize("fault", BELLS)
def test_a_bell_gone_wrong_costs_a_refresh(tasks: tuple[int, ...], fault: str) -> None:
    for seed in SEEDS:
        calm = Crowd(seed, tasks)
        calm.finish(5)
        assert calm.world.notifications_sent
        for number in range(calm.world.notifications_sent):
            crowd = Crowd(seed, tasks)
            crowd.world.fate_of_notification = lambda wakeup, number=number: (
                BELLS[fault] if wakeup == number else Fate()
            )  # type: ignore[misc]
            crowd.finish(2.5)  # long before the lease of a lost grant would have ended


@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
def test_without_any_bell_everybody_is_served_all_the_same(tasks: tuple[int, ...]) -> None:
    for seed in SEEDS:
        crowd = Crowd(seed, tasks)
        crowd.world.fate_of_notification = lambda wakeup: Fate(lost=True)
        crowd.finish(20)
        crowd.check_fifo()


def test_a_server_that_forbids_bells_is_polled() -> None:
    for seed in SEEDS:
        crowd = Crowd(seed, TOGETHER)
        crowd.world.no_pubsub = True
        crowd.finish(10)
        crowd.check_fifo()


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_waiter_whose_attempt_to_subscribe_was_cut_subscribes_later(cuts: int) -> None:
    play = Play(seed=1)
    play.world.cut_subscriptions = cuts
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, ttl=60, hold=20.0))
    play.run(0.01)
    second = play.start(two, play.cycle(two, ttl=60))
    play.run(10.0)
    assert play.machines[1].router.armed
    asked = len(play.world.sent)
    play.run(2.0)
    assert len(play.world.sent) - asked <= 5, "it waits for a notification and does not poll"
    play.run(8.1)
    second.outcome()


def test_a_waiter_that_subscribes_late_keeps_its_place_and_its_end() -> None:
    play = Play(seed=1)
    play.world.cut_subscriptions = 1000
    one, two, three = (play.client(name) for name in ("one", "two", "three"))
    play.start(one, play.cycle(one, ttl=60, hold=6.0))
    play.run(0.01)
    second = play.start(two, play.cycle(two, ttl=60))
    play.run(0.01)
    third = play.start(three, play.cycle(three, ttl=60, wait=5.0))
    play.run(4.0)
    assert play.world.cut_subscriptions > 980, "attempts are ever further apart"
    play.run(1.1)
    assert third.done
    assert isinstance(third.error, holdfast.AcquireTimeout)
    play.run(1.0)
    second.outcome()


def events_of(crowd: Crowd, seconds: float) -> int:
    count = 0
    while crowd.world._events and crowd.world._events[0][0] <= seconds * 1e6:
        crowd.world.advance()
        count += 1
    return count


@pytest.mark.long
@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
def test_a_waiter_cancelled_at_any_moment_passes_its_turn_on(tasks: tuple[int, ...]) -> None:
    events = events_of(Crowd(0, tasks), 0.05)
    assert events > 50
    for victim in range(sum(tasks)):
        for moment in range(events):
            crowd = Crowd(0, tasks)
            for _ in range(moment):
                crowd.step()
            cancelled = crowd.processes.pop(victim)
            cancelled.cancel()
            crowd.finish(0.35)  # less than a grace or a refresh: nobody is saved by those
            assert cancelled.done
            assert cancelled.error is None or isinstance(cancelled.error, Cancelled)


@pytest.mark.long
@pytest.mark.parametrize("tasks", [ONE_EACH, TOGETHER], ids=["one each", "cohorts"])
@pytest.mark.parametrize("seconds", [0.4, 1.0, 4.0])
def test_a_machine_stopped_at_any_moment_holds_nobody_up_for_longer_than_the_lease(
    tasks: tuple[int, ...], seconds: float
) -> None:
    events = events_of(Crowd(0, tasks), 0.05)
    for victim in range(len(tasks)):
        for moment in range(0, events, 3):
            crowd = Crowd(0, tasks)
            for _ in range(moment):
                crowd.step()
            machine = crowd.machines[victim]
            machine.pause()
            crowd.run(seconds)
            machine.resume()
            crowd.run(TTL + GRACE + 1.5)
            for process in crowd.processes:
                assert process.done
                assert process.error is None or isinstance(process.error, holdfast.LeaseLost)
            crowd.check_nothing_is_left()


@pytest.mark.long
def test_storms_of_every_fault_at_once_never_let_two_hold() -> None:
    for seed in range(150):
        dice = random.Random(seed)
        crowd = Crowd(seed, dice.choice([ONE_EACH, TOGETHER, (2, 2, 2)]), cycles=4, hold=dice.choice([0.0, 0.002, 0.2]))

        def any_fate(dice: random.Random = dice) -> Fate:
            if dice.random() > 0.12:
                return Fate()
            return dice.choice([*(Fate(**fault) for fault in FAULTS.values()), *BELLS.values()])

        crowd.doom(lambda message, any_fate=any_fate: any_fate())  # type: ignore[misc]
        crowd.world.fate_of_notification = lambda number, any_fate=any_fate: any_fate()  # type: ignore[misc]
        for _ in range(10):
            crowd.run(dice.random())
            machine = dice.choice(crowd.machines)
            machine.pause()
            crowd.run(dice.choice([0.01, 0.6, 2.0]))
            machine.resume()
            if dice.random() < 0.2:
                crowd.world.cut_listeners()
        crowd.doom(lambda message: None)
        crowd.world.fate_of_notification = lambda number: Fate()
        crowd.run(4 * TTL)
        for process in crowd.processes:
            assert process.done, f"seed {seed}"
            assert process.error is None or isinstance(process.error, holdfast.HoldfastError)
        crowd.run(10)  # whatever is late has come
        crowd.check_nothing_is_left()


@pytest.mark.long
def test_listeners_cut_at_any_moment_are_armed_again_and_nobody_is_lost() -> None:
    events = events_of(Crowd(0, TOGETHER), 0.05)
    for moment in range(0, events, 2):
        crowd = Crowd(0, TOGETHER)
        for _ in range(moment):
            crowd.step()
        crowd.world.cut_listeners()
        crowd.finish(2.0)


@pytest.mark.parametrize("how", ["killed", "stopped", "cut off"])
@pytest.mark.parametrize("since_ms", range(0, 1600, 40))
def test_a_dead_head_costs_the_next_waiter_a_second_and_a_half_and_a_frozen_one_its_ttl(
    how: str, since_ms: int
) -> None:
    """However long before the release it died or froze. A frozen process is still subscribed, for a second."""
    play = Play(seed=1)
    holder, head, third = play.client("holder"), play.client("head"), play.client("third")
    freed_at: list[float] = []
    got_at: list[float] = []

    async def hold() -> None:
        async with holder.lock("a", ttl=600):
            await play.sleep(holder, 0.5 + since_ms / 1000)
        freed_at.append(play.world.now_us / 1e6)

    async def follow() -> None:
        await play.sleep(third, 0.02)
        async with third.lock("a", ttl=600):
            got_at.append(play.world.now_us / 1e6)

    async def lead() -> None:
        await play.sleep(head, 0.01)
        await play.cycle(head, ttl=600 if how == "killed" else 2)

    play.start(holder, hold())
    play.start(head, lead())
    play.start(third, follow())
    play.run(0.5)
    dead: Any = head._driver
    if how == "killed":
        dead.crash()
    elif how == "stopped":
        dead.pause()
    else:
        cut = dead
        play.doom(lambda message: Fate(lost=True) if message.machine is cut else None)
        play.world.fate_of_notification = lambda number: Fate(lost=True) if not got_at and number == 0 else Fate()
    play.run(since_ms / 1000 + 4)
    assert got_at, "the next waiter was never served"
    assert got_at[0] - freed_at[0] <= (1.5 if how == "killed" or since_ms > 1000 else 2.1)


@pytest.mark.parametrize(("ttl", "order"), [(1, "holder third sleeper"), (600, "holder sleeper third")])
def test_a_waiter_that_was_stopped_in_its_turn_has_the_lock_for_its_ttl_and_no_longer(ttl: float, order: str) -> None:
    play = Play(seed=1)
    holder, sleeper, third = play.client("holder"), play.client("sleeper"), play.client("third")
    served: list[str] = []

    async def take(client: holdfast.aio.Client, name: str, after: float, hold: float) -> None:
        await play.sleep(client, after)
        async with client.lock("a", ttl=ttl) as lease:
            lease.check()
            served.append(name)
            await play.sleep(client, hold)

    play.start(holder, take(holder, "holder", 0.0, 0.3))
    slept = play.start(sleeper, take(sleeper, "sleeper", 0.01, 0.01))
    play.start(third, take(third, "third", 0.02, 2.0))
    play.run(0.299)
    sleeper._driver.pause()  # type: ignore[attr-defined]
    play.run(2.0)
    sleeper._driver.resume()  # type: ignore[attr-defined]
    play.run(6.0)  # a notification that is older than the ttl grants nothing any more
    slept.outcome()
    assert served == order.split()


def foreign(play: Play, *args: str | int) -> Any:
    return play.world.execute(Command(args))


def test_a_foreign_client_that_frees_the_lock_wakes_the_first_in_the_queue() -> None:
    for after_ms in (1, 20, 60, 200, 430, 900, 1501):
        play = Play(seed=1)
        waiter = play.client("waiter")
        assert foreign(play, "SET", "a", "theirs", "NX", "PX", 30_000) is not None
        got = play.start(waiter, play.cycle(waiter, ttl=TTL))
        play.run(after_ms / 1000)
        foreign(play, "DEL", "a")
        play.run(0.055)
        assert play.fences, f"freed after {after_ms} ms, and not taken within 50 ms"
        play.run(1.0)
        got.outcome()


def test_a_waiter_that_becomes_the_first_because_another_gives_up_watches_the_lock_from_then_on() -> None:
    """The waiter before it gives up just after it has asked: it is told, and does not wait for its next turn to ask."""
    play = Play()
    play.world.execute(Command(("SET", "a", "another's", "PX", "60000")))
    one, two = play.client("one"), play.client("two")
    first = play.start(one, play.cycle(one))
    play.run(0.1)
    second = play.start(two, play.cycle(two))
    asked = 0
    while asked < 3:  # it queues, it is subscribed, it shows that it is there
        asked = sum(message.machine is play.machines[1] for message in play.world.sent)
        play.step()
    first.cancel()
    play.run(0.1)
    play.world.execute(Command(("DEL", "a")))
    play.run(0.05)
    assert second.done, "the lock is free, and the first in its queue does not know"


def test_a_foreign_lock_that_expires_is_met_by_a_timer() -> None:
    play = Play(seed=1)
    waiter = play.client("waiter")
    foreign(play, "SET", "a", "theirs", "NX", "PX", 1730)
    play.start(waiter, play.cycle(waiter, ttl=TTL))
    play.run(1.70)
    assert not play.fences
    play.run(0.05)
    assert play.fences


def test_a_foreign_lock_without_a_ttl_is_asked_about_every_half_second() -> None:
    play = Play(seed=1)
    play.world.tracking = False
    waiter = play.client("waiter")
    foreign(play, "SET", "a", "theirs")
    play.start(waiter, play.cycle(waiter, ttl=TTL))
    play.run(10.0)
    assert len(play.world.sent) <= 24
    foreign(play, "DEL", "a")
    play.run(0.6)
    assert play.fences


@pytest.mark.parametrize("held_for", [0.15, 0.5, 2.9, 11.0])
def test_a_holder_whose_key_is_taken_away_is_told_at_once(held_for: float) -> None:
    play = Play(seed=1)
    robbed = play.client("robbed")
    lost_at: list[float] = []

    async def hold() -> None:
        with pytest.raises(holdfast.LeaseLost):
            async with robbed.lock("a", ttl=6.0, on_lost="ignore") as lease:
                await lease.lost.wait(30.0)
                lost_at.append(play.world.now_us / 1e6)

    play.start(robbed, hold())
    play.run(held_for)
    foreign(play, "DEL", "a")
    play.run(0.05)
    assert lost_at


def test_the_local_waiters_of_a_holder_that_was_robbed_do_not_wait_for_its_body() -> None:
    play = Play(seed=1)
    client = play.client("one")
    gotten: list[int] = []

    async def hold() -> None:
        lease = await client.lock("a", ttl=30).acquire()
        await play.sleep(client, 5.0)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    async def wait() -> None:
        async with client.lock("a", ttl=30) as lease:
            gotten.append(lease.fence)

    play.start(client, hold())
    play.run(0.2)
    play.start(client, wait())
    play.run(0.2)
    foreign(play, "DEL", "a")
    play.run(0.1)
    assert gotten


def test_a_lost_lease_occupies_its_object_also_for_those_who_waited_already() -> None:
    play = Play(seed=1)
    client, other = play.client("one"), play.client("two")
    shared = client.lock("a", ttl=30)
    gotten: list[str] = []

    async def hold() -> None:
        lease = await shared.acquire()
        await play.sleep(client, 1.0)
        assert lease is not None
        with pytest.raises(holdfast.LeaseLost):
            await shared.release()

    async def wait(lock: holdfast.aio.Lock, name: str) -> None:
        lease = await lock.acquire()
        assert lease is not None
        gotten.append(name)
        await lease.release()

    holder = play.start(client, hold())
    play.run(0.2)
    same = play.start(client, wait(shared, "the same object"))
    play.start(client, wait(client.lock("a", ttl=30), "another object"))
    play.start(other, wait(other.lock("a", ttl=30), "another machine"))
    play.run(0.2)
    foreign(play, "DEL", "a")
    play.run(0.3)
    assert sorted(gotten) == ["another machine", "another object"]
    play.run(1.0)
    holder.outcome()
    same.outcome()
    assert len(gotten) == 3


def test_a_bell_older_than_the_last_refusal_is_not_believed() -> None:
    """The lock was granted to us, taken away by hand and given to another before word of the grant came."""
    play = Play(seed=1)
    one, two, three = play.client("one"), play.client("two"), play.client("three")
    play.world.tracking = False
    play.world.fate_of_notification = lambda number: Fate(late_us=500_000) if number == 0 else Fate()
    play.start(one, play.cycle(one, ttl=TTL, hold=0.04))
    play.run(0.01)
    play.start(two, play.cycle(two, ttl=TTL, hold=0.3))
    play.run(0.031)
    foreign(play, "DEL", "a")
    play.start(three, play.cycle(three, ttl=TTL, hold=1.0))
    play.run(3.0)  # with a look at who holds what after every event
    assert len(play.fences) == 3


def test_a_waiter_cancelled_in_its_clean_up_gives_its_seat_away_once() -> None:
    for cancelled_at in range(0, 260, 5):
        play = Play(seed=1)
        holder, one = play.client("holder"), play.client("one")
        play.start(holder, play.cycle(holder, ttl=30, hold=3.0))
        play.run(0.05)
        first = play.start(one, play.cycle(one, ttl=30, wait=0.6))
        play.run(0.05)
        others = [play.start(one, play.cycle(one, ttl=30, wait=8, label=label)) for label in ("x", "")]
        play.run(0.4)
        play.world.hang()
        play.run(0.1 + cancelled_at / 1000)
        first.cancel()
        play.run(0.5)
        play.world.resume()
        play.run(9.0)
        assert first.done
        for other in others:
            other.outcome()


@pytest.mark.parametrize("held_us", range(99_500, 101_000, 50))
def test_a_lease_passed_on_while_the_keeper_first_looks_at_it_is_kept_for_its_next_holder(held_us: int) -> None:
    play = Play(seed=1)
    first, client = play.client("first"), play.client("one")
    play.start(first, play.cycle(first, ttl=TTL, hold=0.05))
    play.run(0.01)
    play.start(client, play.cycle(client, ttl=TTL, hold=held_us / 1e6))
    play.run(0.01)
    successor = play.start(client, play.cycle(client, ttl=TTL, hold=3 * TTL))
    play.run(4 * TTL)
    successor.outcome()


@pytest.mark.long
@pytest.mark.parametrize("tasks", [(1, 1), ONE_EACH, TOGETHER, (2, 2, 2, 2), (6,)], ids=str)
def test_a_plain_client_that_polls_beside_a_busy_queue_gets_its_turn(tasks: tuple[int, ...]) -> None:
    crowd = Crowd(3, tasks, cycles=10**6, hold=0.001)
    dice = random.Random(1)
    turns = 0
    for _ in range(150):  # about 15 s of polls, as redis-py makes them
        crowd.run(dice.uniform(0.09, 0.11))
        if foreign(crowd, "SET", "a", "theirs", "NX", "PX", 10_000):
            turns += 1
            crowd.run(0.002)
            foreign(crowd, "DEL", "a")
    assert turns >= 2, f"{turns} turns"
    assert len(crowd.fences) > 9000, "and the others lose little by that"


@pytest.mark.parametrize("blocked_for", [0.0, 1.0, 20.0])
def test_a_lock_that_was_waited_for_is_held_for_its_whole_ttl_from_the_first_moment(blocked_for: float) -> None:
    """Nothing has to be sent for that: a body may block its whole process right from the start."""
    play = Play(seed=1)
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, ttl=TTL, hold=0.3))
    play.run(0.01)
    seen: list[float] = []

    async def body() -> None:
        async with two.lock("a", ttl=30) as lease:
            seen.append(lease.remaining())
            if blocked_for:
                two._driver.pause()  # type: ignore[attr-defined]
                play.world.at(play.world.now_us + round(blocked_for * 1e6), two._driver.resume)  # type: ignore[attr-defined]
            await play.sleep(two, 0.001)
            lease.check()
            seen.append(lease.remaining())
            pttl_ms = play.world.store.execute("PTTL", "a")
            assert isinstance(pttl_ms, int)
            seen.append(pttl_ms / 1000)

    second = play.start(two, body())
    play.run(40)
    second.outcome()
    first, after, pttl = seen
    assert 29.0 < first <= 30
    assert 29.0 - blocked_for < after <= pttl


def test_a_short_hold_that_was_waited_for_costs_no_request_of_its_own() -> None:
    play = Play(seed=1)
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, ttl=TTL, hold=0.3))
    play.run(0.01)
    second = play.start(two, play.cycle(two, ttl=TTL, hold=0.09))
    play.run(1.0)
    second.outcome()
    machine: object = two._driver
    scripts = [op.script for message in play.world.sent if message.machine is machine for op in message.ops]  # type: ignore[union-attr]
    assert set(scripts) == {"acquire", "release"}
    assert scripts.count("release") == 1


def test_a_forged_notification_stretches_nothing() -> None:
    """It has no duration, and is no longer believed than the waiter's own ttl, counted from before it last asked."""
    play = Play(seed=1)
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, ttl=60, hold=30))
    play.run(0.01)
    seen: list[float] = []

    async def body() -> None:
        async with two.lock("a", ttl=TTL) as lease:
            seen.append(lease.remaining())

    play.start(two, body())
    play.run(0.1)
    router = two._driver.router
    (token,) = router.waiting
    later = play.world.store.now_us + 1_000_000
    router.deliver(f"{token} 12345 {later} -1".encode(), two._driver.now())
    play.run(0.01)
    assert seen
    assert seen[0] <= TTL


def test_a_kept_waiter_without_a_subscriber_gets_a_reservation_and_then_its_whole_ttl() -> None:
    play = Play(seed=1)
    play.world.no_pubsub = True
    one, two = play.client("one"), play.client("two")
    play.start(one, play.cycle(one, ttl=TTL, hold=0.3))
    play.run(0.01)
    ttls: set[int] = set()
    second = play.start(two, play.cycle(two, ttl=30, hold=1.0))
    while not second.done:
        play.run(0.001)
        if as_bytes(play.world.store.values.get(b"a", b"")).startswith(b"two"):
            pttl_ms = play.world.store.execute("PTTL", "a")
            assert isinstance(pttl_ms, int)
            ttls.add(pttl_ms)
    second.outcome()
    assert any(ttl <= 750 for ttl in ttls), "reserved, not granted"
    assert max(ttls) > 29_000


def test_others_wait_for_no_more_than_the_budget_of_a_cohort() -> None:
    crowd = Crowd(2, (0,))
    big, small = crowd.client("big"), crowd.client("small")
    holders: list[str] = []

    async def work(client: holdfast.aio.Client, name: str) -> None:
        for _ in range(200):
            async with client.lock("a", ttl=TTL, cohort=5) as lease:
                holders.append(name)
                crowd.fences.append(lease.fence)
                await crowd.sleep(client, 0.0002)

    for _ in range(8):
        crowd.start(big, work(big, "b"))
    crowd.start(small, work(small, "s"))
    crowd.run(8.0)
    runs = [len(run) for run in "".join(holders).split("s")]
    while_both_wanted = runs[2:150]
    assert max(while_both_wanted) <= 6  # the one to whom the server gave it, and five to whom it was passed on
    assert max(while_both_wanted) == 6
    assert crowd.fences == sorted(set(crowd.fences))


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
def test_a_process_does_not_lose_its_place_because_one_of_its_tasks_gives_up(how: str) -> None:
    play = Play(seed=1)
    holder, one, two = play.client("holder"), play.client("one"), play.client("two")
    order: list[str] = []

    async def take(client: holdfast.aio.Client, name: str, after: float, **options: Any) -> None:
        await play.sleep(client, after)
        async with client.lock("a", ttl=60, **options) as lease:
            order.append(name)
            play.fences.append(lease.fence)
            await play.sleep(client, 0.5 if name == "holder" else 0.01)

    play.start(holder, take(holder, "holder", 0.0))
    patience = 0.3 if how == "timeout" else None
    impatient = play.start(one, take(one, "impatient", 0.01, wait=patience))
    play.start(one, take(one, "patient", 0.02))
    play.start(two, take(two, "two", 0.03))
    play.run(0.28)
    before = len(play.world.sent)
    if how == "cancelled":
        impatient.cancel()
    play.run(0.1)
    assert impatient.done
    scripts = [op.script for message in play.world.sent[before:] for op in message.ops if not isinstance(op, Command)]
    assert "abandon" not in scripts
    play.run(1.0)
    assert order == ["holder", "patient", "two"]
    assert play.fences == sorted(set(play.fences))
    assert play.world.keys() == []


def test_a_stint_ends_after_a_tenth_of_a_second() -> None:
    crowd = Crowd(2, (0,))
    slow, other = crowd.client("slow"), crowd.client("other")
    holders: list[str] = []

    async def work(client: holdfast.aio.Client, name: str, hold: float) -> None:
        for _ in range(60):
            async with client.lock("a", ttl=TTL):
                holders.append(name)
                await crowd.sleep(client, hold)

    for _ in range(4):
        crowd.start(slow, work(slow, "b", 0.03))
    crowd.start(other, work(other, "s", 0.001))
    crowd.run(10.0)
    runs = [len(run) for run in "".join(holders).split("s")]
    assert max(runs[2:25]) <= 4


def a_pass(first: dict[str, Any], second: dict[str, Any], *, hold: float = 0.01) -> tuple[list[Any], list[str]]:
    """Two tasks of one process, one after the other; both leases as the holder sees them, and what was sent."""
    play = Play(seed=1)
    client = play.client("one")
    seen: list[Any] = []

    async def work(options: dict[str, Any], after: float) -> None:
        await play.sleep(client, after)
        async with client.lock("a", **options) as lease:
            seen.append((lease.fence, lease.token, lease.remaining()))
            await play.sleep(client, hold)

    play.start(client, work(first, 0.0))
    play.start(client, work(second, 0.001))
    play.run(5.0)
    assert len(seen) == 2
    return seen, [op.script for message in play.world.sent for op in message.ops if not isinstance(op, Command)]


def test_a_pass_needs_no_network_and_gives_a_greater_fence() -> None:
    (first, second), sent = a_pass({"ttl": 30}, {"ttl": 30})
    assert sent == ["acquire", "release"]
    assert second[0] == first[0] + 1
    assert second[1] == first[1]
    assert second[2] > 29


@pytest.mark.parametrize(
    ("first", "second", "hold", "sent"),
    [
        ({"ttl": 1}, {"ttl": 30}, 0.01, ["acquire", "renew", "release"]),
        ({"ttl": 0.2}, {"ttl": 0.2}, 0.06, ["acquire", "renew", "release", "release"]),
        ({"ttl": 30}, {"ttl": 1}, 0.01, ["acquire", "release", "acquire", "release"]),
        ({"ttl": 30, "label": "x"}, {"ttl": 30, "label": "y"}, 0.01, ["acquire", "release", "acquire", "release"]),
        (
            {"ttl": 30, "cohort": 0},
            {"ttl": 30, "cohort": 0},
            0.01,
            ["acquire", "acquire", "acquire", "release", "release"],
        ),
    ],
    ids=["renewed first", "nearly over", "shorter ttl", "another label", "cohort=0"],
)
def test_what_a_pass_could_not_give_goes_by_the_server(
    first: dict[str, Any], second: dict[str, Any], hold: float, sent: list[str]
) -> None:
    (one, two), really = a_pass(first, second, hold=hold)
    assert two[0] > one[0]
    assert two[2] > 0.7 * second["ttl"] or two[2] > 0.6
    if second["ttl"] != 0.2:
        assert really == sent


def count(play: Play, seconds: float) -> int:
    before = len(play.world.sent)
    play.run(seconds)
    return len(play.world.sent) - before


def test_a_sleeping_waiter_sends_nothing_but_its_refresh() -> None:
    play = Play(seed=1)
    holder = play.client("holder")
    play.start(holder, play.cycle(holder, ttl=60, hold=30.0))
    play.run(0.01)
    crowd = [play.client(f"w{number}") for number in range(20)]
    for client in crowd:
        for _ in range(5):
            play.start(client, play.cycle(client, ttl=60))
    play.run(2.0)
    assert count(play, 5.0) <= 20 * 10 + 2


def test_memory_of_a_contended_lock_is_given_back() -> None:
    crowd = Crowd(1, TOGETHER)
    crowd.finish(5)
    crowd.run(3700)
    assert crowd.world.store.values == {}
