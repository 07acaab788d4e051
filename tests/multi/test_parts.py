"""Names that live in different places, as in a cluster: one step in each, in order, and nothing kept after a refusal.

The worlds here have one server, of which each name is a place: whatever a client sends is divided as it would be for a
cluster, and each part is a message of its own that can be lost, late, or its sender's last.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.lab.servers.store import Store
from holdfast.lab.simulation.world import Fate, perform
from holdfast.names import keys_of, slot_of
from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.kinds.parts import StepInParts, is_divisible
from tests.multi import test_simulated
from tests.multi.test_simulated import CIRCLE, CROSSED, FAULTS, SAME, Wants
from tests.protocol.harness import at

SEEDS = range(1)


class Crowd(test_simulated.Crowd):
    """The same crowd, on a server that takes one name at a time."""

    def __init__(self, seed: int, wants: Wants, **options: Any) -> None:
        super().__init__(seed, wants, **options)
        self._send = self.world.send
        self.world.send = self.send_in_parts  # type: ignore[method-assign]

    def send_in_parts(self, machine: Any, ops: Any, answer: Callable[[list[Any]], None], link: Any = None) -> None:
        whole = ops[0]
        if len(ops) > 1 or not isinstance(whole, Step) or not is_divisible(whole):
            self._send_each(machine, ops, answer, link)
            return
        order = StepInParts(whole, lambda key: ord(key[0]))

        def on(replies: list[Any]) -> None:
            if isinstance(replies[0], StepFailed):
                answer(replies)
                return
            order.answer(replies[0])
            go()

        def go() -> None:
            if order.step is None:
                answer([order.reply])
            else:
                self._send(machine, [order.step], on, link)

        go()

    def _send_each(self, machine: Any, ops: Any, answer: Callable[[list[Any]], None], link: Any) -> None:
        """A keeper's round: what can be divided goes by itself."""
        if len(ops) == 1 or not any(isinstance(op, Step) and is_divisible(op) for op in ops):
            self._send(machine, ops, answer, link)
            return
        replies: list[Any] = [None] * len(ops)
        left = [len(ops)]

        def on(place: int, reply: list[Any]) -> None:
            replies[place] = reply[0]
            left[0] -= 1
            if not left[0]:
                answer(replies)

        for place, op in enumerate(ops):
            self.send_in_parts(machine, [op], partial(on, place), link)


@pytest.mark.long
@pytest.mark.parametrize("wants", [CROSSED, CIRCLE, SAME], ids="-".join)
@pytest.mark.parametrize("fault", ["none", "crash before", "crash after", *FAULTS])
def test_a_fault_at_any_message(wants: Wants, fault: str) -> None:
    for seed in SEEDS:
        crowd = Crowd(seed, wants)
        crowd.finish(8)
        messages = len(crowd.world.sent)
        steps = [op for message in crowd.world.sent for op in message.ops if isinstance(op, Step)]
        assert {len(step.keys) for step in steps if step.script == "multi_acquire"} == {5}, "one name each"
        crowd.end()
        for number in range(messages if fault != "none" else 0):
            crowd = Crowd(seed, wants)
            crashes = fault.startswith("crash")
            crowd.doom(at(number, sender_crashes=fault.split()[1]) if crashes else FAULTS[fault](number))
            crowd.finish(20)
            crowd.end()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(15))
def test_a_crowd_with_names_by_the_dice_comes_to_its_end(seed: int) -> None:
    dice = random.Random(seed)
    wants = tuple("".join(dice.sample("abcd", dice.randint(1, 4))) for _ in range(8))
    crowd = Crowd(seed, wants, cycles=4, hold=dice.choice([0.0, 0.0005, 0.003]))
    crowd.finish(30)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(15))
def test_storms_of_every_fault_at_once_never_let_two_hold(seed: int) -> None:
    dice = random.Random(seed)
    wants = tuple("".join(dice.sample("abc", dice.randint(1, 3))) for _ in range(6))
    crowd = Crowd(seed, wants, cycles=3)
    at_once = {"lost": Fate(lost=True), "reply_lost": Fate(reply_lost=True)}

    def choose(message: Any) -> Fate | None:
        if dice.random() > 0.1 or crowd.world.now_us > 20_000_000:
            return None
        fault = dice.choice(["lost", "reply_lost", "late", "crash"])
        if fault == "crash":
            return Fate(sender_crashes=dice.choice(["before", "after"])) if dice.random() < 0.2 else None
        return Fate(late_us=dice.choice([5_000, 200_000, 2_000_000])) if fault == "late" else at_once[fault]

    crowd.doom(choose)
    crowd.run(90)
    crowd.check_nothing_is_left()


def acquire_step(*names: str, channel: str = "bell") -> Step:
    keys = tuple(key for name in names for key in (*keys_of(name).shared, keys_of(name).tombstone("t")))
    return Step("multi_acquire", keys, ("t", "3000", "3600000", "0", channel, "750", "0"))


def played(step: Step, *replies: Any) -> tuple[list[tuple[str, list[str]]], Any]:
    """What was sent, step by step, and what came of it."""
    order = StepInParts(step, lambda key: {"a": 2, "b": 1, "c": 2, "d": 3}[key[0]])
    sent = []
    for reply in replies:
        assert order.step is not None
        sent.append((order.step.script, [key for key in order.step.keys if ":" not in key]))
        order.answer(reply)
    assert order.step is None
    return sent, order.reply


def test_places_are_gone_through_in_their_order_and_each_has_its_fence() -> None:
    sent, reply = played(acquire_step("a", "b", "c"), b"5", b"9")
    assert sent == [("multi_acquire", ["b"]), ("multi_acquire", ["a", "c"])]
    assert reply == [1, 9, [9, 5, 9]]


def test_who_is_refused_gives_back_what_it_had() -> None:
    refused = [0, 100, 7, 1]
    sent, reply = played(acquire_step("a", "b"), b"5", refused, b"0")
    assert sent == [("multi_acquire", ["b"]), ("multi_acquire", ["a"]), ("multi_roll_back", ["b"])]
    assert reply == refused
    sent, reply = played(acquire_step("a", "b", "d"), b"5", b"6", refused, b"0", b"0")
    assert sent[2:] == [("multi_acquire", ["d"]), ("multi_roll_back", ["b"]), ("multi_roll_back", ["a"])]
    assert reply == refused


def test_who_is_refused_gives_up_its_turn_further_on() -> None:
    refused = [0, 100, 7, 1]
    sent, reply = played(acquire_step("a", "b"), refused, b"0")
    assert sent == [("multi_acquire", ["b"]), ("multi_roll_back", ["a"])]
    assert reply == refused
    sent, reply = played(acquire_step("a", "b"), refused, b"9", b"0")
    assert sent[1:] == [("multi_roll_back", ["a"])] * 2, "an earlier try was granted it: now its fence is known"
    assert reply == refused
    sent, _ = played(acquire_step("a", "b", channel=""), refused)
    assert sent == [("multi_acquire", ["b"])], "a client that does not queue has no place in any queue"


class Slots:
    """A server on which each name is a slot of its own, and two clients."""

    def __init__(self) -> None:
        self.store = Store()

    def acquire(self, token: str, *names: str) -> StepInParts:
        keys = tuple(key for name in names for key in (*keys_of(name).shared, keys_of(name).tombstone(token)))
        args = (token, "3000", "3600000", "0", "0 bell", "0", "")
        return StepInParts(Step("multi_acquire", keys, args), lambda key: ord(key[0]))

    def do(self, parts: StepInParts, steps: int = 9) -> Any:
        """Perform that many parts, or all; returns the reply, if it is known."""
        while parts.step is not None and steps:
            parts.answer(perform(self.store, parts.step))
            steps -= 1
        return parts.reply

    def owner(self, name: str) -> Any:
        return self.store.values.get(name.encode())


def test_a_late_roll_back_does_not_free_what_the_next_try_was_granted() -> None:
    slots = Slots()
    slots.do(slots.acquire("B", "b"))
    first = slots.acquire("A", "a", "b")
    slots.do(first, 2)  # it has a, and is refused b
    late = first.step
    assert late is not None
    perform(slots.store, Step("release", keys_of("b").shared, ("B",)))
    assert slots.do(slots.acquire("A", "a", "b"))[0] == 1
    perform(slots.store, late)
    assert slots.owner("a") == slots.owner("b") == b"A"


def test_a_late_roll_back_in_a_later_slot_does_not_free_a_grant() -> None:
    slots = Slots()
    slots.do(slots.acquire("B", "a"))
    first = slots.acquire("A", "a", "b")
    slots.do(first, 1)  # it is refused a
    late = first.step
    assert late is not None
    assert late.keys[0] == "b"
    perform(slots.store, Step("release", keys_of("a").shared, ("B",)))
    assert slots.do(slots.acquire("A", "a", "b"))[0] == 1
    perform(slots.store, late)
    assert slots.owner("a") == slots.owner("b") == b"A"


def test_a_name_that_an_earlier_try_was_granted_is_freed_after_a_refusal() -> None:
    slots = Slots()
    lost = slots.acquire("A", "b")
    slots.do(lost)  # as a part of a try whose replies were lost
    slots.do(slots.acquire("B", "a"))
    assert slots.do(slots.acquire("A", "a", "b"))[0] == 0
    assert slots.owner("b") is None


def test_one_place_is_one_step() -> None:
    assert played(acquire_step("a", "c"), b"5") == ([("multi_acquire", ["a", "c"])], b"5")


def test_the_worst_reply_counts() -> None:
    keys = acquire_step("a", "b").keys
    assert played(Step("multi_release", keys, ("t",)), 1, -1)[1] == -1
    assert played(Step("multi_renew", ("a", "b"), ("t", "9")), 0, 1)[1] == 0
    assert played(Step("multi_abandon", keys, ("t", "9")), [1, 1], [0, 0])[1] == [0, 0]


def test_slots_are_those_of_a_cluster() -> None:
    """As CLUSTER KEYSLOT says."""
    assert slot_of("foo") == 12182
    assert slot_of("123456789") == 12739
    assert slot_of("{user1000}.following") == slot_of("{user1000}.followers") == slot_of("user1000")
    for name in ("a", "order:42", "{tag}x"):
        assert {slot_of(key) for key in keys_of(name).shared} == {slot_of(name)}
