"""Locks whose value is their deadline: SETNX of a time; a client that finds it past takes over by GETSET.

Invariant. The key never expires on the server. The number in it excludes others, compared with the clock of the client
that wants the lock. So the clocks of all clients must agree.

Each try reads the clock once, at its start. The value is that time plus the ttl (plus one, in some originals). Past
means strictly less than that time. A missing value counts as 0, and so does one that is no number, as with atol() and
PHP's casts; so the token of another kind of lock reads as a deadline in 1970.

The winner's deadline may be overwritten: if a second client also saw the old deadline as past, and its GETSET comes
after the winner's, it has lost, but its number is in the key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from holdfast.protocol.effects import Command, Effects, call, wall_clock
from holdfast.protocol.recipes.algorithm import LOST, WON, Leased, Outcome, RecipeHold, one_of, option, pause
from holdfast.untrusted import atol

PER_SECOND: Final = {"us": 1_000_000, "ms": 1_000, "s": 1}


@dataclass(frozen=True, kw_only=True)
class Deadlined(Leased):
    sleep: float = pause(0.001)
    unit: str = option("us", one_of(*PER_SECOND))
    plus_one: bool | None = option(False, one_of(True, False))

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        now = yield from self.read_now()
        hold.value = yield from self.write(hold, self.deadline(now))
        if (yield from call(Command(("SETNX", hold.key, hold.value)), timeout)) == 1:
            return WON
        seen = yield from call(Command(("GET", hold.key)), timeout)
        if not self.is_past(seen, now):
            return LOST
        before = yield from call(Command(("GETSET", hold.key, hold.value)), timeout)
        return WON if self.wins(seen, before, now) else LOST

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        """Whether a GETSET that replaced ``before`` has won the lock, after a GET that returned ``seen``."""
        raise NotImplementedError

    def read_now(self) -> Effects[int]:
        return int((yield from wall_clock()) * PER_SECOND[self.unit])

    def deadline(self, now: int) -> int:
        ttl = math.ceil(self.ttl * PER_SECOND[self.unit] - 1e-6)  # 0.07 s are 70,000 us in spite of float rounding
        return now + ttl + self.adds_one

    @property
    def adds_one(self) -> bool:
        return bool(self.plus_one)

    def write(self, hold: RecipeHold, deadline: int) -> Effects[str]:
        """The value to write to the key."""
        yield from ()
        return str(deadline)

    def read(self, value: bytes | None) -> int:
        """The deadline in a value of the key."""
        return atol(value)

    def is_past(self, value: bytes | None, now: int) -> bool:
        return self.read(value) < now

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        value = yield from call(Command(("GET", key)), timeout)
        return not self.is_past(value, (yield from self.read_now()))

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        return self.read(value) * (1_000_000 // PER_SECOND[self.unit])
