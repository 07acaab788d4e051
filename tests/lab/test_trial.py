"""The primitives on trial: what is said of a row, and that what is broken shows."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from holdfast.errors import InvalidConfig
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Verdict
from holdfast.lab.invariants.primitives import PRIMITIVE_CHECKS
from holdfast.lab.search.faults import FAULTS
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.lab.surveys import primitives as trial
from holdfast.lab.surveys.primitives import Tried, try_all, try_primitive
from tests.lab.mutations import in_step, plant


def tried_long_enough(row: str, budget: float, *, late: bool = False) -> Tried:
    """Tried with a budget that is enough to explore the runs without a fault: on a busy machine, a larger one."""
    while (tried := try_primitive(row, budget, late=late)).explored < 0:
        assert budget < 60, tried.heading
        budget *= 2
    return tried


def test_what_holds_is_said_to_hold() -> None:
    tried = tried_long_enough("latch", 1.0)
    assert tried.is_passed
    assert tried.heading.startswith(f"latch, 3 clients: {tried.states:,} states; ")
    assert not logging.getLogger("holdfast").disabled, "it was for the search alone"
    assert list(tried.details) == ["  holds: ShutUntilZero, CountedOnce, NoLostWakeup, NoOrphan"]


def test_what_is_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(in_step("latch_count_down", "left - ARGV[3]", "left - ARGV[3] - 1"), monkeypatch)
    tried = tried_long_enough("latch", 0.5)
    assert not tried.is_passed
    assert tried.verdicts["CountedOnce"] == BROKEN
    told = "\n".join(tried.details)
    assert "broken: ShutUntilZero, CountedOnce" in told
    assert re.search(r"CountedOnce: the latch of 2 was counted down by 1, and . gets the answer 0 left \(", told)
    assert "no fault)" in told


def test_without_time_nothing_is_claimed() -> None:
    tried = try_primitive("several", 0.0)
    assert tried.explored == -1
    assert not tried.is_passed
    assert "not complete, 2 faults in part" in tried.heading
    unknown, why = tried.details
    assert unknown.startswith("  unknown: ")
    assert "the budget ended before" in why


@pytest.mark.parametrize(
    ("explored", "verdict", "passed", "said"),
    [
        (0, HOLDS, True, "complete without faults, 2 faults in part"),
        (1, HOLDS, True, "complete with 1 fault, 2 faults in part"),
        (2, HOLDS, True, "complete with 2 faults"),
        (2, UNKNOWN, False, "complete with 2 faults"),
        (2, BROKEN, False, "complete with 2 faults"),
    ],
)
def test_how_far_it_came(explored: int, verdict: Verdict, passed: bool, said: str) -> None:
    tried = Tried("latch", 3, 1234, explored, {"NoOrphan": verdict}, ())
    assert tried.heading == f"latch, 3 clients: 1,234 states; {said}"
    assert tried.is_passed == passed


@pytest.mark.parametrize(("verdict", "passed"), [(BROKEN, True), (HOLDS, False)])
def test_a_limit_of_a_row_must_be_found(verdict: Verdict, passed: bool) -> None:
    tried = Tried("replicas:beside", 2, 1234, 2, {"MutualExclusion": verdict, "FencedSafety": HOLDS}, ())
    assert tried.is_passed == passed
    assert not tried._replace(verdicts={"MutualExclusion": verdict, "FencedSafety": BROKEN}).is_passed
    assert tried._replace(late=True).is_passed
    assert not tried._replace(late=True, verdicts={"FencedSafety": BROKEN}).is_passed


def test_late_replies_are_tried_with_the_first_two_clients() -> None:
    tried = tried_long_enough("rwlock", 1.5, late=True)
    assert tried.heading.startswith(f"rwlock, 2 clients with late replies: {tried.states:,} states; ")
    assert tried.is_passed
    assert not tried._replace(explored=-1).is_passed
    assert not tried._replace(verdicts={"NoOrphan": BROKEN}).is_passed


def test_rows_are_tried_in_the_order_they_were_named() -> None:
    assert [tried.row for tried in try_all(["rlock", "latch"], budget=0.4)] == ["rlock", "latch"]


def test_one_core_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "count_cores", lambda: 1)
    assert [tried.row for tried in try_all(["latch", "rlock"], budget=0.4)] == ["latch", "rlock"]


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=", ".join(PRIMITIVES)):
        list(try_all(["lotch"], budget=1))


def test_the_page_has_every_row_and_every_promise() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    for row in PRIMITIVES:
        assert f"| `{row.partition(':')[0]}`" in page
        assert re.search(rf"^{row}, [23] clients: ", page, re.MULTILINE), "and how far it came"
    for name, check in PRIMITIVE_CHECKS.items():
        assert f"| {name} | {check.meaning} |" in page
    for kind, what in FAULTS.items():
        assert f"| `{kind}` | {what} |" in page
