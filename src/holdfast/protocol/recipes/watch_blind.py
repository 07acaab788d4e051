"""WATCH, MULTI SET EXEC, without ever looking at the key: a Python program.

Invariant. None that excludes another client: EXEC fails only after a write of another client since WATCH, and then it
is tried again. The program never checks whether the key exists, so a client that tries while it is held wins, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, StepFailed
from holdfast.protocol.recipes.algorithm import AGAIN, WON, Algorithm, Outcome, RecipeHold, on_connection, prefixed
from holdfast.protocol.recipes.transaction import EXEC, MULTI


@dataclass(frozen=True, kw_only=True)
class WatchBlind(Algorithm):
    pitfall: ClassVar[str] = "it excludes no other client: every try succeeds"

    prefix: str = prefixed("lock:")

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        try:
            yield from on_connection(hold, timeout, Command(("WATCH", hold.key)))
            *_, done = yield from on_connection(hold, timeout, MULTI, Command(("SET", hold.key, 1)), EXEC)
        except StepFailed as failed:
            if not failed.connection_broke:
                raise
            return AGAIN  # the watch ended with its connection; the original takes that for another client's write
        return WON if done is not None else AGAIN
