"""The results of a run, computed from the records that its workers wrote.

A record is one hold: when the worker began to ask, when it was granted, until when it relied on the lock, and its
fence. All times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Record(NamedTuple):
    """One hold of one worker."""

    asked: float
    granted: float
    relied_until: float
    fence: int  # 0: the library has none
    refused: bool  # the resource refused the write of this hold
    lost: bool  # the worker was told that it no longer holds the lock


class Wait(NamedTuple):
    """The last wait of a worker, if the run ended before the worker was granted the lock."""

    asked: float
    ended: float


class Told(NamedTuple):
    """What the workers of one library have seen."""

    records: list[Record]
    ungranted: list[Wait]
    errors: int  # attempts that raised


class Fault(NamedTuple):
    """One failover or resharding: when it began, and when the servers accepted writes again."""

    began: float
    ended: float


class Summary(NamedTuple):
    grants: int
    errors: int
    refused: int
    lost: int
    regressions: int
    violations: int
    until_work_p50: float
    until_work_max: float
    longest_wait_beyond: float  # the longest wait, without the time of faults during that wait


def summarise(told: Told, faults: Sequence[Fault]) -> Summary:
    records = told.records
    gaps = until_work_goes_on(records, faults)
    return Summary(
        grants=len(records),
        errors=told.errors,
        refused=sum(record.refused for record in records),
        lost=sum(record.lost for record in records),
        regressions=fence_regressions(records),
        violations=overlaps(records),
        until_work_p50=median(gaps) if gaps else float("nan"),
        until_work_max=max(gaps, default=float("nan")),
        longest_wait_beyond=longest_wait_beyond(
            [*(Wait(record.asked, record.granted) for record in records), *told.ungranted], faults
        ),
    )


def overlaps(records: Sequence[Record]) -> int:
    """Holds that began while a worker still relied on another hold."""
    found, until = 0, 0.0
    for record in sorted(records, key=lambda one: one.granted):
        found += record.granted < until
        until = max(until, record.relied_until)
    return found


def fence_regressions(records: Sequence[Record]) -> int:
    """Holds whose fence is not greater than that of every hold that was granted before they were requested."""
    by_grant = sorted((record for record in records if record.fence), key=lambda one: one.granted)
    found, highest, granted = 0, 0, 0
    for record in sorted(by_grant, key=lambda one: one.asked):
        while granted < len(by_grant) and by_grant[granted].granted <= record.asked:
            highest = max(highest, by_grant[granted].fence)
            granted += 1
        found += record.fence <= highest
    return found


def until_work_goes_on(records: Sequence[Record], faults: Sequence[Fault]) -> list[float]:
    """For each fault, seconds from its start to the first grant that a server wrote after that start."""
    grants = sorted(record.granted for record in records)
    gaps = []
    for fault in faults:
        place = bisect_left(grants, fault.began + _IN_FLIGHT)
        if place < len(grants):
            gaps.append(grants[place] - fault.began)
    return gaps


def longest_wait_beyond(waits: Sequence[Wait], faults: Sequence[Fault]) -> float:
    """The longest wait, less the time for which the servers accepted no writes meanwhile."""
    return max((_beyond(wait, faults) for wait in waits), default=0.0)


def _beyond(wait: Wait, faults: Sequence[Fault]) -> float:
    down = sum(max(0.0, min(wait.ended, fault.ended) - max(wait.asked, fault.began)) for fault in faults)
    return wait.ended - wait.asked - down


_IN_FLIGHT = 0.02  # seconds in which a reply that was sent before the fault may still arrive
