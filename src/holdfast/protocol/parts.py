"""A step on several names that do not live in the same place: one step in each place, one after the other.

Invariant. Whoever was refused in one place holds nothing in any other: what it had taken before is given back, and a
turn in a queue further on is given up, before it is told. Everybody goes through the places in the same order, and
nobody waits in one while it holds another, so no order of names can end in a deadlock here either.

Atomic: the step in each place. In between a client can end: what it had taken until then ends by its ttl; or, if only
the connection was lost, by its own abandon, which leaves tombstones in all places.

A server is one place; a cluster has one for each hash slot, and a script may touch one only. Whoever performs a step
there asks here what to send next, and finds the reply here when there is nothing more to send. What a single step
cannot give is one fence for all: each place has its own, and the holder is told all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.protocol.effects import Step

__all__ = ["InOrder", "is_divisible"]

ACQUIRE: Final = "multi_acquire"
ADOPT: Final = "multi_adopt"
RENEW: Final = "multi_renew"
_IS_WHOLE: Final = 3  # among the arguments of an acquire: whether it has all names,
_CHANNEL: Final = 4  # and its channel; empty if it does not queue
_WIDTH: Final = {  # how many keys a name has
    **dict.fromkeys((ACQUIRE, ADOPT, "multi_hand_over", "multi_release", "multi_abandon"), 5),
    RENEW: 1,
}


def is_divisible(step: Step) -> bool:
    """Whether it is a step on several names."""
    return step.script in _WIDTH


class InOrder:
    """What is sent for one step on several names. ``step`` is to be sent next; None when ``reply`` is known."""

    def __init__(self, whole: Step, place_of: Callable[[str], int]) -> None:
        self._whole = whole
        self._script = whole.script
        self._parts = _divide(whole, place_of)
        self._replies: list[Any] = []
        self._cleaning: list[Step] = []
        self.reply: Any = None
        self.step: Step | None = self._parts[0]

    def answer(self, reply: Any) -> None:
        """This was the reply to that step."""
        if self._cleaning:
            self._cleaning.pop(0)
        elif self._is_refusal(reply):
            self.reply = reply
            self._cleaning = self._roll_back(len(self._replies))
        else:
            self._replies.append(reply)
            if len(self._replies) < len(self._parts):
                self.step = self._parts[len(self._replies)]
                return
            self.reply = self._sum()
        self.step = self._cleaning[0] if self._cleaning else None

    def _is_refusal(self, reply: Any) -> bool:
        if self._script == ADOPT:
            return int(reply) <= 0
        return self._script == ACQUIRE and isinstance(reply, list)

    def _roll_back(self, refused: int) -> list[Step]:
        """Give back what was taken before, and a turn further on, where it may have waited until now.

        What a giver has left further on is not touched: somebody else may be adopting it, who was first.
        """
        taken, further = self._parts[:refused], self._parts[refused + 1 :]
        steps = [Step("multi_release", part.keys, part.args[:1]) for part in taken]
        if self._script == ACQUIRE and self._whole.args[_CHANNEL]:
            steps += [Step("multi_abandon", part.keys, (part.args[0], "0")) for part in further]
        return steps

    def _sum(self) -> Any:
        if len(self._replies) == 1:
            return self._replies[0]
        if self._script in (ACQUIRE, ADOPT):
            fences = {
                key: int(reply) for part, reply in zip(self._parts, self._replies, strict=True) for key in _mains(part)
            }
            return [1, max(fences.values()), [fences[key] for key in _mains(self._whole)]]
        if self._script == "multi_abandon":
            return [min(freed for freed, _ in self._replies), min(buried for _, buried in self._replies)]
        return min(self._replies)


def _mains(step: Step) -> tuple[str, ...]:
    return step.keys[:: _WIDTH[step.script]]


def _divide(whole: Step, place_of: Callable[[str], int]) -> list[Step]:
    """A step for each place, in the order of places, which is the same for everybody."""
    width = _WIDTH[whole.script]
    places: dict[int, list[str]] = {}
    for start in range(0, len(whole.keys), width):
        places.setdefault(place_of(whole.keys[start]), []).extend(whole.keys[start : start + width])
    args = whole.args
    if whole.script == ACQUIRE and len(places) > 1:
        args = (*args[:_IS_WHOLE], "0", *args[_IS_WHOLE + 1 :])
    return [whole._replace(keys=tuple(keys), args=args) for _, keys in sorted(places.items())]
