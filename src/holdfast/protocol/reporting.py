"""Reporting what happens to a hold, for logs, metrics and traces.

Invariant. An event is reported after the change that it describes, and never affects that change.
``registry.observed()`` says whether a hook or the log wants events of normal operation. If not, no such event is made,
and no effect is yielded for it.

Every Waiting is followed by an Acquired or Abandoned with ``queued``, and every Acquired by a Released, PassedOn or
Lost of the same hold; except in a process that ends or forks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.errors import HoldfastError, LeaseLost, NotHeld, rounded
from holdfast.events import Abandoned, Acquired, Event, Lost, PassedOn, Released, RenewalFailed, Renewed, Waiting
from holdfast.holder import Holder, holder_of
from holdfast.protocol.effects import STOPPED, Effects, clock, report, wall_clock
from holdfast.protocol.hold import CHECK_AFTER, HELD, LOST, Hold
from holdfast.protocol.refusals import TimedOut, holder_named, holder_seen
from holdfast.protocol.wait.waiter import NOT_WAITING

if TYPE_CHECKING:
    from holdfast.lease import BaseLease
    from holdfast.protocol.keepalive import LeaseRegistry
    from holdfast.protocol.leases import Driver
    from holdfast.protocol.lock import BaseLock

# A renewal is slow if it is later than due by this part of the validity. It is due with two thirds left, so less than a
# third is left then: time for one more try.
SLOW: Final = 1 / 3
LONG_WAIT: Final = 10.0  # seconds after which a wait is reported again; then after twice that time, and so on


T = TypeVar("T")


def described(hold: Hold) -> dict[str, Any]:
    """The fields that every event of this hold has."""
    mode = {"any": "read", "all": "write"}.get(hold.mode, "")
    return {
        "name": hold.name,
        "key": hold.key,
        "kind": hold.kind,
        "mode": mode,
        "label": hold.options.label,
        "fence": hold.public_fence or None,
    }


def report_wait(hold: Hold, holder: Holder | None = None) -> Effects[None]:
    """Report that this hold has to wait, unless that was reported before. ``holder``: one of the same client."""
    if hold.waits_since:
        return
    hold.waits_since = yield from clock()
    yield from report(Waiting(**described(hold), holder=holder or refuser(hold), local=hold.waiter.refused is None))


def report_long_wait(hold: Hold, waited: float, holder: Holder | None, deadlock: str) -> Effects[None]:
    holder = holder or refuser(hold)
    yield from report(Waiting(**described(hold), waited=waited, holder=holder, deadlock=deadlock))


def report_local_waits(registry: LeaseRegistry, now: float) -> Effects[None]:
    """Report the long waits in local queues. Waiters there have no timers, so the keeper looks for them."""
    registry.local_waits_at = now + LONG_WAIT
    holders = {waiting: hold for hold in list(registry.holds) for waiting in list(hold.local_queue())}
    waits = {sleeper: one for one in holders if (sleeper := _sleeper(one)) is not None}
    for waiting, hold in holders.items():
        waiter = waiting.waiter
        if waiter is NOT_WAITING:  # it was promoted just now
            continue
        if now >= (waiter.report_at or waiter.since + LONG_WAIT):
            waiter.report_at = now + (now - waiter.since)
            since = (yield from wall_clock()) - (now - hold.since)
            holder = replace(holder_of(hold.token.encode(), hold.remaining(now)), fence=hold.public_fence, since=since)
            deadlock = _local_deadlock(waiting, holders, waits)
            waited = now - waiter.since
            yield from report(
                Waiting(**described(waiting), waited=waited, holder=holder, local=True, deadlock=deadlock)
            )
        registry.local_waits_at = min(registry.local_waits_at, waiter.report_at or waiter.since + LONG_WAIT)


def _sleeper(waiting: Hold) -> object:
    """The thread or task that waits for it; None if it does not sleep yet."""
    wakeup = waiting.waiter.wakeup
    return None if wakeup is None else _alive(wakeup.caller)


def _alive(caller: Any) -> object:
    """The thread or task of a weak reference; None if it has ended."""
    return None if caller is None else caller()


def _local_deadlock(waiting: Hold, holders: dict[Hold, Hold], waits: dict[object, Hold]) -> str:
    """A sentence if callers of this client wait for each other. ``holders``: for what each hold waits; ``waits``: what
    each caller waits for.

    It is possible, not certain: another thread may release what a caller holds.
    """
    chain: list[str] = []
    me, at = _sleeper(waiting), _alive(holders[waiting].caller)
    seen: set[object] = set()
    while at != me:
        blocked = None if at in seen else waits.get(at)
        if blocked is None:
            return ""
        seen.add(at)
        chain.append(blocked.key)
        at = _alive(holders[blocked].caller)
    if me is None:
        return ""
    if not chain:
        return "This thread or task holds it itself, and would wait forever"
    what = ", whose holder waits for ".join(map(repr, chain))
    return f"Possibly a deadlock: that thread or task waits for {what}, which this caller holds"


def log_outages(driver: Driver, log: Callable[[str], object]) -> None:
    """Log there when contact with a server is lost, while it is, and when it is back."""
    at_risk = partial(_leases_at_risk, driver.registry)
    driver.registry.contacts.tell(log, at_risk, driver.cohorts.wake_local_waiters, driver.router.asks.wake_all)


def _leases_at_risk(registry: LeaseRegistry, now: float) -> str:
    """A sentence about the leases that an outage may end; "" if there are none."""
    ends = [hold.deadline - now for hold in list(registry.holds) if hold.valid(now)]
    if not ends:
        return ""
    held, first = ("1 lease is", "it") if len(ends) == 1 else (f"{len(ends)} leases are", "the first")
    return f" ({held} held; unless contact is back, {first} ends in {rounded(max(0.0, min(ends)))} s)"


def refuser(hold: Hold) -> Holder | None:
    """The holder that the last refusal named."""
    refused = hold.waiter.refused
    return holder_named(refused) if refused is not None and refused.holder else None


def lateness(hold: Hold, now: float) -> float:
    """How much later than due it is renewed at that time. A hold can begin with little left: a grant is told late."""
    return max(0.0, now - max(hold.deadline - hold.options.renewed_with, hold.since + CHECK_AFTER))


def report_renewal(hold: Hold, left: float, late: float, *, observed: bool) -> Effects[None]:
    """It was renewed that late, with that many seconds of validity left. A slow renewal is always reported."""
    options = hold.options
    slow = late > SLOW * options.validity and hold.deadline < hold.max_hold_ends
    if options.renew and (slow or observed):
        yield from report(Renewed(**described(hold), remaining=left, validity=options.validity, late=late, slow=slow))


def report_failed_renewal(hold: Hold, now: float, error: HoldfastError) -> Effects[None]:
    left = hold.remaining(now)
    lost = hold.contact.lost_at is not None
    yield from report(
        RenewalFailed(**described(hold), remaining=left, tries=hold.failed_renewals, error=error, outage=lost)
    )


def lost_event(hold: Hold, now: float) -> Lost:
    return Lost(**described(hold), held=max(0.0, now - hold.since), reason=hold.reason)


def note_attempt(tried: list[Hold], hold: Hold) -> None:
    """Note that the caller continues with this hold. It takes over what was reported of the hold before it."""
    if tried:
        hold.waits_since, hold.tries = tried[-1].waits_since, tried[-1].tries
    tried.append(hold)


def observe_acquire(attempt: Effects[BaseLease], tried: list[Hold], lock: BaseLock[Any]) -> Effects[Any]:
    """Run an attempt to acquire that lock, and report how it ends.

    ``tried``: the holds that the attempt has used so far; the attempt adds them.
    """
    driver, withdraw = lock._driver, lock._withdraw
    started = yield from clock()
    try:
        lease = yield from attempt
    except STOPPED as error:
        hold = tried[-1] if tried else lock._new_hold()
        over = isinstance(error, TimedOut)
        now = yield from clock()
        yield from report(
            Abandoned(
                **described(hold),
                waited=now - started,
                tries=hold.tries,
                queued=bool(hold.waits_since),
                holder=holder_seen(driver, hold, now) if over else None,
                error=None if over else error,
            )
        )
        raise
    try:
        yield from report(acquired_event(lease._hold, (yield from clock()) - started))
    except STOPPED:  # Ctrl-C while a hook runs: the caller gets no lease
        yield from withdraw(lease._hold)
        raise
    return lease


def acquired_event(hold: Hold, waited: float) -> Acquired:
    return Acquired(
        **described(hold), waited=waited, tries=hold.tries, passed=hold.passed, queued=bool(hold.waits_since)
    )


def observe_release(release: Effects[T], hold: Hold) -> Effects[T]:
    """Run a release or a hand-over, and report how it ends."""
    found_lost = hold.phase is LOST  # then it was reported as lost
    was_held = hold.phase is HELD
    failed: HoldfastError | None = None
    try:
        return (yield from release)
    except NotHeld:
        was_held = False  # another thread has released it
        raise
    except HoldfastError as error:
        failed = error
        raise
    finally:
        if was_held and not found_lost:
            yield from report(_end_event(hold, (yield from clock()), failed))


def _end_event(hold: Hold, now: float, failed: HoldfastError | None) -> Event:
    if isinstance(failed, LeaseLost):
        return lost_event(hold, now)
    if hold.successor is not None:
        return PassedOn(**described(hold), held=max(0.0, now - hold.since))
    return released_event(hold, now, failed)


def released_event(hold: Hold, now: float, failed: HoldfastError | None = None) -> Released:
    return Released(**described(hold), held=max(0.0, now - hold.since), error=failed)
