"""The latch: it opens when it has been counted down to nothing, and whoever waits goes on.

Invariant. What is left never rises while the latch is remembered, and each ``count_down`` lowers it once: it has a
token of its own, which leaves a tombstone, so that a request that arrives twice is known. Open, it stays open, for as
long as it is remembered; then its keys are gone, and a latch of that name begins anew.

Atomic: each latch_*.lua step. The latch comes into being with whoever first counts down or waits, and keeps in mind
what it began with. Who comes with another count is refused: one of the two is mistaken, and nobody knows which.

Waiting. A look that finds it shut has entered its process among the waiters, in the same step. It is sent again every
half second, which is also how a waiter shows that it lives. Whoever opens the latch rings the bell of each process.
Bells are hints: who hears one looks again, and who hears none looks soon. Within a process one of those who wait looks
for all of them. Should it be lost on the way (Ctrl-C strikes anywhere), another takes its place a little later.

Clocks. How long it is remembered is reckoned by the server, from the last time that it was counted down or waited for.
Once open it is not touched any more, so from then on that is the time since it has opened. Of those who do not agree on
how long that should be, the most patient one is heard.

Why no lease? To count down says that something is done, and that stays true when whoever did it is gone. A latch that
counted those who live would be another thing: a semaphore, say.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from holdfast.errors import HoldfastError, InvalidConfig, OutcomeUnknown, Unsupported
from holdfast.lease import Hold, Terms
from holdfast.names import Keys
from holdfast.protocol import mutex
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import Bell, Effects, Step, StepFailed, call, clock, new_token, wait
from holdfast.protocol.replies import OtherCount, Remaining, WrongKind
from holdfast.protocol.retry import SHORTEST_CALL, Tries, outage, until_answered
from holdfast.protocol.waiting import REFRESH, Pause, Waiter, pause_for

__all__ = ["BaseLatch", "Vigils"]

_NEVER: Final = float("inf")
_UNSEEN: Final = float("-inf")


class Watcher:
    """One caller who waits."""

    __slots__ = ("bell", "opened")

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.opened = False


class Vigil:
    """Those of one process who wait for one latch. Single dict operations, so any thread may call."""

    __slots__ = ("due", "outage", "seen_at", "speaker", "watchers")

    def __init__(self, now: float) -> None:
        self.watchers: dict[Watcher, None] = {}
        self.speaker: dict[None, Watcher] = {}  # who looks for all: whoever got this seat first
        self.due = now + REFRESH  # by when the speaker will have looked again, if it is still there
        self.seen_at = _UNSEEN  # when the server was last asked and answered
        self.outage: StepFailed | None = None  # why we are not among its waiters, though we should be

    def find_speaker(self, me: Watcher, now: float) -> Watcher:
        speaker = self.speaker.setdefault(None, me)
        if speaker is not me and now > self.due:
            self.due = now + REFRESH  # or all would take its place at once
            self.speaker[None] = speaker = me
        return speaker

    def leave(self, me: Watcher) -> None:
        self.watchers.pop(me, None)
        if self.speaker.get(None) is me:
            self.speaker.pop(None, None)
        if not self.speaker:  # it was us, or somebody who has called us to take its place
            for other in list(self.watchers):
                other.bell.ring()
                return


Vigils: TypeAlias = dict[tuple[int, str, str], Vigil]  # of one client, by its life, the latch and the count


class BaseLatch:
    """One latch, that began with a given count."""

    __slots__ = ("_count", "_driver", "_keys", "_retention", "_shared", "_terms", "_vigils")

    def __init__(self, driver: Any, vigils: Vigils, keys: Keys, *, count: int, retention: float, terms: Terms) -> None:
        self._driver = driver
        self._vigils = vigils
        self._keys = keys
        self._terms = terms
        self._count = str(count)
        self._retention = str(round(retention * 1000))
        latch, waiters = (f"{keys.head}{part}{keys.tail}" for part in ("latch", "latch:waiters"))
        self._shared = latch, waiters, keys.main, *keys.shared[2:]

    @property
    def name(self) -> str:
        return self._keys.name

    def _count_down(self, n: int) -> Effects[int]:
        """What is left then. If the caller is cancelled it may have been counted, but not twice."""
        token = yield from new_token("")
        # Late is what comes after the last try was given up; so it stands from then on, as other tombstones do.
        stands_ms = mutex.TOMBSTONE_MS + round(self._terms.timeout * 1000)
        args = (token, self._count, str(n), self._retention, str(stands_ms))
        step = Step("latch_count_down", (*self._shared, self._keys.tombstone(token)), args)
        try:
            reply, *_ = yield from until_answered(lambda: step, self._terms, jitter=token, shielded=True)
        except StepFailed as failed:
            if not failed.sent:
                raise self._outage(failed) from failed.__cause__
            advice = "ask for count(), and count down again only if nobody else can have done it"
            raise OutcomeUnknown(self.name, "a count_down", advice) from failed.error
        return self._left(reply)

    def _look(self) -> Effects[int]:
        step = self._look_step("", "")
        try:
            reply, *_ = yield from until_answered(lambda: step, self._terms)
        except StepFailed as failed:
            raise self._outage(failed) from failed.__cause__
        return self._left(reply)

    def _outage(self, failed: StepFailed, waited: float | None = None) -> HoldfastError:
        return outage(failed, f"latch {self.name!r}", self._terms.timeout if waited is None else waited)

    def _look_step(self, token: str, channel: str) -> Step:
        return Step("latch_look", self._shared, (token, self._count, channel, self._retention))

    def _left(self, reply: Remaining | OtherCount | WrongKind) -> int:
        if isinstance(reply, OtherCount):
            raise InvalidConfig(
                f"latch({self.name!r}, count={self._count})",
                f"it began with count={reply.total}; all must give the same, or choose another name",
            )
        if isinstance(reply, WrongKind):
            raise Unsupported(
                f"latch {self.name!r}: it is in use as a {reply.kind}", "choose another name for one of the two"
            )
        return reply.left

    def _wait(self, patience: float | None) -> Effects[bool]:
        """Wait until it is open, at most that long (None: for ever); whether it is."""
        board: Switchboard = self._driver.board
        started = now = yield from clock()
        until = _NEVER if patience is None else now + patience
        key = self._driver.life, self._shared[0], self._count
        vigil = self._vigils.setdefault(key, Vigil(now))
        me = Watcher(board.new_bell())
        try:
            vigil.watchers[me] = None
            while not me.opened:
                if now >= until:
                    return (yield from self._look_last(vigil, started, until))
                if vigil.find_speaker(me, now) is me:
                    yield from self._watch(vigil, me, until)
                    now = yield from clock()
                else:
                    now = yield from wait(me.bell, min(until, now + REFRESH))
            return True
        finally:
            vigil.leave(me)
            if not vigil.watchers and self._vigils.get(key) is vigil:
                self._vigils.pop(key, None)

    def _watch(self, vigil: Vigil, me: Watcher, until: float) -> Effects[None]:
        """Look again and again until it is open, or that time has come; and tell all who wait here."""
        board: Switchboard = self._driver.board
        hold = Hold(self._keys, self._terms, Gate())  # by whose token we are notified; it is never held
        hold.token = yield from new_token("")
        waiter = Waiter("latch", hold, board, Tries(self._terms, (yield from clock()), until, jitter=hold.token), until)

        def look(waiter: Waiter, channel: str, now: float, timeout: float) -> Effects[bool | Pause]:
            if vigil.speaker.get(None) is not me:
                return False  # another caller has taken our place, because we were late
            vigil.due = now + timeout + 2 * REFRESH
            there = list(vigil.watchers)  # one that comes later may have come after the latch was forgotten
            try:
                left = self._left((yield from call(self._look_step(hold.token, channel), timeout)))
            except StepFailed as failed:
                vigil.outage = StepFailed(failed.error, sent=failed.sent, retry=failed.retry, silent=failed.silent)
                raise
            vigil.seen_at = now
            if channel:  # else only a look, which a replica answers as well
                vigil.outage = None
            if left:
                pause = pause_for(hold.token, channel, waiter.attempt)
                vigil.due = (yield from clock()) + (pause if channel else timeout) + 2 * REFRESH
                return Pause(pause)
            for watcher in there:
                watcher.opened = True
                watcher.bell.ring()
            return True

        try:
            yield from waiter.run(look)
        except StepFailed as failed:
            raise self._outage(failed, (yield from clock()) - waiter.tries.failing_since) from failed.__cause__
        finally:
            board.dismiss(hold)

    def _look_last(self, vigil: Vigil, started: float, until: float) -> Effects[bool]:
        """Its patience is over, and it has one look of its own: a notification may have been lost.

        If that brings no answer, the last look of this process decides, if that was answered; else it is an outage.
        """
        if until <= started:
            return (yield from self._look()) == 0
        step = self._look_step("", "")
        failed = vigil.outage
        try:
            ends = (yield from clock()) + SHORTEST_CALL
            reply, *_ = yield from until_answered(lambda: step, self._terms, until=ends)
            if failed is None or self._left(reply) == 0:
                return self._left(reply) == 0
        except StepFailed as last:
            if failed is None and vigil.seen_at >= started:
                return False
            failed = last
        raise self._outage(failed, until - started) from failed.__cause__

    def __reduce__(self) -> Any:
        raise TypeError("a Latch cannot be pickled: connect and name the latch anew in the other process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Latch object {self.name!r}, count {self._count}>"
