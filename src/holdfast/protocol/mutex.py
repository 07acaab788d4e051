"""The fenced mutex: acquire, release, extend.

Invariant. A key on the server that holds a token is believed in by exactly one hold, or is about to be removed by its
holder, its keeper or its ttl. A hold that says ``held`` is before its local deadline, and that deadline lies before
the end of the key's ttl.

Atomic: each .lua step, and nothing else. Every step is idempotent by token, so after an unknown outcome it is simply
sent again. When the attempt is given up instead, an ``abandon`` takes the key away and leaves a tombstone, because
the request of unknown outcome may still be on its way and would otherwise arrive after its own abandon.

Clocks. The deadline is counted from before the send, on our own clock, and is shorter than the ttl by the drift that
two clocks are allowed (1 % + 2 ms). Nothing on the wire carries a time of ours. That the server's clock does not jump
is assumed for mutual exclusion; the fence guards the resource when it does.

Why not plain SET NX PX, which is one round trip too? Its reply, once lost, leaves a key that its own resend mistakes
for another's; and it cannot bring a fence.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import (
    HoldfastError,
    InvalidConfig,
    LeaseLost,
    NotAcquired,
    NotHeld,
    OutcomeUnknown,
    ServerSilent,
    Unavailable,
    Unsupported,
)
from holdfast.lease import ENDED, HELD, TRYING, Hold, drift
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, call, clock, entrust, tell, wait

__all__ = ["abandon_step", "acquire", "extend", "release", "renew_step", "settle"]

GRACE: Final = 0.25  # how long a caller who is leaving stays to see the clean-up confirmed; then the keeper takes over
SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip
TOMBSTONE_MS: Final = 60_000

GONE: Final = "its key expired or was deleted"
TAKEN: Final = "its key is now another holder's"

_FIRST_PAUSE: Final = 0.004
_LONGEST_PAUSE: Final = 0.25


def acquire_step(hold: Hold) -> Step:
    keys, terms, token = hold.keys, hold.terms, hold.token
    stone = keys.tombstone(token)
    return Step("acquire", (keys.main, keys.fence, stone), (token, terms.ttl_ms, terms.fence_retention_ms))


def release_step(hold: Hold) -> Step:
    return Step("release", (hold.keys.main,), (hold.token,))


def abandon_step(hold: Hold) -> Step:
    stands_ms = max(hold.terms.ttl_ms, TOMBSTONE_MS)
    return Step("abandon", (hold.keys.main, hold.keys.tombstone(hold.token)), (hold.token, stands_ms))


def renew_step(hold: Hold, ttl: float) -> Step:
    return Step("renew", (hold.keys.main,), (hold.token, max(1, round(ttl * 1000))))


def acquire(hold: Hold, until: float | None) -> Effects[bool]:
    """Try until that time (None: for ever); whether it was granted. Whatever else happens, no key is left behind."""
    try:
        granted = yield from _try_until(hold, until)
    except STOPPED:
        if hold.doubtful or hold.phase is HELD:
            yield from settle(hold)
        raise
    if not granted and hold.doubtful:
        yield from settle(hold)
    return granted


def _try_until(hold: Hold, until: float | None) -> Effects[bool]:
    step = acquire_step(hold)
    started = asked_at = yield from clock()
    attempt = 0
    while True:
        failure = None
        left_ms = -1
        try:
            left_ms = yield from _ask(hold, step, _call_timeout(hold, until, asked_at), asked_at)
        except StepFailed as failed:
            if not failed.retry:
                raise _named(hold, failed.error) from failed.__cause__
            failure = failed
        now = yield from clock()
        if hold.phase is HELD:
            if now < hold.deadline:
                return True
            # The reply came after the deadline: a grant worth nothing, whose key is there all the same.
            hold.phase, hold.doubtful = TRYING, True
        if failure is not None and failure.prompt and attempt == 0:
            pass  # only the connection was lost, most likely while it lay idle: another is worth a try, even the last
        elif until is not None and now >= until:
            if failure is None:
                return False
            raise _silent(hold, now - started, failure.error) from failure.__cause__
        else:
            pause = backoff(hold.token, attempt)
            if left_ms >= 0:
                pause = min(pause, (left_ms + 1) / 1000)
            yield from wait(None, now + pause if until is None else min(now + pause, until))
            now = yield from clock()
        asked_at = now
        attempt += 1


def _ask(hold: Hold, step: Step, timeout: float, asked_at: float) -> Effects[int]:
    """One try. It ends with a grant, or with how long the holder has left in ms (-1: that is not known)."""
    doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
    try:
        reply = yield from call(step, timeout)
    except StepFailed as failed:
        hold.doubtful = doubtful or failed.sent
        raise
    left_ms = -1
    if not isinstance(reply, list):
        hold.grant(int(reply), asked_at)
    elif reply[0] == 0:
        left_ms = reply[1]
    else:
        raise NotAcquired(hold.name, "this attempt was given up before its request arrived")
    hold.doubtful = doubtful
    return left_ms


def _call_timeout(hold: Hold, until: float | None, now: float) -> float:
    timeout = hold.terms.call_timeout
    if until is not None and until > now:
        timeout = min(timeout, until - now)
    return max(timeout, SHORTEST_CALL)


def backoff(token: str, attempt: int) -> float:
    """How long to pause between tries: doubling, and jittered by the token, which is random enough for that."""
    longest = min(_FIRST_PAUSE * 2.0 ** min(attempt, 10), _LONGEST_PAUSE)
    dice = ord(token[-1 - attempt % min(len(token), 16)]) % 16 if token else 0
    return longest * (0.5 + dice / 32)


def _named(hold: Hold, error: HoldfastError) -> HoldfastError:
    """An engine knows of keys; whose lock it is about is known here."""
    return Unsupported(f"lock {hold.name!r}: {error.what}", error.advice) if isinstance(error, Unsupported) else error


def _silent(hold: Hold, waited: float, error: HoldfastError) -> HoldfastError:
    if isinstance(error, Unavailable):
        return ServerSilent(hold.name, waited, error.causes, error.advice)
    return error


def settle(hold: Hold) -> Effects[None]:
    """See to it that nothing of this hold stays on the server: now if that is quick, else let the keeper do it."""
    hold.phase = ENDED
    hold.doubtful = True
    try:
        _, buried = yield from call(abandon_step(hold), GRACE, shielded=True)
    except StepFailed:
        buried = 0
    except STOPPED:  # interrupted once more; nobody else knows of this token, so the keeper must
        yield from entrust(hold)
        raise
    if not buried:
        yield from entrust(hold)


def release(hold: Hold) -> Effects[None]:
    """Give it back. The hold is over whatever comes of it; LeaseLost if it was over before."""
    lost = ""
    try:
        now = yield from clock()
        lost = hold.why_lost(now)
        hold.phase = ENDED
        freed, certain = yield from _free_until(hold, now + hold.terms.timeout)
    except HoldfastError:
        if not lost:
            raise
    except STOPPED:
        yield from settle(hold)
        raise
    if lost:
        raise LeaseLost(hold.name, hold.fence, lost)
    if freed == 1:
        return
    if certain:
        raise LeaseLost(hold.name, hold.fence, GONE if freed == 0 else TAKEN)
    now = yield from clock()
    if now >= hold.deadline:
        raise OutcomeUnknown(
            hold.name,
            "a release",
            "the key is gone now, but the lease may have ended before; let what it guards check the fence",
        )
    # Before the deadline nobody else can have had the key, so it was our own earlier release that took it away.


def _free_until(hold: Hold, until: float) -> Effects[tuple[int, bool]]:
    """What became of the key (1 freed, 0 gone, -1 another's), and whether that is for certain the first word on it."""
    resent = False
    attempt = 0
    while True:
        timeout = hold.terms.resend_after
        try:
            if hold.doubtful:
                freed, buried = yield from call(abandon_step(hold), timeout, shielded=True)
                if not buried:
                    yield from entrust(hold)
            else:
                freed = yield from call(release_step(hold), timeout, shielded=True)
            return freed, not resent
        except StepFailed as failed:
            resent = resent or failed.sent
            hold.doubtful = hold.doubtful or failed.sent
            now = yield from clock()
            if not failed.retry or now >= until:
                yield from entrust(hold)
                raise _unreleased(hold, failed, resent, now) from failed.__cause__
            if attempt:
                yield from wait(None, min(now + backoff(hold.token, attempt), until))
            attempt += 1


def _unreleased(hold: Hold, failed: StepFailed, sent: bool, now: float) -> HoldfastError:
    if not sent:
        return failed.error
    left = max(0.0, hold.deadline - now) + drift(hold.terms.ttl)
    advice = f"it goes on in the background, and the lease ends by itself in about {left:.2g} s at the latest"
    return OutcomeUnknown(hold.name, "a release", advice)


def extend(hold: Hold, seconds: float) -> Effects[None]:
    """Make it last at least that long from now. It never gets shorter."""
    started = now = yield from clock()
    if now + seconds > hold.ends and not hold.why_lost(now):
        left = max(0.0, hold.ends - now)
        raise InvalidConfig(
            f"extend({seconds:g})",
            f"max_hold={hold.terms.max_hold:g} leaves {hold.name!r} only {left:.3g} s more",
        )
    attempt = 0
    while True:
        if reason := hold.why_lost(now):
            raise LeaseLost(hold.name, hold.fence, reason)
        if hold.phase is ENDED:  # released by somebody else in the meantime
            raise NotHeld(hold.name)
        try:
            was_doubtful, hold.doubtful = hold.doubtful, True
            renewed = yield from call(renew_step(hold, seconds), hold.terms.resend_after)
        except StepFailed as failed:
            hold.doubtful = was_doubtful or failed.sent
            attempt += 1
            if not failed.retry or (yield from clock()) >= started + hold.terms.timeout:
                raise failed.error from failed.__cause__
            if attempt > 1:
                yield from wait(None, (yield from clock()) + backoff(hold.token, attempt))
            now = yield from clock()
            continue
        hold.doubtful = was_doubtful
        if renewed == 1:
            hold.prolong(seconds, now)
            return
        if hold.lose(GONE if renewed == 0 else TAKEN):
            yield from tell(hold)
        now = yield from clock()
