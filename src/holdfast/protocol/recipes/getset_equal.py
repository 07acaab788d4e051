"""SETNX of a deadline, GET, GETSET; won if GETSET replaced exactly what GET saw: an algorithm copied by many articles.

Invariant. Between the GET and the GETSET of a winner the value of the key did not change.

Pitfalls. Losers stretch the lock, as in getset.py. If the lock was released between the two commands, GETSET finds
nothing, which differs from what GET saw: that client has lost, but its number stays, a lock without a holder. And equal
values do not prove that nothing changed: two clients may have written the same deadline.

It is released by DEL, if less time than the ttl has passed on the holder's own clock; else it is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Effects, clock
from holdfast.protocol.recipes.algorithm import RecipeHold
from holdfast.protocol.recipes.deadline import Deadlined


@dataclass(frozen=True, kw_only=True)
class GetSetEqual(Deadlined):
    pitfall: ClassVar[str] = (
        "losers overwrite the holder's deadline or leave a lock without a holder, and clocks must agree"
    )

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        return seen == before

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        if (yield from clock()) - hold.since >= self.ttl:
            return False
        return (yield from super().free(hold, timeout))
