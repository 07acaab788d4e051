"""A key of fences that was damaged by hand: it is repaired, or every acquire is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.protocol.harness import Play
from tests.support import as_bytes

TTL = 3.0
KEY = "a:hf1:fence:{a}"
LIMIT = 2**53
DAY_MS = 86_400_000

NOT_OURS = ["", "text", "inf", "-inf", "nan", "1e18", "1e308", "-5", "-1e18", "1.5", "0x7fffffffffffff", " 7", "7\n"]
NOT_OURS += ["7 1", "7  ab", "1e18 1 ab", "inf 64 ab", "-7 1 ab", "7 -1 ab", "7 1e9 ab", f"7 {10**15} ab", "7 1 ab cd"]
TOO_LARGE = [str(LIMIT - 64), str(LIMIT - 1), str(LIMIT), str(LIMIT + 1), str(10**18), str(2**63), "9" * 400]
TOO_LARGE += [f"{LIMIT - 64} 1 ab", f"{LIMIT - 127} 64 ab", f"{LIMIT} 64 ab", "9" * 400 + " 1 ab"]


class Poisoned(Play):
    def __init__(self) -> None:
        super().__init__(seed=1)
        self.one, self.two = self.client("one"), self.client("two")

    def poison(self, value: str) -> None:
        self.world.store.execute("SET", KEY, value)

    def last(self) -> int:
        first, count = self.block()
        return first + count - 1

    def block(self) -> tuple[int, int]:
        """The first of the fences that were set aside, and their number."""
        first, count, _ = as_bytes(self.world.store.execute("GET", KEY)).split()
        return int(first), int(count)

    def ttl_ms(self) -> Any:
        return self.world.store.execute("PTTL", KEY)


@pytest.mark.parametrize("value", NOT_OURS, ids=repr)
def test_what_was_never_given_out_is_replaced_and_fences_rise(value: str) -> None:
    play = Poisoned()
    play.world.run(play.start(play.one, play.cycle(play.one, ttl=TTL)))
    play.poison(value)
    for client in (play.one, play.two):
        play.world.run(play.start(client, play.cycle(client, ttl=TTL)))
    assert play.fences == sorted(set(play.fences))
    assert 0 < play.fences[-1] <= play.last() < LIMIT
    assert 0 < play.ttl_ms() <= 400 * DAY_MS


@pytest.mark.parametrize("value", TOO_LARGE)
def test_a_number_that_is_too_large_is_refused_by_an_error_that_names_the_key(value: str) -> None:
    play = Poisoned()
    play.poison(value)
    for options in ({"wait": 0.0}, {"wait": None}):
        process = play.start(play.one, play.cycle(play.one, ttl=TTL, **options))
        play.run(0.1)
        with pytest.raises(holdfast.Unsupported, match=r"lock 'a'.*'a:hf1:fence:\{a\}'.*delete that key"):
            process.outcome()
    assert play.world.keys() == [], "nothing was written"
    assert play.world.store.execute("GET", KEY) == value.encode()
    play.world.store.execute("DEL", KEY)
    play.world.run(play.start(play.one, play.cycle(play.one, ttl=TTL)))


def test_fences_are_exact_up_to_the_limit_and_never_the_same() -> None:
    play = Poisoned()
    play.poison(str(LIMIT - 65 - 1000))
    refused = None
    while refused is None:
        process = play.start(play.one, play.cycle(play.one, ttl=TTL))
        play.run(0.1)
        refused = process.error
    assert isinstance(refused, holdfast.Unsupported)
    assert play.fences == sorted(set(play.fences))
    assert play.fences[-1] < LIMIT
    assert play.last() < LIMIT


@pytest.mark.parametrize(
    ("value", "last"), [(str(2**51), 2**51), (f"{2**51} 1 ab", 2**51), (f"{2**51} 64 ab", 2**51 + 63)]
)
def test_the_next_fence_comes_after_the_last_one_of_the_block(value: str, last: int) -> None:
    """A number alone, which earlier versions wrote, is the last fence."""
    play = Poisoned()
    play.poison(value)
    play.world.run(play.start(play.one, play.cycle(play.one, ttl=TTL)))
    assert play.fences == [last + 1]
    assert play.block() == (last + 1, 64)


def test_a_counter_far_ahead_of_the_clock_is_kept_for_four_hundred_days_at_most() -> None:
    play = Poisoned()
    play.poison(str(5 * 10**15))  # a hundred years ahead
    play.world.run(play.start(play.one, play.cycle(play.one, ttl=TTL)))
    assert play.fences == [5 * 10**15 + 1]
    assert play.ttl_ms() == pytest.approx(400 * DAY_MS, abs=1000)


def test_a_release_succeeds_and_the_waiter_is_told_why_it_gets_no_lock() -> None:
    play = Poisoned()
    holding = play.start(play.one, play.cycle(play.one, ttl=TTL, hold=0.5))
    play.run(0.1)
    waiting = play.start(play.two, play.cycle(play.two, ttl=TTL))
    play.run(0.1)
    play.poison(str(10**18))
    play.run(2)
    holding.outcome()
    with pytest.raises(holdfast.Unsupported, match="fence"):
        waiting.outcome()
    assert play.world.keys() == []


@pytest.mark.parametrize("fence", ["0", "-1", str(LIMIT), str(10**18), "9" * 5000])
def test_a_notification_with_a_fence_that_is_none_is_ignored(fence: str) -> None:
    play = Poisoned()
    hold: Any = object()
    router = play.two._driver.router
    router.waiting["token"] = hold
    router.deliver(f"token {fence} 1700000000000000 -1".encode(), 0.0)
    assert not hasattr(hold, "word")
