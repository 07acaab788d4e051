"""Grants that count once replicas have them (``replicas=``).

Invariant. With ``replicas=n`` no caller gets a lease before the server has said that n replicas have acknowledged all
its writes up to then, including the grant.

One request does it: a renewal of the grant, and WAIT after it on the same connection, because WAIT counts the replicas
that have what *this connection* wrote. The renewal writes the key even if it prolongs nothing (an extension that no
replica confirmed may have made it last longer): otherwise replicas that have seen none of it would satisfy WAIT. The
renewal also shows whether the server that answers has the grant at all: another server may have taken over since.

Names in different slots of a cluster are on different servers: one such request for each slot.

It is the same request whether a reply, a notification or a ticket brought the grant. A hold that is passed on within
its process is not a new grant, and is not confirmed again.

Renewals. A primary that was replaced, but does not know it, would renew a lease for ever beside the next holder at the
new primary. So a renewal counts once n replicas have it, too; until then the deadline of the hold stays as it is. All
holds that are due at one primary are renewed by one request with one WAIT. It runs beside the keeper, because replicas
that do not answer must delay no other renewal. The keeper looks at the key, which has it tracked, before the first
renewal and after each: to the server our own renewal is a write of another connection, which ends tracking.

What it does not give is consensus: a replica that has acknowledged the grant need not be the one that takes over, and a
replica that is cut off together with its primary goes on acknowledging. The server's ``min-replicas-to-write`` has the
same limit, and stops an old primary ten seconds later; but then for all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError, Unavailable, rounded
from holdfast.names import slot_of
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
    parsed_or_failed,
    start,
)
from holdfast.protocol.hold import HELD, Hold
from holdfast.protocol.kinds.parts import divide, is_divisible
from holdfast.protocol.mutex import renew_step
from holdfast.protocol.replies import DONE
from holdfast.protocol.reporting import lateness, report_failed_renewal, report_renewal
from holdfast.protocol.retry import outage
from holdfast.protocol.wait.contact import SHORTEST_CALL, one_node

if TYPE_CHECKING:
    from holdfast.protocol.keepalive import LeaseRegistry
    from holdfast.protocol.leases import Driver

_SERVER_WAITS: Final = 0.8  # part of the request's timeout for which the server waits, so that the reply is in time
_WRITING: Final = "write"  # an argument of a renewal
_SEVERAL: Final = "several slots"  # where locks on several primaries are renewed: they delay no others
_LONGEST: Final = 1.0  # seconds for which a renewal waits for replicas; then it is tried again


def confirm(hold: Hold, driver: Driver) -> Effects[None]:
    """Wait until enough replicas have the grant of this hold. Unavailable if they have not in time."""
    try:
        yield from confirm_renewal(hold, hold.options.ttl, driver, "grant")
        if (yield from clock()) >= hold.deadline:
            advice = "Give a longer ttl, or look why the server is that slow"
            raise Unavailable({driver.address: "its answer came after the ttl"}, advice, f"lock {hold.key!r}")
    except HoldfastError:
        hold.take_back()
        raise


def confirm_renewal(hold: Hold, ttl: float, driver: Driver, what: str = "renewal") -> Effects[None]:
    """Renew the hold, and wait until enough replicas have that. Unavailable if they have not in time."""
    options, timeout = hold.options, hold.options.call_timeout
    asked_at = yield from clock()
    hold.ask_to_prolong(ttl, asked_at + timeout)
    try:
        step = _writing(hold, ttl)
        kept, copies = yield from _ask_in_slots(step, options.replicas, timeout, driver.registry)
    except StepFailed as failed:
        raise outage(failed, f"lock {hold.key!r}", timeout) from failed.__cause__
    if kept == DONE and copies >= options.replicas:
        hold.prolong(ttl, asked_at)
        return
    if kept != DONE:
        why, advice = "the server that granted it was replaced by one that knows nothing of it", "Try again"
    else:
        why, advice = _too_few(hold, copies, timeout, what)
    raise Unavailable({driver.address: why}, advice, f"lock {hold.key!r}")


def _too_few(hold: Hold, copies: int, timeout: float, what: str) -> tuple[str, str]:
    waited = rounded(_SERVER_WAITS * timeout)
    why = f"{copies} of {hold.options.replicas} replicas confirmed the {what} within {waited} s"
    return why, "See INFO replication there, or ask for fewer (replicas=)"


# What the keeper has renewed.


def needs_replicas(hold: Hold, now: float) -> bool:
    """Whether it must be renewed now, and that counts once replicas have it; else the keeper only looks at its key."""
    options = hold.options
    if not options.replicas or not options.renew or hold.confirming or hold.deadline >= hold.max_hold_ends:
        return False
    return hold.deadline - options.renewed_with <= now + options.ttl / 12


def renew_with_replicas(registry: LeaseRegistry, due: dict[Hold, float]) -> Effects[None]:
    """Renew these holds, each for its ttl, beside the keeper. That counts once replicas have it."""
    requests: dict[tuple[str, Hold | None], dict[Hold, float]] = {}  # by primary; a lock in several slots has its own
    for hold, ttl in due.items():
        hold.confirming, hold.check_at = True, float("inf")
        divided = len(_in_slots(renew_step(hold, ttl), registry)) > 1
        request = (_SEVERAL, hold) if divided else (registry.contacts.node_of(hold.main_keys[0]), None)
        requests.setdefault(request, {})[hold] = ttl
    for (place, _), holds in requests.items():
        yield from start(_renew_together(registry, holds), place)


def _renew_together(registry: LeaseRegistry, due: dict[Hold, float]) -> Effects[None]:
    held = {hold: ttl for hold, ttl in due.items() if hold in registry.holds and hold.phase is HELD}
    try:
        timeout = max(SHORTEST_CALL, min((_LONGEST, *(hold.options.ttl / 3 for hold in held))))
        asked_at = yield from clock()
        for hold, ttl in held.items():
            hold.ask_to_prolong(ttl, asked_at + timeout)
        found = (yield from _ask_for_all(held, timeout, registry)) if held else []
        now = yield from clock()
        for (hold, ttl), (kept, copies) in zip(held.items(), found, strict=True):
            if hold not in registry.holds or hold.phase is not HELD:
                continue  # released meanwhile, or lost
            if kept == DONE and copies >= hold.options.replicas:
                registry.renewals += 1
                left, late = hold.remaining(now), lateness(hold, now)
                hold.prolong(ttl, asked_at)
                yield from report_renewal(hold, left, late, observed=registry.observed())
            elif kept == DONE or isinstance(kept, StepFailed):
                failed = kept if isinstance(kept, StepFailed) else None
                why, advice = _too_few(hold, copies, timeout, "renewal")
                error = failed.error if failed is not None else Unavailable({"the server": why}, advice)
                registry.failed_renewals += 1
                hold.fail_to_renew(failed is not None and failed.sent, now + retry_pause(hold, now))
                yield from report_failed_renewal(hold, now, error)
            if kept != DONE or (hold.steps.tracks_key and not all(key in registry.watched for key in hold.main_keys)):
                # It is gone, and the keeper will find out why; or our own write ended client tracking: re-arm it.
                hold.check_at = min(hold.check_at, max(now, hold.retry_at))
        registry.wake_the_keeper()
    finally:
        for hold in due:
            hold.confirming = False


def retry_pause(hold: Hold, now: float) -> float:
    """Seconds until the next try after a failed renewal: shorter the less time is left."""
    return max(0.02, min(1.0, hold.options.ttl / 30, (hold.deadline - now) / 10))


def _ask_for_all(
    renewed: dict[Hold, float], timeout: float, registry: LeaseRegistry
) -> Effects[list[tuple[int | StepFailed, int]]]:
    """For each hold what a renewal finds, or why it failed, and how many replicas have it."""
    steps = [_writing(hold, ttl) for hold, ttl in renewed.items()]
    replicas = next(iter(renewed)).options.replicas  # of the client, so the same for all
    try:
        if len(steps) == 1:
            return [(yield from _ask_in_slots(steps[0], replicas, timeout, registry))]
        found, copies = yield from _ask(steps, replicas, timeout)
        return [(kept, copies) for kept in found]
    except StepFailed as failed:
        return [(failed, 0)] * len(steps)


# Requests.


def _writing(hold: Hold, ttl: float) -> Step:
    """A renewal after which WAIT says which replicas have it."""
    step = renew_step(hold, ttl)
    return step._replace(args=(*step.args, _WRITING))


def _in_slots(step: Step, registry: LeaseRegistry) -> list[Step]:
    """The step, or one for each slot: names in different slots of a cluster may be on different servers."""
    return divide(step, slot_of) if registry.contacts.node_of is not one_node and is_divisible(step) else [step]


def _ask_in_slots(step: Step, replicas: int, timeout: float, registry: LeaseRegistry) -> Effects[tuple[int, int]]:
    """What a renewal finds, and how many replicas have it: of the first slot where it is not as it should be."""
    for part in _in_slots(step, registry):
        (kept,), copies = yield from _ask([part], replicas, timeout)
        if isinstance(kept, StepFailed):
            raise kept
        if kept != DONE or copies < replicas:
            break
    return kept, copies


def _ask(steps: Sequence[Step], replicas: int, timeout: float) -> Effects[tuple[list[Any], int]]:
    """For each renewal what it finds, or why it failed; and how many replicas have all of them."""
    connection = yield from open_connection(timeout)
    patience_ms = max(1, round(1000 * _SERVER_WAITS * timeout))
    try:
        *found, copies = yield from call_on(
            connection, *steps, Command(("WAIT", replicas, patience_ms)), timeout=timeout
        )
    except STOPPED:
        yield from close_connection(connection)
        raise
    yield from close_connection(connection)
    if isinstance(copies, StepFailed):
        raise copies
    return [parsed_or_failed(step, kept) for step, kept in zip(steps, found, strict=True)], int(copies)
