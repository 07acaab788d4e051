"""SETNX with a token, EXPIRE, and losers who set the ttl that they find missing: a Python program.

Invariant. What was meant: a key whose holder died before EXPIRE gets its ttl from the next one who wants it, so it is
locked for ever only while nobody cares.

``repair="missing"`` does that: TTL says -1 for a key without one. ``repair="as_written"`` does what the program says,
``not ttl``. Once, the client library said None for a missing ttl; today it says -1, which is true, so nothing is ever
repaired. And TTL rounds: a live lock with less than half a second left reads 0, and a loser gives it a full ttl again.

The name has ``lock:`` before it, the ttl is whole seconds, rounded up, and there is a millisecond between tries. It is
given back by WATCH, compare and MULTI DEL EXEC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call, new_token
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn, one_of, option, pausing, prefixed
from holdfast.protocol.recipes.transaction import delete_own

__all__ = ["SetNXRepair"]

_NO_TTL = -1


@dataclass(frozen=True, kw_only=True)
class SetNXRepair(Leased):
    pit: ClassVar[str] = "a dead holder's lock is repaired only while somebody contends for it, and it has no fence"
    compares: ClassVar[bool] = True

    prefix: str = prefixed("lock:")
    sleep: float = pausing(0.001)
    repair: str = option("missing", one_of("missing", "as_written"))

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        if not turn.token:
            turn.token = yield from new_token("")
        expire = Command(("EXPIRE", turn.key, self.whole_seconds))
        if (yield from call(Command(("SETNX", turn.key, turn.token)), timeout)) == 1:
            yield from call(expire, timeout)
            return WON
        left = yield from call(Command(("TTL", turn.key)), timeout)
        if left == _NO_TTL if self.repair == "missing" else not left:
            yield from call(expire, timeout)
        return LOST

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        return (yield from delete_own(turn, timeout))
