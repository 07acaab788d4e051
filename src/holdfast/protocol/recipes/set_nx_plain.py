"""SET key 1 EX NX: one command, since Redis 2.6.12.

Invariant. The client that has set the key holds the lock, until the key is deleted or its ttl ends on the server; no
key is ever without a ttl.

Pitfall. The key does not name its holder: a late holder deletes its successor's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.algorithm import LOST, WON, LeasedInSeconds, Outcome, RecipeHold


@dataclass(frozen=True, kw_only=True)
class SetNXPlain(LeasedInSeconds):
    pitfall: ClassVar[str] = "a late DEL frees another holder's lock"

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        command = Command(("SET", hold.key, 1, "EX", self.whole_seconds, "NX"))
        return WON if (yield from call(command, timeout)) is not None else LOST
