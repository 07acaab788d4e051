"""SETNX, then EXPIRE: the first repair of setnx.py, in many languages.

Invariant. Whoever has set the key holds the lock, until the key is deleted or its ttl ends on the server.

Pits. The two commands are two: who dies between them leaves a key without a ttl, for ever. And who is late deletes the
key of whoever came after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn

__all__ = ["SetNXExpire"]


@dataclass(frozen=True, kw_only=True)
class SetNXExpire(Leased):
    pit: ClassVar[str] = (
        "a holder that dies between SETNX and EXPIRE leaves it locked for ever, and a late DEL frees another's"
    )

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        if (yield from call(Command(("SETNX", turn.key, 1)), timeout)) != 1:
            return LOST
        yield from call(Command(("EXPIRE", turn.key, self.whole_seconds)), timeout)
        return WON
