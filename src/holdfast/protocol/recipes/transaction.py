"""WATCH, compare, MULTI DEL EXEC: how a client without scripts deletes its own key and nobody else's.

Invariant. The key is deleted only if it held our token at the time of EXEC: a write in between, by anybody, makes EXEC
do nothing, and then it is all done again. The server forgets the WATCH with its connection, so a lost connection is
taken for such a write.
"""

from __future__ import annotations

from typing import Final

from holdfast.protocol.effects import Command, Effects, StepFailed, clock
from holdfast.protocol.recipes.scheme import Turn, on_link

__all__ = ["EXEC", "MULTI", "UNWATCH", "delete_own"]

MULTI: Final = Command(("MULTI",))
EXEC: Final = Command(("EXEC",))
UNWATCH: Final = Command(("UNWATCH",))


def delete_own(turn: Turn, timeout: float) -> Effects[bool]:
    """Delete the key if it holds the token of this turn; whether it did."""
    until = (yield from clock()) + timeout
    while True:
        try:
            yield from on_link(turn, timeout, Command(("WATCH", turn.key)))
            [owner] = yield from on_link(turn, timeout, Command(("GET", turn.key)))
            if owner != turn.token.encode():
                yield from on_link(turn, timeout, UNWATCH)
                return False
            *_, done = yield from on_link(turn, timeout, MULTI, Command(("DEL", turn.key)), EXEC)
            if done is not None:
                return True
        except StepFailed as failed:
            if not failed.prompt or (yield from clock()) >= until:
                raise
