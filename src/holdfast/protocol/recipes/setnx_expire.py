"""SETNX, then EXPIRE: the first repair of setnx.py, in many languages.

Invariant. The client that has set the key holds the lock, until the key is deleted or its ttl ends on the server.

Pitfalls. These are two commands: a client that dies between them leaves a key without a ttl, forever. And a late
holder deletes its successor's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.algorithm import LOST, WON, LeasedInSeconds, Outcome, RecipeHold


@dataclass(frozen=True, kw_only=True)
class SetNXExpire(LeasedInSeconds):
    pitfall: ClassVar[str] = (
        "a holder that dies between SETNX and EXPIRE leaves it locked forever, and a late DEL frees another's"
    )

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        if (yield from call(Command(("SETNX", hold.key, 1)), timeout)) != 1:
            return LOST
        yield from call(Command(("EXPIRE", hold.key, self.whole_seconds)), timeout)
        return WON
