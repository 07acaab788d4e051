"""WATCH, compare, MULTI DEL EXEC: how a client without scripts deletes only its own key.

Invariant. The key is deleted only if it held our token at the time of EXEC: a write of any client in between makes EXEC
do nothing, and then all is repeated. The server forgets a WATCH with its connection, so a lost connection counts as
such a write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from holdfast.protocol.effects import Command, Effects, StepFailed, clock
from holdfast.protocol.recipes.algorithm import LeasedInSeconds, RecipeHold, on_connection, prefixed

MULTI: Final = Command(("MULTI",))
EXEC: Final = Command(("EXEC",))
UNWATCH: Final = Command(("UNWATCH",))


@dataclass(frozen=True, kw_only=True)
class FreedByTransaction(LeasedInSeconds):
    checks_owner: ClassVar[bool] = True

    prefix: str = prefixed("lock:")

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        """Delete the key if it has the token of this hold. Returns whether it had."""
        until = (yield from clock()) + timeout
        while True:
            try:
                yield from on_connection(hold, timeout, Command(("WATCH", hold.key)))
                [owner] = yield from on_connection(hold, timeout, Command(("GET", hold.key)))
                if owner != hold.token.encode():
                    yield from on_connection(hold, timeout, UNWATCH)
                    return False
                *_, done = yield from on_connection(hold, timeout, MULTI, Command(("DEL", hold.key)), EXEC)
                if done is not None:
                    return True
            except StepFailed as failed:
                if not failed.connection_broke or (yield from clock()) >= until:
                    raise
