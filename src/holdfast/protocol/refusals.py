"""Why a caller does not get a lock: another holder has it, the server does not answer, or the client was closed.

Invariant. A wait that is over found the lock busy, unless a request of its client on that lock is overdue or has
failed. A hold that waited only in the local queue has sent no request: those of the active hold decide. If nothing was
asked at all, contact with the server decides; if that was not lost, this process was too busy, and nothing is known of
the lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final

from holdfast.errors import AcquireTimeout, HoldfastError, Unavailable, rounded, why_busy
from holdfast.holder import Holder, holder_of
from holdfast.protocol.hold import HELD, LOST, TRYING, Hold
from holdfast.protocol.replies import Refused
from holdfast.protocol.retry import outage

if TYPE_CHECKING:
    from holdfast.protocol.leases import Driver

TRY_LATER: Final = "Wait longer (wait=), or catch AcquireTimeout and try again later"


class TimedOut(Exception):
    """The wait is over and the lock was refused: None for ``acquire``, AcquireTimeout for ``with``.

    AcquireTimeout is made only if a caller needs it: if many waits end together, finding out why would take longer than
    everything else (benchmarks.crowd).
    """

    def __init__(self, hold: Hold) -> None:
        self.hold = hold


def refuse_closed(driver: Driver) -> None:
    if driver.registry.closed:
        raise Unavailable({driver.address: "this client was closed"}, "Connect again, or close it later")


def why_refused(driver: Driver, hold: Hold, until: float) -> HoldfastError | TimedOut:
    """What to raise when a wait is over: Unavailable if that is because of an outage, else TimedOut: it is busy.

    A request is overdue if it was under way for the answer time of the waiter that judges, together with those before
    it that failed.
    """
    now, subject, contact = driver.now(), f"lock {hold.key!r}", hold.contact
    if hold.began < until and now < until:  # it ended early
        return outage(contact.failure(), subject, now - hold.began)
    waited, active = now - hold.began, driver.cohorts.active(hold)
    if active is not None and active.phase is HELD:
        return TimedOut(hold)  # a hold of this client has it
    if active is not None and active.phase is LOST:
        active = None  # it asks nothing any more, and what it asked was about its lease
    answer_time = contact.answer_time(hold.options, hold.patience)
    asker = (active or hold).asker
    failures, sent_at = asker.failures, asker.sent_at  # its own thread may get an answer meanwhile
    if failures is not None and (failed := failures.overdue(now, answer_time)) is not None:
        return outage(failed, subject, waited)
    silence = max(failures.silence if failures is not None else 0.0, now - sent_at if sent_at is not None else 0.0)
    if silence >= answer_time:
        what = f"it did not answer within {rounded(silence)} s"
        return Unavailable({driver.address: what}, "It may be hung or far away; see timeout= of connect", subject)
    if until <= hold.began:  # it does not wait, and the server has answered, or a hold of this process asks it
        return TimedOut(hold)
    if active is not None and (hold.found_busy or active.is_known_busy()):
        return TimedOut(hold)
    # What other requests of this client have found is all that is known.
    if (failed := contact.overdue(now, answer_time)) is not None:
        return outage(failed, subject, waited)
    if active is None or active.tries:  # None: the hold before it has just ended
        return TimedOut(hold)
    what = f"this process was too busy to ask it within {rounded(hold.patience)} s"
    return Unavailable({driver.address: what}, "Wait longer, or for fewer locks at once", subject)


def refusal_of(driver: Driver, hold: Hold) -> Refused | None:
    """The last refusal: its own, or that of the active waiter of its client."""
    refused, active = hold.waiter.refused, driver.cohorts.active(hold)
    if refused is None and active is not None and active.phase is TRYING:
        refused = active.waiter.refused
    return refused


def holder_seen(driver: Driver, hold: Hold, now: float) -> Holder | None:
    """The holder that the last refusal named, or a holder of this client before it in the local queue."""
    refused = refusal_of(driver, hold)
    if refused is None:
        return holder_here(driver, hold, now)
    return holder_named(refused) if refused.holder else None


def holder_named(refused: Refused) -> Holder:
    """The holder that a refusal names."""
    left = refused.left_ms / 1000 if refused.left_ms >= 0 else None
    return holder_of(refused.holder, left, "reserved" if refused.reserved else "")


def holder_here(driver: Driver, hold: Hold, now: float) -> Holder | None:
    """The holder of this client behind which that hold waits in the local queue; None if there is none."""
    active = driver.cohorts.active(hold)
    if active is None or not active.fence:
        return None
    return holder_of(active.token.encode(), max(0.0, active.lasts_until - now))


def timeout_error(driver: Driver, hold: Hold, waited: float, why: str, now: float) -> AcquireTimeout:
    """The error of a caller whose wait is over, and why the lock was refused."""
    refused = refusal_of(driver, hold)
    key = "" if refused is None else refused.key  # of several names, the refused one
    name = next((keys.name for keys in hold.all_keys() if keys.main == key), "")
    holder = holder_seen(driver, hold, now)
    if hold.mode and holder is not None:
        why = f"{why}. One holder is {holder}"  # a permit pool may have many
    why = why or why_busy(holder, key)
    return AcquireTimeout(hold.name, waited, why, holder, name, key=hold.key)


def held_by(me: Hashable, holder: Hashable, refused: str = "") -> str:
    """Why ``me`` could not get a lock that ``holder`` has, a caller of this process. ``refused``: of several names."""
    what = repr(refused) if refused else "it"
    if me == holder:
        advice = "Lock all names at once" if refused else "Pass the lease down, or use client.rlock"
        return f"this thread or task holds {what}. Nested by mistake? {advice}"
    return f"another thread or task of this process holds {what}. {TRY_LATER}"
