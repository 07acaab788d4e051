"""One acquisition, as a protocol knows it.

Invariant. A ``Hold`` changes its phase by these transitions and no others:

    from      by                       to
    --------  -----------------------  ------  -------------------------------------------------------
    TRYING    grant, accept, inherit   HELD    by a reply, by a notification, from another hold of this client
    TRYING    take_queue_place         TRYING  it continues in the place of a waiter that gave up
    HELD      take_back                TRYING  the reply came after the deadline
    HELD      lose, disown             LOST    the key is gone, or this is a forked child
    any       end, hand_over           ENDED   released, passed on or given up; handed over to another process

Its ``Waiter`` exists only while it waits: see waiter.py.

``held`` is decided by a clock and a deadline, not by a thread that sets a flag. A process that was stopped, starved or
suspended knows that its lease is over as soon as it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import LeaseLost, NotHeld, rounded
from holdfast.names import Keys
from holdfast.options import LockOptions, drift
from holdfast.protocol.steps import LOCK_STEPS, Steps
from holdfast.protocol.wait.contact import Contact, Probe
from holdfast.protocol.wait.failures import Failures
from holdfast.protocol.wait.waiter import IS_ACTIVE, NOT_WAITING, Notification, PassBudget, Waiter

if TYPE_CHECKING:
    from holdfast.protocol.effects import Wakeup
    from holdfast.protocol.keepalive import LeaseRegistry
    from holdfast.protocol.replies import Refused
    from holdfast.protocol.wait.cohort import ObjectSlot

TRYING: Final = "trying"
HELD: Final = "held"
LOST: Final = "lost"
ENDED: Final = "ended"

CHECK_AFTER: Final = 0.1  # seconds; a hold that lasts longer is watched, a shorter one costs no extra request

_NEVER: Final = float("inf")
_HANDED_OVER: Final = "was handed over, and this lease has ended. The process that adopts the ticket continues with it"


class Hold:
    """One acquisition. Holds of a cohort that pass a lease on use the same token, one after the other.

    Defaults are class attributes, so that a new hold is made quickly (benchmarks.uncontended).
    """

    steps: Steps = LOCK_STEPS
    kind = "lock"
    mode = ""  # how much of it is held: "any", "all", "n5"; empty for a mutex. It is part of a ticket
    token = ""
    phase = TRYING
    caller: Hashable = None  # the thread or task that asked; a weak reference, because a task may refer to the lease
    nested = ""  # the tokens that its caller holds: see lua/multi/acquire.lua
    not_held_type: type[NotHeld] = NotHeld  # what a second release raises
    waiter: Waiter = NOT_WAITING
    waits_since = 0.0  # when it was reported as waiting; 0 if it was not
    tries = 0  # acquire steps that were sent
    began = 0.0  # when its call began
    patience = _NEVER  # how long its call waits for the lock; for an answer, if it does not wait
    probe: Probe | None = None  # if its call is that, and nothing was answered yet: see contact.py
    sent_at: float | None = None  # when its step was sent that is under way
    failures: Failures | None = None  # of steps on its lock, since one was answered
    found_busy = False  # it was refused, or another hold of this client before it was refused or had the lock
    outcome_unknown = False  # a step of it may still be under way, or has had an unknown outcome
    server_silent = False  # it was given up because the server is silent
    # While it is held.
    fence = 0
    since = 0.0  # when it was granted or passed on, by our clock
    slot = -1  # its permit, if that has a number
    lasts_until = 0.0  # the server keeps it for at least this long, by our clock
    may_last_until = 0.0  # the server keeps it at most this long, if a renewal of unknown outcome was executed
    deadline = 0.0  # the holder may rely on it until then: the earlier of lasts_until and max_hold_ends
    max_hold_ends = _NEVER  # when max_hold ends it
    check_at = _NEVER  # when the keeper should check it even though it is not due
    retry_at = 0.0
    fence_kept_at = 0.0  # when the record of its fence was last prolonged; 0: not yet
    failed_renewals = 0  # in a row
    confirming = False  # a renewal waits for replicas: see replication.py
    passed = False  # another hold of this client has passed it on to this one
    budget = PassBudget()
    successor: Hold | None = None  # to which it was passed
    notify: Callable[[], object] | None = None  # notifies the holder of its loss
    observer: Callable[[], object] | None = None  # the client's on_lost, called in addition to cancelling a body
    loss_wakeups: Sequence[Wakeup] = ()  # of callers that wait for its loss: see ``loss_watchers``
    reason = ""
    handed_over = False
    mine = True  # False in a forked child: the hold stayed with the parent

    def __init__(self, keys: Keys, options: LockOptions, object_slot: ObjectSlot) -> None:
        self.keys = keys
        self.options = options
        self.object_slot = object_slot  # of its Lock object; taken until this hold is over
        self.local_key: Hashable = keys.main if options.cohort else object_slot  # of its local queue

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def key(self) -> str:
        return self.keys.key

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(keys.name for keys in self.all_keys())

    @property
    def public_fence(self) -> int | None:
        """Its fence; None where the engine gives out none, and the number only counts passes."""
        return self.fence if self.options.fenced else None

    @property
    def permit(self) -> str:
        """Its permit as text; empty if it is not a hold of a permit pool."""
        return ""

    def fences(self, fence: Any) -> dict[str, Any]:
        """Its fence for each name. They are equal, unless the names are on different servers."""
        return dict.fromkeys(self.names, fence)

    @property
    def main_keys(self) -> tuple[str, ...]:
        return (self.keys.main,)

    def all_keys(self) -> tuple[Keys, ...]:
        """The keys of each of its names."""
        return (self.keys,)

    @property
    def ask_within(self) -> float:
        """Seconds after a refusal until its next step, at the latest."""
        return _NEVER

    # Waiting.

    def wait_locally(self, wakeup: Wakeup, now: float) -> Waiter:
        """It waits in the local queue from now on."""
        waiter = self.waiter = Waiter(wakeup, {})
        waiter.since = now
        return waiter

    def wait_at_server(self) -> Waiter:
        """Its record of waiting at the server, as the active hold of its client."""
        if self.waiter is NOT_WAITING:
            self.waiter = Waiter(None, IS_ACTIVE)
        return self.waiter

    def activate(self) -> None:
        """Its caller has noticed that it was promoted."""
        if self.phase is TRYING:
            self.waiter.decided = IS_ACTIVE  # this also drops the reference to the hold that promoted it
        else:
            self.waiter = NOT_WAITING

    def local_queue(self) -> Collection[Hold]:
        """The holds of this client that wait behind it in the local queue."""
        return self.object_slot.cohorts.local_queues.get(self.local_key) or ()

    def refuse(self, refused: Refused, now: float, *, queued: bool, foreign: bool) -> None:
        """The server refused it, on a request sent at that time. ``foreign``: a client of another library has it."""
        waiter = self.wait_at_server()
        waiter.refused = refused
        self.found_busy = True
        self.failures = None
        waiter.asked = now, refused.now_us
        waiter.queued = waiter.queued or queued
        budget = self.budget
        if foreign or budget.run_since:
            seen_at = now if foreign else budget.polling_seen_at
            self.budget = budget._replace(run_since=0.0, polling_seen_at=seen_at)

    def follow(self, other: Hold) -> None:
        """It waits behind that hold of this client, or was promoted by it: what that one knows of the lock counts."""
        self.found_busy = self.found_busy or other.is_known_busy()

    @property
    def asker(self) -> Hold:
        """The hold of this client that sent the last step on the lock: itself, or that which has just promoted it."""
        return giver if isinstance(giver := self.waiter.decided.get(None), Hold) else self

    @property
    def contact(self) -> Contact:
        """Contact with the server of its lock, which may have moved to another node since it began."""
        return self.object_slot.cohorts.contacts.of(self.keys.main)

    def wait_ends(self, until: float) -> float:
        """When its wait is over: at ``until``, or early in an outage."""
        return min(until, self.contact.gives_up_at(self.options, self.began, self.patience, self.probe))

    def is_known_busy(self) -> bool:
        """Whether it has found the lock busy, or has had it; or the hold that has just promoted it."""
        return self.found_busy or self.since > 0 or (asker := self.asker).found_busy or asker.since > 0

    def continue_run(self, giver: Hold) -> None:
        """The giver has ended, and this hold asks the server next: it is the same run of holds of this client."""
        given = giver.budget
        turns = given.run_turns + 1 + (giver.fence - given.first_fence)
        self.budget = PassBudget(run_since=given.run_since, run_turns=turns, polling_seen_at=given.polling_seen_at)

    # Steps of unknown outcome. From the send to the reply it is not known what the server has done.

    def send(self) -> bool:
        """A step is about to be sent. Returns whether the outcome of an earlier step is unknown, for ``answer``."""
        before, self.outcome_unknown = self.outcome_unknown, True
        return before

    def answer(self, before: bool) -> None:
        """A step was answered: only an earlier one can have an unknown outcome."""
        self.outcome_unknown = before

    # Transitions.

    def grant(self, fence: int, asked_at: float, slot: int = -1) -> None:
        """The server gave it to us, on a request sent at that time."""
        budget, options = self.budget, self.options
        self.budget = budget.refilled(fence, options, asked_at, budget.run_since or asked_at)
        self.slot = slot
        self.check_at = asked_at + CHECK_AFTER
        self._begin(fence, asked_at, asked_at + options.validity)
        self.waiter = NOT_WAITING

    def accept(self, notification: Notification, now: float) -> bool:
        """The server granted it for our ttl and notified us; False if that is too long ago to rely on it.

        The notification has the server's time of the grant. The last step that the server answered relates that clock
        to ours: it was executed after we sent it. So a delayed notification never gives a deadline after the end of
        the grant.
        """
        asked_at, asked_us = self.waiter.asked
        since = (notification.at_us - asked_us) / 1e6
        if since < 0:
            return False  # we were refused after that, so the grant is gone; or the server's clock was set back
        granted_at = min(asked_at + since, notification.heard_at)
        ttl = self.options.ttl
        lasts = granted_at + ttl - drift(ttl + since)
        if now >= lasts:
            return False
        self.budget = self.budget.refilled(notification.fence, self.options, now, 0.0)
        self.slot = notification.slot
        self.check_at = now + CHECK_AFTER
        self._begin(notification.fence, now, lasts)
        self.waiter = NOT_WAITING
        return True

    def inherit(self, giver: Hold, now: float) -> None:
        """The giver passes it on to this hold: the same key and token on the server, and the next fence."""
        self.token = giver.token
        self.passed = True
        self.budget = giver.budget
        # A check that is due stays due. If the keeper has checked the key before, that was for the giver: check again.
        self.check_at = giver.check_at if giver.check_at != _NEVER else now + CHECK_AFTER
        self._begin(giver.fence + 1, now, giver.lasts_until)

    def take_queue_place(self, other: Hold) -> None:
        """The other hold gives up waiting: continue with its token and its place in the queue on the server."""
        self.token = other.token
        self.outcome_unknown = other.outcome_unknown
        self.server_silent = other.server_silent
        mine, theirs = self.waiter, other.waiter
        mine.queued, mine.asked, mine.refused = theirs.queued, theirs.asked, theirs.refused
        self.budget = self.budget._replace(polling_seen_at=other.budget.polling_seen_at)

    def _begin(self, fence: int, since: float, lasts: float) -> None:
        self.fence, self.failures = fence, None
        self.since = since
        self.lasts_until = self.deadline = lasts
        if (max_hold := self.options.max_hold) is not None:
            self.max_hold_ends = since + max_hold
            self.deadline = min(lasts, self.max_hold_ends)
        self.phase = HELD

    def take_back(self) -> None:
        """Its grant came too late to rely on. The key may still exist."""
        self.phase, self.outcome_unknown = TRYING, True

    def prolong(self, ttl: float, asked_at: float) -> None:
        """The server has made it last that long, on a request sent at that time. It never gets shorter."""
        self.failed_renewals, self.confirming = 0, False
        self.lasts_until = max(self.lasts_until, asked_at + ttl - drift(ttl))
        self.deadline = min(self.lasts_until, self.max_hold_ends)
        if not self.outcome_unknown:
            self.may_last_until = 0.0

    def ask_to_prolong(self, ttl: float, by: float) -> None:
        """The server is asked to make it last for ``ttl``, and may execute that request until ``by``."""
        self.may_last_until = max(self.may_last_until, by + ttl)

    def fail_to_renew(self, sent: bool, retry_at: float) -> None:
        self.outcome_unknown = self.outcome_unknown or sent
        self.retry_at = self.check_at = retry_at
        self.confirming = False
        self.failed_renewals += 1

    def lose(self, reason: str) -> bool:
        """Mark it as lost. False if it was over: the keeper and a caller may find the loss at the same time."""
        finder = object()
        if self.phase is not HELD or self.__dict__.setdefault("found_lost_by", finder) is not finder:
            return False
        self.reason = reason
        self.phase = LOST
        self.object_slot.deactivate(self)  # other holds of this client may try; its Lock object stays in use
        self.wake_loss_waiters()
        return True

    def disown(self, reason: str) -> None:
        """In a forked child: it stayed with the parent."""
        self.mine, self.phase, self.reason = False, LOST, reason

    def end(self) -> None:
        self.phase = ENDED

    def hand_over(self) -> None:
        """It ends here, and goes on in the process that adopts its ticket."""
        self.handed_over = True
        self.end()

    def drop(self, registry: LeaseRegistry) -> bool:
        """Its lease was dropped without release: end it here, and let its key expire. False if it was over."""
        if self.phase is ENDED or not self.mine or not registry.leave(self):
            return False
        was_held = self.phase is HELD  # else its loss was reported
        self.end()
        if was_held and not registry.closed:  # close() releases it
            self.reason = "its lease was dropped without release(), so it is not renewed any more"
            registry.dropped.append(self)
            registry.wake_the_keeper()
        if not registry.keys_expire:
            registry.defer_cleanup(self, self.since, not_before=self.deadline)
        self.object_slot.leave(self)
        return True

    def loss_watchers(self) -> list[Wakeup]:
        """The wake-ups of callers that wait for its loss, to add one or to take it away."""
        watchers: list[Wakeup] = self.__dict__.setdefault("loss_wakeups", [])  # atomic: two threads may be first
        return watchers

    def wake_loss_waiters(self) -> None:
        """Wake all callers that wait for its loss; each one takes its wake-up away."""
        for wakeup in list(self.loss_wakeups):
            wakeup.wake()

    # Queries.

    def gone_by(self) -> float:
        """The time by which the server no longer has it, even if requests of unknown outcome were executed."""
        return max(self.lasts_until + 2 * drift(self.options.ttl), self.may_last_until)

    def valid(self, now: float) -> bool:
        return self.phase is HELD and now < self.deadline

    def remaining(self, now: float) -> float:
        return max(0.0, self.deadline - now) if self.phase is HELD else 0.0

    def why_lost(self, now: float) -> str:
        """Why it is not held any more; empty if it is, or was released."""
        if self.phase is LOST:
            return self.reason
        if self.phase is HELD and now >= self.deadline:
            return self.why_over()
        return ""

    def why_over(self) -> str:
        """What it means that the deadline has passed."""
        if self.deadline >= self.max_hold_ends:
            return f"it was held for its max_hold of {rounded(self.options.max_hold or 0.0)} s"
        if not self.options.renew:
            return f"its ttl of {rounded(self.options.ttl)} s ran out, and it is not renewed (renew=False)"
        count = self.options.replicas
        confirmed = f" and confirmed by {count} replica{'s' * (count > 1)}" if count else ""
        return f"its ttl of {rounded(self.options.ttl)} s ran out before it could be renewed{confirmed}"

    def check(self, now: float) -> None:
        """Raise LeaseLost unless it is held; NotHeld if it was released."""
        if reason := self.why_lost(now):
            raise self.lost_error(reason)
        if self.phase is not HELD:
            raise self.not_held_error() if self.handed_over else NotHeld(self.name, key=self.key)

    def lost_error(self, reason: str = "") -> LeaseLost:
        """The error for its holder once it is lost. Without a reason, that which was found."""
        return LeaseLost(self.name, self.public_fence, reason or self.reason, key=self.key)

    def not_held_error(self) -> NotHeld:
        """The error for a caller that uses a hold that has ended."""
        return self.not_held_type(self.name, _HANDED_OVER if self.handed_over else "", key=self.key)

    def state(self, now: float) -> str:
        """Its state in one word."""
        return HELD if self.valid(now) else LOST if self.phase is HELD else self.phase
