"""Waiting for something on the server: ask, wait for a notification, ask again.

Invariant. Notifications are hints: a waiter asks again after half a second at the latest, which also shows the server
that it is alive. So a notification that is lost, late or sent twice costs only time. A waiter that cannot be notified
(no permission, no free connection) polls; if it may subscribe but could not, it tries again later. Every loop pauses,
and every loop ends: when the caller's wait is over, when a server never answered this client, or when the server
refuses for good.

Atomic: each step that is sent. The subscriber is started after the first refusal. Then the step is sent again before
the first wait, because the lock may have become free before the server could notify us.

Many waiters of one client take turns at asking (asks.py), and let the keeper show that they are alive (presence.py).

Locks, latches and cached values all wait by this loop, each with its own request and its own answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.holder import Holder
from holdfast.protocol.effects import Command, Effects, StepFailed, clock, listen, show_presence, wait
from holdfast.protocol.hold import HELD, Hold
from holdfast.protocol.inspection.explaining import explain_wait
from holdfast.protocol.reporting import LONG_WAIT, report_long_wait
from holdfast.protocol.retry import Tries, backoff
from holdfast.protocol.wait.presence import is_attended

if TYPE_CHECKING:
    from holdfast.protocol.wait.notifications import NotificationRouter

NO_CHANNEL: Final = "-"  # the channel of a waiter that cannot be notified
REFRESH: Final = 0.5  # how often a waiter asks again; after a second of silence it loses its place

_LONGEST_POLL: Final = 0.1  # of a waiter that cannot be notified
_SUBSCRIBE_AGAIN: Final = 0.25  # seconds until the next attempt to subscribe; doubled each time
_RAREST_ATTEMPT: Final = 4.0
_NEVER: Final = float("inf")


class Pause(NamedTuple):
    """The server refused for now: ask again after these seconds, or when notified."""

    seconds: float


def pause_for(token: str, channel: str, attempt: int, left_ms: int = -1) -> float:
    """How long to wait for a notification before asking again; at most until the present holder's lease ends."""
    pause = REFRESH if channel not in ("", NO_CHANNEL) else min(backoff(token, attempt), _LONGEST_POLL)
    return min(pause, (left_ms + 1) / 1000) if left_ms >= 0 else pause


class WaitLoop:
    """One waiting caller. The server notifies it by the token of its hold."""

    __slots__ = (  # a dict for each would make garbage collection slower (benchmarks.crowd)
        "_report_at",
        "_subscribe_at",
        "_subscribe_pause",
        "answered",
        "asks_last",
        "attempt",
        "hold",
        "patient",
        "router",
        "tries",
        "unsubscribed",
        "until",
        "what",
    )

    def __init__(
        self, what: str, hold: Hold, router: NotificationRouter, tries: Tries, until: float, *, asks_last: bool = False
    ) -> None:
        self.what = what  # what it waits for: "lock", "latch" or another kind
        self.hold = hold
        self.router = router
        self.tries = tries
        self.until = until  # when the wait is over
        self.patient = tries.patient = until > tries.started  # if False, it waits for one answer only
        self.asks_last = asks_last  # at the end of the wait, ask once more: a notification may have been lost
        self.attempt = 0
        self.answered = False  # the server has answered this waiter at least once
        self.unsubscribed = False  # the last attempt to subscribe failed, so this waiter polls
        self._report_at = tries.started + LONG_WAIT  # when to report that it is still waiting
        self._subscribe_at = 0.0  # when to try to subscribe again
        self._subscribe_pause = _SUBSCRIBE_AGAIN

    @property
    def subject(self) -> str:
        return f"{self.what} {self.hold.key!r}"

    def run(
        self,
        ask: Callable[[WaitLoop, str, float, float], Effects[Any]],
        found: Any = None,
        channel: str = "",
    ) -> Effects[Any]:
        """The first result of ``ask(waiter, channel, now, timeout)`` that is not a Pause; None when the wait is over.

        True if a notification has granted the hold. Raises StepFailed if the last step was not answered. ``found`` is
        the result of a first ask on that channel, a Pause or a StepFailed, if the caller has asked already.
        """
        tries, hold = self.tries, self.hold
        now = tries.started
        try:
            while True:
                if found is None:
                    if self.patient and hold.probe is None and self.router.asks.is_full():
                        now = yield from self._wait_for_turn()
                        if hold.phase is HELD:
                            return True
                        if now >= self._ends() and not self.asks_last:
                            self.router.asks.end(hold)  # it may have been admitted just now
                            return None
                    try:
                        found, channel = yield from self._ask(ask, now)
                    except StepFailed as failed:
                        found = failed
                if isinstance(found, StepFailed):
                    now = yield from clock()
                    pause = tries.pause_after(found, now)
                    if pause is None:
                        raise tries.final()
                    if pause:
                        now = yield from self.sleep(now + pause)
                else:
                    tries.answered()
                    self.answered = True
                    if type(found) is not Pause:
                        return found
                    now = yield from clock()
                    if now >= self.until:
                        return None
                    if not channel or (channel == NO_CHANNEL and self.unsubscribed and now >= self._subscribe_at):
                        yield from self._subscribe(now)
                        now = yield from clock()
                    else:
                        shown_by_keeper = hold.token in self.router.crowd.members
                        until = self.until + (self.router.crowd.spread(self.until) if shown_by_keeper else 0.0)
                        rest, found = found.seconds, None
                        now = yield from self.sleep(wakes_at := min(until, now + rest))
                        while shown_by_keeper and now < self.until and self._sleeps_on(wakes_at, now):
                            yield from show_presence(hold)
                            rest *= 2
                            now = yield from self.sleep(wakes_at := min(until, now + rest))
                        ends = self._ends() if shown_by_keeper else self.until
                        if now >= ends and hold.phase is not HELD and not self.asks_last and channel != NO_CHANNEL:
                            return None
                if hold.phase is HELD:
                    return True
                found = None
                self.attempt += 1
        finally:
            found = None  # an error would keep its frames alive

    def _ask(self, ask: Callable[[WaitLoop, str, float, float], Effects[Any]], now: float) -> Effects[tuple[Any, str]]:
        """The result of one ask, and its channel. Raises StepFailed if the turn to ask came too late."""
        hold, router, channel, longest = self.hold, self.router, "", _NEVER
        if self.patient:
            router.asks.begin(hold)
            channel = router.enlist(hold) or (NO_CHANNEL if self.unsubscribed else "")
            longest = max(hold.contact.least, self.until - now)
        try:
            return (yield from ask(self, channel, now, min(self.tries.timeout(now), longest))), channel
        finally:
            router.asks.end(hold)

    def _sleeps_on(self, wakes_at: float, now: float) -> bool:
        """Whether a waiter that the keeper shows need not ask: nothing woke it, and the keeper shows it, or cannot."""
        hold = self.hold
        if hold.phase is HELD:
            return False
        if now < wakes_at:
            return False  # the keeper says that it should ask, or that its wait ends
        return is_attended(hold, now) or (hold.contact.lost_at is not None and now < hold.wait_ends(self.until))

    def _wait_for_turn(self) -> Effects[float]:
        """Wait until this waiter may ask, is granted the lock, or its wait is over; returns the time."""
        hold, asks = self.hold, self.router.asks
        while True:
            now = yield from asks.wait_for_turn(hold, self._ends)
            if hold.waiter.notification is None or hold in asks.under_way:
                return now
            now = yield from self.sleep(now)  # notified before it could ask
            if hold.phase is HELD or now >= self.until:
                return now

    def was_cut_short(self, failed: StepFailed, now: float) -> bool:
        """Whether the wait is over before its last request was overdue; an earlier one was answered."""
        overdue_at = self.tries.failing_since + self.tries.answer_time()
        return failed.silent and self.answered and self.until <= now < overdue_at

    def _ends(self) -> float:
        """When its wait is over: at ``until``, or early in an outage."""
        return self.hold.wait_ends(self.until)

    def _subscribe(self, now: float) -> Effects[None]:
        """Start the client's subscriber. If that fails for now (no connection), poll, and try again later."""
        router, timeout = self.router, self.tries.timeout(now)
        if self.unsubscribed:  # a waiter that does not ask for longer than this may lose its place
            timeout = min(timeout, REFRESH, self.until - now)
        self._subscribe_at = now + self._subscribe_pause
        self._subscribe_pause = min(2 * self._subscribe_pause, _RAREST_ATTEMPT)
        try:
            router.no_pubsub = not (yield from listen(timeout, self.hold.main_keys))
            # True if the subscription was lost at once.
            self.unsubscribed = not (router.no_pubsub or router.channel_of(self.hold))
        except StepFailed as failed:
            if failed.silent:
                ended = yield from clock()
                router.registry.contacts.note_failure(Command(("SUBSCRIBE", self.hold.keys.main)), now, failed, ended)
            self.unsubscribed = failed.retry
            # The server has just answered, so an error that no further try can change means: SUBSCRIBE is forbidden.
            router.no_pubsub = router.no_pubsub or not failed.retry

    def sleep(self, until: float) -> Effects[float]:
        """Wait for a notification, at most until that time; returns the time. The notification may grant the hold."""
        hold = self.hold
        waiter = hold.wait_at_server()
        if waiter.wakeup is None:
            waiter.wakeup = self.router.new_wakeup()
        now = (yield from wait(waiter.wakeup, until)) if waiter.notification is None else (yield from clock())
        waiter.wakeup.clear()
        self.router.crowd.leave(hold)
        if waiter.seen[1] > waiter.asked[1]:
            waiter.asked = waiter.seen
        notification, waiter.notification = waiter.notification, None
        if notification is not None and notification.fence:
            hold.accept(notification, now)  # not accepted if it was delayed: then ask whether the lock is still ours
        elif notification is not None and notification.pause_ms:  # a yield window for polling clients
            now = yield from wait(None, min(until, now + notification.pause_ms / 1000))
        if self._report_at <= now < self.until and hold.phase is not HELD:
            yield from self._report_long_wait(now)
        return now

    def _report_long_wait(self, now: float) -> Effects[None]:
        """Report that the wait lasts long. If many waiters of a client do, one a second asks the server why."""
        began, registry = self.tries.started, self.router.registry
        self._report_at = began + 2 * (now - began)
        if self.what == "lock" and self.answered:
            holder: Holder | None = None
            deadlock = ""
            if registry.may_explain_wait(now):
                holder, deadlock = yield from explain_wait(self.hold, registry)
            yield from report_long_wait(self.hold, now - began, holder, deadlock)
