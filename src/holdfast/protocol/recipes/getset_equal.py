"""SETNX of a deadline, GET, GETSET; won if GETSET replaced exactly what GET saw: a plan that went from
article to article.

Invariant. Between the GET and the GETSET of a winner the key did not change, as far as its value tells.

Pits. The stretch by losers, as in getset.py. If the lock was given back between the two, GETSET finds nothing, which is
not what GET saw: that one has lost, but its number stays, a lock that nobody believes in. And as far as the value tells
is not far: two who wrote the same deadline cannot be told apart.

It is given back by DEL, if less time than the ttl has passed on the holder's own clock; else it is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Effects, clock
from holdfast.protocol.recipes.deadline import Deadlined
from holdfast.protocol.recipes.scheme import Turn

__all__ = ["GetSetEqual"]


@dataclass(frozen=True, kw_only=True)
class GetSetEqual(Deadlined):
    pit: ClassVar[str] = (
        "losers overwrite the holder's deadline or leave a lock that is nobody's, and clocks must agree"
    )

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        return seen == before

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        if (yield from clock()) - turn.since >= self.ttl:
            return False
        return (yield from super().free(turn, timeout))
