"""What counts as an outage, who is told of it and when: the moments that a review of the rules has found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.events import RenewalFailed
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.world import Fate, Message
from holdfast.options import client_options
from holdfast.protocol.effects import Command, Step, StepFailed, Wait
from holdfast.protocol.wait.contact import Contact, Contacts, Probe
from tests.outages.test_outage_wait_simulated import (
    ANSWER_TIME,
    CALLS,
    LATER,
    OUTAGE_WAIT,
    SLACK,
    Timed,
    acquire,
    acquire_and_hold,
    heal,
    kill,
    stop,
    swallow,
    warm_client,
)
from tests.protocol.harness import Play


def lose(play: Play, script: str, key: str = "") -> None:
    """Lose each request of that script for a name that contains the key."""

    def is_lost(op: Any) -> bool:
        return isinstance(op, Step) and op.script == script and key in op.keys[0]

    def choose(message: Message) -> Fate | None:
        return Fate(lost=True) if any(map(is_lost, message.ops)) else None

    play.doom(choose)


def contact_of(client: holdfast.aio.Client) -> Contact:
    return client._driver.registry.contacts.only


def machine_of(client: holdfast.aio.Client) -> Machine:
    machine: Any = client._driver
    assert isinstance(machine, Machine)
    return machine


def warnings_of(client: holdfast.aio.Client) -> list[str]:
    return machine_of(client).warnings


def keep_using(play: Play, client: holdfast.aio.Client, name: str, seconds: float) -> None:
    """Another caller takes that lock again and again, and is served."""

    async def use(client: holdfast.aio.Client) -> None:
        for _ in range(round(seconds / 0.02)):
            async with client.lock(name):
                await play.sleep(client, 0.02)

    Timed(play, client, use)


def wait_for_latch(name: str) -> Callable[[holdfast.aio.Client], Any]:
    return lambda client: client.latch(name, 2).wait(5)


# Busy or not: the requests on the lock itself decide.


@pytest.mark.parametrize("wait", [0.5, 2.0, 5.0])
def test_a_lock_on_which_no_request_is_answered_is_not_busy_although_others_are_served(wait: float) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    lose(play, "acquire", "mute")
    keep_using(play, client, "other", wait + 1)
    call = Timed(play, client, acquire("mute", wait=wait))
    play.run(wait + 2)
    assert isinstance(call.result, holdfast.Unavailable), repr(call.result)


def test_a_request_that_is_lost_on_another_lock_does_not_make_a_busy_lock_an_outage() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = Timed(play, play.client("two"), acquire_and_hold(play, "hot"))
    play.run(1)
    lose(play, "acquire", "slow")
    found = []
    for number in range(40):
        call = Timed(play, client, acquire("hot", wait=0.3))
        play.run(0.05 + number * 0.004)
        Timed(play, client, acquire("slow", wait=0.3))
        play.run(1.0)
        found.append(call)
    assert [type(call.result) for call in found] == [holdfast.AcquireTimeout] * 40
    assert not holder.ended


# Probes.


def test_a_probe_on_a_latch_does_not_wait_for_a_caller_without_a_limit() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    stop(play)
    Timed(play, client, lambda client: client.latch("l", 2).wait())
    play.run(4.0)
    late = Timed(play, client, wait_for_latch("l"))
    play.run(1.0)
    assert isinstance(late.result, holdfast.Unavailable)
    assert late.took <= LATER


def test_a_probe_of_a_value_does_not_wait_for_an_earlier_caller() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    kill(play)
    Timed(play, client, acquire("z"))
    play.run(1.9)
    Timed(play, client, CALLS["value"])
    play.run(0.3)
    late = [Timed(play, client, CALLS["value"]) for _ in range(5)]
    play.run(8)
    assert all(call.took <= LATER for call in late)


@pytest.mark.parametrize("what", ["lock", "latch", "value", "locked"])
def test_a_probe_does_not_wait_for_its_turn_to_ask(what: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    client._driver.router.asks.most = 3
    stop(play)
    for number in range(8):
        Timed(play, client, acquire(f"p{number}", wait=None))
    play.run(4.2)
    call = Timed(play, client, CALLS[what])
    play.run(8)
    assert call.took <= LATER


class Woken:
    """A wake-up that notes it."""

    caller = None

    def __init__(self) -> None:
        self.woken = False

    def wake(self) -> None:
        self.woken = True

    prewake = wake

    def clear(self) -> None:
        self.woken = False


def fail(contact: Contact, sent_at: float, now: float) -> None:
    contact.lose("acquire", sent_at, StepFailed(holdfast.Unavailable({"s": "x"}, "y"), sent=False, retry=True), now)


def lost_contact() -> Contact:
    contact = Contact(had=True)
    fail(contact, 0.0, 0.1)
    return contact


OPTIONS = client_options(timeout=5.0, fence_retention=60.0, cohort=1, outage_wait=2.0)


def admitted(contact: Contact, now: float, new_wakeup: Callable[[], Any] = Woken) -> Any:
    """What ``admit`` returns for a call that begins then, or the first effect that it waits with."""
    call = contact.admit(OPTIONS, new_wakeup)
    next(call)  # asks for the time
    try:
        effect = call.send(now)
        return call.send(now + 0.01) if not isinstance(effect, Wait) else effect
    except StopIteration as done:
        return done.value


def test_a_verdict_that_comes_before_its_waiter_is_registered_is_not_missed() -> None:
    contact = lost_contact()
    probe = admitted(contact, 10.0)
    assert isinstance(probe, Probe)

    def new_wakeup() -> Woken:
        fail(contact, 10.0, 10.2)
        probe.end()  # by another thread, just here
        return Woken()

    with pytest.raises(StepFailed):
        admitted(contact, 10.05, new_wakeup)


def test_of_two_calls_at_once_one_is_the_probe_and_the_other_waits_for_its_verdict() -> None:
    contact = lost_contact()
    assert isinstance(admitted(contact, 10.0), Probe)
    second = admitted(contact, 10.0)
    assert isinstance(second, Wait)
    assert 10.0 < second.until <= 10.5


@pytest.mark.parametrize("seed", range(10))
def test_calls_that_are_cancelled_in_an_outage_leave_nothing(seed: int) -> None:
    dice = random.Random(seed)
    play = Play(seed=seed)
    client = warm_client(play)
    dice.choice([kill, stop])(play)
    Timed(play, client, acquire("z"))
    play.run(4)
    # Two permits look like two holders to the checker, and callers of "acquire" and "try" keep what they get.
    names = ["lock", "latch", "value", "locked", "leader", "count_down", "count"]
    for _ in range(60):
        call = Timed(play, client, CALLS[dice.choice(names)])
        play.run(dice.random() * 0.2)
        if dice.random() < 0.5:
            call.process.cancel()
    heal(play)
    play.run(1.0)
    calls = [Timed(play, client, CALLS[name]) for name in ("locked", "count", "leader", "value", "lock")]
    play.run(8)
    assert not [call.result for call in calls if isinstance(call.result, holdfast.Unavailable)]
    contact = contact_of(client)
    assert not contact._probe
    assert not contact._waiting
    assert not client._driver.router.asks.under_way


class Recovering(Contact):
    """Another thread ends the outage as soon as this one has looked."""

    ends = False
    kept: float | None = None

    @property
    def lost_at(self) -> float | None:
        lost_at, self.kept = self.kept, None if self.ends else self.kept
        return lost_at

    @lost_at.setter
    def lost_at(self, lost_at: float | None) -> None:
        self.kept = lost_at


def test_an_outage_that_another_thread_ends_in_between() -> None:
    failed = StepFailed(holdfast.Unavailable({"s": "x"}, "y"), sent=False, retry=True)
    looks: list[Callable[[Contact], object]] = [
        lambda contact: contact.lose("acquire", 0.5, failed, 1.0),
        lambda contact: contact.line(9.0),
        lambda contact: contact.overdue(9.0, 0.1),
        lambda contact: contact.gives_up_at(OPTIONS, 0.0, 5.0),
    ]
    for look in looks:
        contact = Recovering(had=True)
        contact.lose("acquire", 0.7, failed, 0.9)
        contact.ends = True
        look(contact)


# What begins an outage, and what ends it.


def test_contact_is_lost_at_the_first_request_that_failed_also_if_a_later_one_failed_before_it() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    stop(play)
    first = Timed(play, client, acquire("a", wait=None))
    play.run(1.4)
    Timed(play, client, acquire("b", wait=0.4))
    call = Timed(play, client, acquire("c", wait=5))
    play.run(8)
    assert call.ended <= first.began + 1.4 + 2 * ANSWER_TIME + SLACK


def test_a_subscription_without_an_answer_counts() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = Timed(play, play.client("two"), acquire_and_hold(play, "a"))
    play.run(1)
    call = Timed(play, client, acquire("a"))
    sent = len(play.world.sent)
    while len(play.world.sent) == sent:
        play.step()
    play.run(0.00019)  # it is refused, and subscribes
    stop(play)
    hung_at = play.world.now_us / 1e6
    play.run(8)
    assert isinstance(call.result, holdfast.Unavailable)
    assert call.ended - hung_at <= OUTAGE_WAIT + SLACK
    assert not holder.ended


def test_a_full_server_that_still_has_values_does_not_serve() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    Timed(play, client, lambda client: client.get_or_compute("v", lambda: 1, ttl=600))
    play.run(1)
    play.world.store.oom = True
    reads = []

    async def read(client: holdfast.aio.Client) -> None:
        for _ in range(100):
            reads.append(await client.get_or_compute("v", lambda: 1, ttl=600, wait=None))
            await play.sleep(client, 0.4)

    reader = Timed(play, client, read)
    calls = []
    for number in range(8):
        calls.append(Timed(play, client, acquire(f"x{number}", wait=5)))
        play.run(6.0)
    assert all(isinstance(call.result, holdfast.Unavailable) for call in calls)
    assert all(call.took <= OUTAGE_WAIT + SLACK for call in calls)
    assert len(warnings_of(client)) < 10
    assert reader.result is None
    assert len(reads) == 100


@pytest.mark.parametrize("what", ["value", "locked", "leader", "count"])
def test_a_full_server_is_asked_by_calls_that_take_nothing(what: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    Timed(play, client, lambda client: client.get_or_compute("v", lambda: 1, ttl=600))
    play.run(1)
    play.world.store.oom = True
    Timed(play, client, acquire("x", wait=5))
    play.run(3)
    calls = []
    for _ in range(50):
        calls.append(Timed(play, client, CALLS[what]))
        play.run(0.07)
    play.run(1)
    assert not [call.result for call in calls if isinstance(call.result, holdfast.Unavailable)]
    kill(play)  # now it does not answer either
    play.run(0.1)
    Timed(play, client, CALLS[what])
    play.run(3)
    later = Timed(play, client, CALLS[what])
    play.run(1)
    assert isinstance(later.result, holdfast.Unavailable)
    assert later.took <= LATER


def test_a_crowd_asks_although_contact_was_lost_when_nobody_asks_any_more() -> None:
    play = Play(seed=1)
    client, other = warm_client(play), play.client("two")
    held = Timed(play, other, lambda client: client.lock("hot", ttl=20).acquire())
    play.run(1)
    waiting = [Timed(play, client, acquire("hot", wait=None, cohort=0)) for _ in range(40)]
    play.run(2.2)
    assert client._driver.registry.crowd.members
    play.world.store.oom = True
    refused = play.start(client, client.lock("x").acquire())
    play.run(0.002)
    refused.cancel()
    play.run(0.001)
    play.world.store.oom = False
    assert contact_of(client).lost_at is not None
    machine_of(other).crash()
    play.run(60)
    assert all(call.ended for call in waiting)
    assert not held.result.held


def test_waiters_of_latches_leave_no_place_among_the_requests_under_way() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    asks = client._driver.router.asks
    asks.most = 2
    for turn in range(4):
        stop(play)
        for number in range(6):
            Timed(play, client, acquire(f"k{turn}{number}", wait=5))
        for number in range(4):
            Timed(play, client, wait_for_latch(f"l{turn}{number}"))
        play.run(8)
        heal(play)
        play.run(10)
    assert not asks.under_way


def test_a_clean_up_that_a_slow_server_answers_too_late_is_no_outage() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = Timed(play, play.client("two"), acquire_and_hold(play, "hot"))
    play.run(1)
    play.doom(lambda message: Fate(reply_late_us=280_000))
    for _ in range(8):
        call = Timed(play, client, acquire("hot", wait=2))
        play.run(4)
        assert isinstance(call.result, holdfast.AcquireTimeout), repr(call.result)
    assert not warnings_of(client)
    assert not holder.ended


def test_renewals_that_fail_while_other_requests_are_served_are_no_outage_and_are_logged() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    Timed(play, client, acquire_and_hold(play, "h", ttl=6))
    play.run(0.05)
    lose(play, "renew")
    keep_using(play, client, "other", 6)
    play.run(5)
    failed = [event for event in machine_of(client).events if isinstance(event, RenewalFailed)]
    assert failed
    assert not any(event.outage for event in failed)


# Several nodes.

ACQUIRE = Step("acquire", ("k",), ())


def refused(*, answered: bool = False, retry: bool = True) -> StepFailed:
    failed = StepFailed(holdfast.Unavailable({"s": "gone"}, "y"), sent=False, retry=retry)
    failed.answered = answered
    return failed


def test_a_node_that_has_no_locks_any_more_is_forgotten() -> None:
    owner = {"k": "A"}
    contacts = Contacts()
    lines: list[str] = []
    contacts.tell(lines.append, lambda now: "")
    contacts.node_of = owner.__getitem__
    for number in range(1, 40):
        contacts.note_failure(ACQUIRE, number / 10, refused(), number / 10)
    owner["k"] = "B"
    contacts.keep_only(["B"])
    assert lines[-1] == "no contact with A any more: its locks have moved to other nodes"
    owner["k"] = "A"  # an hour later
    assert contacts.of("k").lost_at is None


def test_a_denied_command_does_not_end_the_outage_of_a_full_server() -> None:
    contacts = Contacts()
    contacts.only.had = True
    contacts.note_failure(ACQUIRE, 1.0, refused(answered=True), 1.0)
    contacts.note_failure(ACQUIRE, 2.0, refused(answered=True, retry=False), 2.0)
    assert contacts.only.lost_at == 1.0
    contacts.note_reply(Command(("EXISTS", "k")), 1, 3.0, 3.0)
    assert contacts.only.lost_at == 1.0
    contacts.note_reply(ACQUIRE, 7, 4.0, 4.0)
    assert contacts.only.lost_at is None


@pytest.mark.parametrize("outage_wait", [OUTAGE_WAIT, None])
@pytest.mark.parametrize("what", ["lock", "latch", "value", "locked", "count_down", "count"])
def test_a_first_request_that_is_lost_in_an_outage_leaves_time_for_another(
    what: str, outage_wait: float | None
) -> None:
    play = Play(seed=1)
    client = warm_client(play, outage_wait=outage_wait)
    swallow(play)
    Timed(play, client, acquire("z", wait=0.3))
    play.run(0.5)
    assert contact_of(client).lost_at is not None
    call = Timed(play, client, CALLS[what])
    play.run(0.3)
    heal(play)
    if what == "latch":
        Timed(play, client, lambda client: client.latch("l", 2).count_down(2))
    play.run(4)
    assert not isinstance(call.result, holdfast.HoldfastError), call.result
    assert call.took <= 5 / 3 + SLACK


def test_a_clean_up_that_wrote_nothing_does_not_end_an_outage_in_which_clean_ups_were_refused() -> None:
    contacts = Contacts()
    acquire, abandon = Step("acquire", ("a",), ("t",)), Step("abandon", ("a",), ("t", "60000"))
    contacts.note_reply(acquire, 7, 0.0, 0.0)
    for number, step in enumerate((acquire, abandon), 1):
        full = StepFailed(holdfast.Unavailable({"s": "it is out of memory"}, "y"), sent=False, retry=True)
        full.answered = True
        contacts.note_failure(step, number, full, number)
    contacts.note_reply(abandon, [0, 0], 3.0, 3.0)
    assert contacts.only.lost_at == 1.0
    contacts.note_reply(abandon, [0, 1], 4.0, 4.0)
    assert contacts.only.lost_at is None
