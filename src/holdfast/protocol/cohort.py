"""Cohorts: the waiters of one process on one lock stand in one local queue, and one of them speaks for all.

Invariant. Lock by lock there is one *seat*. Whoever sits on it talks to the server: tries, waits in its queue, holds.
Everybody else in the process stands in *line*, in the order of arrival, and costs the server nothing. A seat is never
empty while somebody who may sit down stands in line, and whoever was called to it sits there or is about to.

A hold that is given back goes to the first in line without the network, at most ``cohort`` times and for a tenth of a
second in a row; then it goes back to the server, which lets other processes have their turn. What is passed on is
the key with its token, the rest of its ttl (renewed first if that is too little) and the next fence of those
that the server has set aside. After Dice, Marathe and Shavit, "Lock Cohorting" (2012).

A process that has the lock for itself would ask for it again as soon as it has given it back, and those who only poll
would never find it free. So it waits now and then, as the server does where processes queue there (lua/grant.lua).

A Lock object has a gate of its own on top: it has at most one lease, and a lost lease occupies it until release() has
reported the loss, though its seat is free by then. With ``cohort=0`` the seat is the gate's own, shared with nobody.

Atomic: single dict and deque operations, in an order in which any thread may be interrupted, by another or by Ctrl-C,
between any two of them. ``setdefault`` decides: who sits on a seat, who has called whom, or whether it had left before.
Whatever was interrupted is simply done again, by the same caller, and finds what it did already. A mutex would be
easier to read and would stay shut when Ctrl-C strikes between taking it and noting that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from holdfast.lease import ENDED, LOST, POLLED, TRYING, Hold
from holdfast.protocol.effects import Bell, Effects, clock, wait

if TYPE_CHECKING:
    from holdfast.protocol.keepalive import Book

__all__ = ["Cohorts", "Gate"]

ENOUGH: Final = 0.8  # of its validity must be left for a hold to be passed on as it is
# Yield windows for polling clients; must match lua/grant.lua, which says why.
OPEN: Final = 0.1
LEAST_OPEN: Final = 0.005
SHUT: Final = 0.05
TURNS: Final = 8
POLLED_SHUT: Final = 0.04
FADING: Final = 10

_LEFT: Final = "left"
_ARRIVED: Final[dict[None, object]] = {None: "arrived"}  # who had called it matters no more, and can be freed
_LOSER: Final = "loser"
_ENDER: Final = "ender"
_NEVER: Final = float("inf")


class Gate(dict[None, Hold]):
    """A Lock object's own seat, for one hold."""

    __slots__ = ("cohorts",)
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    cohorts: Cohorts  # set by whoever makes it: an __init__ would take as long as all the rest

    def vacate(self, hold: Hold) -> None:
        self.cohorts.vacate(hold, _LOSER)

    def leave(self, hold: Hold) -> None:
        self.cohorts.leave(hold)


class Cohorts:
    """Who speaks for this process, lock by lock; and who stands in line."""

    def __init__(self, new_bell: Callable[[], Bell]) -> None:
        self.new_bell = new_bell
        self.seats: dict[Hashable, Hold] = {}
        self.lines: dict[Hashable, deque[Hold]] = {}
        self._vacating: dict[Hold, str] = {}

    def sit_down(self, hold: Hold) -> bool:
        """Take the seat at once; False if one has to stand in line for it."""
        if self.seats.setdefault(hold.seat, hold) is not hold:
            return False
        if hold.gate.setdefault(None, hold) is hold:
            return True
        self.vacate(hold)  # it is the object that is occupied, by a lease that was lost
        return False

    def active(self, hold: Hold) -> Hold | None:
        """The hold of this process that waits for the server or holds, where that one stands in the local queue."""
        return self.seats.get(hold.seat) or hold.gate.get(None)

    def sit_apart(self, hold: Hold) -> bool:
        """For a try that does not wait: ask the server beside the active waiter, whose answer is still to come.

        False if a hold of this process has the lock, or the Lock object is in use: then it is busy.
        """
        seat, active = hold.seat, self.seats.get(hold.seat)
        if seat is hold.gate or active is None or active.phase is not TRYING:
            return False
        hold.seat = hold.gate
        if self.sit_down(hold):
            return True
        hold.seat = seat
        return False

    def stand_in_line(self, hold: Hold, until: float) -> Effects[float | None]:
        """Come to sit, by that time; when it did, or None. It may have been passed a hold as well."""
        seat = hold.seat
        bell = hold.bell = self.new_bell()
        hold.seated = False
        hold.fate = {}
        self._queue_up(seat, hold)
        seated = self.seats.get(seat)
        if seated is None or not (seated.seated or seated.told):
            self._call_next(seat, hold)
        while True:
            now = yield from wait(bell, _NEVER if hold.fate else until)
            if hold.fate and self._arrives(hold):
                return now
            if now >= until and self._step_out(seat, hold):
                return None

    def _arrives(self, hold: Hold) -> bool:
        """Whether it was given the seat. What was passed on to it may have been lost before it could sit down."""
        if self.seats.get(hold.seat) is hold:
            hold.gate[None] = hold
        elif hold.phase is not LOST:
            return False
        if not hold.passed and isinstance(giver := _fate(hold).get(None), Hold) and giver.phase is ENDED:
            hold.shut_since, hold.shut_turns = giver.shut_since, giver.shut_turns + 1
            hold.polled_at = giver.polled_at
        hold.fate = _ARRIVED
        hold.seated = True
        return True

    def _queue_up(self, seat: Hashable, hold: Hold) -> None:
        while True:
            line = self.lines.get(seat)
            if line is None:
                line = self.lines.setdefault(seat, deque())
            hold.lined = True
            line.append(hold)
            if self.lines.get(seat) is line:  # else it was found empty and thrown away just then
                return

    def _step_out(self, seat: Hashable, hold: Hold) -> bool:
        """Leave the line; False if it has just been called."""
        if _fate(hold).setdefault(None, _LEFT) != _LEFT:
            return False
        _drop(self.lines.get(seat), hold)
        return True

    def withdraw(self, hold: Hold) -> Effects[None]:
        """Interrupted: leave the line; or, called at that very moment, sit down, so as to get up in good order."""
        seat = hold.seat
        if hold.seated or self._step_out(seat, hold):
            return
        while not self._arrives(hold):
            yield from wait(hold.bell, (yield from clock()) + 0.01)

    def _call_next(self, seat: Hashable, by: Hold) -> None:
        """If the seat is empty, call the first in line who may sit there."""
        while line := self.lines.get(seat):
            seated = self.seats.get(seat)
            if seated is None:
                heir = _first(line, by)
                if heir is None:
                    return
                seated = self.seats.setdefault(seat, heir)
            if seated.seated:
                return
            # It does not know yet: we have just put it there, or somebody who was interrupted before the last word.
            if _fate(seated).setdefault(None, by) != _LEFT:
                assert seated.bell is not None
                seated.bell.ring()
                seated.told = True
                _drop(line, seated)
                return
            self.vacate(seated)

    def vacate(self, hold: Hold, party: str = _ENDER) -> None:
        """Get up from the seat, if it sits there, and call the next. It may be lost and given back at the same time."""
        seat = hold.seat
        if self._vacating.setdefault(hold, party) is not party:
            return
        if self.seats.get(seat) is hold:
            del self.seats[seat]
        self._vacating.pop(hold, None)
        if seat in self.lines:
            self._tidy(seat)
            self._call_next(seat, hold)

    def leave(self, hold: Hold) -> None:
        """It is over, or did not come about: its object is free again, and its seat."""
        if hold.gate.get(None) is hold:
            hold.gate.pop(None, None)
        self.vacate(hold)

    def _tidy(self, seat: Hashable) -> None:
        """Throw an empty line away. Whoever joins it at this very moment joins another."""
        line = self.lines.get(seat)
        if line is not None and not line and self.lines.pop(seat, None) is line:
            while line:
                try:
                    self._queue_up(seat, line.popleft())
                except IndexError:
                    return  # it has seen that and went by itself

    def first_in_line(self, hold: Hold) -> Hold | None:
        """To whom this hold could be passed on."""
        line = self.lines.get(hold.seat)
        return _first(line, hold) if line else None

    def pass_at_once(self, hold: Hold, book: Book, now: float) -> bool:
        """Give it back by passing it on, if it can be passed on as it is; else False, and it is held as before."""
        line = self.lines.get(hold.seat)
        heir = _first(line, hold) if line else None
        if heir is None:
            return False
        assert heir.bell is not None
        heir.bell.stir()
        if not hold.valid(now) or not may_inherit(heir, hold, now) or not book.leave(hold):
            return False
        if self.pass_on(hold, heir, book, now):
            return True
        book.enter(hold)  # it leaves the line at this very moment, or the keeper has just found the hold lost
        return False

    def pass_on(self, hold: Hold, heir: Hold, book: Book, now: float) -> bool:
        """Pass it on to the first in line, who may inherit it; False if that cannot be.

        The hold was taken out of the book before. Done again after an interrupt, it goes on where it was.
        """
        if hold.heir is None and not self._call(heir, hold):
            return False
        seat = hold.seat
        if self.seats.get(seat) is hold:
            heir.inherit(hold, now)
            book.enter(heir)
            hold.phase = ENDED
            hold.gate.pop(None, None)  # it is ours: whoever sits has passed the gate
            self.seats[seat] = heir  # from here on it is the heir's
        self._let_sit(heir, hold)
        return True

    def hand_on(self, hold: Hold) -> bool:
        """It gives up waiting: let the first in line go on in its place of the server's queue; whether there was one.

        So a process does not lose its turn because one of its threads has lost patience. Again, it may be done twice.
        """
        heir = hold.heir or self.first_in_line(hold)
        if heir is None or (hold.heir is None and not (may_follow(heir, hold) and self._call(heir, hold))):
            return False
        seat = hold.seat
        if self.seats.get(seat) is hold:
            heir.follow(hold)
            hold.phase = ENDED
            hold.gate.pop(None, None)
            self.seats[seat] = heir
        self._let_sit(heir, hold)
        return True

    def _call(self, heir: Hold, hold: Hold) -> bool:
        """Call it to the seat; False if it leaves just now. It will know when it is rung."""
        if self._vacating.setdefault(hold, _ENDER) is not _ENDER:
            return False  # the keeper has just found the hold lost
        # Checked second: from here on the keeper cannot take the seat away, but it may have done so before.
        if self.seats.get(hold.seat) is not hold:
            self._vacating.pop(hold, None)
            return False
        if _fate(heir).setdefault(None, hold) is not hold:
            self._vacating.pop(hold, None)
            return False  # to look for another is not worth the trouble
        hold.heir = heir
        return True

    def _let_sit(self, heir: Hold, hold: Hold) -> None:
        """The seat is the heir's: let it know."""
        self._vacating.pop(hold, None)
        _drop(self.lines.get(hold.seat), heir)
        assert heir.bell is not None
        heir.bell.ring()  # and last, for now there is somebody else who wants to go on
        heir.told = True

    def forget(self) -> None:
        """In a forked child, or a new event loop: whoever sat or stood here is not in this process."""
        self.seats.clear()
        self.lines.clear()
        self._vacating.clear()


def moment_for_others(hold: Hold, now: float) -> float:
    """How long to leave the lock free for polling clients before we ask for it again; mostly 0."""
    since, unseen = hold.shut_since, now - hold.polled_at
    polled = unseen <= POLLED
    shut = POLLED_SHUT + unseen / FADING if polled else SHUT
    if not since or now < since + shut + since * 1e6 % 1000 / 10_000 or (hold.shut_turns < TURNS and not polled):
        return 0.0
    hold.shut_since, hold.shut_turns = 0.0, 0
    return OPEN if polled else min(OPEN, max(LEAST_OPEN, (now - since) / 20))


def may_inherit(heir: Hold, hold: Hold, now: float) -> bool:
    """Whether a pass would give the heir what a grant gives: its own label, its own ttl, and neither less nor more."""
    if hold.passes <= 0 or now >= hold.stint_ends or hold.doubtful:
        return False
    terms = heir.terms
    if terms is not hold.terms and terms.label != hold.terms.label:
        return False
    return ENOUGH * terms.trust <= hold.lasts - now <= terms.trust


def may_follow(heir: Hold, hold: Hold) -> bool:
    """Whether the heir can use the token for which the other has waited: it tells its label, and brings its ttl and as
    many fences as were asked for."""
    ours, theirs = heir.terms, hold.terms
    return (ours.label, ours.ttl_ms, ours.fences) == (theirs.label, theirs.ttl_ms, theirs.fences)


def wants_renewal(heir: Hold, hold: Hold, now: float) -> bool:
    """Whether it could be passed on if only it lasted longer."""
    return hold.lasts - now < ENOUGH * heir.terms.trust and (
        hold.passes > 0 and now < hold.stint_ends and not hold.doubtful and heir.terms.label == hold.terms.label
    )


def _first(line: deque[Hold], by: Hold) -> Hold | None:
    """The first in line who may sit down: whose object is free, or will be as soon as ``by`` has left it."""
    while line:
        try:
            first = line[0]
        except IndexError:
            return None
        if (not first.fate and not first.gate) or _may_sit(first, by):
            return first
        if first.lined:
            return next((hold for hold in list(line) if _may_sit(hold, by)), None)
        try:  # it stood there twice, for it joined a line that was just being thrown away
            line.remove(first)
        except ValueError:
            pass
    return None


def _may_sit(hold: Hold, by: Hold) -> bool:
    if hold.fate and hold.fate.get(None) is not by:
        return False
    inside = hold.gate.get(None)
    # Who gives its lease back leaves its object as well; who has lost it does not, until that was reported.
    return inside is None or inside is hold or (inside is by and by.phase is not LOST)


def _fate(hold: Hold) -> dict[None, object]:
    assert hold.fate is not None  # whoever stands in line has one
    return hold.fate


def _drop(line: deque[Hold] | None, hold: Hold) -> None:
    """Take it out of the line. That is quick for the first; and whoever is not in it is not looked for twice."""
    if hold.lined:
        try:
            if line is not None:
                line.remove(hold)
        except ValueError:
            pass  # somebody else did it
        hold.lined = False
