"""Closing a client: its holders are notified, then its keys are released.

Invariant. A hold is lost to its holder before its key is released, so no holder relies on a lock that is free. A
driver calls ``lose_all``, lets on_lost run, and calls ``give_back``. All of it is bounded by the client's timeout: a
key that could not be given back ends by its ttl.

Atomic: the abandon step of each hold, in batches, as the keeper sends it. It also leaves a tombstone where a request of
unknown outcome may still arrive. Clocks: none but the driver's, for that bound.

Why not at interpreter exit, too? Daemon threads are frozen by then, so on_lost could not run. If a program ends without
close(), its locks end by their ttl, as if it had been killed.
"""

from __future__ import annotations

import logging

from holdfast.protocol import mutex
from holdfast.protocol.effects import Effects, StepFailed, call_each, clock, report_loss
from holdfast.protocol.hold import Hold
from holdfast.protocol.keepalive import BATCH, CLOSED, LeaseRegistry
from holdfast.protocol.wait.cohort import Cohorts
from holdfast.protocol.wait.contact import LONGEST_CALL, SHORTEST_CALL

log = logging.getLogger("holdfast")


def lose_all(registry: LeaseRegistry) -> Effects[list[Hold]]:
    """Close the registry: mark every hold lost, and tell its holder. Returns the holds that this call has ended."""
    registry.close()
    lost = []
    for hold in list(registry.holds.values()):
        if hold.lose(CLOSED):
            lost.append(hold)
            yield from report_loss(hold)
    return lost


def give_back(lost: list[Hold], registry: LeaseRegistry, cohorts: Cohorts, until: float) -> Effects[None]:
    """Release these holds on the server, by that time at the latest. A batch is sent again if its connection was dead.

    Release as well what was granted since, and what other threads or tasks are acquiring or releasing now. Each of
    these attempts either has seen that the registry is closed, or has its token among the active holds. An attempt
    with a token is abandoned, with a tombstone against a request that is still under way.
    """
    asking = [hold for hold in list(cohorts.active_holds.values()) if hold.token and hold not in lost]
    held = [*lost, *list(registry.holds.values())]
    holds = [*dict.fromkeys([*held, *asking])]
    if not held:  # there are only attempts to abandon: do not wait long for a silent server
        until = min(until, (yield from clock()) + LONGEST_CALL)
    for start in range(0, len(holds), BATCH):
        left = holds[start : start + BATCH]
        for _ in range(2):
            timeout = max(SHORTEST_CALL, until - (yield from clock()))
            steps = [mutex.abandon_step(hold, tombstone=hold in asking) for hold in left]
            replies = yield from call_each(steps, timeout)
            failed = [reply for reply in replies if isinstance(reply, StepFailed)]
            left = [hold for hold, reply in zip(left, replies, strict=True) if isinstance(reply, StepFailed)]
            if not left or not failed[0].connection_broke:
                break
        if left:
            log.warning(
                "closing: %d locks were not given back and end by their ttl: %s", len(holds) - start, failed[0].error
            )
            return
