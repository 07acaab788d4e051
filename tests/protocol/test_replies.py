"""A reply that is none: it grants nothing, ends no renewal loop, and is an error of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.lua import SCRIPTS
from holdfast.protocol.effects import Command, Step, StepFailed, parsed
from holdfast.protocol.replies import REPLIES, Granted, Malformed, Refused
from tests.protocol.harness import Play

TTL = 3.0

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.binary(max_size=24),
    st.sampled_from([b"", b"0", b"-5", b"1"]),
)
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=7), max_leaves=12)

# Each of these has passed for a fence.
NO_FENCES: list[Any] = [
    0,
    -5,
    True,
    False,
    1.5,
    None,
    "7",
    b"",
    b"0",
    b"-5",
    b"+5",
    b" 7",
    b"1_0",
    b"7.0",
    b"9" * 30,
    2**53,
    b"9007199254740992",
    b"1000000000000000000",
    [],
]


def test_every_script_declares_its_reply() -> None:
    assert SCRIPTS.keys() - {"guard_write"} <= REPLIES.keys()  # guards are not run by a protocol


@pytest.mark.parametrize("name", sorted(REPLIES))
@given(reply=ANYTHING)
def test_a_reply_is_a_value_of_its_step_or_malformed_and_nothing_else(name: str, reply: Any) -> None:
    try:
        REPLIES[name](reply)
    except Malformed:
        pass


@pytest.mark.parametrize("name", ["acquire", "pool_acquire", "multi_acquire", "adopt", "pool_adopt", "multi_adopt"])
@pytest.mark.parametrize("fence", NO_FENCES, ids=repr)
def test_what_is_no_fence_grants_nothing(name: str, fence: Any) -> None:
    for reply in (fence, [1, fence, 0], [1, 7, [fence]]):
        try:
            assert type(REPLIES[name](reply)) is not Granted
        except Malformed:
            pass


def test_a_fence_is_read_from_text_and_from_numbers() -> None:
    assert REPLIES["acquire"](b"1790000000000000") == Granted(1790000000000000)
    assert REPLIES["pool_acquire"]([1, b"17", 2]) == Granted(17, 2)
    assert REPLIES["multi_acquire"]([1, 17, [16, 17]]) == Granted(17, [16, 17])
    assert REPLIES["acquire"]([0, 250, 17, 1, b"them"]) == Refused(250, 17, True, b"them")


def test_a_malformed_reply_is_a_step_whose_outcome_is_unknown() -> None:
    for step in (Step("renew", ("a",), ("token", "1")), Command(("EXISTS", "a"))):
        with pytest.raises(StepFailed) as caught:
            parsed(step, b"nonsense")
        assert caught.value.sent
        assert isinstance(caught.value.error, holdfast.Unavailable)
        assert "nonsense" not in str(caught.value)
        assert "token" not in str(caught.value.error)


class Garbling(Play):
    """A world in which the replies to chosen messages are replaced on their way."""

    def __init__(self, garbage: Any, numbers: set[int], until: float = 1e9) -> None:
        super().__init__(seed=1)
        execute = self.world.execute

        def garble(op: Step | Command, machine: Any = None, link: str | None = None) -> Any:
            reply = execute(op, machine, link)
            spoilt = len(self.world.sent) - 1 in numbers and self.world.now_us < until * 1e6
            return garbage if spoilt and isinstance(op, Step) else reply

        self.world.execute = garble  # type: ignore[method-assign]


@pytest.mark.parametrize("garbage", [*NO_FENCES, 7, 2, -9, [1, 0, 0], [2], [0, 1], [-2, 5], [None] * 5], ids=repr)
def test_one_garbled_reply_costs_a_try_and_nothing_else(garbage: Any) -> None:
    for number in range(6):
        play = Garbling(garbage, {number})
        one, two = play.client("one"), play.client("two")
        first = play.start(one, play.cycle(one, hold=2.5, ttl=TTL))
        second = play.start(two, play.cycle(two, hold=0.2, ttl=TTL))
        play.run(20)
        for process in (first, second):
            # A garbled release that was executed is found out by the next try; a garbled "gone" is believed.
            assert process.done
            assert process.error is None or isinstance(process.error, holdfast.HoldfastError), repr(process.error)
            if not isinstance(garbage, int) or isinstance(garbage, bool) or garbage not in (0, 1, -1):
                assert process.error is None, repr(process.error)
        assert play.world.keys() == []


def test_a_server_that_answers_nonsense_is_unavailable_and_never_grants() -> None:
    play = Garbling(b"nonsense", set(range(10_000)))
    one = play.client("one")
    for options in ({"wait": 0.0}, {"wait": 0.5}, {"wait": None}):
        process = play.start(one, play.cycle(one, ttl=TTL, **options))
        play.run(8)
        with pytest.raises(holdfast.Unavailable, match="unexpected reply"):
            process.outcome()
    assert play.fences == []


def test_a_keeper_that_is_answered_nonsense_goes_on_and_the_lease_ends_by_its_deadline() -> None:
    for garbage in (b"nonsense", None, [1], 5, True):
        play = Garbling(garbage, set(range(1, 10_000)))
        one = play.client("one")
        process = play.start(one, play.cycle(one, hold=2 * TTL, ttl=TTL))
        play.run(3 * TTL)
        with pytest.raises(holdfast.LeaseLost):
            process.outcome()
        keeper: Any = one._driver.keeper  # type: ignore[attr-defined]
        assert keeper is not None
        assert not keeper.done


def test_a_keeper_that_was_answered_nonsense_for_a_while_keeps_the_lease() -> None:
    play = Garbling([], set(range(1, 10_000)), until=2.0)
    one = play.client("one")
    process = play.start(one, play.cycle(one, hold=4 * TTL, ttl=TTL))
    play.run(5 * TTL)
    process.outcome()


def test_a_cache_that_answers_an_unknown_state_is_not_asked_in_a_spin() -> None:
    play = Garbling([9], set(range(10_000)))
    one = play.client("one")

    async def get() -> Any:
        return await one.get_or_compute("k", lambda: 1)

    process = play.start(one, get())
    play.run(6)
    with pytest.raises(holdfast.Unavailable):
        process.outcome()
    assert len(play.world.sent) < 60, "tries have pauses, and an end"
