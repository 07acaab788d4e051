"""Retries: how long one try may take, whether another try follows a failed one, and the loop that sends them.

Invariant. Only steps that are idempotent by token, or that change nothing, are sent again. Every series of tries has an
end (a deadline, or the end of the caller's wait), and a pause between two tries. The first try gets a third of the
time: if its request or reply is lost (a NAT that forgot the connection, a half-open peer), there is time left to send
it again. After a silence the engine takes a new connection.

Atomic: each try. If one try was sent and not answered, the outcome of the whole series is unknown (``sent``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from holdfast.errors import HoldfastError, Unavailable, Unsupported, rounded
from holdfast.options import LockOptions
from holdfast.protocol.effects import Command as PlainCommand
from holdfast.protocol.effects import Effects, Step, StepFailed, call, clock, defer_cleanup, new_token, wait
from holdfast.protocol.hold import Hold
from holdfast.protocol.wait.contact import SHORTEST_CALL, Contact, Probe
from holdfast.protocol.wait.failures import Failures

if TYPE_CHECKING:
    from holdfast.protocol.leases import Driver

_FIRST_PAUSE: Final = 0.004
_LONGEST_PAUSE: Final = 0.25
_NEVER: Final = float("inf")


# The reply; when its request was sent; whether an earlier try may have taken effect; and the value of
# ``hold.outcome_unknown`` once the caller has processed the reply.
Answer: TypeAlias = tuple[Any, float, bool, bool]


class Tries:
    """The tries at one request, or at a request that a waiter repeats until it is granted."""

    failures = 0  # in a row
    failing_since = 0.0
    sent = False  # one of the tries may have taken effect
    patient = True  # if False, a server that answers with an error is asked twice at most
    last: StepFailed | None = None  # the failure to report if no try follows, without its traceback
    _ever_answered = True  # the server has answered this client before

    def __init__(
        self,
        options: LockOptions,
        started: float,
        until: float = _NEVER,
        *,
        jitter: str = "",
        outage: float = _NEVER,
        hold: Hold | None = None,
    ) -> None:
        self.options = options
        self.started = started
        self.until = until  # no new try after this
        self.jitter = jitter
        self.hold = hold  # of the call that ends early in an outage, if it does
        self._outage = outage  # how long tries may fail in a row, in seconds
        self._asked_at = started

    def timeout(self, now: float) -> float:
        """How long a try that begins now may take."""
        options = self.options
        self._asked_at = now
        hold = self.hold
        least = SHORTEST_CALL if hold is None else hold.contact.least
        if hold is not None and hold.probe is not None:
            return max(least, hold.probe.ends - now)
        longest = options.call_timeout if self.failures else self.answer_time()
        if not self.failures and (hold is None or hold.contact.lost_at is None):
            return longest
        return max(least, min(longest, self.until - now, self._gives_up_at() - now))

    def answer_time(self) -> float:
        """How long the first try may take; a request that was under way for longer is overdue."""
        answer_time = first_timeout if self.hold is None else self.hold.contact.answer_time
        return answer_time(self.options, min(self.until - self.started, self._outage))

    def _gives_up_at(self) -> float:
        """When the tries end if none is answered; they also end with the caller's wait."""
        hold = self.hold
        if hold is not None and hold.probe is not None:
            return hold.probe.ends - hold.contact.least  # so that its last try ends in time
        outage = self._outage if self._ever_answered else min(self._outage, self.options.timeout)
        ends = (self.failing_since if self.failures else self._asked_at) + outage
        return ends if hold is None else hold.wait_ends(ends)

    def answered(self) -> None:
        self.failures = 0
        self.last = None
        if self.hold is not None:
            self.hold.probe = None

    def pause_after(self, failed: StepFailed, now: float) -> float | None:
        """How long to pause before the next try; None if no try follows: then raise ``final``."""
        self.sent = self.sent or failed.sent
        cut_short = failed.silent and self.until - self._asked_at < self.options.call_timeout
        if not cut_short or self.last is None or self.last.silent:  # else keep the error reply before, which says more
            self.last = failed.with_traceback(None)
        if not self.failures:
            self.failing_since = self._asked_at
        self.failures += 1
        self._ever_answered = failed.ever_answered
        if not failed.retry or (self.failures > 1 and not self.patient and not failed.silent):
            return None
        if failed.connection_broke and self.failures == 1:
            return 0.0  # the connection died while idle: try another one, even if the time is over
        ends = min(self.until, self._gives_up_at())
        if now >= ends or self._is_hopeless(failed, now):
            return None
        return min(backoff(self.jitter, self.failures), max(0.0, ends - now))

    def final(self) -> StepFailed:
        """The failure to raise. It is not kept here, because its traceback will refer to these tries: a cycle."""
        assert self.last is not None
        last, self.last = self.last, None
        last.sent = self.sent
        return last

    def _is_hopeless(self, failed: StepFailed, now: float) -> bool:
        """Whether the server has never answered this client, and the client's timeout is over.

        A wait without end is meant for a server that comes back. If a server accepts the connection but never answers,
        or is a replica, the caller needs an error.
        """
        return not failed.ever_answered and now >= self.failing_since + self.options.timeout * 0.99


def first_timeout(options: LockOptions, patience: float) -> float:
    """How long the first try may take: a third of the time, so that a lost request or reply can be sent again."""
    return max(SHORTEST_CALL, min(options.first_try, patience / 3))


def backoff(jitter: str, attempt: int) -> float:
    """How long to pause between tries: doubling, with jitter from a token, which is random."""
    longest = min(_FIRST_PAUSE * 2.0 ** min(attempt, 10), _LONGEST_PAUSE)
    dice = ord(jitter[-1 - attempt % min(len(jitter), 16)]) % 16 if jitter else 0
    return longest * (0.5 + dice / 32)


def until_answered(
    make_step: Callable[[], Step | PlainCommand],
    options: LockOptions,
    *,
    now: float | None = None,
    until: float = _NEVER,
    hold: Hold | None = None,
    jitter: str = "",
    shielded: bool = False,
    check: Callable[[float], None] | None = None,
    tries: Tries | None = None,
) -> Effects[Answer]:
    """The answer to a step, which is sent until it is answered. StepFailed after the client's timeout.

    ``hold``: the hold of this step; its outcome is unknown until the caller has processed the answer. ``check``: called
    before each try; raises to end the tries. ``tries``: of a call that ends early in an outage.
    ``StepFailed.sent``: whether any try may have taken effect.
    """
    if now is None:
        now = yield from clock()
    until = min(until, now + options.timeout)
    timeout = first_timeout(options, until - now) if tries is None else tries.timeout(now)
    while True:
        if check is not None:
            check(now)
        step = make_step()
        outcome_unknown = False
        if hold is not None:
            outcome_unknown = hold.send()
            hold.sent_at = now
        try:
            try:
                reply = yield from call(step, timeout, shielded=shielded)
            finally:
                if hold is not None:
                    hold.sent_at = None
        except StepFailed as failed:
            if hold is not None:
                hold.answer(outcome_unknown or failed.sent)
                hold.failures = Failures.add(hold.failures, now, failed)
            # Created on the first failure: most steps are answered.
            tries = tries or Tries(options, now, until, jitter=jitter or (hold.token if hold is not None else ""))
            now = yield from clock()
            pause = tries.pause_after(failed, now)
            if pause is None:
                raise tries.final()  # noqa: B904 (it has the cause that the engine gave it)
            if pause:
                now = yield from wait(None, now + pause)
            timeout = tries.timeout(now)
        else:
            if hold is not None:
                hold.failures = None
            return reply, now, tries is not None and tries.sent, outcome_unknown


def until_answered_or_outage(
    driver: Driver,
    hold: Hold,
    step: Step | PlainCommand,
    subject: str,
    *,
    reads: bool = False,
    shielded: bool = False,
) -> Effects[Any]:
    """The answer to a step that is sent for no holder. StepFailed after the client's timeout, or early in an outage.

    ``hold``: a new hold of that lock or latch, which is never granted. ``reads``: the step takes nothing.
    """
    options, contact = hold.options, hold.contact
    hold.began, hold.patience = driver.now(), options.timeout
    probe = None
    if contact.lost_at is not None:
        probe = yield from begin_in_outage(driver, contact, options, subject, reads=reads)
    hold.probe = probe
    try:
        now = yield from clock()
        tries = Tries(options, now, now + options.timeout, jitter=subject, hold=hold)
        reply, *_ = yield from until_answered(lambda: step, options, now=now, shielded=shielded, tries=tries)
        return reply
    except StepFailed:
        yield from let_keeper_ask(driver, hold)
        raise
    finally:
        if probe is not None:
            probe.end()


def ask_server(driver: Driver, hold: Hold, step: Step | PlainCommand, subject: str) -> Effects[Any]:
    """The answer to a step that changes nothing, on the lock of this new hold. Unavailable if there is none."""
    began = driver.now()
    try:
        return (yield from until_answered_or_outage(driver, hold, step, subject, reads=True))
    except StepFailed as failed:
        raise outage(failed, subject, driver.now() - began) from failed.__cause__


def begin_in_outage(
    driver: Driver, contact: Contact, options: LockOptions, subject: str, *, reads: bool = False
) -> Effects[Probe | None]:
    """A call with a bounded wait begins while contact is lost: Unavailable if that is long ago.

    ``reads``: it takes nothing. Returns a probe if the call is one; then it must end it.
    """
    try:
        return (yield from contact.admit(options, driver.router.new_wakeup, reads=reads))
    except StepFailed as failed:
        raise outage(failed, subject) from failed.__cause__


def let_keeper_ask(driver: Driver, hold: Hold) -> Effects[None]:
    """A call ends in an outage. If nobody asks the server any more, the keeper does, to find it when it is back.

    It buries the token of this new hold, which was never used: that is a write, as an acquire is.
    """
    registry, contact = driver.registry, hold.contact
    if contact.lost_at is None or not contact.had:
        return
    if any(cleanup.hold.contact is contact for cleanup in registry.pending_cleanups()):
        return
    hold.token = yield from new_token(hold.options.label)
    hold.outcome_unknown = True
    hold.end()
    yield from defer_cleanup(hold)


def outage(failed: StepFailed, subject: str, waited: float | None = None) -> HoldfastError:
    """The error of a failed step for the caller: with the lock's name, which the engine does not know.

    ``waited``: how long the caller has waited in total, if that is more than the last try.
    """
    error = failed.error
    if isinstance(error, Unsupported):
        return Unsupported(f"{subject}: {error.what}", error.advice)
    if type(error) is not Unavailable:
        return error
    causes = error.causes
    if failed.silent and waited is not None and waited >= SHORTEST_CALL:
        causes = dict.fromkeys(causes, f"it did not answer within {rounded(waited)} s")
    return Unavailable(causes, error.advice, subject)
