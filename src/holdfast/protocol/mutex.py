"""The fenced mutex: acquire, release, extend.

Invariant. If a key on the server contains a token of this client, either exactly one hold relies on the key, or its
holder, the keeper or its ttl is about to remove it. A hold that says ``held`` is before its local deadline, and that
deadline is before the end of the key's ttl.

Atomic: each .lua step, and nothing else. Every step is idempotent by token, so after an unknown outcome it is simply
sent again. When the attempt is given up instead, an ``abandon`` removes the key and leaves a tombstone, because the
request of unknown outcome may still arrive after the abandon.

Waiting. A refused acquire of a client that is subscribed takes a place in the queue on the server. It is sent again
every half second, which shows that its waiter is alive, and when the holder's lease ends. A release grants the lock to
the next waiter, for its whole ttl, and notifies the client of that waiter, which starts at once; no other waiter wakes
up and no new client can take the lock first. A waiter that cannot be notified gets a short reservation, which its own
next acquire makes a grant. The key is tracked for the first in the queue, because a client that knows of no queue may
free it. Notifications are hints: a waiter that receives none finds its token in the key when it asks again.

Clocks. The deadline is counted from before the send, on our own clock, and is shorter than the ttl by the drift that
two clocks are allowed (1 % + 2 ms); see ``Hold.accept`` for a grant by notification. Nothing on the wire carries a time
of ours. That the server's clock does not jump is assumed for mutual exclusion; the fence guards the resource when it
does.

Why not plain SET NX PX, which is one round trip too? If its reply is lost, the second request finds the key and takes
it for another client's. And SET cannot return a fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.errors import (
    HoldfastError,
    InvalidConfig,
    NotAcquired,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
    rounded,
)
from holdfast.holder import is_foreign
from holdfast.options import LockOptions
from holdfast.protocol.effects import (
    STOPPED,
    Command,
    Effects,
    Step,
    StepFailed,
    call,
    call_each,
    caller,
    clock,
    defer_cleanup,
    report_loss,
    show_presence,
)
from holdfast.protocol.hold import ENDED, Hold
from holdfast.protocol.inspection.history import read_notice
from holdfast.protocol.replies import DONE, GONE, TAKEN, Abandoned, Cleaned, Granted, Refused, WrongKind
from holdfast.protocol.reporting import report_wait
from holdfast.protocol.retry import Tries, outage, until_answered
from holdfast.protocol.wait.failures import Failures
from holdfast.protocol.wait.presence import rest_of
from holdfast.protocol.wait.waiter import NOT_WAITING
from holdfast.protocol.wait.waiting import NO_CHANNEL, REFRESH, Pause, WaitLoop, pause_for

if TYPE_CHECKING:
    from holdfast.protocol.wait.notifications import NotificationRouter

CLEANUP_WAIT: Final = 0.25  # seconds for which a leaving caller waits for its clean-up; then the keeper does it
TOMBSTONE_MS: Final = 60_000

NOTICE_WAIT: Final = 0.25  # seconds for which the report of a loss waits for its reason

ABANDONED: Final = -2
LOSS_REASON: Final = {
    GONE: "its key expired or was deleted",
    TAKEN: "its key is now another holder's",
    ABANDONED: "this attempt was given up before its request arrived",
}

WATCH_AFTER: Final = 0.05  # the key is tracked for the first in the queue if it must wait longer than this

_TOO_SLOW: Final = "Give a longer ttl, or find out why the server is that slow"


def abandon_step(hold: Hold, *, tombstone: bool = False) -> Step:
    """``tombstone``: write one even if no request of it is known to be under way."""
    tombstone_ms = max(hold.options.ttl_ms, TOMBSTONE_MS) if hold.outcome_unknown or tombstone else 0
    return hold.steps.abandon_step(hold, tombstone_ms)


def renew_step(hold: Hold, ttl: float, *, watch: bool = False) -> Step:
    return hold.steps.renew_step(hold, max(1, round(ttl * 1000)), watch and hold.steps.tracks_key)


def fence_kept_for(options: LockOptions) -> float:
    """How long the record of a fence lasts while its lock is held: until the next renewals, at least."""
    return max(options.fence_retention, options.ttl)


def keep_fence_steps(hold: Hold) -> list[Step]:
    """Let the records of its fence last as long as it is held, for inspectors."""
    args = hold.token[-8:], str(round(fence_kept_for(hold.options) * 1000))
    return [Step("keep_fence", (keys.shared[1],), args) for keys in hold.all_keys()]


def loss_reasons(lost: Sequence[tuple[Hold, int]]) -> Effects[list[str]]:
    """Why the server no longer has these holds, by one request. If an operator broke a hold, its tombstone says why.

    ``lost``: each hold, and what its step found. If the request is not answered soon, that code alone is the reason,
    because the holders must be told.
    """
    asked = [(place, keys.tombstone(hold.token)) for place, (hold, _) in enumerate(lost) for keys in hold.all_keys()]
    found = yield from call_each([Command(("GET", key)) for _, key in asked], NOTICE_WAIT)
    reasons = [LOSS_REASON[code] for _, code in lost]
    for (place, _), notice in zip(asked, found, strict=True):
        if isinstance(notice, bytes) and (entry := read_notice(notice)) is not None:
            reasons[place] = f"it was broken by {entry.by}: {entry.reason}"
    return reasons


def is_settled(hold: Hold) -> bool:
    """Whether the hold can have nothing on the server: no key, no place in the queue, no request under way."""
    return not (hold.fence or hold.waiter.queued or hold.outcome_unknown)


def acquire(hold: Hold, now: float, until: float, answer_by: float, router: NotificationRouter) -> Effects[bool]:
    """Try until ``until``, and for the first answer until ``answer_by``. Returns whether it was granted.

    False: the wait is over, and ``why_refused`` says why. Unavailable is raised if the server cannot be used. If it
    was not granted, something may be left on the server: see ``is_settled``.
    """
    patient = until > now
    channel = ""
    asks, started = router.asks, now
    contact, probe = hold.contact, hold.probe
    found: bool | Pause | StepFailed
    try:
        try:
            if patient:
                if asks.is_full() and probe is None:
                    now = yield from asks.wait_for_turn(hold, partial(hold.wait_ends, until))
                    if hold not in asks.under_way and hold.waiter.notification is None:
                        return False
                if router.holds_any():
                    hold.nested = router.held_by((yield from caller()))
                asks.begin(hold)
                channel = router.enlist(hold)
            # Most locks are free, so nothing is prepared for waiting before this (``make bench``: uncontended).
            timeout = contact.answer_time(hold.options, answer_by - now) if probe is None else contact.probe_time
            if contact.lost_at is not None:
                timeout = max(contact.least, min(timeout, hold.wait_ends(answer_by) - now))
            found = yield from _ask(hold, router, channel, now, timeout, 0, patient)
            if found is True:
                return True
        except StepFailed as failed:
            found = failed
        finally:
            asks.end(hold)
        if patient and router.registry.observed() and type(found) is Pause:
            yield from report_wait(hold)
        tries = Tries(hold.options, now, answer_by, jitter=hold.token, hold=hold)
        waiting = WaitLoop("lock", hold, router, tries, until).run(_ask_again, found, channel)
        found = False  # drop a StepFailed: it would keep the frames of its traceback alive
        return bool((yield from waiting))
    except StepFailed as failed:
        hold.server_silent = failed.silent
        now = yield from clock()
        if failed.silent and hold.began < until <= now:
            return False  # the wait is over; ``why_refused`` says whether the silence was long enough for an outage
        raise outage(failed, f"lock {hold.key!r}", now - started) from failed.__cause__
    finally:
        if router.waiting or router.watching:
            if hold.waiter is not NOT_WAITING:
                hold.waiter.crowded = router.is_crowded()
            router.dismiss(hold)


def _ask_again(waiter: WaitLoop, channel: str, now: float, timeout: float) -> Effects[bool | Pause]:
    return _ask(waiter.hold, waiter.router, channel, now, timeout, waiter.attempt, waiter.patient)


def _ask(  # noqa: PLR0917 (hot path: passing keywords would cost half as much as the rest)
    hold: Hold, router: NotificationRouter, channel: str, now: float, timeout: float, attempt: int, patient: bool
) -> Effects[bool | Pause]:
    """Send the acquire step once: True if it was granted."""
    before = hold.waiter.refused
    watches = hold.steps.tracks_key
    watched = ""
    if (
        watches
        and before is not None
        and before.first
        and channel not in ("", NO_CHANNEL)
        and not _is_crowded(hold, router)
    ):
        watched = before.key or hold.keys.main
        router.watching[watched] = hold
    outcome_unknown = hold.send()
    hold.tries += 1
    hold.sent_at = now
    try:
        reply = yield from call(hold.steps.acquire_step(hold, channel, watched != ""), timeout)
    except StepFailed as failed:
        hold.answer(outcome_unknown or failed.sent)
        hold.failures = Failures.add(hold.failures, now, failed)
        raise
    except STOPPED:  # its caller left before the answer came
        hold.failures = Failures.cut_short(hold.failures, (yield from clock()) - now)
        raise
    finally:
        hold.sent_at = None
    if type(reply) is Granted:
        hold.grant(reply.fence, now, reply.slot)
        hold.answer(outcome_unknown)
        if (yield from clock()) < hold.deadline:
            return True
        # The reply came after the deadline, so this grant cannot be used, but its key exists.
        hold.take_back()
        error = Unavailable({"the server": "its answer came after the ttl"}, _TOO_SLOW)
        raise StepFailed(error, sent=True, retry=patient)
    if type(reply) is Abandoned:
        raise NotAcquired(hold.name, (yield from loss_reasons([(hold, ABANDONED)]))[0], key=hold.key)
    if type(reply) is WrongKind:
        hold.answer(outcome_unknown)
        raise Unsupported(
            f"lock {hold.key!r}: {repr(reply.key) if reply.key else 'it'} is in use as a {reply.kind}",
            "a name is one kind of lock at a time, so choose another name for this one",
        )
    hold.refuse(reply, now, queued=channel != "", foreign=bool(reply.holder) and is_foreign(reply.holder))
    hold.answer(outcome_unknown)  # not earlier: an interrupt between the two would leave its place in the queue
    if channel in ("", NO_CHANNEL):
        pause = pause_for(hold.token, channel, attempt, reply.left_ms)
    elif (crowded := _is_crowded(hold, router)) and not (
        reply.first and (hold.steps.first_waiter_asks or 0 <= reply.left_ms < 2000 * REFRESH)
    ):
        pause = rest_of(hold)
        yield from show_presence(hold)
    elif not reply.first:
        pause = REFRESH  # only the first waiter in the queue asks when the lease ends
    else:
        pause = pause_for(hold.token, channel, attempt, reply.left_ms)
        if watches and not crowded and watched != (reply.key or hold.keys.main):
            pause = 0.0 if hold.steps.foreign_clients and _is_polled(reply) else min(pause, WATCH_AFTER)
    return Pause(min(pause, hold.ask_within))


def _is_crowded(hold: Hold, router: NotificationRouter) -> bool:
    """Whether the keeper shows the presence of this waiter: then the key is not tracked for it."""
    return router.is_crowded() and hold.steps.shown_by_keeper


def _is_polled(refused: Refused) -> bool:
    """Whether a client of another library has the lock, or a long yield window is open for one: track it at once."""
    return is_foreign(refused.holder) if refused.holder else refused.left_ms > WATCH_AFTER * 1000


def settle(hold: Hold) -> Effects[None]:
    """Remove what this hold may have on the server: now if that is quick, else let the keeper do it."""
    hold.end()
    buried = 0
    try:
        # A server that was silent would be silent again. If very many waiters give up together, their callers return
        # first, and the keeper cleans up afterwards.
        if not hold.server_silent and not hold.waiter.crowded and hold.contact.answers():
            timeout = max(CLEANUP_WAIT, hold.contact.least)
            _, buried = yield from call(abandon_step(hold), timeout, shielded=True)
        if not buried:
            yield from defer_cleanup(hold)
    except StepFailed:
        yield from defer_cleanup(hold)
    except STOPPED:  # interrupted once more: only the keeper can finish it
        yield from defer_cleanup(hold)
        raise


def release(hold: Hold, now: float) -> Effects[None]:
    """Release the hold. It has ended afterwards in any case; LeaseLost if it had ended before."""

    def step() -> Step:
        return abandon_step(hold) if hold.outcome_unknown else hold.steps.release_step(hold)

    if lost := hold.why_lost(now):
        # Its holder is told at once. What may be left on the server is removed now if that is quick.
        yield from settle(hold)
        hold.reason = lost
        raise hold.lost_error()
    try:
        hold.end()
        # Once the lease has ended by itself there is nothing to wait for; the keeper does the rest.
        freed, _, resent, _ = yield from until_answered(
            step, hold.options, now=now, until=hold.gone_by(), hold=hold, shielded=True
        )
        if type(freed) is Cleaned:
            freed, buried = freed
            if not buried:
                yield from defer_cleanup(hold)
    except StepFailed as failed:
        yield from defer_cleanup(hold)
        raise _unreleased(hold, failed, failed.sent, (yield from clock())) from failed.__cause__
    except STOPPED:
        yield from settle(hold)
        raise
    if freed == DONE:
        return
    if not resent:  # else an earlier try of ours may have freed it
        hold.reason = (yield from loss_reasons([(hold, freed)]))[0]
        raise hold.lost_error()
    now = yield from clock()
    if now >= hold.deadline:
        raise OutcomeUnknown(
            hold.name,
            "a release",
            "the key is gone now, but the lease may have ended before; let the guarded resource check the fence",
            key=hold.key,
        )
    # Before the deadline no other client can have had the key, so our own earlier release has removed it.


def _unreleased(hold: Hold, failed: StepFailed, sent: bool, now: float) -> HoldfastError:
    left = hold.gone_by() - now
    ends = f"ends by itself in about {rounded(left)} s at the latest" if left > 0 else "has ended by itself meanwhile"
    if sent:
        advice = f"it is repeated in the background, and the lease {ends}"
        return OutcomeUnknown(hold.name, "a release", advice, key=hold.key)
    error = outage(failed, f"the release of lock {hold.key!r}")
    if isinstance(error, Unavailable) and failed.retry:  # else its advice says what keeps the release from succeeding
        error = Unavailable(error.causes, f"It is repeated in the background, and the lease {ends}", error.subject)
    return error


def extend(hold: Hold, seconds: float) -> Effects[None]:
    """Make it last at least that long from now. It never gets shorter."""
    now = yield from clock()
    if now + seconds > hold.max_hold_ends and not hold.why_lost(now):
        left = max(0.0, hold.max_hold_ends - now)
        raise InvalidConfig(
            f"extend({rounded(seconds)})",
            f"max_hold={rounded(hold.options.max_hold or 0.0)} leaves {hold.key!r} only {rounded(left)} s more",
        )
    hold.ask_to_prolong(seconds, now + hold.options.timeout)
    asked_at = yield from step_as_holder(hold, renew_step(hold, seconds))
    if not hold.options.replicas:  # else it counts once replicas have it: see replication.py
        hold.prolong(seconds, asked_at)


def step_as_holder(hold: Hold, step: Step) -> Effects[float]:
    """Send that step for the holder until it is answered. Returns the time at which the answered request was sent.

    LeaseLost if the server no longer has the hold.
    """

    def check(now: float) -> None:
        if reason := hold.why_lost(now):
            raise hold.lost_error(reason)
        if hold.phase is ENDED:  # released by another thread in the meantime
            raise hold.not_held_error()

    try:
        found, asked_at, _, outcome_unknown = yield from until_answered(
            lambda: step, hold.options, hold=hold, check=check
        )
    except StepFailed as failed:
        raise outage(failed, f"lock {hold.key!r}", hold.options.timeout) from failed.__cause__
    hold.answer(outcome_unknown)
    if found == DONE:
        return asked_at
    (reason,) = yield from loss_reasons([(hold, found)])
    if hold.lose(reason):
        yield from report_loss(hold)
    check((yield from clock()))
    raise hold.not_held_error()
