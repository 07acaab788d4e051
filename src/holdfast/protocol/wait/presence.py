"""Presence of many waiters: if a client has many, its keeper shows the server in batches that they are alive.

Invariant. A waiter of a crowd sleeps. Every half second a ``present`` step shows the server that it is alive. The reply
says whether the waiter should ask: its entry is gone (a notification was lost, or the entry was removed), the lock is
free, or the holder's lease is about to end. So a lost notification costs half a second, as it does without a crowd. If
a batch is not answered, it is sent again with the next round, and the waiters sleep on, until their waits end early
because contact is lost. After REST, a waiter that was not shown lately asks by itself, because the
keeper may be stuck.

Atomic: the ``present`` step, over the waiters of one batch; in a cluster, over those of one slot. It changes nothing
for a waiter that is not in the queue. Any thread may call the methods of a Crowd: they are single dict operations.

Clocks. The reply has the server's time, which ties the server's clock to ours as each answered acquire step does; see
``Hold.accept``.

Why waiters do not send an acquire step each: 20,000 waiters would send 40,000 steps a second, and delay the renewals of
their client too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.protocol.effects import Effects, Step, StepFailed, call_each, clock
from holdfast.protocol.hold import Hold
from holdfast.protocol.wait.contact import LONGEST_CALL, Contacts
from holdfast.protocol.wait.failures import Failures

CROWD: Final = 32  # up to this number, each waiter shows its own presence
REST: Final = 120.0  # longest first sleep of a waiter, in seconds; doubled after each sleep that nothing ended
LARGE: Final = 500  # more threads than this that time out at once would delay the keeper's renewals
EVERY: Final = 0.5  # seconds; a waiter that was not shown for a second loses its place

_LATELY: Final = 2.0  # seconds; more than one round, because a round may fail or be slow
_A_STEP: Final = 200  # waiters in one step, which takes the server about a millisecond
_A_CALL: Final = 5  # steps in one call
_A_THREAD: Final = 0.0002  # seconds that a thread needs to wake up and return to its caller
_NEVER: Final = float("inf")


def _one_slot(_: str) -> int:
    return 0


class Crowd:
    """The waiters of one client whose presence the keeper shows."""

    def __init__(self) -> None:
        self.most_alone = CROWD
        self.spread_over = 0.0  # seconds over which timeouts at the same time are spread
        self._last_end = 0.0  # the end of the wait that was planned last
        self.slot_of: Callable[[str], int] = _one_slot  # of a key: a step is for the waiters of one slot
        self.members: dict[str, Hold] = {}  # by token
        self.due_at = _NEVER
        self._left: deque[Hold] = deque()  # waiters that the current round has not shown yet

    def join(self, hold: Hold, now: float) -> bool:
        """Add a waiter that sleeps from now on; returns whether the keeper must be told of the first round."""
        self.members[hold.token] = hold
        if self.due_at != _NEVER:
            return False
        self.due_at = now + EVERY
        return True

    def spread(self, until: float) -> float:
        """How much longer a waiter of a large crowd sleeps, so that not all threads wake at once (benchmarks.crowd)."""
        if len(self.members) <= LARGE or until == _NEVER:
            return 0.0
        end = self._last_end + _A_THREAD
        self._last_end = end = end if until <= end < until + self.spread_over else until
        return end - until

    def leave(self, hold: Hold) -> None:
        self.members.pop(hold.token, None)

    def look_at_once(self) -> bool:
        """Begin a round now, because notifications may have been lost; returns whether there are waiters."""
        if self.members:
            self.due_at = 0.0
        return bool(self.members)

    def forget(self) -> None:
        self.members.clear()
        self._left.clear()
        self.due_at = _NEVER

    def is_due(self, now: float) -> bool:
        if not self.members:
            self.due_at = _NEVER
            self._left.clear()
        elif now >= self.due_at and not self._left:
            self._left.extend(list(self.members.values()))
            self.due_at = now + EVERY
        return bool(self._left)

    def next_batch(self) -> list[list[Hold]]:
        """The next waiters that still wait, a list for each step."""
        steps: list[list[Hold]] = []
        latest: dict[int, list[Hold]] = {}  # by slot
        for _ in range(min(len(self._left), _A_CALL * _A_STEP)):
            hold = self._left.popleft()
            if self.members.get(hold.token) is hold:
                holds = latest.setdefault(slot := self.slot_of(hold.keys.main), [])
                if len(holds) == _A_STEP:
                    holds = latest[slot] = []
                if not holds:
                    steps.append(holds)
                holds.append(hold)
        return steps

    def call_time(self, contacts: Contacts, now: float) -> float:
        """How long a call may take on which no lease depends; wakes the waiters whose waits end.

        Without contact it is over when the next wait ends.
        """
        if not self.members or not contacts.any_lost():
            return LONGEST_CALL
        return min(LONGEST_CALL, max(contacts.least, self.end_waits(now) - now))

    def end_waits(self, now: float) -> float:
        """Wake the waiters whose wait ends because contact is lost; returns when the next wait ends so.

        The next round begins then at the latest.
        """
        next_end = _NEVER
        for hold in list(self.members.values()):
            ends = hold.wait_ends(_NEVER)
            if now >= ends:
                hold.waiter.wake()
            else:
                next_end = min(next_end, ends)
        self.due_at = min(self.due_at, next_end)
        return next_end

    def end_round(self) -> None:
        """No step of a call was answered, so the rest of the round would not be answered either."""
        self._left.clear()


def rest_of(hold: Hold) -> float:
    """How long a waiter sleeps at most; spread over the waiters by their tokens."""
    return REST * (0.5 + ord(hold.token[-1]) % 16 / 32)


def is_attended(hold: Hold, now: float) -> bool:
    """Whether the keeper has shown this waiter lately, so that it need not ask by itself."""
    return now - hold.waiter.seen[0] < _LATELY


def present_step(holds: list[Hold]) -> Step:
    keys: list[str] = []
    args: list[str] = []
    for hold in holds:
        main, _, queue, waiters = hold.keys.shared
        keys += (main, queue, waiters)
        args += (hold.token, str(len(hold.local_queue())))
    return Step("present", tuple(keys), tuple(args))


def show_presence(crowd: Crowd, until: float, timeout: float) -> Effects[None]:
    """Continue the round until its end, or until that time; wake the waiters that should ask."""
    while batch := crowd.next_batch():
        asked_at = yield from clock()
        shown = [hold for holds in batch for hold in holds]
        for hold in shown:
            hold.sent_at = asked_at
        try:
            replies = yield from call_each([present_step(holds) for holds in batch], timeout)
        finally:
            for hold in shown:
                if hold.sent_at == asked_at:  # else it asks by itself meanwhile
                    hold.sent_at = None
        for holds, reply in zip(batch, replies, strict=True):
            if isinstance(reply, StepFailed):
                for hold in holds:
                    hold.failures = Failures.add(hold.failures, asked_at, reply)
                if not reply.retry:
                    _wake(crowd, holds)  # the waiter whose request was refused must raise the error
                continue
            now_us, *codes = reply
            if len(codes) != len(holds):  # a reply to another step
                _wake(crowd, holds)
                continue
            seen = asked_at, now_us
            for hold, asks in zip(holds, codes, strict=True):
                hold.failures = None
                if not asks:
                    hold.waiter.show(seen)
            _wake(crowd, [hold for hold, asks in zip(holds, codes, strict=True) if asks])
        now = yield from clock()
        failed = [isinstance(reply, StepFailed) for reply in replies]
        if all(failed):
            crowd.end_round()
        if any(failed):
            crowd.end_waits(now)  # of one node of a cluster, maybe
        if now >= until:
            return


def _wake(crowd: Crowd, holds: list[Hold]) -> None:
    for hold in holds:
        if crowd.members.get(hold.token) is hold:
            hold.waiter.wake()
