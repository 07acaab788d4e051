"""SETNX with a token, EXPIRE, and losers that set a missing ttl: a Python program.

Invariant. What was meant: if a holder died before EXPIRE, the next client that wants the lock sets the ttl, so the key
stays forever only while no client wants it.

``repair="missing"`` does that: TTL says -1 for a key without one. ``repair="as_written"`` does what the program says,
``not ttl``. Once, the client library returned None for a missing ttl; today it returns -1, which is true, so nothing is
ever repaired. And TTL rounds: a live lock with less than half a second left reads 0, and a loser gives it a full ttl.

The key is the name with ``lock:`` before it, the ttl is whole seconds, rounded up, and there is a millisecond between
tries. It is released by WATCH, compare and MULTI DEL EXEC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call, new_token
from holdfast.protocol.recipes.algorithm import LOST, WON, Outcome, RecipeHold, one_of, option, pause
from holdfast.protocol.recipes.transaction import FreedByTransaction

_NO_TTL = -1


@dataclass(frozen=True, kw_only=True)
class SetNXRepair(FreedByTransaction):
    pitfall: ClassVar[str] = "a dead holder's lock is repaired only while another client wants it, and it has no fence"

    sleep: float = pause(0.001)
    repair: str = option("missing", one_of("missing", "as_written"))

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        if not hold.token:
            hold.token = yield from new_token("")
        expire = Command(("EXPIRE", hold.key, self.whole_seconds))
        if (yield from call(Command(("SETNX", hold.key, hold.token)), timeout)) == 1:
            yield from call(expire, timeout)
            return WON
        left = yield from call(Command(("TTL", hold.key)), timeout)
        if left == _NO_TTL if self.repair == "missing" else not left:
            yield from call(expire, timeout)
        return LOST
