"""SET key token NX PX, and a script that deletes only its own key: what most libraries do.

Invariant. The client whose token is in the key holds the lock; only its own release, or the end of its ttl on the
server, removes the key. Each of the two is one step.

Pitfall. A holder that was paused does not know that its ttl has ended. It works at the same time as its successor, and
a resource cannot tell them apart, because there is no fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, Step, call, new_token
from holdfast.protocol.recipes.algorithm import LOST, WON, Leased, Outcome, RecipeHold


@dataclass(frozen=True, kw_only=True)
class SetNXToken(Leased):
    pitfall: ClassVar[str] = "it has no fence, so a holder that was paused writes beside its successor"
    checks_owner: ClassVar[bool] = True

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        if not hold.token:
            hold.token = yield from new_token("")
        command = Command(("SET", hold.key, hold.token, "NX", "PX", round(self.ttl * 1000)))
        return WON if (yield from call(command, timeout)) is not None else LOST

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        return bool((yield from call(Step("free", (hold.key,), (hold.token,)), timeout, shielded=True)))
