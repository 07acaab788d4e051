"""Presence of many waiters: above a number of them, the keeper shows the server that they are alive, in batches.

Invariant. A waiter of a crowd sleeps. Every half second a ``present`` step shows the server that it is alive, and finds
out whether the waiter should ask: its entry is gone (a notification was lost, or it was struck off), the lock is free,
or the holder's lease is about to end. So a lost notification costs half a second, as it does without a crowd. A batch
that is not answered is sent again with the next round, and the waiters sleep on; a waiter whose time ends meanwhile
raises what the batch has failed with. If the keeper cannot do its work, each waiter asks by itself after REST.

Atomic: the ``present`` step, over the waiters of one batch. It changes nothing for a waiter that is not in the queue.
Any thread may call the methods of a Crowd: they are single dict operations.

Clocks. The reply has the server's time, which ties the server's clock to ours as each answered acquire step does; see
``Hold.rung``.

Why not an acquire step each? 20,000 waiters would send 40,000 of them a second, and no renewal of their client would
come through.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from holdfast.lease import Hold
from holdfast.protocol.effects import Effects, Step, StepFailed, call_each, clock, warn

__all__ = ["CROWD", "Crowd", "rest_of", "show_presence"]

CROWD: Final = 32  # up to this number of waiters, each one shows its own presence
REST: Final = 30.0  # at the longest: in case that the keeper cannot do its work
LARGE: Final = 500  # threads that give up at once would keep the keeper from renewing
EVERY: Final = 0.5  # seconds; a waiter that was not seen for a second loses its place

_A_STEP: Final = 200  # waiters: about a millisecond of the server's time
_A_CALL: Final = 5  # steps
_FIRST_WARNING: Final = 1.0  # seconds between two warnings, doubled each time
_RAREST_WARNING: Final = 60.0
_NEVER: Final = float("inf")


class Crowd:
    """The waiters of one client for which its keeper speaks."""

    def __init__(self) -> None:
        self.most_alone = CROWD
        self.spread_over = 0.0  # seconds within which a large crowd that gives up together does so
        self.members: dict[str, Hold] = {}  # by token
        self.due_at = _NEVER
        self.outage: StepFailed | None = None  # why the last batch brought no answer
        self._left: deque[Hold] = deque()  # of the present round
        self._warn_at = 0.0
        self._warn_after = _FIRST_WARNING

    def join(self, hold: Hold, now: float) -> bool:
        """It sleeps from now on; whether the keeper has to be told of the first round."""
        self.members[hold.token] = hold
        if self.due_at != _NEVER:
            return False
        self.due_at = now + EVERY
        return True

    def spread(self, hold: Hold) -> float:
        """How much longer a waiter of a large crowd sleeps, so that not all threads wake at once (benchmarks.crowd)."""
        return self.spread_over * int(hold.token[-4:], 16) / 0xFFFF if len(self.members) > LARGE else 0.0

    def leave(self, hold: Hold) -> None:
        self.members.pop(hold.token, None)

    def look_at_once(self) -> bool:
        """Anything may have happened: begin a round now. Whether there is anybody to look for."""
        if self.members:
            self.due_at = 0.0
        return bool(self.members)

    def forget(self) -> None:
        self.members.clear()
        self._left.clear()
        self.due_at = _NEVER
        self.outage = None

    def is_due(self, now: float) -> bool:
        if not self.members:
            self.due_at = _NEVER
            self._left.clear()
        elif now >= self.due_at and not self._left:
            self._left.extend(list(self.members.values()))
            self.due_at = now + EVERY
        return bool(self._left)

    def next_batch(self) -> list[list[Hold]]:
        """Waiters that are still there, a list for each step. Where locks live on several nodes, a step is for one."""
        steps: list[list[Hold]] = []
        while self._left and len(steps) < _A_CALL:
            holds: list[Hold] = []
            while self._left and len(holds) < _A_STEP:
                hold = self._left.popleft()
                if self.members.get(hold.token) is hold:
                    holds.append(hold)
            if holds:
                steps.append(holds)
        return steps

    def fail(self, failed: StepFailed) -> None:
        """No answer: what is left of this round would have none, either."""
        self.outage = failed.with_traceback(None)
        self._left.clear()

    def is_to_be_warned_of(self, now: float) -> bool:
        """At once, and then ever more rarely."""
        if now < self._warn_at:
            return False
        self._warn_at = now + self._warn_after
        self._warn_after = min(2 * self._warn_after, _RAREST_WARNING)
        return True

    def check(self) -> None:
        """Raise why the last batch brought no answer, if it brought none."""
        if (failed := self.outage) is not None:
            raise StepFailed(failed.error, sent=False, retry=False, silent=failed.silent)

    def succeed(self) -> None:
        self.outage = None
        self._warn_at, self._warn_after = 0.0, _FIRST_WARNING


def rest_of(hold: Hold) -> float:
    """How long a waiter sleeps at most; not all of them equally long."""
    return REST * (0.5 + ord(hold.token[-1]) % 16 / 32)


def present_step(holds: list[Hold]) -> Step:
    keys: list[str] = []
    for hold in holds:
        main, _, queue, waiters = hold.keys.shared
        keys += (main, queue, waiters)
    return Step("present", tuple(keys), tuple([hold.token for hold in holds]))


def show_presence(crowd: Crowd, until: float, timeout: float) -> Effects[None]:
    """Go on with the present round until that time, or to its end; wake the waiters that should ask."""
    while batch := crowd.next_batch():
        asked_at = yield from clock()
        replies = yield from call_each([present_step(holds) for holds in batch], timeout)
        for holds, reply in zip(batch, replies, strict=True):
            if isinstance(reply, StepFailed):
                crowd.fail(reply)
                if not reply.retry:
                    _wake(crowd, holds)  # what is wrong with one of them must be told to that one
                continue
            crowd.succeed()
            now_us, *codes = reply
            if len(codes) != len(holds):  # not an answer to this step
                _wake(crowd, holds)
                continue
            for hold, asks in zip(holds, codes, strict=True):
                if not asks:
                    hold.seen = asked_at, now_us
            _wake(crowd, [hold for hold, asks in zip(holds, codes, strict=True) if asks])
        now = yield from clock()
        if (failed := crowd.outage) is not None and crowd.is_to_be_warned_of(now):
            yield from warn(f"{len(crowd.members)} waiters of this client go on waiting: {failed.error}")
        if now >= until:
            return


def _wake(crowd: Crowd, holds: list[Hold]) -> None:
    for hold in holds:
        if crowd.members.get(hold.token) is hold and hold.bell is not None:
            hold.bell.ring()
