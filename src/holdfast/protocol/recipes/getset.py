"""SETNX of a deadline, GET, GETSET; won if the value that GETSET replaced is past, too. In C++, PHP and old Redis docs.

Invariant. Of several clients that find the deadline past, the first GETSET wins: it replaces a past number by a future
one, which the others find, and so they have lost. (See deadline.py for the numbers that they leave.)

Pitfalls. The losers' numbers stretch the winner's lock. A client that was paused between GET and GETSET leaves a number
that is almost past, so the next client gets the lock while the winner still holds it. Clocks must agree.
``release="unexpired"`` (GET, and DEL if the value is not past: the C++ client) and ``"del"`` can free a later holder's
lock. With ``"same_value"`` (a script: DEL if the number is still ours) the owner cannot release its lock once a loser
has overwritten its number. With ``owner_prefix`` the value is a name, a dot, and the deadline. For the same reason the
name may be a loser's: a lock that lets its owner in again by that name would let in the loser.

As in the C++ client, the ttl is 10 s, and there is a millisecond between tries, whose number is logged if it is above
one. An error is logged and counts as a failed try, a broken connection is replaced, and a failed release is logged
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, Step, call, new_token
from holdfast.protocol.recipes.algorithm import RecipeHold, one_of, option, prefixed
from holdfast.protocol.recipes.deadline import Deadlined


@dataclass(frozen=True, kw_only=True)
class GetSet(Deadlined):
    pitfall: ClassVar[str] = "losers overwrite the holder's deadline, clocks must agree, a late release frees another's"
    logs_errors: ClassVar[bool] = True

    prefix: str = prefixed("lock.")
    plus_one: bool | None = option(None, one_of(True, False, None))
    owner_prefix: bool = option(False, one_of(True, False))
    release: str = option("unexpired", one_of("unexpired", "same_value", "del"))

    @property
    def checks_owner(self) -> bool:  # type: ignore[override]
        return self.release == "same_value"

    @property
    def adds_one(self) -> bool:
        return self.unit != "ms" if self.plus_one is None else self.plus_one  # PHP clients count in ms and add nothing

    def write(self, hold: RecipeHold, deadline: int) -> Effects[str]:
        if not self.owner_prefix:
            return str(deadline)
        if not hold.token:
            hold.token = yield from new_token("")
        return f"{hold.token}.{deadline}"

    def read(self, value: bytes | None) -> int:
        return super().read(value.rpartition(b".")[2] if value and self.owner_prefix else value)

    def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
        return self.is_past(before, now)

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        if self.release == "same_value":
            return bool((yield from call(Step("free", (hold.key,), (hold.value,)), timeout, shielded=True)))
        if self.release == "unexpired":
            now = yield from self.read_now()
            if self.is_past((yield from call(Command(("GET", hold.key)), timeout, shielded=True)), now):
                return False
        return (yield from super().free(hold, timeout))
