"""Cached values: of the callers that miss a value one computes it, and the others wait for the result.

Invariant. A value is stored only by the holder of the claim, which is given up in the same step. So at most one
computation counts at a time. A process that was replaced because it was silent cannot overwrite what its
successor stored; nor can a process whose key was invalidated since its computation began.

Atomic: each step in lua/cache. A look finds the value, claims the right to compute it, or registers its process for a
notification; nothing happens between a miss and a claim. It is idempotent by token, like an acquire, but a token claims
once: if the reply to a look is lost and a later look claims, this also disables the first look, which may still arrive.
Otherwise the first look could restore the claim after an invalidation, and a computation that began before the
invalidation could be stored.

The claim is a key with a token and a short ttl, as a lock is. The keeper renews it during the computation, and cleans
up if the caller leaves. No queue forms for it, because waiters want the value and not the claim. They are notified when
there is a value, a failure, or neither. Notifications are hints: waiters also ask again after half a second, or when
the claim ends. A process that crashes while it computes is replaced when its claim ends.

Within a process one caller asks for all (see singleflight.py).

Failures. Callers that wait when a computation fails share its failure; if each of them tried, that would be the same
stampede, only slower. Later callers try again, unless failures are remembered (``errors``).

Clocks. The server's clock alone decides until when a value is fresh. The cost of a value is a duration on our clock.
Early refresh is XFetch (Vattani, Chierichetti and Lowenstein, 2015): each caller may refresh a value before it expires.
The probability rises towards the expiry, and rises earlier for a costly value. The token is the source of randomness.

Why not a lock around a look-up? Each caller would get the lock only to find the value: n hand-overs, where one
notification is enough.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any, Final, NamedTuple
from zlib import crc32

from holdfast.errors import ComputeTimeout, InvalidConfig, Unavailable
from holdfast.options import LockOptions
from holdfast.protocol import mutex
from holdfast.protocol.cache.computation import Computation
from holdfast.protocol.cache.entry import ComputeFailure, Entry, Policy
from holdfast.protocol.cache.singleflight import Group, Outage, Participant, join_alone
from holdfast.protocol.effects import (
    STOPPED,
    Effects,
    Step,
    StepFailed,
    call,
    caller,
    clock,
    defer_cleanup,
    new_token,
    report,
    wait,
)
from holdfast.protocol.hold import Hold
from holdfast.protocol.replies import Abandoned, Claimed, Computing, Failed, Found
from holdfast.protocol.reporting import acquired_event
from holdfast.protocol.retry import Tries, begin_in_outage, outage, until_answered
from holdfast.protocol.wait.cohort import ObjectSlot
from holdfast.protocol.wait.contact import Probe
from holdfast.protocol.wait.waiting import REFRESH, Pause, WaitLoop, pause_for

_NEVER: Final = float("inf")


class Patience(NamedTuple):
    """When a caller began to wait, and when it gives up; the probe that it is, in an outage."""

    started: float
    until: float
    probe: Probe | None = None

    @property
    def last_try(self) -> float:
        """No new try after this. A caller that does not wait for a computation waits for an answer."""
        return self.until if self.until > self.started else _NEVER

    def for_an_answer(self, options: LockOptions) -> float:
        """Seconds without an answer after which it gives up. A computation may take longer, if the server answers."""
        return min(self.last_try - self.started, options.timeout)


def ask(group: Group, entry: Entry, policy: Policy) -> Effects[Computation]:
    """The value, loaded; or a failure; or the right to compute it. Waits while another caller computes it.

    A value that the serializer cannot load counts as missing: one caller computes it again.
    """
    now = yield from clock()
    patience = Patience(now, _NEVER if policy.options.wait is None else now + policy.options.wait)
    contact = group.driver.registry.contacts.of(entry.shared[0])
    if contact.lost_at is not None:
        probe = yield from begin_in_outage(group.driver, contact, policy.options, f"value {entry.key!r}", reads=True)
        patience = patience._replace(probe=probe)
    try:
        computation = yield from _ask(group, entry, policy, patience)
    finally:
        if patience.probe is not None:
            patience.probe.end()
            patience = patience._replace(probe=None)
    while computation.hold is None and not (yield from computation.load()):
        computation = yield from _ask(group, entry, policy, patience, computation.digest())
    return computation


def _ask(group: Group, entry: Entry, policy: Policy, patience: Patience, unreadable: str = "") -> Effects[Computation]:
    """Look once, as leader or as a follower of this process's leader; wait while another caller computes."""
    now = patience.started
    participant = Participant((yield from caller()), now, unreadable)
    computation: Computation | None = None
    try:
        if patience.probe is None:
            group.join(entry.shared[0], participant)
        else:  # an earlier caller may wait for the server for longer
            participant = join_alone(entry.shared[0], participant)
        while participant.answer is None:
            shared_call = participant.shared_call
            leader = shared_call.leader.setdefault(None, participant)
            if shared_call.completed:  # by a caller that was interrupted before it saw us
                group.join(entry.shared[0], participant)
            elif leader is participant:
                computation = yield from _look(group, entry, policy, participant, patience)
                return computation
            elif leader.left:
                group.complete(shared_call)
            elif leader.caller == participant.caller:
                problem = "its own computation asks for the same key, and would wait for itself"
                raise InvalidConfig(f"get_or_compute({entry.key!r})", problem)
            elif now >= patience.until:  # one look of its own before it gives up
                group.leave(participant)
                participant = join_alone(entry.shared[0], participant)
            elif participant.wakeup is None:
                participant.wakeup = group.driver.router.new_wakeup()  # then check again: an answer may have come
            else:
                now = yield from wait(participant.wakeup, min(patience.until, now + REFRESH))
            if isinstance(participant.answer, Outage) and _may_go_on(group, entry, policy, patience, now):
                group.leave(participant)
                participant = Participant(participant.caller, now, unreadable)
                group.join(entry.shared[0], participant)
        if isinstance(participant.answer, Outage):
            error = participant.answer.error
            raise copy(error) from error.__cause__  # a copy, because a traceback belongs to one thread
        return Computation(group, entry, policy, participant.answer)
    finally:
        if computation is None or computation._participant is None:
            group.leave(participant)


def _may_go_on(group: Group, entry: Entry, policy: Policy, patience: Patience, now: float) -> bool:
    """Whether that caller has not tried for long enough in the present outage, although its leader has."""
    contact, options = group.driver.registry.contacts.of(entry.shared[0]), policy.options
    ends: float = contact.gives_up_at(options, patience.started, patience.for_an_answer(options))
    return now < ends < _NEVER


class Search:
    """A look-up on the server, repeated until there is an answer."""

    def __init__(self, group: Group, entry: Entry, policy: Policy, leader: Participant, patience: Patience) -> None:
        self.served = 0  # participants with a lower number had joined before the last look was sent
        self.since_us = 0  # server's time when it began to wait for another caller's computation
        self._group = group
        self._entry = entry
        self._policy = policy
        self._leader = leader
        self._patience = patience

    def new_hold(self) -> Effects[Hold]:
        """A hold for the claim, with a fresh token: a token claims once."""
        hold = Hold(self._entry.claim, self._policy.options, ObjectSlot(self._group.driver.cohorts))
        hold.kind = "cache"
        patience = self._patience
        hold.began, hold.probe = patience.started, patience.probe
        hold.patience = patience.for_an_answer(hold.options)
        hold.token = yield from new_token(self._policy.options.label)
        return hold

    def look(self, waiter: WaitLoop, channel: str, now: float, timeout: float) -> Effects[Computation | Pause]:
        """Look once: a Computation, or how long to wait for another caller's computation."""
        reply = yield from self._send(waiter, channel, timeout)
        if type(reply) is Abandoned:  # this token had a claim, but its reply was lost: use a new token
            waiter.router.dismiss(waiter.hold)
            waiter.hold = waiter.tries.hold = yield from self.new_hold()
            reply = yield from self._send(waiter, channel, timeout)
        hold = waiter.hold
        match reply:
            case Claimed(now_us, stale):
                hold.grant(now_us, now)
                if (began := (yield from clock())) < hold.deadline:
                    return self._begin(hold, stale, began)
                hold.take_back()  # the claim may have ended by now: ask again
                raise _too_late()
            case Found(value):
                return (yield from self._end(hold, value, _NEVER))
            case Failed(why, ago_us):
                before = _NEVER if ago_us < 0 else now - ago_us / 1e6
                return (yield from self._end(hold, ComputeFailure.read(why), before))
            case Computing(left_ms, now_us):
                self.since_us = self.since_us or now_us
                return Pause(pause_for(hold.token, channel, waiter.attempt, left_ms))
        raise _too_late()  # a fresh token cannot be abandoned

    def _begin(self, hold: Hold, stale: bytes | None, now: float) -> Computation:
        """Begin to compute. Give a stale value, if there is one, to the other callers at once."""
        computation = Computation(self._group, self._entry, self._policy, stale)
        computation.begin(hold, self._leader if stale is None else None, now)
        if stale is not None:
            self._group.complete(self._leader.shared_call, stale, self.served)
        return computation

    def _end(self, hold: Hold, found: bytes | ComputeFailure, before: float) -> Effects[Computation]:
        self._group.complete(self._leader.shared_call, found, self.served, before)
        if hold.outcome_unknown:  # an earlier request may still arrive, and claim without a computation
            hold.end()
            yield from defer_cleanup(hold)
        return Computation(self._group, self._entry, self._policy, found)

    def _send(self, waiter: WaitLoop, channel: str, timeout: float) -> Effects[Any]:
        hold = waiter.hold
        outcome_unknown = hold.send()
        if channel:
            waiter.router.join_search(hold)
        self.served = self._leader.shared_call.next_number()
        early = self._policy.early
        args = (
            hold.token,
            str(hold.options.ttl_ms),
            f"{earliness(early, hold.token):.6f}" if early else "0",
            channel,
            str(self.since_us),
            str(mutex.TOMBSTONE_MS if outcome_unknown else 0),  # an earlier look with this token was not answered
            self._leader.unreadable,
        )
        try:
            step = Step("cache_look", (*self._entry.shared, hold.keys.tombstone(hold.token)), args)
            reply = yield from call(step, timeout)
        except StepFailed as failed:
            hold.answer(outcome_unknown or failed.sent)
            raise
        hold.answer(outcome_unknown)
        return reply


def _look(group: Group, entry: Entry, policy: Policy, leader: Participant, patience: Patience) -> Effects[Computation]:
    """Ask the server, until there is an answer for this shared call."""
    driver = group.driver
    options = policy.options
    search = Search(group, entry, policy, leader, patience)
    hold = yield from search.new_hold()
    now = yield from clock()
    tries = Tries(options, now, patience.last_try, jitter=hold.token, outage=options.timeout, hold=hold)
    waiter = WaitLoop("value", hold, driver.router, tries, patience.until, asks_last=True)
    try:
        computation: Computation | None = yield from waiter.run(search.look)
        if computation is None:
            raise ComputeTimeout(entry.name, (yield from clock()) - patience.started, key=entry.key)
        if computation.hold is not None and driver.registry.observed():
            yield from report(acquired_event(computation.hold, (yield from clock()) - patience.started))
        return computation
    except StepFailed as failed:
        waiter.hold.server_silent = failed.silent
        now = yield from clock()
        if waiter.was_cut_short(failed, now):
            yield from _clean_up(driver, waiter.hold)
            raise ComputeTimeout(entry.name, now - patience.started, key=entry.key) from None
        error = outage(failed, f"value {entry.key!r}", now - tries.failing_since)
        group.complete(leader.shared_call, Outage(error), search.served)
        yield from _clean_up(driver, waiter.hold)
        raise error from failed.__cause__
    except STOPPED:
        yield from _clean_up(driver, waiter.hold)
        raise
    finally:
        driver.router.dismiss(waiter.hold)


def _clean_up(driver: Any, hold: Hold) -> Effects[None]:
    if not mutex.is_settled(hold):
        driver.registry.leave(hold)
        yield from mutex.settle(hold)


def _too_late() -> StepFailed:
    why = {"the server": "its answer came after the claim had ended"}
    return StepFailed(Unavailable(why, "Check why the server is slow"), sent=True, retry=True)


def earliness(beta: float, token: str) -> float:
    """How early to refresh a value, in multiples of its cost: -beta * ln(u), with u from the token."""
    return -beta * math.log((crc32(token.encode()) + 1) / 2**32)


def forget(group: Group, entry: Entry, options: LockOptions) -> Effects[bool]:
    """Invalidate the value. Returns whether there was one. Later callers get no result of an earlier computation."""
    step = Step("cache_drop", entry.shared, ())
    try:
        found, *_ = yield from until_answered(lambda: step, options, jitter=entry.name)
    except StepFailed as failed:
        raise outage(failed, f"value {entry.key!r}", options.timeout) from failed.__cause__
    # Later callers must not wait for a computation whose result no longer counts.
    shared_call = group.calls.get(entry.shared[0])
    if shared_call is not None:
        group.close(shared_call)
    return bool(found)
