"""SET key 1 EX NX: one command, since Redis 2.6.12.

Invariant. Whoever has set the key holds the lock, until the key is deleted or its ttl ends on the server; no key is
ever without a ttl.

Pit. The key does not say whose it is: who is late deletes the key of whoever came after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn

__all__ = ["SetNXPlain"]


@dataclass(frozen=True, kw_only=True)
class SetNXPlain(Leased):
    pit: ClassVar[str] = "a late DEL frees another holder's lock"

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        command = Command(("SET", turn.key, 1, "EX", self.whole_seconds, "NX"))
        return WON if (yield from call(command, timeout)) is not None else LOST
