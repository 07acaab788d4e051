"""WATCH, GET, and MULTI SET EX EXEC if the key is free: what watch_blind.py could have been.

Invariant. The key is set only if it was free at GET and nobody wrote it until EXEC, and deleted only by a transaction
that found its own token there; so it is as good as SET NX with a token.

Pits. Every write to the key fails the transactions of all who are under way, so tries grow with contention. A dropped
connection drops the watch, and if it drops after EXEC was sent, nobody knows what came of it: the next try may find its
own key, and wait for it. There is no fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, StepFailed, new_token
from holdfast.protocol.recipes.scheme import AGAIN, LOST, WON, Leased, Outcome, Turn, on_link, prefixed
from holdfast.protocol.recipes.transaction import EXEC, MULTI, UNWATCH, delete_own

__all__ = ["Watch"]


@dataclass(frozen=True, kw_only=True)
class Watch(Leased):
    pit: ClassVar[str] = "it has no fence, so a holder that was paused writes beside its successor"
    compares: ClassVar[bool] = True

    prefix: str = prefixed("lock:")

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        if not turn.token:
            turn.token = yield from new_token("")
        try:
            yield from on_link(turn, timeout, Command(("WATCH", turn.key)))
            [owner] = yield from on_link(turn, timeout, Command(("GET", turn.key)))
            if owner is not None:
                yield from on_link(turn, timeout, UNWATCH)
                return LOST
            take = Command(("SET", turn.key, turn.token, "EX", self.whole_seconds))
            *_, done = yield from on_link(turn, timeout, MULTI, take, EXEC)
        except StepFailed as failed:
            if not failed.prompt:
                raise
            return AGAIN  # the watch went with its connection
        return WON if done is not None else AGAIN

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        return (yield from delete_own(turn, timeout))
