"""Several names that live in different places, as in a cluster: a hold on them is adopted place by place."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.names import keys_of
from holdfast.protocol.effects import Step
from tests.handover.test_simulated import FAULTS, TTL, AnyPlay, Relay
from tests.multi.test_parts import Crowd, played
from tests.protocol.harness import at


class DividedPlay(AnyPlay):
    """A world with a server that takes one name at a time."""

    send_in_parts = Crowd.send_in_parts
    _send_each = Crowd._send_each

    def __init__(self) -> None:
        super().__init__()
        self._send = self.world.send
        self.world.send = self.send_in_parts  # type: ignore[method-assign, misc]


class DividedRelay(Relay):
    def __init__(self) -> None:
        super().__init__("several", DividedPlay())


def messages() -> range:
    relay = DividedRelay()
    for process in relay.start():
        relay.play.run(3)
        process.outcome()
    assert not relay.trouble
    steps = [op for message in relay.play.world.sent for op in message.ops if isinstance(op, Step)]
    assert [len(step.keys) for step in steps if step.script == "multi_adopt"] == [5, 5], "one name each"
    relay.play.run(6)
    relay.check()
    relay.play.end()
    return range(len(relay.play.world.sent))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_gone_wrong_costs_a_retry(fault: dict[str, Any]) -> None:
    for number in messages():
        relay = DividedRelay()
        relay.play.doom(at(number, **fault))
        processes = relay.start()
        relay.play.run(TTL - 1)
        for process in processes:
            process.outcome()
        assert not relay.trouble
        assert len(relay.play.fences) == 3
        relay.play.run(60)
        relay.check()
        relay.play.end()


@pytest.mark.parametrize(
    "fault", [{"sender_crashes": "before"}, {"sender_crashes": "after"}, {"late_us": 12_000_000}], ids=str
)
def test_whatever_ends_in_the_middle_ends_for_others_by_its_ttl(fault: dict[str, Any]) -> None:
    for number in messages():
        relay = DividedRelay()
        relay.play.doom(at(number, **fault))
        processes = relay.start()
        relay.play.run(5 * TTL)
        for process in processes:
            assert process.done
            if not process.machine.crashed:
                process.outcome()
        relay.check()
        relay.play.end()


def test_each_name_has_a_fence_that_is_greater_than_before() -> None:
    play = DividedPlay()
    giver, taker = play.client("giver"), play.client("taker")

    async def relay() -> None:
        lease = await giver.lock("b", "a", ttl=TTL).acquire()
        taken = await taker.adopt(await lease.hand_over(), ttl=TTL)
        assert len({*taken.fences.values()}) == 2
        for name, fence in taken.fences.items():
            assert fence > lease.fences[name]
        assert taken.fence == max(taken.fences.values())
        await taken.release()

    process = play.start(giver, relay())
    play.run(5)
    process.outcome()
    assert play.left() == []


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_who_finds_one_name_gone_gives_back_those_it_has_taken(lost: str) -> None:
    """The parts that it did not reach are left to the first adopter, or to their ttl."""
    play = DividedPlay()
    giver, taker, other = play.client("giver"), play.client("taker"), play.client("other")

    async def relay() -> None:
        lease = await giver.lock("a", "b", "c", ttl=TTL).acquire()
        ticket = await lease.hand_over()
        play.world.store.remove(lost.encode())
        with pytest.raises(holdfast.NotAcquired, match="time ran out"):
            await taker.adopt(ticket, ttl=TTL)
        for name in "abc":
            kept = play.world.store.values.get(name.encode())
            assert kept == (lease.token.encode() if name > lost else None), name
        async with other.lock("a", "b", "c", ttl=TTL, wait=TTL + 1):
            pass

    process = play.start(giver, relay())
    play.run(30)
    process.outcome()
    assert play.left() == []


def adopt_step(*names: str) -> Step:
    keys = tuple(key for name in names for key in (*keys_of(name).shared, keys_of(name).tombstone("t")))
    return Step("multi_adopt", keys, ("t", "3000", "3600000", "giver"))


def test_what_is_sent_for_an_adoption() -> None:
    sent, reply = played(adopt_step("a", "b", "c"), b"5", b"9")
    assert sent == [("multi_adopt", ["b"]), ("multi_adopt", ["a", "c"])]
    assert reply == [1, 9, [9, 5, 9]]
    sent, reply = played(adopt_step("a", "b"), b"5", -1, b"0")
    assert sent == [("multi_adopt", ["b"]), ("multi_adopt", ["a"]), ("multi_roll_back", ["b"])]
    assert reply == -1
    assert played(adopt_step("a", "b"), 0) == ([("multi_adopt", ["b"])], 0)
    assert played(adopt_step("a", "c"), b"5") == ([("multi_adopt", ["a", "c"])], b"5")
