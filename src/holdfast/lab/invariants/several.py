"""The invariants of locks on several names. ``primitives`` describes their events."""

from __future__ import annotations

from typing import Final

from holdfast.lab.invariants.history import BROKEN, Check, History, Report, beside, invariant, judged, never

SEVERAL_CHECKS: Final[dict[str, Check]] = {}


@invariant(SEVERAL_CHECKS, "NameExclusion", "granted", "extended")
def name_exclusion(history: History) -> Report:
    """No two clients hold the same name at the same time.

    ``what`` of a grant lists its names.
    """
    counted = False
    for holder, others in beside(history):
        counted = counted or holder.what != ""
        for other in others:
            if shared := set(holder.what) & set(other.what):
                why = f"{{0}} has the lock on {min(shared)!r}, and {{1}} still has it too"
                return Report(BROKEN, why, (holder.client, other.client))
    return judged(counted)


@invariant(SEVERAL_CHECKS, "AllOrNone", "torn")
def all_or_none(history: History) -> Report:
    """A client holds all of its names, or none."""
    return never(history, {"torn": "{0} holds some of its names, and not the others"}, "granted")


@invariant(SEVERAL_CHECKS, "ArrivalOrder", "overtaken", "uneven")
def arrival_order(history: History) -> Report:
    """A waiter has one time of arrival in all its queues, and is served before waiters that arrived later."""
    uneven = "{0} stands in two queues with two times of arrival"
    overtaken = "{0} stands in all its queues, and a client that came later is served first"
    return never(history, {"uneven": uneven, "overtaken": overtaken}, "granted")
