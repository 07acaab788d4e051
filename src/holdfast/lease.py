"""What people hold, and what a protocol knows of it.

``Hold`` is the record of one acquisition: protocols write it, the keeper renews it. ``BaseLease`` is the view of it
that a user gets; the faces add the methods that talk to the server. They are two objects so that the keeper can
hold on to the record while the user's dropping the lease is still noticed.

``held`` is decided by a clock and a deadline, not by a thread that sets a flag: a process that was stopped, or
starved, or asleep with its machine, knows that its lease is over the moment it can think again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from holdfast.errors import LeaseLost, NotHeld
from holdfast.names import Keys

if TYPE_CHECKING:
    from holdfast.protocol.effects import Bell, Gate

__all__ = ["ENDED", "HELD", "LOST", "TRYING", "BaseLease", "Hold", "Terms", "drift"]

TRYING: Final = "trying"
HELD: Final = "held"
LOST: Final = "lost"
ENDED: Final = "ended"  # released, or given up

_NEVER: Final = float("inf")


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
    ttl_ms: int = field(init=False)
    fence_retention_ms: int = field(init=False)
    trust: float = field(init=False)  # how long a holder may rely on a fresh ttl
    renewed_with: float = field(init=False)  # how much of its validity is left when it is renewed
    call_timeout: float = field(init=False)  # of one step, if the caller is in no hurry
    resend_after: float = field(init=False)  # the same where the caller's patience is the client's timeout

    def __post_init__(self) -> None:
        for name, value in (
            ("ttl_ms", round(self.ttl * 1000)),
            ("fence_retention_ms", round(self.fence_retention * 1000)),
            ("trust", self.ttl - drift(self.ttl)),
            ("renewed_with", self.ttl * 2 / 3),
            ("call_timeout", min(self.ttl / 3, self.timeout)),
            # Twice that fits into the timeout; but however short the ttl, a round trip should.
            ("resend_after", max(min(self.ttl / 3, self.timeout / 2), min(0.1, self.timeout))),
        ):
            object.__setattr__(self, name, value)


def drift(ttl: float) -> float:
    """How far our clock and the server's may come apart within a ttl, with the rounding of the wire."""
    return ttl * 0.01 + 0.002


class Hold:
    """One acquisition: its token serves this one alone."""

    __slots__ = (
        "bells",
        "deadline",
        "doubtful",
        "ends",
        "fence",
        "gate",
        "keys",
        "mine",
        "notify",
        "phase",
        "reason",
        "retry_at",
        "terms",
        "token",
    )

    def __init__(self, keys: Keys, terms: Terms, gate: Gate) -> None:
        self.keys = keys
        self.terms = terms
        self.gate = gate  # of its Lock object, shut as long as this hold is not over
        self.token = ""
        self.fence = 0
        self.deadline = 0.0  # what the holder may rely on, on its own clock
        self.ends = _NEVER  # where max_hold puts an end to it
        self.phase = TRYING
        self.reason = ""
        self.doubtful = False  # a step of it had an unknown outcome, and may still be on its way
        self.retry_at = 0.0
        self.mine = True  # False in a forked child: the hold stayed with the parent
        self.bells: list[Bell] = []  # of those who wait for its loss
        self.notify: Callable[[], object] | None = None  # how the holder wants to be told of its loss

    @property
    def name(self) -> str:
        return self.keys.name

    def grant(self, fence: int, asked_at: float) -> None:
        """The server gave it to us, on a request sent at that time."""
        terms = self.terms
        self.fence = fence
        self.deadline = asked_at + terms.trust
        if terms.max_hold is not None:
            self.ends = asked_at + terms.max_hold
            self.deadline = min(self.deadline, self.ends)
        self.phase = HELD

    def prolong(self, ttl: float, asked_at: float) -> None:
        """The server has made it last that long, on a request sent at that time. It never gets shorter."""
        self.deadline = min(max(self.deadline, asked_at + ttl - drift(ttl)), self.ends)

    def valid(self, now: float) -> bool:
        return self.phase is HELD and now < self.deadline

    def lose(self, reason: str) -> bool:
        """Mark it as lost; whether that is news."""
        if self.phase is not HELD:
            return False
        self.reason = reason
        self.phase = LOST
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

    def why_over(self) -> str:
        """What it means that the deadline has passed."""
        if self.deadline >= self.ends:
            return f"it was held for its max_hold of {self.terms.max_hold:g} s"
        if not self.terms.renew:
            return f"its ttl of {self.terms.ttl:g} s ran out, and it is not renewed (renew=False)"
        return f"its ttl of {self.terms.ttl:g} s ran out before it could be renewed"


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
            hold.notify = partial(_tell, ref(self), hold.terms.on_lost)

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
    def held(self) -> bool:
        """Whether the holder may still rely on it."""
        return self._hold.valid(self._driver.now())

    def remaining(self) -> float:
        """Seconds that the holder may still rely on, never optimistic; 0.0 when it is over."""
        hold = self._hold
        return max(0.0, hold.deadline - self._driver.now()) if hold.phase is HELD else 0.0

    def check(self) -> None:
        """Raise LeaseLost unless it is still held (NotHeld if it was released)."""
        hold = self._hold
        if reason := hold.why_lost(self._driver.now()):
            raise LeaseLost(hold.name, hold.fence, reason)
        if hold.phase is not HELD:
            raise NotHeld(hold.name)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise TypeError("a Lease cannot be pickled: nobody shares a hold; acquire the lock in the other process")

    def __repr__(self) -> str:
        state = "held" if self.held else self._hold.phase if self._hold.phase is not HELD else LOST
        return f"<{state} {type(self).__module__}.Lease on {self.name!r}, fence {self.fence}>"

    def __del__(self) -> None:
        # Interpreter shutdown may have taken the parts away already; then there is nobody to warn either.
        try:
            hold = self._hold
            if hold.phase is not ENDED and hold.mine and self._driver.book.leave(hold):
                hold.phase = ENDED
                warnings.warn(
                    f"a lease on {hold.name!r} was dropped without release(): it is not renewed any more",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        except (AttributeError, TypeError):
            pass
