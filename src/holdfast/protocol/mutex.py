"""The fenced mutex: acquire, release, extend.

Invariant. A key on the server that holds a token is believed in by exactly one hold, or is about to be removed by its
holder, its keeper or its ttl. A hold that says ``held`` is before its local deadline, and that deadline lies before
the end of the key's ttl.

Atomic: each .lua step, and nothing else. Every step is idempotent by token, so after an unknown outcome it is simply
sent again. When the attempt is given up instead, an ``abandon`` takes the key away and leaves a tombstone, because
the request of unknown outcome may still be on its way and would otherwise arrive after its own abandon.

Waiting. A refused acquire has taken a place in the queue on the server, and shows that it lives by being sent again,
every half second, or when the holder's lease ends. Whoever releases writes the lock over to the first in the queue, for
one grace, and rings the bell of its process; the woken waiter starts at once, and the keeper claims the full ttl
behind it. Nobody else wakes up and no newcomer barges in. The first in the queue also has the key watched, for somebody
who knows of no queue may free it. Bells are hints: a waiter that hears none finds its token when it asks again.

Clocks. The deadline is counted from before the send, on our own clock, and is shorter than the ttl by the drift that
two clocks are allowed (1 % + 2 ms). Nothing on the wire carries a time of ours. That the server's clock does not jump
is assumed for mutual exclusion; the fence guards the resource when it does.

Why not plain SET NX PX, which is one round trip too? Its reply, once lost, leaves a key that its own resend mistakes
for another's; and it cannot bring a fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from holdfast.errors import (
    HoldfastError,
    InvalidConfig,
    LeaseLost,
    NotAcquired,
    OutcomeUnknown,
    ServerSilent,
    Unavailable,
    Unsupported,
)
from holdfast.lease import ENDED, HELD, TRYING, Hold, Terms
from holdfast.protocol.effects import (
    STOPPED,
    Effects,
    Step,
    StepFailed,
    call,
    clock,
    entrust,
    listen,
    tell,
    wait,
)

if TYPE_CHECKING:
    from holdfast.protocol.bells import Switchboard

__all__ = [
    "Kind",
    "abandon_step",
    "acquire",
    "extend",
    "insist",
    "is_hopeless",
    "is_settled",
    "release",
    "renew_step",
    "settle",
]

GRACE: Final = 0.25  # how long a caller who is leaving stays to see the clean-up confirmed; then the keeper takes over
SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip
TOMBSTONE_MS: Final = 60_000

GONE: Final = "its key expired or was deleted"
TAKEN: Final = "its key is now another holder's"

OF_ANOTHER_KIND: Final = -2  # what an acquire answers where the name is a rwlock, say

MUTE: Final = "-"  # the channel of a waiter whom no bell can reach
REFRESH: Final = 0.5  # how often a waiter shows that it lives; after a second without, it loses its place
WATCH_AFTER: Final = 0.05  # the first in the queue has the key watched if it must wait longer than this

_FIRST_PAUSE: Final = 0.004
_LONGEST_PAUSE: Final = 0.25
_LONGEST_POLL: Final = 0.1  # of a waiter in the queue whom no bell can reach


_LEAST_SAID: Final = 4  # of a refusal

_make: Final[Any] = tuple.__new__  # as in effects


class Refusal(NamedTuple):
    """Somebody else has that key, for so many ms (-1: nobody knows); and whether we are the first in its queue."""

    left_ms: int
    first: bool
    key: str


class Kind(Protocol):
    """Another kind of lock, which is acquired, kept and given back as the mutex is, by steps of its own.

    They answer as the mutex's do; but a grant may also be a list, [1, the fence, the slot]. Where that kind is not
    watched (``watches``), the loss of a key is found out by the next renewal.
    """

    watches: bool

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
    ttl, retention, fences, grace = hold.terms.said
    step: Step = _make(
        Step,
        ("acquire", (*keys.shared, keys.tombstone(token)), (token, ttl, retention, fences, channel, grace), watch),
    )
    return step


def release_step(hold: Hold) -> Step:
    if hold.kind is not None:
        return hold.kind.release_step(hold)
    step: Step = _make(Step, ("release", hold.keys.shared, (hold.token,), False))
    return step


def abandon_step(hold: Hold) -> Step:
    keys = hold.keys
    stands_ms = max(hold.terms.ttl_ms, TOMBSTONE_MS) if hold.doubtful else 0
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


def acquire(hold: Hold, until: float | None, board: Switchboard) -> Effects[bool]:
    """Try until that time (None: for ever); whether it was granted.

    If it was not, for whatever reason, something may be left on the server: see ``is_settled``.
    """
    started = asked_at = yield from clock()
    patient = until is None or until > started
    attempt = 0
    refusal: Refusal | None = None
    deaf = False  # we could not listen just now, and queue without a bell
    watches = hold.kind is None or hold.kind.watches
    try:
        while True:
            failure = None
            channel = board.enlist(hold) if patient else ""
            if deaf:
                channel = channel or MUTE
            watched = ""
            if watches and refusal is not None and refusal.first and channel not in ("", MUTE):
                watched = refusal.key
                board.watching[watched] = hold
            step = acquire_step(hold, channel, watch=watched != "")
            try:
                refusal = yield from _ask(hold, step, _call_timeout(hold, until, asked_at), asked_at)
            except StepFailed as failed:
                if not failed.retry:
                    raise _named(hold, failed.error) from failed.__cause__
                failure, refusal = failed, None
            now = yield from clock()
            if hold.phase is HELD:
                if now < hold.deadline:
                    return True
                # The reply came after the deadline: a grant worth nothing, whose key is there all the same.
                hold.phase, hold.doubtful = TRYING, True
            if failure is not None and failure.prompt and attempt == 0:
                pass  # only the connection was lost, most likely while it lay idle: try another, even if it is the last
            elif failure is not None and (error := _given_up(hold, failure, started, until, now)) is not None:
                raise error from failure.__cause__
            elif until is not None and now >= until:
                return False
            elif refusal is not None and not channel:
                deaf = not (yield from _arm(hold, board, until, now))
                now = yield from clock()  # and ask again: it may have been freed before we could hear that
            else:
                wakes_at = now + pause_for(hold, refusal, attempt, channel, watched if watches else None)
                now = yield from _sleep(hold, board, wakes_at if until is None else min(wakes_at, until))
                if hold.phase is HELD:
                    return True
                if refusal is not None and channel not in ("", MUTE) and until is not None and now >= until:
                    return False
            asked_at = now
            attempt += 1
    finally:
        failure = error = None  # which keep alive the frames that they went through, and this one is among them
        if board.waiting or board.watching:
            board.dismiss(hold)


def pause_for(hold: Hold, refusal: Refusal | None, attempt: int, channel: str, watched: str | None) -> float:
    """How long to wait for a bell before asking again, with that key watched (None: it never is)."""
    if refusal is None:
        return backoff(hold.token, attempt)
    pause = REFRESH
    if channel in ("", MUTE):
        pause = min(backoff(hold.token, attempt), _LONGEST_POLL)
    elif not refusal.first:
        return pause  # it is for the one before us to see when the lease ends
    elif watched is not None and watched != refusal.key:
        pause = WATCH_AFTER
    return min(pause, (refusal.left_ms + 1) / 1000) if refusal.left_ms >= 0 else pause


def _arm(hold: Hold, board: Switchboard, until: float | None, now: float) -> Effects[bool]:
    """Let bells be heard from now on; False if that cannot be had just now (the server may have no connection left)."""
    try:
        board.mute = not (yield from listen(_call_timeout(hold, until, now)))
    except StepFailed as failed:
        if failed.retry:
            return False
        board.mute = True  # the server is there, as we have just seen: what it minds is the listener
    return True


def _sleep(hold: Hold, board: Switchboard, until: float) -> Effects[float]:
    """Wait for the bell, until that time at most; what time it is then. The bell may have brought the lock."""
    if hold.bell is None:
        hold.bell = board.new_bell()
    now = (yield from wait(hold.bell, until)) if hold.word is None else (yield from clock())
    hold.bell.clear()
    word, hold.word = hold.word, None
    if word is not None and word.fence:
        if hold.rung(word, now):  # else it was long under way: ask if the lock is still there for us
            hold.queued = False
    elif word is not None and word.grace_ms:  # the moment of those who only poll
        now = yield from wait(None, min(until, now + word.grace_ms / 1000))
    return now


def _ask(hold: Hold, step: Step, timeout: float, asked_at: float) -> Effects[Refusal | None]:
    """One try: None if it was granted."""
    doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
    try:
        reply = yield from call(step, timeout)
    except StepFailed as failed:
        hold.doubtful = doubtful or failed.sent
        raise
    if not isinstance(reply, list):
        hold.queued = False
        hold.grant(int(reply), asked_at)
        hold.doubtful = doubtful
        return None
    if reply[0] == 1:
        hold.queued = False
        hold.slot = reply[2]
        hold.grant(int(reply[1]), asked_at)
        hold.doubtful = doubtful
        return None
    if reply[0] == OF_ANOTHER_KIND:
        hold.doubtful = doubtful
        raise Unsupported(
            f"lock {hold.name!r}: it is in use as a {reply[1].decode()}",
            "a name is one kind of lock at a time, so choose another name for this one",
        )
    if reply[0] != 0:
        raise NotAcquired(hold.name, "this attempt was given up before its request arrived")
    hold.asked = asked_at, reply[2]
    hold.shut_since = 0.0  # somebody else has it
    hold.queued = hold.queued or step.args[4] != ""
    hold.doubtful = doubtful
    key = reply[4].decode() if len(reply) > _LEAST_SAID else hold.keys.main  # of several names, that one
    return Refusal(reply[1], reply[3] == 1, key)


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


def is_hopeless(failed: StepFailed, terms: Terms, started: float, now: float) -> bool:
    """Whether it has been tried for long enough with a server that nobody here has ever heard.

    A wait without end is meant for a server that will come back. One that takes a connection and says nothing from the
    very first (a wrong port, a proxy with nothing behind it) is for the caller to know of.
    """
    return not failed.met and now >= started + terms.timeout * 0.99


def _named(hold: Hold, error: HoldfastError) -> HoldfastError:
    """An engine knows of keys; whose lock it is about is known here."""
    return Unsupported(f"lock {hold.name!r}: {error.what}", error.advice) if isinstance(error, Unsupported) else error


def _given_up(hold: Hold, failed: StepFailed, started: float, until: float | None, now: float) -> HoldfastError | None:
    """What to raise after a failed try, if there is to be no other."""
    over = until is not None and now >= until
    if not over and not is_hopeless(failed, hold.terms, started, now):
        return None
    hold.unheard = failed.silent
    error = failed.error
    if over and isinstance(error, Unavailable):
        return ServerSilent(hold.name, now - started, error.causes, error.advice)
    return error


def settle(hold: Hold) -> Effects[None]:
    """See to it that nothing of this hold stays on the server: now if that is quick, else let the keeper do it."""
    hold.phase = ENDED
    buried = 0
    try:
        if not hold.unheard:  # else this would be, as well, and the caller's patience is over
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
    lost = ""
    try:
        lost = hold.why_lost(now)
        hold.phase = ENDED
        freed, certain = yield from _free(hold, now)
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


def _free(hold: Hold, now: float) -> Effects[tuple[int, bool]]:
    """What became of the key (1 freed, 0 gone, -1 another's), and whether that is for certain the first word on it."""
    # Once it has ended by itself there is nothing more to wait for; the keeper sees to the rest.
    until = min(now + hold.terms.timeout, hold.gone_by())
    resent = False
    attempt = 0
    # The first try ends early enough for a second to come before the lease ends, which may still be in its grace.
    timeout = min(hold.terms.resend_after, max(SHORTEST_CALL, (hold.lasts - now) / 3))
    while True:
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
            timeout = max(SHORTEST_CALL, min(hold.terms.resend_after, until - now))


def _unreleased(hold: Hold, failed: StepFailed, sent: bool, now: float) -> HoldfastError:
    if not sent:
        return failed.error
    left = hold.gone_by() - now
    ends = f"ends by itself in about {left:.2g} s at the latest" if left > 0 else "has ended by itself meanwhile"
    return OutcomeUnknown(hold.name, "a release", f"it goes on in the background, and the lease {ends}")


def extend(hold: Hold, seconds: float) -> Effects[None]:
    """Make it last at least that long from now. It never gets shorter."""
    now = yield from clock()
    if now + seconds > hold.ends and not hold.why_lost(now):
        left = max(0.0, hold.ends - now)
        raise InvalidConfig(
            f"extend({seconds:g})",
            f"max_hold={hold.terms.max_hold:g} leaves {hold.name!r} only {left:.3g} s more",
        )
    hold.ask_to_prolong(seconds, now + hold.terms.timeout)
    asked_at = yield from insist(hold, renew_step(hold, seconds))
    hold.prolong(seconds, asked_at)
    hold.claimed = True


def insist(hold: Hold, step: Step) -> Effects[float]:
    """Let the holder take that step, again and again until it was answered; when the request was sent that was.

    It says 1 if the hold is still there, else the hold is lost.
    """
    started = now = yield from clock()
    attempt = 0
    while True:
        if reason := hold.why_lost(now):
            raise LeaseLost(hold.name, hold.fence, reason)
        if hold.phase is ENDED:  # released by somebody else in the meantime
            raise hold.ended()
        try:
            was_doubtful, hold.doubtful = hold.doubtful, True
            found = yield from call(step, hold.terms.resend_after)
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
        if found == 1:
            return now
        if hold.lose(GONE if found == 0 else TAKEN):
            yield from tell(hold)
        now = yield from clock()
