"""A latch in the simulated world: at every message, what can go wrong does.

Three count down, two machines wait. No waiter goes on before all have counted, and none waits on when they have.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.process import Cancelled, Process
from holdfast.lab.simulation.world import Fate, Message
from tests.protocol.harness import Play, at
from tests.support import as_bytes

COUNT = 3
MESSAGES = range(14)  # three count_downs and some looks of two machines, with retries a few more


class Latches(Play):
    """Machines that count down, machines that wait, and the truth about both."""

    def __init__(self, seed: int | None = None, count: int = COUNT) -> None:
        super().__init__(seed)
        self.count = count
        self.begun = 0  # how many count_downs were asked for
        self.too_early = 0

    async def counts(self, client: holdfast.aio.Client, after: float) -> int:
        await self.sleep(client, after)
        self.begun += 1
        return await client.latch("a", self.count).count_down()

    async def waits(self, client: holdfast.aio.Client, timeout: float | None = None) -> bool:
        opened = await client.latch("a", self.count).wait(timeout)
        if opened and self.begun < self.count:
            self.too_early += 1
        return opened

    def cast(self, counters: int = COUNT) -> tuple[list[Process], list[Process]]:
        counting = []
        for number in range(counters):
            client = self.client(f"c{number}")
            counting.append(self.start(client, self.counts(client, 0.002 + 0.001 * number)))
        waiting = []
        for number in range(2):
            client = self.client(f"w{number}")
            waiting += [self.start(client, self.waits(client, 40)) for _ in range(2)]
        return counting, waiting

    def left(self) -> int:
        """What the server says is left."""
        value = self.world.store.values.get(b"a:hf1:latch:{a}")
        return self.count if value is None else int(as_bytes(value).split()[0])


def test_nothing_goes_wrong() -> None:
    play = Latches()
    counting, waiting = play.cast()
    play.run(0.1)
    assert [process.outcome() for process in counting] == [2, 1, 0]
    assert [process.outcome() for process in waiting] == [True] * 4
    assert play.too_early == 0
    assert play.world.notifications_sent == 2, "one for each machine, for all its waiters"
    looks = [message for message in play.world.sent if message.ops[0].script == "latch_look"]  # type: ignore[union-attr]
    assert len(looks) == 2 * 3, "each machine looks, listens and looks again, and looks when it was rung"


def test_a_waiter_that_stays_removes_those_whose_process_has_ended() -> None:
    play = Latches()
    clients = [play.client(f"w{number}") for number in range(3)]
    for client in clients:
        play.start(client, play.waits(client, 40))
    play.run(0.1)
    waiting = play.world.store.values[b"a:hf1:latch:waiters:{a}"]
    assert len(waiting) == 3
    for machine in play.machines[:2]:
        machine.crash()
    play.run(3.0)
    assert len(play.world.store.values[b"a:hf1:latch:waiters:{a}"]) == 1


@pytest.mark.parametrize("fault", [{"lost": True}, {"reply_lost": True}, {"reply_late_us": 400_000}], ids=str)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_lost_message_is_sent_again_and_counted_once(number: int, fault: dict[str, Any]) -> None:
    play = Latches()
    play.doom(at(number, **fault))
    counting, waiting = play.cast()
    play.run(20)
    assert sorted(process.outcome() for process in counting) == [0, 1, 2]
    assert [process.outcome() for process in waiting] == [True] * 4
    assert play.too_early == 0


@pytest.mark.parametrize(
    "fate", [{"late_us": 500_000}, {"late_us": 4_000_000}, {"late_us": 30_000_000}, {"again_us": 50}]
)
@pytest.mark.parametrize("number", MESSAGES)
def test_a_request_that_arrives_late_or_twice_is_counted_once(number: int, fate: dict[str, int]) -> None:
    """With one more to come, the latch must still be shut when all is over."""
    play = Latches(count=COUNT + 1)
    play.doom(at(number, **fate))
    counting, waiting = play.cast()
    play.run(35)
    for process in counting:
        process.outcome()
    assert play.left() == 1
    play.run(10)
    assert [process.outcome() for process in waiting] == [False] * 4


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", MESSAGES)
def test_a_crash_at_any_message_costs_nobody_else_anything(number: int, when: str) -> None:
    play = Latches()
    play.doom(at(number, sender_crashes=when))
    counting, waiting = play.cast()
    play.run(1)
    play.doom(lambda message: None)
    left = play.left()
    assert left <= 1
    alive = [process for process in waiting if not process.machine.crashed]
    assert all(process.done for process in alive) == (left == 0)
    if left:  # a machine that crashed had not counted, and is replaced
        spare = play.client("spare")
        counting.append(play.start(spare, play.counts(spare, 0)))
        play.begun -= 1
    play.run(1)
    assert alive
    assert all(process.outcome() for process in alive)
    assert play.too_early == 0


@pytest.mark.parametrize("after_us", [0, 50, 99, 100, 150, 199, 200, 201, 250, 300, 400, 600, 2_500, 400_000])
@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_cancelled_waiter_stops_no_other_waiter(after_us: int, who: str) -> None:
    play = Latches()
    counting, waiting = play.cast(COUNT - 1)
    victim = waiting[0 if who == "leader" else 1]
    play.world.at(after_us, victim.cancel)
    play.run(0.5)
    assert isinstance(victim.error, Cancelled)
    late = play.client("late")
    counting.append(play.start(late, play.counts(late, 0)))
    play.run(0.6)
    for process in waiting:
        assert process is victim or process.outcome() is True
    assert play.too_early == 0
    assert not any(machine.router.waiting for machine in play.machines)


@pytest.mark.parametrize("gap_us", [0, 10, 100, 200, 1000])
def test_waiters_that_are_cancelled_one_after_the_other_leave_the_last_one_listening(gap_us: int) -> None:
    """The leader leaves, and so does the waiter that it woke to replace it. The other waiters are not delayed."""
    play = Latches(count=1)
    client, other = play.client("w"), play.client("c")
    waiting = [play.start(client, play.waits(client)) for _ in range(5)]
    for number, victim in enumerate(waiting[:4]):
        play.world.at(300_000 + gap_us * number, victim.cancel)
    counting = play.start(other, play.counts(other, 0.301 + 5 * gap_us / 1e6))
    play.run(0.32)
    assert counting.outcome() == 0
    assert waiting[4].outcome() is True


@pytest.mark.parametrize("after_us", [0, 2_000, 2_050, 2_100, 2_150, 2_199, 2_200, 2_250, 2_300])
@pytest.mark.parametrize("reply_lost", [False, True], ids=["", "reply lost"])
def test_a_count_down_that_is_cancelled_counts_once_or_not_at_all(after_us: int, reply_lost: bool) -> None:
    play = Latches()
    if reply_lost:
        play.doom(at(0, reply_lost=True))
    one = play.client("one")
    process = play.start(one, play.counts(one, 0.002))
    play.world.at(after_us, process.cancel)
    play.run(10)
    assert process.done
    assert isinstance(process.error, Cancelled) or process.error is None
    assert play.left() in (COUNT, COUNT - 1)
    if after_us >= 2_050:  # it was on its way, and what is said is done
        assert play.left() == COUNT - 1


@pytest.mark.parametrize("fate", [{"lost": True}, {"late_us": 300_000}, {"again_us": 100_000}], ids=str)
def test_bells_are_hints(fate: dict[str, Any]) -> None:
    play = Latches()
    play.world.fate_of_notification = lambda number: Fate(**fate)
    _, waiting = play.cast()
    play.run(0.6)
    assert [process.outcome() for process in waiting] == [True] * 4
    assert play.too_early == 0


def test_where_pub_sub_is_forbidden_waiters_poll_within_bounds() -> None:
    play = Latches()
    play.world.no_pubsub = True
    _, waiting = play.cast(COUNT - 1)
    play.run(10)
    looks = [message for message in play.world.sent if message.ops[0].script == "latch_look"]  # type: ignore[union-attr]
    assert 2 * 90 < len(looks) < 2 * 250, "each machine looks about every tenth of a second"
    late = play.client("late")
    play.start(late, play.counts(late, 0))
    play.run(0.2)
    assert [process.outcome() for process in waiting] == [True] * 4


def test_waiting_costs_two_requests_a_second_of_each_machine() -> None:
    play = Latches()
    clients = [play.client(f"w{number}") for number in range(3)]
    for client in clients:
        for _ in range(50):
            play.start(client, play.waits(client))
    play.run(1)
    before = len(play.world.sent)
    play.run(10)
    assert len(play.world.sent) - before <= 3 * 20 + 3


def test_a_broken_listener_costs_a_look() -> None:
    play = Latches()
    _, waiting = play.cast(COUNT - 1)
    play.run(0.1)
    play.world.cut_listeners()
    late = play.client("late")
    play.start(late, play.counts(late, 0))
    play.run(0.6)
    assert [process.outcome() for process in waiting] == [True] * 4


def test_an_outage_is_waited_out() -> None:
    play = Latches()
    _, waiting = play.cast(COUNT - 1)
    play.run(0.1)
    play.world.down = True
    play.run(1.9)  # a little less than outage_wait
    assert not any(process.done for process in waiting)
    play.world.down = False
    late = play.client("late")
    play.start(late, play.counts(late, 0))
    play.run(1)
    assert [process.outcome() for process in waiting] == [True] * 4


def test_an_outage_that_lasts_ends_all_waits_together() -> None:
    play = Latches()
    _, waiting = play.cast(COUNT - 1)
    play.run(0.1)
    play.world.down = True
    play.run(3)
    for process in waiting:
        with pytest.raises(holdfast.Unavailable):
            process.outcome()


def test_a_wait_ends_in_time_on_a_hung_server() -> None:
    play = Latches()
    one = play.client("one")
    seen = play.start(one, play.waits(one, 2))
    play.run(0.5)
    play.world.hang()
    blind = play.start(one, play.waits(one, 1))
    stranger = play.client("two")
    lost = play.start(stranger, play.waits(stranger, 1))
    play.run(1.75)
    for process in (seen, blind, lost):  # the last look of each process was not answered
        with pytest.raises(holdfast.Unavailable):
            process.outcome()
    play.world.resume()


def test_a_count_down_that_is_never_answered_says_so() -> None:
    play = Latches()
    one = play.client("one")
    play.world.hang()
    process = play.start(one, play.counts(one, 0))
    play.run(10)
    with pytest.raises(holdfast.OutcomeUnknown, match="count_down of 'a'"):
        process.outcome()
    play.world.resume()
    play.run(1)
    assert play.left() == COUNT - 1, "what was kept waiting is counted once, however often it was sent"


def test_a_server_that_forgets_begins_anew() -> None:
    play = Latches()
    _, waiting = play.cast(COUNT - 1)
    play.run(0.1)
    assert play.left() == 1
    play.world.restart_empty()
    play.run(0.6)
    assert play.left() == COUNT
    again = play.client("again")
    for _ in range(COUNT):
        play.start(again, play.counts(again, 0))
    play.run(0.6)
    assert [process.outcome() for process in waiting] == [True] * 4


def test_many_who_come_and_go_leave_nothing_behind() -> None:
    play = Latches()
    one = play.client("one")
    steady = play.start(one, play.waits(one))

    def come() -> None:
        play.start(one, play.waits(one, 0.05))

    for number in range(300):
        play.world.at(number * 10_000, come)
    play.run(4)
    assert list(one.statistics().latch_waiters.values()) == [1]
    assert len(play.world.store.values[b"a:hf1:latch:waiters:{a}"]) <= 2
    for _ in range(COUNT):
        play.start(one, play.counts(one, 0))
    play.run(1)
    assert steady.outcome() is True
    assert one.statistics().latch_waiters == {}


@pytest.mark.parametrize("seed", range(100))
def test_chance(seed: int) -> None:
    """Five count down and five wait, with faults on a tenth of the messages: the seed is the replay."""
    dice = random.Random(seed)
    play = Latches(seed=seed, count=5)

    def fate(message: Message) -> Fate | None:
        if dice.random() > 0.1 or play.world.now_us > 20_000_000:
            return None
        kind = dice.choice(["lost", "late", "again", "reply"])
        amount = dice.randrange(1, 20_000_000)
        return {
            "lost": Fate(lost=True),
            "late": Fate(late_us=amount),
            "again": Fate(again_us=amount),
            "reply": Fate(reply_lost=True),
        }[kind]

    play.doom(fate)
    play.world.fate_of_notification = lambda number: Fate(lost=dice.random() < 0.3)
    counting, waiting = [], []
    for number in range(5):
        client = play.client(f"m{number}")
        counting.append(play.start(client, play.counts(client, dice.random() * 10)))
        waiting.append(play.start(client, play.waits(client)))
    play.run(60)
    unknown = sum(isinstance(process.error, holdfast.OutcomeUnknown) for process in counting)
    assert play.too_early == 0
    assert play.left() <= unknown, f"replay: pytest -k 'test_chance and {seed}'"
    assert all(process.done for process in waiting) == (play.left() == 0)
