"""The fenced mutex: acquire, release, extend.

Invariant. A key on the server that holds a token is believed in by exactly one hold, or is about to be removed by its
holder, its keeper or its ttl. A hold that says ``held`` is before its local deadline, and that deadline lies before
the end of the key's ttl.

Atomic: each .lua step, and nothing else. Every step is idempotent by token, so after an unknown outcome it is simply
sent again. When the attempt is given up instead, an ``abandon`` takes the key away and leaves a tombstone, because
the request of unknown outcome may still be on its way and would otherwise arrive after its own abandon.

Waiting. A refused acquire has taken a place in the queue on the server, and shows that its waiter is alive by being
sent again, every half second, or when the holder's lease ends. A release grants the lock to the next waiter, for its
whole ttl, and notifies the process of that waiter, which starts at once; no other waiter wakes up and no newcomer
barges in. A waiter that cannot be notified gets a short reservation, which its own next acquire makes a grant. The
first in the queue also has the key watched, because a client that knows of no queue may free it. Notifications are
hints: a waiter that receives none finds its token in the key when it asks again.

Clocks. The deadline is counted from before the send, on our own clock, and is shorter than the ttl by the drift that
two clocks are allowed (1 % + 2 ms); see ``Hold.rung`` for a grant by notification. Nothing on the wire carries a time
of ours. That the server's clock does not jump is assumed for mutual exclusion; the fence guards the resource when it
does.

Why not plain SET NX PX, which is one round trip too? Its reply, once lost, leaves a key that its own resend mistakes
for another's; and it cannot bring a fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.errors import (
    HoldfastError,
    InvalidConfig,
    LeaseLost,
    NotAcquired,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
    rounded,
)
from holdfast.holder import is_foreign
from holdfast.lease import ENDED, TRYING, Hold
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, attend, call, caller, clock, entrust, tell
from holdfast.protocol.presence import rest_of
from holdfast.protocol.replies import FREED, GONE, TAKEN, Abandoned, Cleaned, Granted, Refused, WrongKind
from holdfast.protocol.retry import Tries, first_timeout, outage, until_answered
from holdfast.protocol.waiting import MUTE, REFRESH, Pause, Waiter, pause_for

if TYPE_CHECKING:
    from holdfast.protocol.bells import Switchboard

__all__ = [
    "LOST_BY",
    "Kind",
    "abandon_step",
    "acquire",
    "extend",
    "insist",
    "is_settled",
    "release",
    "renew_step",
    "settle",
]

GRACE: Final = 0.25  # how long a caller who is leaving stays to see the clean-up confirmed; then the keeper takes over
TOMBSTONE_MS: Final = 60_000

LOST_BY: Final = {GONE: "its key expired or was deleted", TAKEN: "its key is now another holder's"}

WATCH_AFTER: Final = 0.05  # the first in the queue has the key watched if it must wait longer than this

_TOO_SLOW: Final = "Give a longer ttl, or look why the server is that slow"

_make: Final[Any] = tuple.__new__  # as in effects


class Kind(Protocol):
    """Another kind of lock, which is acquired, kept and given back as the mutex is, by steps of its own.

    They answer as the mutex's do (see replies.py). Where that kind is not watched (``watches``), the loss of a key is
    found out by the next renewal. Where it is ``attended``, the keeper can show the presence of its waiters.
    """

    watches: bool
    attended: bool  # the present step knows its queue

    def acquire_step(self, hold: Any, channel: str, watch: bool) -> Step: ...
    def release_step(self, hold: Any) -> Step: ...
    def abandon_step(self, hold: Any, stands_ms: int) -> Step: ...
    def renew_step(self, hold: Any, ttl_ms: int, watch: bool) -> Step: ...
    def hand_over_step(self, hold: Any, stands_ms: int) -> Step: ...
    def adopt_step(self, hold: Any, giver: str) -> Step: ...


def acquire_step(hold: Hold, channel: str = "", *, watch: bool = False) -> Step:
    """Take it, or (unless the channel is empty) a place in its queue."""
    if hold.kind is not None:
        return hold.kind.acquire_step(hold, channel, watch)
    keys, token = hold.keys, hold.token
    ttl, retention, fences = hold.terms.said
    step: Step = _make(
        Step,
        (
            "acquire",
            (*keys.shared, keys.tombstone(token)),
            (token, ttl, retention, fences, channel, hold.nested),
            watch,
        ),
    )
    return step


def release_step(hold: Hold) -> Step:
    if hold.kind is not None:
        return hold.kind.release_step(hold)
    step: Step = _make(Step, ("release", hold.keys.shared, (hold.token,), False))
    return step


def abandon_step(hold: Hold, *, tombstone: bool = False) -> Step:
    """``tombstone``: a request of it may be on its way, whatever its own thread or task knows."""
    keys = hold.keys
    stands_ms = max(hold.terms.ttl_ms, TOMBSTONE_MS) if hold.doubtful or tombstone else 0
    if hold.kind is not None:
        return hold.kind.abandon_step(hold, stands_ms)
    return Step("abandon", (*keys.shared, keys.tombstone(hold.token)), (hold.token, str(stands_ms)))


def renew_step(hold: Hold, ttl: float, *, watch: bool = False) -> Step:
    ttl_ms = max(1, round(ttl * 1000))
    if hold.kind is not None:
        return hold.kind.renew_step(hold, ttl_ms, watch and hold.kind.watches)
    return Step("renew", (hold.keys.main,), (hold.token, str(ttl_ms)), watch)


def is_settled(hold: Hold) -> bool:
    """Whether nothing of it can be on the server: no key, no place in the queue, no request on its way there."""
    return not (hold.fence or hold.queued or hold.doubtful)


def acquire(hold: Hold, now: float, until: float, answer_by: float, board: Switchboard) -> Effects[bool]:
    """Try from now until that time, and for the first answer until the other; whether it was granted.

    False: the last step was refused (``hold.outcome`` says by whom). If the last step was not answered, Unavailable is
    raised. If it was not granted, something may be left on the server: see ``is_settled``.
    """
    patient = until > now
    channel = ""
    asks, started = board.asks, now
    found: bool | Pause | StepFailed
    try:
        try:
            if patient:
                if asks.is_full():
                    now = yield from asks.wait_for_turn(hold, until)
                    if now >= until:
                        raise asks.too_busy(now - started)
                if board.holds_any():
                    hold.nested = board.held_by((yield from caller()))
                asks.begin(hold)
                channel = board.enlist(hold)
            # Most locks are free, so nothing is prepared for waiting before this (``make bench``: uncontended).
            found = yield from _ask(hold, board, channel, now, first_timeout(hold.terms, answer_by - now), 0, patient)
            if found is True:
                return True
        except StepFailed as failed:
            found = failed
        finally:
            asks.end(hold)
        tries = Tries(hold.terms, now, answer_by, jitter=hold.token)
        waiter = Waiter("lock", hold, board, tries, until)

        def ask(waiter: Waiter, channel: str, now: float, timeout: float) -> Effects[bool | Pause]:
            return _ask(hold, board, channel, now, timeout, waiter.attempt, patient)

        return bool((yield from waiter.run(ask, found, channel)))
    except StepFailed as failed:
        hold.unheard = failed.silent
        raise outage(failed, f"lock {hold.name!r}", (yield from clock()) - started) from failed.__cause__
    finally:
        found = False  # which may be an error, and keep alive the frames that it went through
        if board.waiting or board.watching:
            hold.crowded = board.is_crowded()
            board.dismiss(hold)


def _ask(  # noqa: PLR0917 (a dictionary of keywords would cost as much as half of the rest)
    hold: Hold, board: Switchboard, channel: str, now: float, timeout: float, attempt: int, patient: bool
) -> Effects[bool | Pause]:
    """Send the acquire step once: True if it was granted."""
    before = hold.outcome
    watches = hold.kind is None or hold.kind.watches
    watched = ""
    if (
        watches
        and type(before) is Refused
        and before.first
        and channel not in ("", MUTE)
        and not _is_crowded(hold, board)
    ):
        watched = before.key or hold.keys.main
        board.watching[watched] = hold
    doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
    try:
        reply = yield from call(acquire_step(hold, channel, watch=watched != ""), timeout)
    except StepFailed as failed:
        hold.doubtful = doubtful or failed.sent
        hold.outcome = failed.error
        raise
    if type(reply) is Granted:
        hold.queued = False
        hold.slot = reply.slot
        hold.grant(reply.fence, now)
        hold.doubtful = doubtful
        if (yield from clock()) < hold.deadline:
            return True
        # The reply came after the deadline: a grant worth nothing, whose key is there all the same.
        hold.phase, hold.doubtful = TRYING, True
        error = Unavailable({"the server": "its answer came after the ttl"}, _TOO_SLOW)
        raise StepFailed(error, sent=True, retry=patient)
    if type(reply) is Abandoned:
        raise NotAcquired(hold.name, "this attempt was given up before its request arrived")
    hold.doubtful = doubtful
    if type(reply) is WrongKind:
        raise Unsupported(
            f"lock {hold.name!r}: {repr(hold.name_of(reply.key)) if reply.key else 'it'} is in use as a {reply.kind}",
            "a name is one kind of lock at a time, so choose another name for this one",
        )
    hold.outcome = reply
    hold.asked = now, reply.now_us
    hold.shut_since = 0.0  # another process has it
    if reply.holder and is_foreign(reply.holder):
        hold.polled_at = now
    hold.queued = hold.queued or channel != ""
    if channel in ("", MUTE):
        pause = pause_for(hold.token, channel, attempt, reply.left_ms)
    elif (crowded := _is_crowded(hold, board)) and not (
        reply.first and (hold.kind is not None or 0 <= reply.left_ms < 2000 * REFRESH)
    ):
        pause = rest_of(hold)
        yield from attend(hold)
    elif not reply.first:
        pause = REFRESH  # the first in the queue sees when the lease ends
    else:
        pause = pause_for(hold.token, channel, attempt, reply.left_ms)
        if watches and not crowded and watched != (reply.key or hold.keys.main):
            pause = 0.0 if hold.kind is None and _is_polled(reply) else min(pause, WATCH_AFTER)
    return Pause(min(pause, hold.ask_within))


def _is_crowded(hold: Hold, board: Switchboard) -> bool:
    """Whether the keeper speaks for this waiter: then the key is not watched for it."""
    return board.is_crowded() and (hold.kind is None or hold.kind.attended)


def _is_polled(refused: Refused) -> bool:
    """Whether a client of another library has the lock, or a long yield window is open for one: watch it at once."""
    return is_foreign(refused.holder) if refused.holder else refused.left_ms > WATCH_AFTER * 1000


def settle(hold: Hold) -> Effects[None]:
    """See to it that nothing of this hold stays on the server: now if that is quick, else let the keeper do it."""
    hold.phase = ENDED
    buried = 0
    try:
        # A silent server would be silent again; and of very many waiters that give up together, each returns first.
        if not hold.unheard and not hold.crowded:
            _, buried = yield from call(abandon_step(hold), GRACE, shielded=True)
        if not buried:
            yield from entrust(hold)
    except StepFailed:
        yield from entrust(hold)
    except STOPPED:  # interrupted once more; nobody else knows of this token, so the keeper must
        yield from entrust(hold)
        raise


def release(hold: Hold, now: float) -> Effects[None]:
    """Give it back. The hold is over whatever comes of it; LeaseLost if it was over before."""

    def step() -> Step:
        return abandon_step(hold) if hold.doubtful else release_step(hold)

    lost = ""
    try:
        lost = hold.why_lost(now)
        hold.phase = ENDED
        # Once the lease has ended by itself there is nothing to wait for; the keeper sees to the rest.
        freed, _, resent, _ = yield from until_answered(
            step, hold.terms, now=now, until=hold.gone_by(), hold=hold, shielded=True
        )
        if type(freed) is Cleaned:
            freed, buried = freed
            if not buried:
                yield from entrust(hold)
    except StepFailed as failed:
        yield from entrust(hold)
        if not lost:
            raise _unreleased(hold, failed, failed.sent, (yield from clock())) from failed.__cause__
    except STOPPED:
        yield from settle(hold)
        raise
    if not lost and freed == FREED:
        return
    if lost or not resent:  # else an earlier try of ours may have freed it
        hold.reason = lost or LOST_BY[freed]
        raise LeaseLost(hold.name, hold.fence, hold.reason)
    now = yield from clock()
    if now >= hold.deadline:
        raise OutcomeUnknown(
            hold.name,
            "a release",
            "the key is gone now, but the lease may have ended before; let what it guards check the fence",
        )
    # Before the deadline nobody else can have had the key, so it was our own earlier release that took it away.


def _unreleased(hold: Hold, failed: StepFailed, sent: bool, now: float) -> HoldfastError:
    if not sent:
        return failed.error
    left = hold.gone_by() - now
    ends = f"ends by itself in about {rounded(left)} s at the latest" if left > 0 else "has ended by itself meanwhile"
    return OutcomeUnknown(hold.name, "a release", f"it goes on in the background, and the lease {ends}")


def extend(hold: Hold, seconds: float) -> Effects[None]:
    """Make it last at least that long from now. It never gets shorter."""
    now = yield from clock()
    if now + seconds > hold.ends and not hold.why_lost(now):
        left = max(0.0, hold.ends - now)
        raise InvalidConfig(
            f"extend({rounded(seconds)})",
            f"max_hold={rounded(hold.terms.max_hold or 0.0)} leaves {hold.name!r} only {rounded(left)} s more",
        )
    hold.ask_to_prolong(seconds, now + hold.terms.timeout)
    asked_at = yield from insist(hold, renew_step(hold, seconds))
    hold.prolong(seconds, asked_at)


def insist(hold: Hold, step: Step) -> Effects[float]:
    """Let the holder take that step, until it is answered; when the request was sent that brought the answer.

    LeaseLost if the hold is not there any more.
    """

    def check(now: float) -> None:
        if reason := hold.why_lost(now):
            raise LeaseLost(hold.name, hold.fence, reason)
        if hold.phase is ENDED:  # released by another thread in the meantime
            raise hold.ended()

    try:
        found, asked_at, _, hold.doubtful = yield from until_answered(lambda: step, hold.terms, hold=hold, check=check)
    except StepFailed as failed:
        raise outage(failed, f"lock {hold.name!r}", hold.terms.timeout) from failed.__cause__
    if found == FREED:
        return asked_at
    if hold.lose(LOST_BY[found]):
        yield from tell(hold)
    check((yield from clock()))
    raise hold.ended()
