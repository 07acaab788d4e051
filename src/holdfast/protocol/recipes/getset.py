"""SETNX of a deadline, GET, GETSET; won if what GETSET replaced is past, too: in C++ and PHP, and in Redis' own
documentation of old.

Invariant. Of several who find the deadline past, the first GETSET wins: it replaces a number that is past, and leaves
one that is not, so the others find that and have lost. (See deadline.py for what they leave behind.)

Pits. The losers' numbers stretch the winner's lock; and one who was paused between GET and GETSET leaves a number that
is almost past, so that the next one gets in beside the winner. Clocks must agree. ``release="unexpired"`` (GET, and DEL
if that is not past: the C++ client) and ``"del"`` free whoever came after; ``"same_value"`` (a script, DEL if the
number is still ours) leaves the true owner unable to release once a loser has overwritten its number. With
``owner_prefix`` the value is a name, a dot, and the deadline, and for the same reason the name need not be the
holder's: a lock that looks at it to let its owner in again would let in a loser.

As the C++ client does: 10 s, a millisecond between tries, their count logged when it is above one; an error is logged
and counts as a failed try, a broken connection is made anew, and a release that fails is logged and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, Step, call, new_token
from holdfast.protocol.recipes.deadline import Deadlined
from holdfast.protocol.recipes.scheme import Turn, one_of, option, prefixed

__all__ = ["GetSet"]


@dataclass(frozen=True, kw_only=True)
class GetSet(Deadlined):
    pit: ClassVar[str] = "losers overwrite the holder's deadline, clocks must agree, and a late release frees another's"
    forgiving: ClassVar[bool] = True

    prefix: str = prefixed("lock.")
    plus_one: bool | None = option(None, one_of(True, False, None))
    owner_prefix: bool = option(False, one_of(True, False))
    release: str = option("unexpired", one_of("unexpired", "same_value", "del"))

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.release == "same_value"

    @property
    def adds_one(self) -> bool:
        return self.unit != "ms" if self.plus_one is None else self.plus_one  # PHP's counts in ms, and adds nothing

    def write(self, turn: Turn, deadline: int) -> Effects[str]:
        if not self.owner_prefix:
            return str(deadline)
        if not turn.token:
            turn.token = yield from new_token("")
        return f"{turn.token}.{deadline}"

    def read(self, value: bytes | None) -> int:
        return super().read(value.rpartition(b".")[2] if value and self.owner_prefix else value)

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        return self.is_past(before, now)

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        if self.release == "same_value":
            return bool((yield from call(Step("free", (turn.key,), (turn.value,)), timeout, shielded=True)))
        if self.release == "unexpired":
            now = yield from self.read_now()
            if self.is_past((yield from call(Command(("GET", turn.key)), timeout, shielded=True)), now):
                return False
        return (yield from super().free(turn, timeout))
