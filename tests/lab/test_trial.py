"""The primitives on trial: what is said of a row, and that what is broken shows."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from holdfast.errors import InvalidConfig
from holdfast.lab import trial
from holdfast.lab.primitives import PRIMITIVES
from holdfast.lab.promises import PROMISES_MEAN
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN, Verdict
from holdfast.lab.trial import Tried, try_all, try_primitive
from tests.lab.mutations import in_step, plant


def test_what_holds_is_said_to_hold() -> None:
    tried = try_primitive("latch", 2.0)
    assert tried.is_passed
    assert tried.explored >= 0
    assert tried.heading.startswith(f"latch, 3 clients: {tried.states:,} states; ")
    assert not logging.getLogger("holdfast").disabled, "it was for the search alone"
    assert list(tried.details) == ["  holds: ShutUntilZero, CountedOnce, NoLostWakeup, NoOrphan"]


def test_what_is_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(in_step("latch_count_down", "left - ARGV[3]", "left - ARGV[3] - 1"), monkeypatch)
    tried = try_primitive("latch", 0.5)
    assert not tried.is_passed
    assert tried.verdicts["CountedOnce"] == BROKEN
    told = "\n".join(tried.details)
    assert "broken: ShutUntilZero, CountedOnce" in told
    assert re.search(r"CountedOnce: the latch of 2 was counted down by 1, and . is told that there are 0 left \(", told)
    assert "no fault)" in told


def test_without_time_nothing_is_claimed() -> None:
    tried = try_primitive("several", 0.0)
    assert tried.explored == -1
    assert not tried.is_passed
    assert "nothing to the end, 2 faults so far" in tried.heading
    unknown, why = tried.details
    assert unknown.startswith("  unknown: ")
    assert "its time ended before" in why


@pytest.mark.parametrize(
    ("explored", "verdict", "passed", "said"),
    [
        (0, HOLDS, True, "no fault to the end, 2 faults so far"),
        (1, HOLDS, True, "1 fault to the end, 2 faults so far"),
        (2, HOLDS, True, "2 faults to the end"),
        (2, UNKNOWN, False, "2 faults to the end"),
        (2, BROKEN, False, "2 faults to the end"),
    ],
)
def test_how_far_it_came(explored: int, verdict: Verdict, passed: bool, said: str) -> None:
    tried = Tried("latch", 3, 1234, explored, {"NoOrphan": verdict}, ())
    assert tried.heading == f"latch, 3 clients: 1,234 states; {said}"
    assert tried.is_passed == passed


def test_late_replies_are_tried_with_the_first_two_clients() -> None:
    tried = try_primitive("rwlock", 1.5, late=True)
    assert tried.heading.startswith(f"rwlock, 2 clients with late replies: {tried.states:,} states; ")
    assert tried.explored >= 0
    assert tried.is_passed
    assert not tried._replace(explored=-1).is_passed
    assert not tried._replace(verdicts={"NoOrphan": BROKEN}).is_passed


def test_rows_are_tried_in_the_order_they_were_named() -> None:
    assert [tried.row for tried in try_all(["rlock", "latch"], budget=0.4)] == ["rlock", "latch"]


def test_one_core_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.os, "cpu_count", lambda: 1)
    assert [tried.row for tried in try_all(["latch", "rlock"], budget=0.4)] == ["latch", "rlock"]


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=", ".join(PRIMITIVES)):
        list(try_all(["lotch"], budget=1))


def test_the_page_has_every_row_and_every_promise() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    for row in PRIMITIVES:
        assert f"| `{row.partition(':')[0]}`" in page
        assert re.search(rf"^{row}, [23] clients: ", page, re.MULTILINE), "and how far it came"
    for name, meaning in PROMISES_MEAN.items():
        assert f"| {name} | {meaning} |" in page
