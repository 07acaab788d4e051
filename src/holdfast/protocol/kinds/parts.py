"""A step on several names of different hash slots: one step for each slot, one after the other.

Invariant. A waiter that is refused in one slot holds nothing in any other slot: before it gets the refusal, the names
that it had acquired are released, and its entries in the queues of later slots are removed. All clients go through the
slots in the same order, and no client waits in one slot while it holds another. So no order of names can deadlock.

Atomic: the step in each slot. If a client ends in between, the names that it had acquired end by their ttl. If only the
connection was lost, the client's abandon step ends them, and leaves tombstones in all slots.

Late. A try that was refused is followed by another one with the same token. So a step that rolls a try back names the
fence of the grant that it undoes: if it arrives after a later try was granted, it finds another fence, and frees
nothing.

A single server is one slot; on a cluster a script may touch the keys of one slot only. The engine gets the next step
from a StepInParts, and the reply after the last step. Unlike a single step, this cannot give one fence for all names:
each slot has its own fence, and the holder gets all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.protocol.effects import Step
from holdfast.protocol.wait.waiting import NO_CHANNEL

ACQUIRE: Final = "multi_acquire"
ADOPT: Final = "multi_adopt"
RENEW: Final = "multi_renew"
_IS_WHOLE: Final = 3  # argument of an acquire: whether it has all names
_CHANNEL: Final = 4  # argument of an acquire: its channel; empty if it does not wait
_WIDTH: Final = {  # keys per name
    **dict.fromkeys((ACQUIRE, ADOPT, "multi_hand_over", "multi_release", "multi_abandon"), 5),
    **dict.fromkeys((RENEW, "multi_leave"), 1),
}


def is_divisible(step: Step) -> bool:
    """Whether this is a step on several names."""
    return step.script in _WIDTH


class StepInParts:
    """The parts of one step on several names. ``step`` is the next part to send; None when ``reply`` is known."""

    def __init__(
        self, whole: Step, slot_of: Callable[[str], int], channel_of: Callable[[int], str] | None = None
    ) -> None:
        """``channel_of``: the channel on which a script in this slot can notify us; None: the same in all slots."""
        self._whole = whole
        self._script = whole.script
        self._parts = divide(whole, slot_of, channel_of)
        self._replies: list[Any] = []
        self._cleaning: list[Step] = []
        self.reply: Any = None
        self.step: Step | None = self._parts[0]

    def answer(self, reply: Any) -> None:
        """Take the reply to ``step``, and choose the next step."""
        if self._cleaning:
            done = self._cleaning.pop(0)
            if not done.args[1] and reply not in (b"0", 0):  # granted by an earlier try, whose reply was lost
                self._cleaning.insert(0, _roll_back(done, reply))
        elif self._is_refusal(reply):
            self.reply = reply
            self._cleaning = self._clean_up(len(self._replies))
        else:
            self._replies.append(reply)
            if len(self._replies) < len(self._parts):
                self.step = self._parts[len(self._replies)]
                return
            self.reply = self._combine()
        self.step = self._cleaning[0] if self._cleaning else None

    def _is_refusal(self, reply: Any) -> bool:
        if self._script == ADOPT:
            return int(reply) <= 0
        return self._script == ACQUIRE and isinstance(reply, list)

    def _clean_up(self, refused: int) -> list[Step]:
        """The steps that release the names acquired before, and remove the entries in the queues of later slots.

        A giver's holds in later slots are not touched: another client may be adopting them.
        """
        acquired, later = self._parts[:refused], self._parts[refused + 1 :]
        steps = [_roll_back(part, fence) for part, fence in zip(acquired, self._replies, strict=True)]
        if self._script == ACQUIRE and self._whole.args[_CHANNEL]:
            steps += [_roll_back(part) for part in later]
        return steps

    def _combine(self) -> Any:
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


def _roll_back(part: Step, fence: bytes | int | None = None) -> Step:
    """The step that undoes this part, if it was granted with that fence."""
    return Step("multi_roll_back", part.keys, (part.args[0], "" if fence is None else str(int(fence))))


def _mains(step: Step) -> tuple[str, ...]:
    return step.keys[:: _WIDTH[step.script]]


def divide(whole: Step, slot_of: Callable[[str], int], channel_of: Callable[[int], str] | None = None) -> list[Step]:
    """One step for each slot, in the order of slots, which is the same for all clients."""
    width = _WIDTH[whole.script]
    slots: dict[int, list[str]] = {}
    for start in range(0, len(whole.keys), width):
        slots.setdefault(slot_of(whole.keys[start]), []).extend(whole.keys[start : start + width])
    parts = [(slot, whole._replace(keys=tuple(keys))) for slot, keys in sorted(slots.items())]
    if whole.script != ACQUIRE or len(parts) == 1:
        return [part for _, part in parts]
    args, channel = whole.args, whole.args[_CHANNEL]
    if channel_of is None or channel in ("", NO_CHANNEL):
        channels = [channel] * len(parts)
    else:
        channels = [channel_of(slot) for slot, _ in parts]
    return [
        part._replace(args=(*args[:_IS_WHOLE], "0", channel, *args[_CHANNEL + 1 :]))
        for (_, part), channel in zip(parts, channels, strict=True)
    ]
