"""SETNX, and nothing else: the first lock that everybody writes.

Invariant. Whoever has set the key holds the lock, until anybody at all deletes it. No clock is involved.

Pits. A holder that dies leaves the key for ever. The key does not say whose it is, so anybody's DEL frees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.scheme import LOST, WON, Outcome, Scheme, Turn

__all__ = ["SetNX"]


@dataclass(frozen=True, kw_only=True)
class SetNX(Scheme):
    pit: ClassVar[str] = "a holder that dies leaves it locked for ever, and anybody can free it"

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        return WON if (yield from call(Command(("SETNX", turn.key, 1)), timeout)) == 1 else LOST
