"""Waiting for something on the server: ask, wait for a notification, ask again.

Invariant. Notifications are hints: a waiter asks again after half a second at the latest, which also shows the server
that it is alive. So one that was lost, late or sent twice costs time and nothing else. A waiter that cannot be notified
(no permission, no free connection) polls; if it may subscribe but could not, it tries that again. No loop is without a
pause, and none without an end: the caller's patience, a server that never answered this client, or a refusal that
cannot pass.

Atomic: each step that is sent. The subscriber is started after the first refusal, and the step is sent once more before
the first wait, because what is waited for may have happened before the server could notify us.

Many waiters of one client take turns at asking (asks.py), and let the keeper show that they are alive (presence.py).

Locks, latches and cached values wait by this one loop; what they ask, and what an answer means, is their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.errors import rounded
from holdfast.lease import HELD, Hold
from holdfast.protocol.effects import Effects, StepFailed, clock, listen, wait, warn
from holdfast.protocol.retry import SHORTEST_CALL, Tries, backoff

if TYPE_CHECKING:
    from holdfast.protocol.bells import Switchboard

__all__ = ["MUTE", "REFRESH", "Pause", "Waiter", "pause_for"]

MUTE: Final = "-"  # the channel of a waiter that cannot be notified
REFRESH: Final = 0.5  # how often a waiter asks again; after a second of silence it loses its place

_LONGEST_POLL: Final = 0.1  # of a waiter that cannot be notified
_FIRST_WARNING: Final = 1.0  # seconds between two warnings, doubled each time
_RAREST_WARNING: Final = 60.0
_SUBSCRIBE_AGAIN: Final = 0.25  # seconds until the next attempt to subscribe; doubled each time
_RAREST_ATTEMPT: Final = 4.0
_NEVER: Final = float("inf")
_SOON_OVER: Final = 10.0  # a wait that ends within this says nothing before its end


class Pause(NamedTuple):
    """Not yet. Ask again after that many seconds, or when notified."""

    seconds: float


def pause_for(token: str, channel: str, attempt: int, left_ms: int = -1) -> float:
    """How long to wait for a notification before asking again; no longer than the present holder's lease lasts."""
    pause = REFRESH if channel not in ("", MUTE) else min(backoff(token, attempt), _LONGEST_POLL)
    return min(pause, (left_ms + 1) / 1000) if left_ms >= 0 else pause


class Waiter:
    """One caller that waits; the server notifies it by the token of its hold."""

    attempt = 0
    unsubscribed = False  # we could not subscribe just now, and poll
    _subscribe_at = 0.0  # when to try again
    _subscribe_pause = _SUBSCRIBE_AGAIN
    answered = False  # the server has answered it at least once
    _warned_at = float("-inf")
    _warn_after = 0.0

    def __init__(
        self, what: str, hold: Hold, board: Switchboard, tries: Tries, until: float, *, asks_last: bool = False
    ) -> None:
        self.what = what  # is waited for: a lock, a latch, a value
        self.hold = hold
        self.board = board
        self.tries = tries
        self.until = until  # when the patience is over
        self.patient = tries.patient = until > tries.started  # else it waits for an answer, and for nothing more
        self.asks_last = asks_last  # when the patience is over, ask once more: a notification may have been lost

    @property
    def subject(self) -> str:
        return f"{self.what} {self.hold.name!r}"

    def run(
        self,
        ask: Callable[[Waiter, str, float, float], Effects[Any]],
        found: Any = None,
        channel: str = "",
    ) -> Effects[Any]:
        """What ``ask(waiter, channel, now, timeout)`` brings, once it is no Pause; None when the patience is over.

        It is True if a notification has granted the hold. StepFailed, if the last step was not answered. ``found`` is
        what a first ask on that channel has brought before, a Pause or a StepFailed.
        """
        tries, hold = self.tries, self.hold
        now = tries.started
        try:
            while True:
                if found is None:
                    if self.patient and self.board.asks.is_full():
                        now = yield from self._wait_for_turn()
                        if hold.phase is HELD:
                            return True
                        if now >= self.until and self.answered and not self.asks_last:
                            return None
                    try:
                        found, channel = yield from self._ask(ask, now)
                    except StepFailed as failed:
                        found = failed
                if isinstance(found, StepFailed):
                    now = yield from clock()
                    pause = tries.pause_after(found, now)
                    if pause is None:
                        raise found
                    if pause:
                        yield from self._warn(found, now)
                        now = yield from self.sleep(now + pause)
                else:
                    tries.answered()
                    self.answered = True
                    if type(found) is not Pause:
                        return found
                    now = yield from clock()
                    if now >= self.until:
                        return None
                    if not channel or (channel == MUTE and self.unsubscribed and now >= self._subscribe_at):
                        yield from self._subscribe(now)
                        now = yield from clock()
                    else:
                        spoken_for = hold.token in self.board.crowd.members
                        until = self.until + (self.board.crowd.spread(hold) if spoken_for else 0.0)
                        now = yield from self.sleep(min(until, now + found.seconds))
                        if now >= self.until and hold.phase is not HELD and not self.asks_last and channel != MUTE:
                            if spoken_for:
                                self.board.crowd.check()
                            return None
                if hold.phase is HELD:
                    return True
                found = None
                self.attempt += 1
        finally:
            found = None  # which may be an error, and keep alive the frames that it went through

    def _ask(self, ask: Callable[[Waiter, str, float, float], Effects[Any]], now: float) -> Effects[tuple[Any, str]]:
        """What it brings, and on which channel it was asked. The turn to ask may have come too late."""
        hold, board, channel, longest = self.hold, self.board, "", _NEVER
        if self.patient:
            if now >= self.until and not self.answered and not self.asks_last:
                raise board.asks.too_busy(now - self.tries.started)
            board.asks.begin(hold)
            channel = board.enlist(hold) or (MUTE if self.unsubscribed else "")
            longest = max(SHORTEST_CALL, self.until - now)
        try:
            found = yield from ask(self, channel, now, min(self.tries.timeout(now), longest))
        except StepFailed as failed:
            board.asks.outage = failed.with_traceback(None)
            raise
        finally:
            board.asks.end(hold)
        board.asks.outage = None
        return found, channel

    def _wait_for_turn(self) -> Effects[float]:
        """Many waiters want to ask: wait until this one may, is granted the lock, or its time is over."""
        hold, asks = self.hold, self.board.asks
        while True:
            now = yield from asks.wait_for_turn(hold, self.until)
            if hold.word is None or hold in asks.under_way:
                return now
            now = yield from self.sleep(now)  # notified before it could ask
            if hold.phase is HELD or now >= self.until:
                return now

    def _subscribe(self, now: float) -> Effects[None]:
        """Start the client's subscriber; if that fails for now (a cut connection, none left), poll, and try again."""
        board, timeout = self.board, self.tries.timeout(now)
        if self.unsubscribed:  # a waiter that asks nothing for longer than this may lose its place
            timeout = min(timeout, REFRESH, self.until - now)
        self._subscribe_at = now + self._subscribe_pause
        self._subscribe_pause = min(2 * self._subscribe_pause, _RAREST_ATTEMPT)
        try:
            board.mute = not (yield from listen(timeout))
            self.unsubscribed = not board.armed and not board.mute  # it was lost again at once
        except StepFailed as failed:
            self.unsubscribed = failed.retry
            board.mute = board.mute or not failed.retry  # the server just answered, so SUBSCRIBE itself is forbidden

    def sleep(self, until: float) -> Effects[float]:
        """Wait for a notification, until that time at most; what time it is then. It may have granted the hold."""
        hold = self.hold
        if hold.bell is None:
            hold.bell = self.board.new_bell()
        now = (yield from wait(hold.bell, until)) if hold.word is None else (yield from clock())
        hold.bell.clear()
        self.board.crowd.leave(hold)
        if hold.seen[1] > hold.asked[1]:
            hold.asked = hold.seen
        word, hold.word = hold.word, None
        if word is not None and word.fence:
            if hold.rung(word, now):  # else it was long under way: ask whether the lock is still ours
                hold.queued = False
        elif word is not None and word.pause_ms:  # a yield window for polling clients
            now = yield from wait(None, min(until, now + word.pause_ms / 1000))
        return now

    def _warn(self, failed: StepFailed, now: float) -> Effects[None]:
        """A wait that goes on although the server cannot be used says so: at once, and then ever more rarely."""
        tries = self.tries
        if now < self._warned_at + self._warn_after or tries.until - now < _SOON_OVER or not self.patient:
            return
        self._warned_at = now
        self._warn_after = min(max(_FIRST_WARNING, 2 * self._warn_after), _RAREST_WARNING)
        failing = now - tries.failing_since
        since = f", for {rounded(failing)} s so far" if failing >= 1 else ""
        yield from warn(f"{self.subject} goes on waiting{since}: {failed.error}")
