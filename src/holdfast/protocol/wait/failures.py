"""What the requests of one hold have found out about the server.

Invariant. A request that is answered ends them; so does a grant. What failed before says nothing of later requests.
A request whose caller was interrupted counts for the time that it was under way, no longer.
"""

from __future__ import annotations

from copy import copy

from holdfast.protocol.effects import StepFailed


class Failures:
    """The requests on one lock that have failed since one was answered."""

    __slots__ = ("_broke", "_failed", "_since", "silence")

    def __init__(self) -> None:
        self.silence = 0.0  # how long a request was under way at most when its caller was interrupted
        self._broke = False  # a connection was found closed, which is no failure yet
        self._since = 0.0  # when the first of them was sent
        self._failed: StepFailed | None = None  # the last one

    @staticmethod
    def add(before: Failures | None, sent_at: float, failed: StepFailed) -> Failures:
        """Those before, if there are any, and this one, of a request that was sent at that time."""
        failures = before or Failures()
        failures._add(sent_at, failed)
        return failures

    @staticmethod
    def cut_short(before: Failures | None, silence: float) -> Failures:
        """Those before, and a request that had no answer after that time, when its caller was interrupted."""
        failures = before or Failures()
        failures.silence = max(failures.silence, silence)
        return failures

    def _add(self, sent_at: float, failed: StepFailed) -> None:
        if failed.connection_broke and not self._broke:
            self._broke = True
            return
        if self._failed is None:
            self._since = sent_at
        self._failed = again(failed)

    def overdue(self, now: float, answer_time: float) -> StepFailed | None:
        """The last failure, if the server has had that time to answer, or has failed aloud."""
        failed = self._failed
        return None if failed is None or (failed.silent and now - self._since < answer_time) else again(failed)


def again(failed: StepFailed) -> StepFailed:
    """The same, as the failure of another call: no request of that was sent. Its error is a copy, without traceback."""
    error = copy(failed.error)
    return StepFailed(error, sent=False, retry=failed.retry, ever_answered=failed.ever_answered, silent=failed.silent)
