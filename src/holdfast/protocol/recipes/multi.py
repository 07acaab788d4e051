"""SETNX and EXPIRE in one MULTI: the second repair of setnx.py, in PHP.

Invariant. No key is ever without a ttl, for the two commands are carried out together.

Pit. A transaction has no "if": EXPIRE is carried out whoever SETNX has found there. So every loser gives the holder's
key a full ttl again, and as long as anybody tries often enough, the lock of a dead holder lives on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn, on_link
from holdfast.protocol.recipes.transaction import EXEC, MULTI

__all__ = ["Multi"]


@dataclass(frozen=True, kw_only=True)
class Multi(Leased):
    pit: ClassVar[str] = "every loser prolongs it, so a dead holder's lock never ends while others try"

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        setnx = Command(("SETNX", turn.key, 1))
        expire = Command(("EXPIRE", turn.key, self.whole_seconds))
        *_, done = yield from on_link(turn, timeout, MULTI, setnx, expire, EXEC)
        return WON if done[0] == 1 else LOST
