"""WATCH, MULTI SET EXEC, without ever looking at the key: a Python program.

Invariant. None that excludes anybody: EXEC fails only if somebody else wrote the key after WATCH, and then it is tried
again. Nobody asks whether the key is there, so whoever tries while it is held wins, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, StepFailed
from holdfast.protocol.recipes.scheme import AGAIN, WON, Outcome, Scheme, Turn, on_link, prefixed
from holdfast.protocol.recipes.transaction import EXEC, MULTI

__all__ = ["WatchBlind"]


@dataclass(frozen=True, kw_only=True)
class WatchBlind(Scheme):
    pit: ClassVar[str] = "it excludes nobody: whoever tries, wins"

    prefix: str = prefixed("lock:")

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        try:
            yield from on_link(turn, timeout, Command(("WATCH", turn.key)))
            *_, done = yield from on_link(turn, timeout, MULTI, Command(("SET", turn.key, 1)), EXEC)
        except StepFailed as failed:
            if not failed.prompt:
                raise
            return AGAIN  # the watch went with its connection, which the original takes for a write of somebody else's
        return WON if done is not None else AGAIN
