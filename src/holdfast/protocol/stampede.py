"""The cache storm: a value that many want is computed by one of them, and the others wait for the value.

Invariant. A value is stored only by whoever holds the claim at that moment, and the claim is given up in the same step.
So at most one computation counts at a time, a computer that fell silent and was replaced cannot overwrite what its
successor stored, and neither can one whose key was invalidated meanwhile: it began before that.

Atomic: each cache_*.lua step. A look finds the value, or claims the right to compute it, or enters its process among
those who are told; there is no moment between a miss and a claim. It is idempotent by token, like an acquire. But a
token claims once: if the reply to a look did not come, and a later one claims, that one also bars the way for the
first, which may still be on its way. Arriving after an invalidation it would bring the claim back to life, and the
computation that was begun before could be stored.

The claim is a key with a token and a short ttl, as a lock is, and so the keeper renews it while its holder computes,
and cleans up after a holder who has left. It is no lock: nobody queues for it, because nobody wants it for its own
sake. Whoever waits is told by a bell when there is a value, a failure, or nothing after all; and asks again after half
a second, or when the claim ends, for bells are hints. A crashed computer is replaced when its claim ends.

Within a process one asks for all (see flights.py).

Failures. Those who were waiting when a computation failed share its failure: to let each of them try in turn would be
the storm again, only slower. Who comes later tries anew, unless failures are to be remembered (``errors``).

Clocks. Until when a value is fresh is reckoned by the server's clock alone. What a value cost to compute is measured on
ours, a duration. Early refresh is XFetch (Vattani, Chierichetti and Lowenstein, 2015): each caller refreshes before
the time with a probability that rises as it comes near, and sooner for what takes long; its dice are in the token.

Why not a lock around a look-up? Everybody would get the lock in turn, only to find the value there: n hand-overs where
one bell will do.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any, Final, NamedTuple
from zlib import crc32

from holdfast.errors import ComputeTimeout, InvalidConfig, Unavailable
from holdfast.lease import ENDED, TRYING, Hold, Terms
from holdfast.protocol import mutex
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, call, caller, clock, entrust, new_token, wait
from holdfast.protocol.entries import Entry, Failure, Policy
from holdfast.protocol.flights import Desk, Outage, Seat, fly_alone
from holdfast.protocol.replies import Abandoned, Claimed, Computing, Failed, Found
from holdfast.protocol.retry import Tries, outage, until_answered
from holdfast.protocol.turns import Turn
from holdfast.protocol.waiting import REFRESH, Pause, Waiter, pause_for

__all__ = ["ask", "forget"]

_NEVER: Final = float("inf")


class Patience(NamedTuple):
    """Since when a caller waits, and until when it will."""

    started: float
    until: float


def ask(desk: Desk, entry: Entry, policy: Policy) -> Effects[Turn]:
    """The value, loaded; or a failure; or the right to compute it. Waits while another caller computes it.

    A value that the serializer cannot load counts as missing: one caller computes it anew.
    """
    now = yield from clock()
    patience = Patience(now, _NEVER if policy.terms.wait is None else now + policy.terms.wait)
    turn = yield from _ask(desk, entry, policy, patience)
    while turn.hold is None and not (yield from turn.load()):
        turn = yield from _ask(desk, entry, policy, patience, turn.digest())
    return turn


def _ask(desk: Desk, entry: Entry, policy: Policy, patience: Patience, unreadable: str = "") -> Effects[Turn]:
    """Look for the value, alone or together with others of this process; wait for it if somebody is computing it."""
    now = patience.started
    seat = Seat((yield from caller()), now, unreadable)
    turn: Turn | None = None
    try:
        desk.join(entry.shared[0], seat)
        while seat.answer is None:
            flight = seat.flight
            pilot = flight.pilot.setdefault(None, seat)
            if flight.over:  # whoever has ended it was interrupted before it saw us
                desk.join(entry.shared[0], seat)
            elif pilot is seat:
                turn = yield from _look(desk, entry, policy, seat, patience)
                return turn
            elif pilot.left:
                desk.land(flight)
            elif pilot.who == seat.who:
                raise InvalidConfig(
                    f"get_or_compute({entry.name!r})", "its own computation asks for it, and would wait for itself"
                )
            elif now >= patience.until:  # its patience is over, and it has one look of its own
                desk.leave(seat)
                seat = fly_alone(entry.shared[0], seat)
            elif seat.bell is None:
                seat.bell = desk.driver.board.new_bell()  # and see once more: it may have been just before
            else:
                now = yield from wait(seat.bell, min(patience.until, now + REFRESH))
        if isinstance(seat.answer, Outage):
            error = seat.answer.error
            raise copy(error) from error.__cause__  # each has its own, for a traceback belongs to one thread
        return Turn(desk, entry, policy, seat.answer)
    finally:
        if turn is None or turn._seat is None:
            desk.leave(seat)


class Search:
    """A look at the server, repeated until something comes of it."""

    def __init__(self, desk: Desk, entry: Entry, policy: Policy, seat: Seat) -> None:
        self.served = 0  # callers that came before the last look was sent: its answer is good for them
        self.since_us = 0  # since when it waits for another's computation, by the server's clock
        self._desk = desk
        self._entry = entry
        self._policy = policy
        self._seat = seat

    def new_hold(self) -> Effects[Hold]:
        """The claim, if there will be one. A token claims once."""
        gate = Gate()
        gate.cohorts = self._desk.driver.cohorts
        hold = Hold(self._entry.claim, self._policy.terms, gate)
        hold.token = yield from new_token(self._policy.terms.label)
        return hold

    def look(self, waiter: Waiter, channel: str, now: float, timeout: float) -> Effects[Turn | Pause]:
        """Look once: the Turn that came of it, or how long to wait for another's computation."""
        reply = yield from self._send(waiter, channel, timeout)
        if type(reply) is Abandoned:  # this token has had its claim, of which we never heard: try with another
            waiter.board.dismiss(waiter.hold)
            waiter.hold = yield from self.new_hold()
            reply = yield from self._send(waiter, channel, timeout)
        hold = waiter.hold
        match reply:
            case Claimed(now_us, stale):
                hold.grant(now_us, now)
                if (began := (yield from clock())) < hold.deadline:
                    return self._begin(hold, stale, began)
                hold.phase, hold.doubtful = TRYING, True  # the reply came too late to count on it: ask again
                raise _too_late()
            case Found(value):
                return (yield from self._end(hold, value, _NEVER))
            case Failed(why, ago_us):
                before = _NEVER if ago_us < 0 else now - ago_us / 1e6
                return (yield from self._end(hold, Failure.read(why), before))
            case Computing(left_ms, now_us):
                self.since_us = self.since_us or now_us
                return Pause(pause_for(hold.token, channel, waiter.attempt, left_ms))
        raise _too_late()  # a fresh token cannot have been given up

    def _begin(self, hold: Hold, stale: bytes | None, now: float) -> Turn:
        """It is ours to compute. If there is an old value, the others get that and need not wait for the new one."""
        turn = Turn(self._desk, self._entry, self._policy, stale)
        turn.begin(hold, self._seat if stale is None else None, now)
        if stale is not None:
            self._desk.land(self._seat.flight, stale, self.served)
        return turn

    def _end(self, hold: Hold, found: bytes | Failure, before: float) -> Effects[Turn]:
        self._desk.land(self._seat.flight, found, self.served, before)
        if hold.doubtful:  # an earlier request may still be on its way, and claim what nobody will compute
            hold.phase = ENDED
            yield from entrust(hold)
        return Turn(self._desk, self._entry, self._policy, found)

    def _send(self, waiter: Waiter, channel: str, timeout: float) -> Effects[Any]:
        hold = waiter.hold
        doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
        if channel:
            waiter.board.join_search(hold)
        self.served = self._seat.flight.number()
        early = self._policy.early
        args = (
            hold.token,
            str(hold.terms.ttl_ms),
            f"{earliness(early, hold.token):.6f}" if early else "0",
            channel,
            str(self.since_us),
            str(mutex.TOMBSTONE_MS if doubtful else 0),  # an earlier look with this token was not answered
            self._seat.unreadable,
        )
        try:
            step = Step("cache_look", (*self._entry.shared, hold.keys.tombstone(hold.token)), args)
            reply = yield from call(step, timeout)
        except StepFailed as failed:
            hold.doubtful = doubtful or failed.sent
            raise
        hold.doubtful = doubtful
        return reply


def _look(desk: Desk, entry: Entry, policy: Policy, seat: Seat, patience: Patience) -> Effects[Turn]:
    """Ask the server, until there is something for this flight."""
    driver = desk.driver
    terms = policy.terms
    search = Search(desk, entry, policy, seat)
    hold = yield from search.new_hold()
    # However long it waits for another's computation: tries that are not answered end after the client's timeout.
    until = patience.until if patience.until > patience.started else _NEVER
    tries = Tries(terms, (yield from clock()), until, jitter=hold.token, outage=terms.timeout)
    waiter = Waiter("value", hold, driver.board, tries, patience.until, asks_last=True)
    try:
        turn: Turn | None = yield from waiter.run(search.look)
        if turn is None:
            raise ComputeTimeout(entry.name, (yield from clock()) - patience.started)
        return turn
    except StepFailed as failed:
        waiter.hold.unheard = failed.silent
        error = outage(failed, f"value {entry.name!r}", (yield from clock()) - tries.failing_since)
        desk.land(seat.flight, Outage(error), search.served)
        yield from _clean_up(driver, waiter.hold)
        raise error from failed.__cause__
    except STOPPED:
        yield from _clean_up(driver, waiter.hold)
        raise
    finally:
        driver.board.dismiss(waiter.hold)


def _clean_up(driver: Any, hold: Hold) -> Effects[None]:
    if not mutex.is_settled(hold):
        driver.book.leave(hold)
        yield from mutex.settle(hold)


def _too_late() -> StepFailed:
    why = {"the server": "its answer came too late to count"}
    return StepFailed(Unavailable(why, "Look why the server is that slow"), sent=True, retry=True)


def earliness(beta: float, token: str) -> float:
    """By how many times its cost a value is refreshed before it is due: -beta * ln(u), by the dice of the token."""
    return -beta * math.log((crc32(token.encode()) + 1) / 2**32)


def forget(desk: Desk, entry: Entry, terms: Terms) -> Effects[bool]:
    """Invalidate it, whether or not it was there: whoever asks from now on gets nothing that was begun before."""
    step = Step("cache_drop", entry.shared, ())
    try:
        found, *_ = yield from until_answered(lambda: step, terms, jitter=entry.name)
    except StepFailed as failed:
        raise outage(failed, f"value {entry.name!r}", terms.timeout) from failed.__cause__
    # Whoever comes now need not wait for a computation that counts no more.
    flight = desk.flights.get(entry.shared[0])
    if flight is not None:
        desk.close(flight)
    return bool(found)
