"""Grants that count once replicas have them (``replicas=``).

Invariant. With ``replicas=n`` no caller gets a lease before the server has said that n replicas have acknowledged all
its writes up to then, including the grant.

One request does it: a renewal of the grant, and WAIT after it on the same connection, because WAIT counts the replicas
that have what *this connection* wrote. The renewal asks for one millisecond more than the grant did, since a renewal
that prolongs nothing writes nothing, and WAIT would then be satisfied by replicas that have seen none of it. The
renewal also shows whether the server that answers has the grant at all: another server may have taken over since.

Names in different slots of a cluster are on different servers: one such request for each slot.

It is the same request whether a reply, a notification or a ticket brought the grant. A hold that is passed on within
its process is not a new grant, and is not confirmed again. Nor are renewals: a failover that loses one ends the lease
earlier on the new primary than its holder believes, by less than a ttl.

What it does not give is consensus: a replica that has acknowledged the grant need not be the one that takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.errors import Unavailable, rounded
from holdfast.names import slot_of
from holdfast.options import LockOptions
from holdfast.protocol.effects import (
    STOPPED,
    Command,
    Effects,
    Step,
    StepFailed,
    call_on,
    clock,
    close_connection,
    open_connection,
    parsed,
)
from holdfast.protocol.hold import Hold
from holdfast.protocol.kinds.parts import divide, is_divisible
from holdfast.protocol.mutex import renew_step
from holdfast.protocol.replies import DONE
from holdfast.protocol.retry import outage

if TYPE_CHECKING:
    from holdfast.protocol.leases import Driver

_SERVER_WAITS: Final = 0.8  # part of the request's timeout for which the server waits, so that the reply is in time
_SHORTEST: Final = 0.001


def confirm(hold: Hold, driver: Driver) -> Effects[None]:
    """Wait until enough replicas have the grant of this hold. Unavailable if they have not in time."""
    options, step = hold.options, renew_step(hold, hold.options.ttl + _SHORTEST)
    asked_at = yield from clock()
    try:
        for part in divide(step, slot_of) if driver.router.shards is not None and is_divisible(step) else [step]:
            kept, copies = yield from _ask(part, options)
            if kept != DONE or copies < options.replicas:
                break
    except StepFailed as failed:
        hold.take_back()
        raise outage(failed, f"lock {hold.name!r}", options.call_timeout) from failed.__cause__
    if kept == DONE and copies >= options.replicas:
        hold.prolong(options.ttl, asked_at)
        if (yield from clock()) < hold.deadline:
            return
        why, advice = "its answer came after the ttl", "Give a longer ttl, or look why the server is that slow"
    elif kept != DONE:
        why, advice = "the server that granted it was replaced by one that knows nothing of it", "Try again"
    else:
        waited = rounded(_SERVER_WAITS * options.call_timeout)
        why = f"{copies} of {options.replicas} replicas confirmed the grant within {waited} s"
        advice = "See INFO replication there, or ask for fewer (replicas=)"
    hold.take_back()
    raise Unavailable({driver.address: why}, advice, f"lock {hold.name!r}")


def _ask(step: Step, options: LockOptions) -> Effects[tuple[int, int]]:
    """Whether the grant is there, and how many replicas have it."""
    timeout = options.call_timeout
    connection = yield from open_connection(timeout)
    patience_ms = max(1, round(1000 * _SERVER_WAITS * timeout))
    try:
        replies = yield from call_on(
            connection, step, Command(("WAIT", options.replicas, patience_ms)), timeout=timeout
        )
    except STOPPED:
        yield from close_connection(connection)
        raise
    yield from close_connection(connection)
    for reply in replies:
        if isinstance(reply, StepFailed):
            raise reply
    return parsed(step, replies[0]), int(replies[1])
