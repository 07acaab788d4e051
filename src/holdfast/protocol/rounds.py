"""Which leases the keeper renews in a round, for how long, and when it looks again.

Plain functions of holds and the time: see keepalive.py, which sends what they plan.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.protocol.hold import HELD, Hold

LONGEST_SLEEP: Final = 60.0


class Round(NamedTuple):
    """What to do now, and when to look again."""

    over: list[Hold]
    due: list[Hold]
    wakes_at: float
    first_deadline: float


def due_at(hold: Hold) -> float:
    """When the keeper must act: after a third of the ttl, which leaves time for two more tries; at the deadline if the
    hold is not renewed, or a renewal waits for replicas; sooner if ``check_at`` says so."""
    deadline, options = hold.deadline, hold.options
    stays = not options.renew or hold.confirming or deadline >= hold.max_hold_ends
    when = deadline if stays else deadline - options.renewed_with
    when = min(when, hold.check_at)
    return when if when > hold.retry_at else hold.retry_at


def asked_for(hold: Hold, now: float) -> float:
    """How long a renewal should make it last.

    If max_hold ends soon, ask for what is left of it, plus the drift that will be subtracted. If the hold is not
    renewed, ask for so little that nothing changes: the step then only shows whether the key exists.
    """
    if not hold.options.renew:
        return 0.001
    return min(hold.options.ttl, (hold.max_hold_ends - now) * 1.02 + 0.003)


def plan(holds: list[Hold], now: float) -> Round:
    """Plan a round. It includes every hold that is due within a twelfth of its ttl."""
    over: list[Hold] = []
    due: list[Hold] = []
    wakes_at = now + LONGEST_SLEEP
    first_deadline = float("inf")
    for hold in holds:
        if hold.phase is not HELD:
            continue
        if now >= hold.deadline:
            over.append(hold)
            continue
        when = due_at(hold)
        if when < hold.deadline:
            first_deadline = min(first_deadline, hold.deadline)
        slack = 0.0 if when == hold.check_at else hold.options.ttl / 12
        if when < hold.deadline and when <= now + slack and hold.retry_at <= now:
            due.append(hold)
        else:
            wakes_at = min(wakes_at, when, hold.deadline)
    return Round(over, due, wakes_at, first_deadline)
