"""Trying again: how long one try may take, whether a failed try is followed by another, and the loop that does it.

Invariant. Only steps that count once however often they arrive are sent again: they are idempotent by token, or change
nothing. Every series of tries has an end (a time, or the caller's own patience), and a pause between two tries. The
first try gets a third of the time, so that a request or reply that was swallowed on the way (a NAT that forgot the
connection, a half-open peer) is sent again while there is time left; after a silence the engine takes a fresh
connection.

Atomic: each try. If one of them was sent without an answer, then the outcome of all of them is unknown (``sent``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from holdfast.errors import HoldfastError, Unavailable, Unsupported, rounded
from holdfast.lease import Hold, Terms
from holdfast.protocol.effects import Command as PlainCommand
from holdfast.protocol.effects import Effects, Step, StepFailed, call, clock, wait

__all__ = ["SHORTEST_CALL", "Answer", "Tries", "backoff", "first_timeout", "outage", "until_answered"]

SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip

_FIRST_PAUSE: Final = 0.004
_LONGEST_PAUSE: Final = 0.25
_NEVER: Final = float("inf")


# The reply; when the request was sent that brought it; whether an earlier try may have taken effect; and what
# ``hold.doubtful`` should be once the caller has taken note of the reply.
Answer: TypeAlias = tuple[Any, float, bool, bool]


class Tries:
    """The tries at one request, or at one that is repeated until something comes of it."""

    failures = 0  # in a row
    failing_since = 0.0
    sent = False  # one of the tries may have taken effect
    patient = True  # else a server that answers with an error is asked twice at most
    _met = True  # the server has answered this client before

    def __init__(
        self, terms: Terms, started: float, until: float = _NEVER, *, jitter: str = "", outage: float = _NEVER
    ) -> None:
        self.terms = terms
        self.started = started
        self.until = until  # no new try after this
        self.jitter = jitter
        self._outage = outage  # how long tries may fail in a row, in seconds
        self._asked_at = started

    def timeout(self, now: float) -> float:
        """How long the try may take that begins now."""
        terms = self.terms
        self._asked_at = now
        if not self.failures:
            return first_timeout(terms, self.until - self.started)
        outage = self._outage if self._met else min(self._outage, terms.timeout)
        return max(SHORTEST_CALL, min(terms.call_timeout, self.until - now, self.failing_since + outage - now))

    def answered(self) -> None:
        self.failures = 0

    def pause_after(self, failed: StepFailed, now: float) -> float | None:
        """How long to pause before the next try; None if there is none."""
        self.sent = self.sent or failed.sent
        if not self.failures:
            self.failing_since = self._asked_at
        self.failures += 1
        self._met = failed.met
        if not failed.retry or (self.failures > 1 and not self.patient and not failed.silent):
            return None
        if failed.prompt and self.failures == 1:
            return 0.0  # the connection had died while idle: try another one, even if the time is over
        if now >= min(self.until, self.failing_since + self._outage) or self._is_hopeless(failed, now):
            return None
        return min(backoff(self.jitter, self.failures), max(0.0, self.until - now))

    def _is_hopeless(self, failed: StepFailed, now: float) -> bool:
        """Whether a server that never answered this client has had the client's timeout.

        A wait without end is meant for a server that comes back. One that takes a connection and stays silent from the
        first, or is a replica, is something that the caller must know of.
        """
        return not failed.met and now >= self.failing_since + self.terms.timeout * 0.99


def first_timeout(terms: Terms, patience: float) -> float:
    """How long the first try may take: a third of the time, so that a swallowed message can be sent again."""
    return max(SHORTEST_CALL, min(terms.first_try, patience / 3))


def backoff(jitter: str, attempt: int) -> float:
    """How long to pause between tries: doubling, and jittered by a token, which is random enough for that."""
    longest = min(_FIRST_PAUSE * 2.0 ** min(attempt, 10), _LONGEST_PAUSE)
    dice = ord(jitter[-1 - attempt % min(len(jitter), 16)]) % 16 if jitter else 0
    return longest * (0.5 + dice / 32)


def until_answered(
    make_step: Callable[[], Step | PlainCommand],
    terms: Terms,
    *,
    now: float | None = None,
    until: float = _NEVER,
    hold: Hold | None = None,
    jitter: str = "",
    shielded: bool = False,
    check: Callable[[float], None] | None = None,
) -> Effects[Answer]:
    """Send a step until it is answered, for the client's timeout at most; else StepFailed.

    ``hold``: whose step it is; its outcome is unknown until the caller has taken note of the answer. ``check``: called
    before each try to raise what ends it. ``StepFailed.sent`` says whether any of the tries may have taken effect.
    """
    if now is None:
        now = yield from clock()
    until = min(until, now + terms.timeout)
    timeout = first_timeout(terms, until - now)
    tries: Tries | None = None  # made when it is needed: most steps are answered
    while True:
        if check is not None:
            check(now)
        step = make_step()
        doubtful = False
        if hold is not None:
            doubtful, hold.doubtful = hold.doubtful, True
        try:
            reply = yield from call(step, timeout, shielded=shielded)
        except StepFailed as failed:
            if hold is not None:
                hold.doubtful = doubtful or failed.sent
            tries = tries or Tries(terms, now, until, jitter=jitter or (hold.token if hold is not None else ""))
            now = yield from clock()
            pause = tries.pause_after(failed, now)
            if pause is None:
                failed.sent = tries.sent
                raise
            if pause:
                now = yield from wait(None, now + pause)
            timeout = tries.timeout(now)
        else:
            return reply, now, tries is not None and tries.sent, doubtful


def outage(failed: StepFailed, subject: str, waited: float | None = None) -> HoldfastError:
    """The error of a failed step, as the caller should see it: an engine knows keys, its caller knows the lock.

    ``waited``: how long the caller has waited in all, which is more than the last try took.
    """
    error = failed.error
    if isinstance(error, Unsupported):
        return Unsupported(f"{subject}: {error.what}", error.advice)
    if type(error) is not Unavailable:
        return error
    causes = error.causes
    if failed.silent and waited is not None:
        causes = dict.fromkeys(causes, f"it did not answer within {rounded(waited)} s")
    return Unavailable(causes, error.advice, subject)
