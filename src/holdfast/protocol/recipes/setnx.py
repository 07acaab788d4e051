"""SETNX and nothing else: the simplest lock.

Invariant. The client that has set the key holds the lock, until any client deletes the key. No clock is involved.

Pitfalls. A holder that dies leaves the key forever. The key does not name its holder, so a DEL of any client frees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.algorithm import LOST, WON, Algorithm, Outcome, RecipeHold


@dataclass(frozen=True, kw_only=True)
class SetNX(Algorithm):
    pitfall: ClassVar[str] = "a holder that dies leaves it locked forever, and any client can free it"

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        return WON if (yield from call(Command(("SETNX", hold.key, 1)), timeout)) == 1 else LOST
