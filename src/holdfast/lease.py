"""What people hold, and what a protocol knows of it.

``Hold`` is the record of one acquisition: protocols write it, the keeper renews it. ``BaseLease`` is the view of it
that a user gets; the faces add the methods that talk to the server. They are two objects so that the keeper can
hold on to the record while the user's dropping the lease is still noticed.

``held`` is decided by a clock and a deadline, not by a thread that sets a flag: a process that was stopped, or
starved, or asleep with its machine, knows that its lease is over the moment it can think again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

from holdfast.errors import HoldfastError, LeaseLost, NotHeld, rounded
from holdfast.names import Keys

if TYPE_CHECKING:
    from holdfast.protocol.cohort import Gate
    from holdfast.protocol.effects import Bell
    from holdfast.protocol.mutex import Kind
    from holdfast.protocol.replies import Refused

__all__ = ["ENDED", "HELD", "LOST", "MAX_FENCE", "TRYING", "BaseLease", "Hold", "Terms", "Word", "drift"]

TRYING: Final = "trying"
HELD: Final = "held"
LOST: Final = "lost"
ENDED: Final = "ended"  # released, or given up

_NEVER: Final = float("inf")
_HANDED_OVER: Final = "was handed over, and this lease has ended: whoever adopts the ticket goes on with it"

MAX_FENCE: Final = 2**53 - 1  # up to here Lua and JSON count exactly; must match lua/fence.lua
# Fences set aside for a holder that may pass its lease on within its process; must match lua/fence.lua.
FENCES: Final = 64
STINT: Final = 0.1  # how long a process may go on passing it on, in seconds
POLLED: Final = 60.0  # how long a client of another library, which polls, is remembered; must match lua/grant.lua
LOOK_AFTER: Final = 0.1  # a hold that lasts so long is watched; shorter ones pay nothing


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a lock is asked for, in seconds; and what follows from that, worked out once for many locks."""

    ttl: float
    wait: float | None
    renew: bool
    max_hold: float | None
    on_lost: Callable[[Any], object] | str | None
    label: str
    cohort: int
    timeout: float
    fence_retention: float
    cancels: bool = False  # the body of an ``async with`` when the lease is lost, beside whatever on_lost does
    ttl_ms: int = field(init=False)
    fences: int = field(init=False)  # how many the server sets aside: one for each holder of a cohort
    said: tuple[str, str, str] = field(init=False)  # ttl, retention and fences, as a step says them
    trust: float = field(init=False)  # how long a holder may rely on a fresh ttl
    renewed_with: float = field(init=False)  # how much of its validity is left when it is renewed
    call_timeout: float = field(init=False)  # of one step, if the caller is in no hurry
    first_try: float = field(init=False)  # of the first try at a step: a reply may have been swallowed on its way

    def __post_init__(self) -> None:
        ttl_ms, retention_ms = round(self.ttl * 1000), round(self.fence_retention * 1000)
        fences = min(self.cohort + 1, FENCES)
        for name, value in (
            ("ttl_ms", ttl_ms),
            ("fences", fences),
            ("said", (str(ttl_ms), str(retention_ms), str(fences))),
            ("trust", self.ttl - drift(self.ttl)),
            ("renewed_with", self.ttl * 2 / 3),
            # However short the ttl, a round trip should fit in.
            ("call_timeout", max(min(self.ttl / 3, self.timeout), min(0.1, self.timeout))),
            ("first_try", max(min(self.ttl, self.timeout) / 3, min(0.1, self.timeout))),
        ):
            object.__setattr__(self, name, value)


def drift(ttl: float) -> float:
    """How far our clock and the server's may come apart within a ttl, with the rounding of the wire."""
    return ttl * 0.01 + 0.002


class Word(NamedTuple):
    """A notification of the server: this waiter was granted the lock, or should ask for it again after a pause."""

    fence: int  # of the grant; 0: nothing was granted, ask again
    at_us: int  # when it was sent, by the server's clock
    heard_at: float  # when it was received, by our clock
    slot: int = -1  # the permit that was granted, if it is a numbered one
    pause_ms: int = 0  # before asking again


class Hold:
    """One acquisition: its token serves this one, or one after the other in a cohort.

    What most of them never need is left to the class, so that making one is quick.
    """

    kind: Kind | None = None  # whose steps it takes, if not the mutex's
    species = "lock"  # what it is a hold on,
    wanted = ""  # and how much of it, where that is not all: so says a ticket for it
    caller: Hashable = None  # the thread or task that has asked for it, weakly, for a task may keep the lease alive
    unheld: type[NotHeld] = NotHeld  # what is raised when it is given back once too often
    # While it waits.
    bell: Bell | None = None
    word: Word | None = None  # what the server's bell said last
    asked = (0.0, 0)  # our time before, and the server's time at, the last step that it answered
    seen = (0.0, 0)  # the same for the last step by which the keeper has shown its presence
    crowded = False  # it waited as one of very many: the keeper cleans up after it
    outcome: Refused | HoldfastError | None = None  # of the last acquire step
    nested = ""  # the tokens that its caller holds: see lua/multi_acquire.lua
    queued = False  # it stands in the queue on the server, as far as we know
    fate: dict[None, object] | None = None  # who has called it to the seat of its process; or that it has left
    seated = True  # False from when it stands in line for the seat of its process until it has come to sit
    told = False  # it was called to the seat, and rung
    lined = False  # it is in that line
    doubtful = False  # a step of it had an unknown outcome, and may still be on its way
    unheard = False  # it was given up because the server is silent
    # While it is held.
    fence = 0
    slot = -1  # which place of a room it has
    lasts = 0.0  # until when the server keeps it for us, at least; on our own clock
    may_last = 0.0  # and until when it may, at most, if a renewal under way or of unknown outcome comes through
    deadline = 0.0  # what the holder may rely on: as long as it lasts, or max_hold
    ends = _NEVER  # where max_hold puts an end to it
    look_at = _NEVER  # when the keeper should see to it even though it is not due
    retry_at = 0.0
    passed = False  # we have it from another holder in this process
    passes = 0  # how often it may still be passed on within the process,
    stint_ends = 0.0  # and until when
    shut_since = 0.0  # since when only this process has had it, and who polls found it taken (0: others had it, too),
    shut_turns = 0  # and how often it has changed hands since
    polled_at = -_NEVER  # when a client of another library was last seen to have the lock
    heir: Hold | None = None  # to whom it was passed
    notify: Callable[[], object] | None = None  # how the holder wants to be told of its loss
    observer: Callable[[], object] | None = None  # the client's on_lost, where a body is to be cancelled as well
    reason = ""
    handed_over = False  # and has ended by that
    mine = True  # False in a forked child: the hold stayed with the parent

    def __init__(self, keys: Keys, terms: Terms, gate: Gate) -> None:
        self.keys = keys
        self.terms = terms
        self.gate = gate  # of its Lock object, shut as long as this hold is not over
        self.seat: Hashable = keys.main if terms.cohort else gate  # on which it sits while it speaks for its process
        self.token = ""
        self.phase = TRYING
        self.bells: list[Bell] = []  # of those who wait for its loss

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.keys.name,)

    @property
    def place(self) -> str:
        """What it has of a room, in words."""
        return ""

    def fences(self, fence: Any) -> dict[str, Any]:
        """By name. They are that one, unless the names live in different places."""
        return dict.fromkeys(self.names, fence)

    @property
    def mains(self) -> tuple[str, ...]:
        return (self.keys.main,)

    @property
    def ask_within(self) -> float:
        """Seconds after a refusal until its next step, at the latest."""
        return _NEVER

    def name_of(self, main: str) -> str:
        """The name whose key that is."""
        return dict(zip(self.mains, self.names, strict=True)).get(main, "")

    def grant(self, fence: int, asked_at: float) -> None:
        """The server gave it to us, on a request sent at that time."""
        terms = self.terms
        self.passes = terms.fences - 1
        self.stint_ends = self._end_of_stint(asked_at)
        self.shut_since = self.shut_since or asked_at
        self._begin(fence, asked_at, asked_at + terms.trust)
        self.look_at = asked_at + LOOK_AFTER

    def rung(self, word: Word, now: float) -> bool:
        """The server granted it for our ttl and notified us; False if that is too long ago to rely on it.

        The notification has the server's time of the grant. The last step that the server answered ties that clock to
        ours: it was executed after we sent it. So a notification that was long under way is never believed more than
        is true.
        """
        asked_at, asked_us = self.asked
        since = (word.at_us - asked_us) / 1e6
        if since < 0:
            return False  # we were refused after that, so the grant is gone; or the server's clock was set back
        granted_at = min(asked_at + since, word.heard_at)
        ttl = self.terms.ttl
        lasts = granted_at + ttl - drift(ttl + since)
        if now >= lasts:
            return False
        self.passes = self.terms.fences - 1
        self.stint_ends = self._end_of_stint(now)
        self.shut_since = 0.0
        self._begin(word.fence, now, lasts)
        self.slot = word.slot
        self.look_at = now + LOOK_AFTER
        return True

    def _end_of_stint(self, now: float) -> float:
        """Until when it may be passed on; irregular beside polling clients, whose polls are regular."""
        return now + (STINT if now - self.polled_at > POLLED else STINT * (0.1 + now * 1e6 % 1000 / 2000))

    def inherit(self, giver: Hold, now: float) -> None:
        """It was passed on to us within the process: the same key and token on the server, and the next fence."""
        self.token = giver.token
        self.passed = True
        self.passes = giver.passes - 1
        self.stint_ends = giver.stint_ends
        self.shut_since = giver.shut_since
        self.shut_turns = giver.shut_turns + 1
        self.polled_at = giver.polled_at
        # If the keeper has looked, or is at it, what it finds is for the giver.
        self.look_at = giver.look_at if giver.look_at != _NEVER else now + LOOK_AFTER
        self._begin(giver.fence + 1, now, giver.lasts)

    def follow(self, other: Hold) -> None:
        """The other one gives up waiting: go on where it was, with its token and its place in the queue."""
        self.token = other.token
        self.queued = other.queued
        self.doubtful = other.doubtful
        self.asked = other.asked
        self.outcome = other.outcome
        self.unheard = other.unheard
        self.polled_at = other.polled_at

    def _begin(self, fence: int, since: float, lasts: float) -> None:
        self.fence = fence
        self.lasts = self.deadline = lasts
        max_hold = self.terms.max_hold
        if max_hold is not None:
            self.ends = since + max_hold
            self.deadline = min(lasts, self.ends)
        self.phase = HELD

    def prolong(self, ttl: float, asked_at: float) -> None:
        """The server has made it last that long, on a request sent at that time. It never gets shorter."""
        self.lasts = max(self.lasts, asked_at + ttl - drift(ttl))
        self.deadline = min(self.lasts, self.ends)
        if not self.doubtful:
            self.may_last = 0.0

    def ask_to_prolong(self, ttl: float, by: float) -> None:
        """The server is asked to make it last that long, and may do so until then."""
        self.may_last = max(self.may_last, by + ttl)

    def gone_by(self) -> float:
        """When it is over on the server, whatever has become of what we asked."""
        return max(self.lasts + 2 * drift(self.terms.ttl), self.may_last)

    def valid(self, now: float) -> bool:
        return self.phase is HELD and now < self.deadline

    def lose(self, reason: str) -> bool:
        """Mark it as lost; whether that is news. The keeper and whoever waits for the loss may find it together."""
        finder = object()
        if self.phase is not HELD or self.__dict__.setdefault("found_lost_by", finder) is not finder:
            return False
        self.reason = reason
        self.phase = LOST
        self.gate.vacate(self)  # others in this process may try; its Lock object stays shut until release()
        for bell in list(self.bells):  # whoever is woken takes its bell away
            bell.ring()
        return True

    def why_lost(self, now: float) -> str:
        """Why it is not held any more; empty if it is, or was given back."""
        if self.phase is LOST:
            return self.reason
        if self.phase is HELD and now >= self.deadline:
            return self.why_over()
        return ""

    def ended(self) -> NotHeld:
        """It is over, and somebody wants something of it: what to raise."""
        return self.unheld(self.name, _HANDED_OVER) if self.handed_over else self.unheld(self.name)

    def why_over(self) -> str:
        """What it means that the deadline has passed."""
        if self.deadline >= self.ends:
            return f"it was held for its max_hold of {rounded(self.terms.max_hold or 0.0)} s"
        if not self.terms.renew:
            return f"its ttl of {rounded(self.terms.ttl)} s ran out, and it is not renewed (renew=False)"
        return f"its ttl of {rounded(self.terms.ttl)} s ran out before it could be renewed"


def _tell(lease: ref[BaseLease], on_lost: Callable[[Any], object]) -> object:
    """Weak, because a lease that is only remembered in order to be told of its loss was dropped."""
    alive = lease()
    return None if alive is None else on_lost(alive)


class BaseLease:
    """What ``acquire`` returns. Always true; ends when it is released, lost, or dropped."""

    __slots__ = ("__weakref__", "_driver", "_hold")

    def __init__(self, driver: Any, hold: Hold) -> None:
        self._driver = driver
        self._hold = hold
        if callable(hold.terms.on_lost):
            told = partial(_tell, ref(self), hold.terms.on_lost)
            if hold.terms.cancels:
                hold.observer = told
            else:
                hold.notify = told

    @property
    def name(self) -> str:
        return self._hold.keys.name

    @property
    def token(self) -> str:
        """What the lock's key holds on the server. It is a capability: keep it out of logs."""
        return self._hold.token

    @property
    def fence(self) -> int:
        """Strictly greater for every later holder. Let what you write to refuse a lower one than it has seen."""
        return self._hold.fence

    @property
    def fences(self) -> dict[str, int]:
        """The fence of each name, where several were locked at once; ``fence`` is the largest."""
        return self._hold.fences(self.fence)

    @property
    def held(self) -> bool:
        """Whether the holder may still rely on it."""
        return self._hold.valid(self._driver.now())

    def remaining(self) -> float:
        """Seconds that the holder may still rely on, never optimistic; 0.0 when it is over."""
        hold = self._hold
        return max(0.0, hold.deadline - self._driver.now()) if hold.phase is HELD else 0.0

    @property
    def reason(self) -> str:
        """Why it was lost; empty as long as it is not."""
        return self._hold.reason or self._hold.why_lost(self._driver.now())

    def check(self) -> None:
        """Raise LeaseLost unless it is still held (NotHeld if it was released)."""
        hold = self._hold
        if reason := hold.why_lost(self._driver.now()):
            raise LeaseLost(hold.name, self.fence, reason)
        if hold.phase is not HELD:
            raise hold.ended() if hold.handed_over else NotHeld(hold.name)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise TypeError("a Lease cannot be pickled: nobody shares a hold; acquire the lock in the other process")

    def __repr__(self) -> str:
        state = "held" if self.held else self._hold.phase if self._hold.phase is not HELD else LOST
        place = f" ({self._hold.place})" if self._hold.place else ""
        return f"<{state} {type(self).__module__}.{type(self).__name__} on {self.name!r}{place}, fence {self.fence}>"

    def __del__(self) -> None:
        # Interpreter shutdown may have taken the parts away already; then there is nobody to warn either.
        try:
            hold = self._hold
            if hold.phase is not ENDED and hold.mine and self._driver.book.leave(hold):
                hold.phase = ENDED
                hold.gate.leave(hold)
                if self._driver.book.closed:  # its client was closed, and has given it back
                    return
                warnings.warn(
                    f"a lease on {hold.name!r} was dropped without release(): it is not renewed any more",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        except (AttributeError, TypeError):
            pass
