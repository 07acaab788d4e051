"""What ``make failover`` counts, on histories that are known."""

from __future__ import annotations

from benchmarks.failover.history import (
    Fault,
    Record,
    Told,
    Wait,
    fence_regressions,
    longest_wait_beyond,
    overlaps,
    summarise,
)


def hold(asked: float, granted: float, until: float, fence: int = 0) -> Record:
    return Record(asked, granted, until, fence, refused=False, lost=False)


def test_holds_one_after_the_other_do_not_overlap() -> None:
    assert overlaps([hold(0, 1, 2), hold(0, 2, 3), hold(1, 3.5, 4)]) == 0


def test_each_hold_that_begins_within_another_is_counted_once() -> None:
    assert overlaps([hold(0, 1, 5), hold(0, 2, 3), hold(0, 4, 6), hold(0, 7, 8)]) == 2


def test_a_lower_fence_of_a_later_request_is_a_regression() -> None:
    assert fence_regressions([hold(0, 1, 2, fence=10), hold(1.5, 3, 4, fence=9)]) == 1
    assert fence_regressions([hold(0, 1, 2, fence=10), hold(1.5, 3, 4, fence=10)]) == 1


def test_a_lower_fence_that_was_asked_for_before_is_none() -> None:
    """Its grant may be the earlier one, which arrived late."""
    assert fence_regressions([hold(0, 1, 2, fence=10), hold(0.5, 3, 4, fence=9)]) == 0


def test_locks_without_fences_have_no_regressions() -> None:
    assert fence_regressions([hold(0, 1, 2), hold(2, 3, 4)]) == 0


def test_a_wait_counts_less_the_time_without_servers() -> None:
    faults = [Fault(10, 12), Fault(20, 23)]
    assert longest_wait_beyond([Wait(9, 13), Wait(19.5, 23.5)], faults) == 2.0


def test_a_summary_of_a_failover() -> None:
    records = [hold(0, 1, 2, 1), hold(1, 2.5, 3, 2), hold(2, 6, 7, 3)]
    summary = summarise(Told(records, [], errors=4), [Fault(3, 5)])
    assert (summary.grants, summary.errors, summary.violations, summary.regressions) == (3, 4, 0, 0)
    assert summary.until_work_p50 == summary.until_work_max == 3.0
    assert summary.longest_wait_beyond == 2.0


def test_a_worker_that_still_waits_at_the_end_counts() -> None:
    summary = summarise(Told([hold(0, 1, 2)], [Wait(3, 12)], errors=0), [Fault(4, 6)])
    assert summary.longest_wait_beyond == 7.0
