"""SETNX and EXPIRE in one MULTI: the second repair of setnx.py, in PHP.

Invariant. No key is ever without a ttl, because both commands run together.

Pitfall. A transaction has no "if": EXPIRE also runs if SETNX has failed. So every loser gives the holder's key a full
ttl again, and while clients try often enough, the lock of a dead holder never ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects
from holdfast.protocol.recipes.algorithm import LOST, WON, LeasedInSeconds, Outcome, RecipeHold, on_connection
from holdfast.protocol.recipes.transaction import EXEC, MULTI


@dataclass(frozen=True, kw_only=True)
class Multi(LeasedInSeconds):
    pitfall: ClassVar[str] = "every loser prolongs it, so a dead holder's lock never ends while others try"

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        setnx = Command(("SETNX", hold.key, 1))
        expire = Command(("EXPIRE", hold.key, self.whole_seconds))
        *_, done = yield from on_connection(hold, timeout, MULTI, setnx, expire, EXEC)
        return WON if done[0] == 1 else LOST
