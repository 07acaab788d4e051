"""SET key token NX PX, and a script that deletes what is still its own: what most libraries do.

Invariant. Whoever's token is in the key holds the lock, and only its own release, or the end of its ttl on the server,
takes the key away. The two commands are one step each.

Pit. The holder does not know when its ttl ends, or was paused: then it goes on beside the next one, and nothing that
both write to can tell them apart, for there is no fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, Step, call, new_token
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn

__all__ = ["SetNXToken"]


@dataclass(frozen=True, kw_only=True)
class SetNXToken(Leased):
    pit: ClassVar[str] = "it has no fence, so a holder that was paused writes beside its successor"
    compares: ClassVar[bool] = True

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        if not turn.token:
            turn.token = yield from new_token("")
        command = Command(("SET", turn.key, turn.token, "NX", "PX", round(self.ttl * 1000)))
        return WON if (yield from call(command, timeout)) is not None else LOST

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        return bool((yield from call(Step("free", (turn.key,), (turn.token,)), timeout, shielded=True)))
