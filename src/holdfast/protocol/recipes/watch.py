"""WATCH, GET, and MULTI SET EX EXEC if the key is free: the correct form of watch_blind.py.

Invariant. The key is set only if it was free at GET and not written until EXEC, and deleted only by a transaction that
found its own token; so it is as good as SET NX with a token.

Pitfalls. Every write to the key fails all transactions under way, so tries grow with contention. A dropped connection
drops the watch; if it drops after EXEC was sent, the outcome is unknown: the next try may find its own key, and wait
for it. There is no fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, StepFailed, new_token
from holdfast.protocol.recipes.algorithm import AGAIN, LOST, WON, Outcome, RecipeHold, on_connection
from holdfast.protocol.recipes.transaction import EXEC, MULTI, UNWATCH, FreedByTransaction


@dataclass(frozen=True, kw_only=True)
class Watch(FreedByTransaction):
    pitfall: ClassVar[str] = "it has no fence, so a holder that was paused writes beside its successor"

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        if not hold.token:
            hold.token = yield from new_token("")
        try:
            yield from on_connection(hold, timeout, Command(("WATCH", hold.key)))
            [owner] = yield from on_connection(hold, timeout, Command(("GET", hold.key)))
            if owner is not None:
                yield from on_connection(hold, timeout, UNWATCH)
                return LOST
            take = Command(("SET", hold.key, hold.token, "EX", self.whole_seconds))
            *_, done = yield from on_connection(hold, timeout, MULTI, take, EXEC)
        except StepFailed as failed:
            if not failed.connection_broke:
                raise
            return AGAIN  # the watch ended with its connection
        return WON if done is not None else AGAIN
