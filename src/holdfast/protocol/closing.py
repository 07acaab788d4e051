"""Closing a client: its holders are told, then its keys are given back.

Invariant. A hold is lost to its holder before its key is given back, so no holder believes in a lock that is free. A
driver calls ``lose_all``, lets on_lost run, and calls ``give_back``. All of it is bounded by the client's timeout: a
key that could not be given back ends by its ttl.

Atomic: the abandon step of each hold, in batches, as the keeper sends it. It also leaves a tombstone where a request of
unknown outcome may still arrive. Clocks: none but the driver's, for that bound.

Why not at interpreter exit, too? Daemon threads are frozen by then and on_lost can run nowhere; a program that just
ends is to its locks like one that was killed.
"""

from __future__ import annotations

import logging

from holdfast.lease import Hold
from holdfast.protocol import mutex
from holdfast.protocol.cohort import Cohorts
from holdfast.protocol.effects import Effects, StepFailed, call_each, clock, tell
from holdfast.protocol.keepalive import BATCH, CLOSED, LONGEST_CALL, Book
from holdfast.protocol.retry import SHORTEST_CALL

__all__ = ["give_back", "lose_all"]

log = logging.getLogger("holdfast")


def lose_all(book: Book) -> Effects[list[Hold]]:
    """Close the book: mark every hold lost, and tell its holder. Returns the holds that this call has ended."""
    book.close()
    lost = []
    for hold in list(book.holds.values()):
        if hold.lose(CLOSED):
            lost.append(hold)
            yield from tell(hold)
    return lost


def give_back(lost: list[Hold], book: Book, cohorts: Cohorts, until: float) -> Effects[None]:
    """Give these back on the server, by that time at the latest. A batch is sent again if its connection was dead.

    So is what was granted since, and what other threads or tasks are just asking for or releasing: each of them has
    seen that the book is closed, or has a token here by which it is abandoned, with a tombstone against a request that
    is still on its way.
    """
    asking = [hold for hold in list(cohorts.seats.values()) if hold.token and hold not in lost]
    held = [*lost, *list(book.holds.values())]
    holds = [*dict.fromkeys([*held, *asking])]
    if not held:  # an attempt is no reason to wait for a silent server
        until = min(until, (yield from clock()) + LONGEST_CALL)
    for start in range(0, len(holds), BATCH):
        left = holds[start : start + BATCH]
        for _ in range(2):
            timeout = max(SHORTEST_CALL, until - (yield from clock()))
            steps = [mutex.abandon_step(hold, tombstone=hold in asking) for hold in left]
            replies = yield from call_each(steps, timeout)
            failed = [reply for reply in replies if isinstance(reply, StepFailed)]
            left = [hold for hold, reply in zip(left, replies, strict=True) if isinstance(reply, StepFailed)]
            if not left or not failed[0].prompt:
                break
        if left:
            log.warning(
                "closing: %d locks were not given back and end by their ttl: %s", len(holds) - start, failed[0].error
            )
            return
