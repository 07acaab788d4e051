"""Locks whose value is their deadline: SETNX of a time; who finds that past, takes over by GETSET.

Invariant. The key never expires on the server. What keeps others out is the number in it, compared with the clock of
whoever wants the lock; so the clocks of all clients must agree, to less than anybody cares about.

In each try the clock is read once, at its start. The value is that time plus the ttl (plus one, in some originals).
Past means strictly less than the time that was read. What is not there counts as 0, and so does what is no number, as
atol() and PHP's casts have it; so a token of another kind of lock passes for one that ended in 1970.

Not even the winner's own deadline stays: whoever has also seen the old one as past, and comes second with its GETSET,
has lost, but has left its own number in the key.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from holdfast.protocol.effects import Command, Effects, call, wall_clock
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn, one_of, option, pausing

__all__ = ["Deadlined", "number_in"]

PER_SECOND: Final = {"us": 1_000_000, "ms": 1_000, "s": 1}

_NUMBER: Final = re.compile(rb"\s*([+-]?\d+)")


def number_in(value: bytes | None) -> int:
    """What atol() makes of it."""
    found = _NUMBER.match(value or b"")
    return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True)
class Deadlined(Leased):
    sleep: float = pausing(0.001)
    unit: str = option("us", one_of(*PER_SECOND))
    plus_one: bool | None = option(False, one_of(True, False))

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        now = yield from self.read_now()
        turn.value = yield from self.write(turn, self.deadline(now))
        if (yield from call(Command(("SETNX", turn.key, turn.value)), timeout)) == 1:
            return WON
        seen = yield from call(Command(("GET", turn.key)), timeout)
        if not self.is_past(seen, now):
            return LOST
        before = yield from call(Command(("GETSET", turn.key, turn.value)), timeout)
        return WON if self.wins(seen, before, now) else LOST

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        """Whether GETSET, which has replaced ``before``, has won the lock, where GET had seen ``seen``."""
        raise NotImplementedError

    def read_now(self) -> Effects[int]:
        return int((yield from wall_clock()) * PER_SECOND[self.unit])

    def deadline(self, now: int) -> int:
        ttl = math.ceil(self.ttl * PER_SECOND[self.unit] - 1e-6)  # 0.07 s are 70,000 us, whatever a float says
        return now + ttl + self.adds_one

    @property
    def adds_one(self) -> bool:
        return bool(self.plus_one)

    def write(self, turn: Turn, deadline: int) -> Effects[str]:
        """What is written to the key."""
        yield from ()
        return str(deadline)

    def read(self, value: bytes | None) -> int:
        """The deadline in what was found there."""
        return number_in(value)

    def is_past(self, value: bytes | None, now: int) -> bool:
        return self.read(value) < now

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        value = yield from call(Command(("GET", key)), timeout)
        return not self.is_past(value, (yield from self.read_now()))

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        return self.read(value) * (1_000_000 // PER_SECOND[self.unit])
