"""The rule, on each resource: greater fences, or the same holder's again, and nothing else."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import StaleFence
from holdfast.guard import Stamp
from tests.guard.resources import Resource


def by(fence: int, holder: str = "a") -> Stamp:
    return Stamp("x", fence, holder)


def test_first_write_is_taken(resource: Resource) -> None:
    resource.write("one", by(7))
    assert resource.text() == "one"
    assert resource.record() == (7, "a")


def test_greater_fence_is_taken(resource: Resource) -> None:
    resource.write("one", by(9))
    resource.write("two", by(10, "b"))  # as text, '9' would be the greater
    assert resource.text() == "two"
    assert resource.record() == (10, "b")


def test_lower_fence_is_refused_and_writes_nothing(resource: Resource) -> None:
    resource.write("two", by(10, "b"))
    with pytest.raises(StaleFence) as caught:
        resource.write("one", by(9))
    assert (caught.value.name, caught.value.fence, caught.value.stored) == ("x", 9, 10)
    assert "fence 10" in str(caught.value)
    assert resource.text() == "two"
    assert resource.record() == (10, "b")


def test_same_holder_may_write_again(resource: Resource) -> None:
    resource.write("one", by(7))
    resource.write("two", by(7))
    assert resource.text() == "two"


def test_equal_fence_of_another_holder_is_refused(resource: Resource) -> None:
    resource.write("one", by(7, "a"))
    with pytest.raises(StaleFence) as caught:
        resource.write("two", by(7, "b"))
    assert caught.value.stored == caught.value.fence == 7
    assert "another holder" in str(caught.value)
    assert resource.text() == "one"
    assert resource.record() == (7, "a")


def test_whoever_enters_is_heard_of_before_it_writes(resource: Resource) -> None:
    """Or an earlier holder could write between the read and the write of the present one, and lose what it wrote."""
    resource.write("one", by(7))
    resource.enter(by(8, "b"))
    assert resource.text() == "one"
    assert resource.record() == (8, "b")
    with pytest.raises(StaleFence):
        resource.write("stale", by(7))
    with pytest.raises(StaleFence):
        resource.enter(by(7))
    with pytest.raises(StaleFence):
        resource.enter(by(8, "c"))
    resource.enter(by(8, "b"))
    resource.write("two", by(8, "b"))
    assert resource.text() == "two"


def test_entering_makes_nothing(resource: Resource) -> None:
    resource.enter(by(8, "b"))
    assert resource.text() is None
    assert resource.record() == (8, "b")


def test_real_fences_are_compared_to_the_last_digit(resource: Resource) -> None:
    """They count microseconds since 1970; a float of 32 bits, or an INTEGER of 32, could not tell them apart."""
    latest = 2**53 - 1
    resource.write("one", by(latest))
    with pytest.raises(StaleFence):
        resource.write("two", by(latest - 1, "b"))
    assert resource.record() == (latest, "a")


writes = st.lists(st.tuples(st.integers(1, 6), st.sampled_from("ab")), max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes)
def test_whatever_the_order_of_writes_the_fence_never_goes_down(
    resource: Resource, order: list[tuple[int, str]]
) -> None:
    resource.clear()
    kept: tuple[int, str] | None = None
    text = None
    accepted = []
    for step, write in enumerate(order):
        try:
            resource.write(str(step), by(*write))
        except StaleFence:
            assert kept is not None
            assert write[0] < kept[0] or (write[0] == kept[0] and write[1] != kept[1])
        else:
            kept, text = write, str(step)
            accepted.append(write)
        assert resource.record() == kept
        assert resource.text() == text
    fences = [fence for fence, _ in accepted]
    assert fences == sorted(fences)
    for fence in set(fences):
        assert len({holder for other, holder in accepted if other == fence}) == 1


@dataclass
class Attempt:
    fence: int
    began: float
    ended: float
    taken: bool


@pytest.mark.parametrize("seed", range(3))
def test_writers_that_race_are_taken_in_the_order_of_their_fences(resource: Resource, seed: int) -> None:
    attempts: list[Attempt] = []
    dice = random.Random(seed)
    plans = [[dice.random() * 0.004 for _ in range(6)] for _ in range(6)]
    start = threading.Barrier(len(plans) + 1)
    seen: list[int] = []
    done = threading.Event()

    def write(fence: int, naps: list[float]) -> None:
        with contextlib.closing(resource.again()) as mine:
            start.wait()
            for nap in naps:
                time.sleep(nap)
                began, taken = time.monotonic(), True
                try:
                    mine.write(str(fence), by(fence, f"holder{fence}"))
                except StaleFence:
                    taken = False
                attempts.append(Attempt(fence, began, time.monotonic(), taken))

    def look() -> None:
        with contextlib.closing(resource.again()) as mine:
            start.wait()
            while not done.is_set():
                if found := mine.record():
                    seen.append(found[0])
                time.sleep(0.001)

    writers = [threading.Thread(target=write, args=(fence, naps)) for fence, naps in enumerate(plans, 1)]
    reader = threading.Thread(target=look)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()

    assert len(attempts) == 36
    assert seen == sorted(seen)
    assert resource.text() == str(len(plans)), "the greatest fence is never refused, and no write follows it"
    for late in attempts:
        if late.taken:
            assert not any(early.taken and early.fence > late.fence and early.ended < late.began for early in attempts)
