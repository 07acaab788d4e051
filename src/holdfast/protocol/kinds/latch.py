"""The latch: it opens when it has been counted down to zero, and then all waiters continue.

Invariant. The count never rises while the server remembers the latch, and each ``count_down`` lowers it once: its token
leaves a tombstone, by which a request that arrives twice is recognised. An open latch stays open until the server
forgets it; then its keys are gone, and a new latch of that name begins.

Atomic: each step in lua/latch. The first count_down or wait creates the latch, which remembers its initial count. A
caller with another count is refused: one of the two is mistaken, and the server cannot know which.

Waiting. A look at a closed latch registers its process as a waiter, in the same step. It is sent again every half
second, which also shows that the waiter is alive. The step that opens the latch notifies each waiting process.
Notifications are hints: a notified waiter looks again, and others look soon. Within a process one waiter, the leader,
looks for all of them. If the leader is lost (Ctrl-C can come at any point), another waiter soon replaces it.

Clocks. The server decides how long it remembers the latch: from the last count_down or wait, so for an open latch from
its opening. If callers give different retentions, the longest one counts.

Why no lease? A count_down says that something is done, and that stays true when its process has gone.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from holdfast.errors import HoldfastError, InvalidConfig, OutcomeUnknown, Unsupported
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol import mutex
from holdfast.protocol.effects import Effects, Step, StepFailed, Wakeup, call, clock, new_token, wait
from holdfast.protocol.hold import Hold
from holdfast.protocol.replies import OtherCount, Remaining, WrongKind
from holdfast.protocol.retry import (
    Tries,
    begin_in_outage,
    let_keeper_ask,
    outage,
    until_answered,
    until_answered_or_outage,
)
from holdfast.protocol.wait.cohort import ObjectSlot
from holdfast.protocol.wait.contact import Probe
from holdfast.protocol.wait.failures import again
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.protocol.wait.waiting import REFRESH, Pause, WaitLoop, pause_for

_NEVER: Final = float("inf")
_UNSEEN: Final = float("-inf")


class LatchWaiter:
    """One caller that waits."""

    __slots__ = ("opened", "wakeup")

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup = wakeup
        self.opened = False


class LatchWaiters:
    """The callers of one process that wait for one latch. Single dict operations, so any thread may call."""

    __slots__ = ("due", "leader", "members", "outage", "seen_at")

    def __init__(self, now: float) -> None:
        self.members: dict[LatchWaiter, None] = {}
        self.leader: dict[None, LatchWaiter] = {}  # the waiter that looks for all; set by ``setdefault``
        self.due = now + REFRESH  # if the leader has not looked again by then, it is lost
        self.seen_at = _UNSEEN  # when the server last answered a look
        self.outage: StepFailed | None = None  # why the server does not count us among its waiters

    def find_leader(self, me: LatchWaiter, now: float) -> LatchWaiter:
        leader = self.leader.setdefault(None, me)
        if leader is not me and now > self.due:
            self.due = now + REFRESH  # else all waiters would replace the leader at the same time
            self.leader[None] = leader = me
        return leader

    def leave(self, me: LatchWaiter) -> None:
        self.members.pop(me, None)
        if self.leader.get(None) is me:
            self.leader.pop(None, None)
        if not self.leader:  # we were the leader, or a former leader has woken us to replace it: wake another
            for other in list(self.members):
                other.wakeup.wake()
                return


WaitersByLatch: TypeAlias = dict[tuple[int, str, str], LatchWaiters]  # of one client, by generation, latch and count


class BaseLatch:
    """One latch with a given initial count."""

    __slots__ = ("_count", "_driver", "_keys", "_latch_waiters", "_options", "_retention", "_shared")

    def __init__(
        self, driver: Any, waiters: WaitersByLatch, keys: Keys, *, count: int, retention: float, options: LockOptions
    ) -> None:
        self._driver = driver
        self._latch_waiters = waiters
        self._keys = keys
        self._options = options
        self._count = str(count)
        self._retention = str(round(retention * 1000))
        latch, waiting = (f"{keys.head}{part}{keys.tail}" for part in ("latch", "latch:waiters"))
        self._shared = latch, waiting, keys.main, *keys.shared[2:]

    @property
    def name(self) -> str:
        return self._keys.name

    @property
    def key(self) -> str:
        """The name with its namespace, as messages show it."""
        return self._keys.key

    @property
    def _subject(self) -> str:
        return f"latch {self.key!r}"

    def _count_down(self, n: int) -> Effects[int]:
        """Count down. Returns the count that is left. If the caller is cancelled, it was counted once or not at all."""
        token, began = (yield from new_token("")), self._driver.now()
        # After the last try, the tombstone must last as long as other tombstones do.
        tombstone_ms = mutex.TOMBSTONE_MS + round(self._options.timeout * 1000)
        args = (token, self._count, str(n), self._retention, str(tombstone_ms))
        step = Step("latch_count_down", (*self._shared, self._keys.tombstone(token)), args)
        try:
            reply = yield from until_answered_or_outage(
                self._driver, self._new_hold(), step, self._subject, shielded=True
            )
        except StepFailed as failed:
            if not failed.sent:
                raise self._outage(failed, self._driver.now() - began) from failed.__cause__
            advice = "call count(), and count down again only if no other caller can have changed it"
            raise OutcomeUnknown(self.name, "a count_down", advice, key=self.key) from failed.error
        return self._left(reply)

    def _look(self) -> Effects[int]:
        step, began = self._look_step("", ""), self._driver.now()
        try:
            reply = yield from until_answered_or_outage(self._driver, self._new_hold(), step, self._subject, reads=True)
        except StepFailed as failed:
            raise self._outage(failed, self._driver.now() - began) from failed.__cause__
        return self._left(reply)

    def _outage(self, failed: StepFailed, waited: float) -> HoldfastError:
        return outage(failed, self._subject, waited)

    def _new_hold(self) -> Hold:
        """A hold that is never granted: it has a token, for notifications, and knows about contact."""
        return Hold(self._keys, self._options, ObjectSlot(self._driver.cohorts))

    def _look_step(self, token: str, channel: str) -> Step:
        return Step("latch_look", self._shared, (token, self._count, channel, self._retention))

    def _left(self, reply: Remaining | OtherCount | WrongKind) -> int:
        if isinstance(reply, OtherCount):
            raise InvalidConfig(
                f"latch({self.key!r}, count={self._count})",
                f"it began with count={reply.total}; give that count, or choose another name",
            )
        if isinstance(reply, WrongKind):
            raise Unsupported(
                f"latch {self.key!r}: it is in use as a {reply.kind}", "choose another name for one of the two"
            )
        return reply.left

    def _wait(self, patience: float | None) -> Effects[bool]:
        """Wait until the latch is open, at most that long (None: forever). Returns whether it is open."""
        router: NotificationRouter = self._driver.router
        contacts = router.registry.contacts
        started = now = yield from clock()
        until = _NEVER if patience is None else now + patience
        key = self._driver.generation, self._shared[0], self._count
        me = LatchWaiter(router.new_wakeup())
        probe: Probe | None = None
        if patience and (contact := contacts.of(self._keys.main)).lost_at is not None:
            probe = yield from begin_in_outage(self._driver, contact, self._options, self._subject)
            now = yield from clock()
        waiters = self._latch_waiters.setdefault(key, LatchWaiters(now))
        try:
            waiters.members[me] = None
            while not me.opened:
                if now >= until:
                    return (yield from self._look_last(waiters, started, until))
                contact = contacts.of(self._keys.main)
                if probe is not None and contact.lost_at is None:
                    probe.end()  # the server has answered
                    probe = None
                ends = min(until, contact.gives_up_at(self._options, started, until - started, probe))
                if now >= ends:
                    yield from let_keeper_ask(self._driver, self._new_hold())
                    raise self._outage(contact.failure(), now - started)
                if waiters.find_leader(me, now) is me:
                    hold = self._new_hold()
                    hold.began, hold.patience, hold.probe = started, until - started, probe
                    yield from self._watch(waiters, me, hold, Tries(self._options, now, until, hold=hold))
                    now = yield from clock()
                else:
                    now = yield from wait(me.wakeup, min(ends, now + REFRESH))
            return True
        finally:
            if probe is not None:
                probe.end()
            waiters.leave(me)
            if not waiters.members and self._latch_waiters.get(key) is waiters:
                self._latch_waiters.pop(key, None)

    def _watch(self, waiters: LatchWaiters, me: LatchWaiter, hold: Hold, tries: Tries) -> Effects[None]:
        """Look as the leader, until the latch is open or the wait is over; wake all waiters of this process."""
        router: NotificationRouter = self._driver.router
        hold.token = tries.jitter = yield from new_token("")
        waiter = WaitLoop("latch", hold, router, tries, tries.until)

        def look(waiter: WaitLoop, channel: str, now: float, timeout: float) -> Effects[bool | Pause]:
            if waiters.leader.get(None) is not me:
                return False  # another waiter has replaced us, because we were late
            waiters.due = now + timeout + 2 * REFRESH
            there = list(waiters.members)  # a waiter that joins later may wait for a new latch of this name
            try:
                left = self._left((yield from call(self._look_step(hold.token, channel), timeout)))
            except StepFailed as failed:
                if not failed.silent or timeout >= waiter.tries.answer_time():
                    waiters.outage = again(failed)
                raise
            waiters.seen_at = now
            if channel:  # else the step writes nothing, and even a replica answers it
                waiters.outage = None
            if left:
                pause = pause_for(hold.token, channel, waiter.attempt)
                waiters.due = (yield from clock()) + (pause if channel else timeout) + 2 * REFRESH
                return Pause(pause)
            for latch_waiter in there:
                latch_waiter.opened = True
                latch_waiter.wakeup.wake()
            return True

        try:
            yield from waiter.run(look)
        except StepFailed as failed:
            now = yield from clock()
            if not waiter.was_cut_short(failed, now):
                yield from let_keeper_ask(self._driver, self._new_hold())
                raise self._outage(failed, now - waiter.tries.failing_since) from failed.__cause__
        finally:
            router.dismiss(hold)

    def _look_last(self, waiters: LatchWaiters, started: float, until: float) -> Effects[bool]:
        """One last look of its own, as a notification may have been lost. Returns whether the latch is open.

        If the server does not answer, the last answered look of this process decides; without one it is an outage.
        """
        if until <= started:
            return (yield from self._look()) == 0
        step = self._look_step("", "")
        failed = waiters.outage
        try:
            ends = (yield from clock()) + self._driver.registry.contacts.of(self._keys.main).least
            reply, *_ = yield from until_answered(lambda: step, self._options, until=ends)
            if failed is None or self._left(reply) == 0:
                return self._left(reply) == 0
        except StepFailed as last:
            if failed is None and waiters.seen_at >= started:
                return False
            failed = last
        raise self._outage(failed, until - started) from failed.__cause__

    def __reduce__(self) -> Any:
        raise TypeError("a Latch cannot be pickled: connect in the other process and name the latch there")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Latch object {self.key!r}, count {self._count}>"
