"""Singleflight: callers of one process that want the same value share one call, and its leader asks the server for all.

Invariant. A caller gets an answer only if it joined before the request for that answer was sent. So no caller gets a
value that was read, or stored, before it asked, and after an invalidation no caller gets an older value. Callers that
join later share the next call, with a leader of their own. A failure is given only to callers that had joined when it
happened. If the server does not answer, the leader retries for all callers; they do not retry one after the other.

A caller that leaves is removed at once: a shared call is as large as its number of waiting callers.

Shared calls only save requests. The server decides what is computed, and by which caller. If there are two shared calls
for one key, or a leader is lost (Ctrl-C can come at any point), that costs one more request or half a second.

Atomic: single dict operations and counters, so any thread may call. ``setdefault`` elects the leader.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any, Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.protocol.effects import Wakeup

_EVER: Final = float("inf")
_MOST_WARNED_OF: Final = 1000  # names that a client remembers, to bound its memory


class Outage(NamedTuple):
    """As an answer: the server could not be asked."""

    error: HoldfastError


class SharedCall:
    """Callers that wait for the same answer."""

    __slots__ = ("_numbers", "completed", "key", "leader", "participants")

    def __init__(self, key: str) -> None:
        self.key = key
        self.participants: dict[Participant, None] = {}
        self.leader: dict[None, Participant] = {}  # the participant that asks the server; set by ``setdefault``
        self.completed = False
        self._numbers = count()

    def add(self, participant: Participant) -> None:
        participant.shared_call = self
        participant.number = self.next_number()
        self.participants[participant] = None

    def next_number(self) -> int:
        """A number above those of all participants so far, and below those of later ones."""
        return next(self._numbers)


_NO_CALL: Final = SharedCall("")  # of a participant that has not joined, or has left
_NO_CALL.completed = True


class Participant:
    """One caller in a shared call."""

    __slots__ = ("answer", "arrived_at", "caller", "left", "number", "shared_call", "unreadable", "wakeup")

    def __init__(self, caller: Hashable, arrived_at: float, unreadable: str = "") -> None:
        self.caller = caller  # the thread or the task
        self.arrived_at = arrived_at
        self.unreadable = unreadable  # digest of a value that it could not load, which counts as missing
        self.number = 0
        self.wakeup: Wakeup | None = None  # a leader needs none
        self.answer: Any = None
        self.left = False
        self.shared_call = _NO_CALL


class Group:
    """The shared calls of one client. A new driver generation (after a fork, or in a new loop) begins with none."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.calls: dict[str, SharedCall] = {}
        self._warned_of: dict[str, None] = {}  # names of values that could not be loaded
        self._generation = driver.generation

    def first_warning(self, name: str) -> bool:
        """Whether there was no warning about that value yet; remembers that there is one now."""
        if name in self._warned_of:
            return False
        if len(self._warned_of) >= _MOST_WARNED_OF:
            self._warned_of.clear()
        self._warned_of[name] = None
        return True

    def join(self, key: str, participant: Participant) -> None:
        """Add the participant to a shared call that is not completed."""
        if self._generation != self.driver.generation:
            self.calls, self._generation = {}, self.driver.generation
        while True:
            shared_call = self.calls.setdefault(key, SharedCall(key))
            shared_call.add(participant)
            shared_call.leader.setdefault(None, participant)
            if not shared_call.completed:
                return
            self.close(shared_call)  # completed at the same time, perhaps before we were added

    def close(self, shared_call: SharedCall) -> None:
        """Let no further participant join."""
        if self.calls.get(shared_call.key) is shared_call:
            self.calls.pop(shared_call.key, None)

    def complete(self, shared_call: SharedCall, answer: Any = None, served: int = 0, before: float = _EVER) -> None:
        """Give the answer to participants numbered below ``served`` that arrived before that time.

        The others, except the leader, go on in a new shared call.
        """
        shared_call.completed = True
        self.close(shared_call)
        given: list[Participant] = []
        late: list[Participant] = []
        leader = shared_call.leader.get(None)
        for participant in list(shared_call.participants):
            if participant.number < served and participant.arrived_at < before:
                participant.answer = answer
                given.append(participant)
            elif participant is not leader and not participant.left and participant.answer is None:
                late.append(participant)
        if late:
            successor = SharedCall(shared_call.key)
            for participant in late:
                successor.add(participant)
            self.calls.setdefault(shared_call.key, successor)
            wake_one(successor)
        for participant in given:
            if participant.wakeup is not None:
                participant.wakeup.wake()

    def leave(self, participant: Participant) -> None:
        """Remove a participant that has its answer, or gives up."""
        participant.left = True
        shared_call = participant.shared_call
        shared_call.participants.pop(participant, None)
        leader = shared_call.leader.get(None)
        if leader is participant:
            if not shared_call.completed:
                self.complete(shared_call)
        elif leader is None:
            wake_one(shared_call)
        participant.shared_call = _NO_CALL  # else each of the two would keep the other alive


class CompleteOnLoss:
    """A wakeup that completes a shared call when its leader loses the claim: then its result no longer counts."""

    caller: Hashable = None  # none sleeps on it

    def __init__(self, group: Group, shared_call: SharedCall) -> None:
        self._group = group
        self._shared_call = shared_call

    def wake(self) -> None:
        if not self._shared_call.completed:
            self._group.complete(self._shared_call)

    def prewake(self) -> None:
        """Nothing: only the loss itself counts."""

    def clear(self) -> None:
        """Nothing: a claim is lost once."""


def wake_one(shared_call: SharedCall) -> None:
    """Wake one participant, which becomes the leader."""
    for participant in list(shared_call.participants):
        if not participant.left:
            if participant.wakeup is not None:  # else it has just joined, and looks before it sleeps
                participant.wakeup.wake()
            return


def join_alone(key: str, other: Participant) -> Participant:
    """A participant for the same caller, as the leader of a shared call that no other can join."""
    participant = Participant(other.caller, other.arrived_at, other.unreadable)
    SharedCall(key).add(participant)
    participant.shared_call.leader[None] = participant
    return participant
