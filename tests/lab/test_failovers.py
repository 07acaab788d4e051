"""Failovers that Sentinels lead, in the search: two views of which server is the primary, and confirmed renewals.

Each planted mistake is what an earlier version did.
"""

from __future__ import annotations

from typing import Final

import pytest

from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.failover import ELECTED, ENDED, NEW, OLD, PROMOTED, Fleet
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.protocol import keepalive, primary
from holdfast.protocol.primary import (
    ASK_AGAIN,
    BEHIND,
    DOWN,
    FOLLOW,
    GO_BACK,
    REPLACED,
    STAY,
    UNKNOWN,
    Sighting,
    choose,
    settle,
)
from tests.lab.mutations import Mistake, in_python, plant


@pytest.mark.parametrize(
    ("seen", "known", "verdict", "endpoint"),
    [
        (Sighting(OLD, OLD, 4), 4, FOLLOW, OLD),
        (Sighting(OLD, OLD, 4, up=False), 4, DOWN, OLD),
        (Sighting(OLD, OLD, 4), 5, BEHIND, OLD),
        (Sighting(OLD, OLD, 4, failing_over=True), 4, FOLLOW, OLD),
        (Sighting(NEW, OLD, 5, failing_over=True, promoted=True, up=False), 4, FOLLOW, NEW),
        (Sighting(NEW, OLD, 5, failing_over=True, promoted=True), 6, BEHIND, NEW),
        (Sighting(OLD, OLD, 5, failing_over=True, promoted=True), 4, ASK_AGAIN, OLD),
        (Sighting(OLD, NEW, 5), 4, ASK_AGAIN, OLD),
        (Sighting(None, OLD, 4), 4, FOLLOW, OLD),
        (Sighting(None, OLD, 5, failing_over=True, promoted=True), 4, REPLACED, OLD),
    ],
)
def test_what_one_answer_means(seen: Sighting, known: int, verdict: str, endpoint: tuple[str, int]) -> None:
    choice = choose(seen, known)
    assert (choice.verdict, choice.endpoint, choice.epoch) == (verdict, endpoint, seen.epoch)


@pytest.mark.parametrize(
    ("behind", "unconfirmed_for", "demoted", "verdict"),
    [
        (0, 60.0, True, UNKNOWN),
        (1, 60.0, True, UNKNOWN),
        (2, 0.0, False, STAY),
        (3, 29.0, False, STAY),
        (2, 30.0, False, GO_BACK),
        (2, 0.0, True, GO_BACK),
    ],
)
def test_when_a_client_goes_back(behind: int, unconfirmed_for: float, demoted: bool, verdict: str) -> None:
    assert settle(behind, 3, unconfirmed_for, demoted=demoted) == verdict
    assert settle(2, 4, unconfirmed_for, demoted=demoted) == UNKNOWN, "half of them are not most"


def test_the_leader_lists_the_old_primary_with_the_new_epoch_until_the_failover_ends() -> None:
    """As tests/sentinel/test_hung_replica.py sees it on real servers."""
    fleet = Fleet((), phase=ELECTED)
    assert fleet.seen_by(0) == Sighting(OLD, OLD, 0, failing_over=True)
    assert fleet._replace(phase=PROMOTED).seen_by(0) == Sighting(NEW, OLD, 1, failing_over=True, promoted=True)
    assert fleet._replace(phase=PROMOTED).seen_by(1) == Sighting(OLD, OLD, 0)
    assert fleet._replace(phase=PROMOTED, heard_us=1).seen_by(1) == Sighting(NEW, NEW, 1)
    assert fleet._replace(phase=ENDED).seen_by(0) == Sighting(NEW, NEW, 1)


ROWS: Final = ["sentinel", "sentinel:resumes", "sentinel:late", "replicas:cut", "replicas:beside"]

MISTAKES: Final[dict[str, Mistake]] = {
    "client_that_goes_by_the_list_of_the_leader": (
        *in_python(primary, "choose", "endpoint = seen.address or seen.listed", "endpoint = seen.listed"),
        *in_python(primary, "choose", "ASK_AGAIN if seen.promoted else FOLLOW", "FOLLOW"),
    ),
    "client_that_goes_back_to_an_earlier_epoch": in_python(primary, "choose", "seen.epoch < known_epoch", "False"),
    "client_that_goes_back_with_sentinels_that_have_not_heard": in_python(
        primary, "settle", "unconfirmed_for >= GO_BACK_AFTER", "True"
    ),
    "client_that_uses_the_late_reply_of_a_primary_that_was_replaced": in_python(
        primary, "is_late", "waited > RECHECK_AFTER", "False"
    ),
    "renewal_that_counts_before_replicas_have_it": (
        *in_python(keepalive, "_renew", "if needs_replicas(hold, asked_at)", "if False"),
        *in_python(keepalive, "_renew", "if hold.options.replicas:", "if False:"),
    ),
}

CAUGHT: Final = [
    ("client_that_goes_by_the_list_of_the_leader", "sentinel", "OnePrimary"),
    ("client_that_goes_by_the_list_of_the_leader", "sentinel", "OneHolder"),
    ("client_that_goes_by_the_list_of_the_leader", "sentinel:resumes", "OnePrimary"),
    ("client_that_goes_by_the_list_of_the_leader", "sentinel:resumes", "OneHolder"),
    ("client_that_goes_back_to_an_earlier_epoch", "sentinel:resumes", "OnePrimary"),
    ("client_that_goes_back_with_sentinels_that_have_not_heard", "sentinel", "OnePrimary"),
    ("client_that_goes_back_with_sentinels_that_have_not_heard", "sentinel:resumes", "OnePrimary"),
    ("client_that_uses_the_late_reply_of_a_primary_that_was_replaced", "sentinel:late", "OnePrimary"),
    ("client_that_uses_the_late_reply_of_a_primary_that_was_replaced", "sentinel:late", "OneHolder"),
    ("renewal_that_counts_before_replicas_have_it", "replicas:cut", "MutualExclusion"),
]


@pytest.mark.long
@pytest.mark.parametrize(("mistake", "row", "invariant"), CAUGHT)
def test_what_an_earlier_version_did_is_found_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, mistake: str, row: str, invariant: str
) -> None:
    plant(MISTAKES[mistake], monkeypatch)
    primitive = PRIMITIVES[row]
    explorer = Explorer(primitive.config(kinds=()), invariants=primitive.invariants, stop_at=[invariant])
    explorer.search(0)
    assert invariant in explorer.broken
    found = explorer.broken[invariant]
    told = tell(found.config, found.choices, invariant)
    assert told[-1].violation
    assert any("A replica is promoted" in moment.does for moment in told)


@pytest.mark.long
def test_an_unconfirmed_renewal_is_found_with_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(MISTAKES["renewal_that_counts_before_replicas_have_it"], monkeypatch)
    primitive = PRIMITIVES["replicas:paused"]
    config = primitive.config(kinds=primitive.kinds)
    explorer = Explorer(config, invariants=primitive.invariants, stop_at=["MutualExclusion"])
    explorer.search(2, states=30_000)
    assert {*explorer.broken} == {"MutualExclusion"}


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_nothing_breaks_but_what_a_row_is_known_to_break(row: str) -> None:
    primitive = PRIMITIVES[row]
    explorer = Explorer(primitive.config(kinds=primitive.kinds), invariants=primitive.invariants)
    assert explorer.search(0, ())
    explorer.search(1, primitive.kinds, states=explorer.states + 3_000)
    assert {*explorer.broken} == {*primitive.limits}
    assert explorer.known == {*primitive.invariants}
