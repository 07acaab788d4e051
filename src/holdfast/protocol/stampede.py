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
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from holdfast.errors import ComputeTimeout, HoldfastError, InvalidConfig
from holdfast.lease import ENDED, TRYING, Hold, Terms
from holdfast.protocol import mutex
from holdfast.protocol.asking import insist
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import (
    STOPPED,
    Effects,
    Step,
    StepFailed,
    call,
    caller,
    clock,
    entrust,
    listen,
    new_token,
    wait,
)
from holdfast.protocol.entries import Entry, Failure, Policy
from holdfast.protocol.flights import Desk, Outage, Seat, fly_alone
from holdfast.protocol.turns import Turn

if TYPE_CHECKING:
    from holdfast.protocol.bells import Switchboard

__all__ = ["ask", "forget"]

# What cache_look.lua says.
COMPUTED: Final = 0  # by somebody else, just now
FOUND: Final = 1
CLAIMED: Final = 2
FAILED: Final = 3
GIVEN_UP: Final = -1
UNANSWERED: Final = -2

_NEVER: Final = float("inf")
_LONGEST_POLL: Final = 0.1  # where no bell can be heard


class Patience(NamedTuple):
    """Since when a caller waits, and until when it will."""

    started: float
    until: float


def ask(desk: Desk, entry: Entry, policy: Policy) -> Effects[Turn]:
    """Look for the value, alone or together with others of this process; wait for it if somebody is computing it."""
    now = yield from clock()
    patience = Patience(now, _NEVER if policy.terms.wait is None else now + policy.terms.wait)
    seat = Seat((yield from caller()), now)
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
                seat = fly_alone(entry.shared[0], seat.who, seat.came)
            elif seat.bell is None:
                seat.bell = desk.driver.board.new_bell()  # and see once more: it may have been just before
            else:
                now = yield from wait(seat.bell, min(patience.until, now + mutex.REFRESH))
        if isinstance(seat.answer, Outage):
            error = seat.answer.error
            raise copy(error) from error.__cause__  # each has its own, for a traceback belongs to one thread
        return Turn(desk, entry, policy, seat.answer)
    finally:
        if turn is None or turn._seat is None:
            desk.leave(seat)


class Search:
    """A look at the server, repeated until something comes of it."""

    def __init__(self, entry: Entry, policy: Policy, hold: Hold, patience: Patience) -> None:
        self.hold = hold  # under whose token it looks
        self.started, self.until = patience
        self.asked_at = 0.0
        self.attempt = 0
        self.failing_since: float | None = None
        self.since_us = 0  # since when it waits for somebody's computation, by the server's clock
        self.channel = ""
        self.deaf = False  # we could not listen just now
        self.outage: HoldfastError | None = None  # why the server could not be asked, by us or anybody
        self._entry = entry
        self._early = f"{earliness(policy.early, hold.token):.6f}" if policy.early else "0"

    def step(self, *, doubtful: bool) -> Step:
        """``doubtful``: an earlier look with this token was not answered."""
        hold = self.hold
        stands_ms = mutex.TOMBSTONE_MS if doubtful else 0
        args = (hold.token, str(hold.terms.ttl_ms), self._early, self.channel, str(self.since_us), str(stands_ms))
        return Step("cache_look", (*self._entry.shared, hold.keys.tombstone(hold.token)), args)

    def timeout(self) -> float:
        """Of one look: no longer than the caller's patience. Who has none from the start still wants an answer."""
        longest = self.hold.terms.call_timeout
        left = self.until - self.asked_at if self.until > self.started else longest
        return max(mutex.SHORTEST_CALL, min(longest, left))


def _look(desk: Desk, entry: Entry, policy: Policy, seat: Seat, patience: Patience) -> Effects[Turn]:
    """Ask the server, until there is something for this flight."""
    driver = desk.driver
    board = driver.board
    search = Search(entry, policy, (yield from _new_hold(driver, entry, policy)), patience)
    flight, served = seat.flight, 0
    try:
        while True:
            hold = search.hold
            search.channel = board.enlist(hold) or (mutex.MUTE if search.deaf else "")
            search.asked_at = yield from clock()
            served = flight.number()
            reply = yield from _send(search)
            now = yield from clock()
            state = UNANSWERED if reply is None else reply[0]
            if state == CLAIMED:
                hold.grant(reply[1], search.asked_at)
                if now < hold.deadline:
                    turn = Turn(desk, entry, policy, reply[2])
                    turn.begin(hold, seat if reply[2] is None else None, now)
                    if reply[2] is not None:  # the others need not wait for the new one
                        desk.land(flight, reply[2], served)
                    return turn
                hold.phase, hold.doubtful = TRYING, True  # the reply came too late to count on it: ask again
            elif state in (FOUND, FAILED):
                found = reply[1] if state == FOUND else Failure.read(reply[1])
                before = _NEVER if state == FOUND or reply[2] < 0 else search.asked_at - reply[2] / 1e6
                desk.land(flight, found, served, before)
                if hold.doubtful:  # an earlier request may still be on its way, and claim what nobody will compute
                    hold.phase = ENDED
                    yield from entrust(hold)
                return Turn(desk, entry, policy, found)
            elif state == COMPUTED:
                yield from _wait(search, board, reply[1], reply[2], now)
            elif state == GIVEN_UP:  # this token has had its claim, which we never heard of: try with another
                board.dismiss(hold)
                search.hold = yield from _new_hold(driver, entry, policy)
            search.attempt += 1
    except STOPPED:
        if search.outage is not None:
            desk.land(flight, Outage(search.outage), served)
        if not mutex.is_settled(search.hold):
            driver.book.leave(search.hold)
            yield from mutex.settle(search.hold)
        raise
    finally:
        board.dismiss(search.hold)


def _new_hold(driver: Any, entry: Entry, policy: Policy) -> Effects[Hold]:
    gate = Gate()
    gate.cohorts = driver.cohorts
    hold = Hold(entry.claim, policy.terms, gate)
    hold.token = yield from new_token(policy.terms.label)
    return hold


def _send(search: Search) -> Effects[Any]:
    """One look: the reply; or None after a pause if it brought none, as long as it may be tried again."""
    hold = search.hold
    doubtful, hold.doubtful = hold.doubtful, True  # from here until the reply
    try:
        reply = yield from call(search.step(doubtful=doubtful), search.timeout())
    except StepFailed as failed:
        hold.doubtful = doubtful or failed.sent
        now = yield from clock()
        search.failing_since = search.failing_since or now
        if failed.retry and failed.prompt and not search.attempt:
            return None  # only the connection was lost, most likely while it lay idle: try another, even if it is late
        if not failed.retry or now >= search.failing_since + hold.terms.timeout:
            search.outage = failed.error
        if search.outage is not None or now >= search.until:
            hold.unheard = failed.silent
            raise failed.error from failed.__cause__
        yield from wait(None, min(now + mutex.backoff(hold.token, search.attempt), search.until))
        return None
    hold.doubtful = doubtful
    search.failing_since = None
    return reply


def _wait(search: Search, board: Switchboard, left_ms: int, now_us: int, now: float) -> Effects[None]:
    """Somebody computes it. Wait for word of that; or, the first time, see that word can reach us, and look again."""
    hold = search.hold
    search.since_us = search.since_us or now_us
    if now >= search.until:
        raise ComputeTimeout(hold.name, now - search.started)
    if not search.channel:
        try:
            board.mute = not (yield from listen(search.timeout()))
        except StepFailed as failed:
            search.deaf = failed.retry
            board.mute = board.mute or not failed.retry  # the server is there: what it minds is the listener
        return
    if hold.bell is None:
        hold.bell = board.new_bell()
    if hold.word is None:
        yield from wait(hold.bell, min(search.until, now + pause_for(search, left_ms)))
    hold.bell.clear()
    hold.word = None


def earliness(beta: float, token: str) -> float:
    """By how many times its cost a value is refreshed before it is due: -beta * ln(u), by the dice of the token."""
    return -beta * math.log((crc32(token.encode()) + 1) / 2**32)


def pause_for(search: Search, left_ms: int) -> float:
    """How long to wait for a bell before looking again: no longer than the claim lasts, whose holder may be dead."""
    pause = mutex.REFRESH
    if search.channel == mutex.MUTE:
        pause = min(mutex.backoff(search.hold.token, search.attempt), _LONGEST_POLL)
    return min(pause, (left_ms + 1) / 1000) if left_ms >= 0 else pause


def forget(desk: Desk, entry: Entry, terms: Terms) -> Effects[bool]:
    """Invalidate it, whether or not it was there: whoever asks from now on gets nothing that was begun before."""
    try:
        found = yield from insist(Step("cache_drop", entry.shared, ()), terms, dice=entry.name)
    except StepFailed as failed:
        raise failed.error from failed.__cause__
    # Whoever comes now need not wait for a computation that counts no more.
    flight = desk.flights.get(entry.shared[0])
    if flight is not None:
        desk.close(flight)
    return bool(found)
