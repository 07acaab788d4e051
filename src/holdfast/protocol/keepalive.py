"""Keeping leases: one keeper renews all leases of a client.

Invariant. A registered hold is renewed once a third of its ttl is over, as long as the server can be reached. The one
caller for which ``leave`` succeeds ends the hold; after that no renewal of it is sent, and no reply to one counts. The
holder is notified when its deadline passes.

The first renewal comes a tenth of a second after the grant. From then on the server notifies us if another client
writes the key. Such a push is a hint: a renewal then finds out what happened. So short holds cost no extra request, and
the loss of longer ones is known in milliseconds. The keys of permit pools are written by every holder, so these are
monitored in another way: see membership.py.

A round renews together all leases that are due now or soon. So ten thousand leases need a few rounds a second, not
thousands. A round that fails is tried again until the deadline of each hold. No error ends the keeper. With
``replicas=`` a renewal counts once replicas have it: see replication.py.

The keeper also finishes what callers could not. A pending clean-up is a hold that has ended, but whose key may still
exist. The keeper sends its abandon step until the server confirms it, or until neither the key nor a late request for
it can exist. If a client has many waiters, the keeper shows the server that they are alive: see presence.py. Renewals
come first: the keeper does other work for a tenth of a second at a time, and then checks again which leases are due.

Clocks: as in mutex.py. If the keeper is late, nothing is unsafe: ``held`` does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple
from weakref import ref

from holdfast.options import drift
from holdfast.protocol import mutex
from holdfast.protocol.effects import Effects, Step, StepFailed, Wakeup, call_each, clock, report, report_loss, wait
from holdfast.protocol.hold import HELD, Hold
from holdfast.protocol.kinds.membership import (
    MembershipCheck,
    MembershipMonitor,
    MembershipMonitors,
    SharedHold,
    check_steps,
    plan_checks,
)
from holdfast.protocol.replication import needs_replicas, renew_with_replicas, retry_pause
from holdfast.protocol.replies import DONE, GONE
from holdfast.protocol.reporting import lateness, lost_event, report_failed_renewal, report_local_waits, report_renewal
from holdfast.protocol.wait.contact import LONGEST_CALL, Contacts
from holdfast.protocol.wait.presence import Crowd, show_presence

LONGEST_SLEEP: Final = 60.0
CLEANUP_PAUSE: Final = 0.2
# While waits of a crowd time out, the callers come first: their clean-ups begin once no wait has ended for QUIET
# seconds, and LONGEST_DELAY after the first at the latest (benchmarks.crowd).
QUIET: Final = 0.25
LONGEST_DELAY: Final = 3.0
BATCH: Final = 1000
SLICE: Final = 0.1  # seconds of other work, before the keeper looks again which leases are due

CLOSED: Final = "its client was closed"
_NEVER: Final = float("inf")


class PendingCleanup(NamedTuple):
    hold: Hold
    until: float  # from then on nothing can be left, even if it is never answered
    not_before: float  # the key of a lease that was dropped stays until its deadline


class LeaseRegistry:
    """The holds of one client. Its methods are single dict and deque operations, so any thread may call them."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup = wakeup
        self.holds: dict[Hold, Hold] = {}
        self.watched: dict[str, Hold] = {}  # by key: the server notifies us when another client writes it
        self.monitors = MembershipMonitors(self.wake_the_keeper)  # of permit pools
        self.crowd = Crowd()  # the waiters whose presence the keeper shows
        self.cleanups: deque[PendingCleanup] = deque()
        self.cleanups_from = self._cleanups_by = 0.0  # when to begin, and when at the latest
        self.cleaning: list[PendingCleanup] = []  # those that were sent and not answered yet
        self.renewals = self.failed_renewals = 0  # so far
        self.contacts = Contacts()
        self.wakes_at = _NEVER  # when the keeper will look next; infinite while it is not asleep
        self.wanted_at = 0.0  # for when a new hold last woke the keeper; it wakes up then even if that hold is over
        self.closed = False
        self.keys_expire = True  # if False, the key of a hold that is over must be deleted
        self.dropped: deque[Hold] = deque()  # holds whose leases were dropped without release, to be reported
        self.local_waits_at = 0.0  # when to look next for long waits in local queues
        self._explained_at = 0.0
        self.observed: Callable[[], bool] = bool  # whether events of normal operation are wanted

    def may_explain_wait(self, now: float) -> bool:
        """Whether to send requests to explain a long wait: once a second for each client, however many wait."""
        if now < self._explained_at + 1.0:
            return False
        self._explained_at = now
        return True

    def pending_cleanups(self) -> list[PendingCleanup]:
        return [*self.cleanups, *self.cleaning]

    def wake_the_keeper(self) -> None:
        self.wakeup.wake()  # looked up here, because it is replaced after a fork and in a new event loop

    def enter(self, hold: Hold) -> None:
        self.holds[hold] = hold
        if self.closed:
            hold.lose(CLOSED)
        when = due_at(hold)
        if isinstance(hold, SharedHold):
            hold.monitors = self.monitors
            self.monitors.in_use = True
            self.monitors.move(hold)
            when = min(when, hold.old_at)
        if when < self.wakes_at:
            self.wanted_at = when
            self.wakeup.wake()

    def leave(self, hold: Hold) -> bool:
        """Take it out; True for exactly one caller, which may then end it."""
        if self.watched:
            self.unwatch(hold)
        if self.monitors.monitored and isinstance(hold, SharedHold):
            self.monitors.move(hold)
        return self.holds.pop(hold, None) is not None

    def unwatch(self, hold: Hold) -> None:
        for key in hold.main_keys:
            if self.watched.get(key) is hold:
                self.watched.pop(key, None)

    def held_by(self, caller: Hashable) -> list[Hold]:
        """What this thread or task has acquired and not released."""
        return [hold for hold in list(self.holds) if hold.caller == ref(caller)]

    def check_key(self, key: str) -> None:
        """Another client wrote that key: if a hold relies on it, renew it at once to see whether it is lost."""
        hold = self.watched.pop(key, None)
        if hold is not None:
            hold.check_at = 0.0
            self.wakeup.wake()
        self.monitors.recheck(key)

    def look_at_all(self) -> None:
        for key in list(self.watched):
            self.check_key(key)
        self.monitors.recheck_all()

    def is_watching(self) -> bool:
        return bool(self.watched or self.monitors.monitored)

    def defer_cleanup(self, hold: Hold, now: float, *, not_before: float = 0.0) -> None:
        # For this long the key may exist (it may have been extended), or a late request could bring it back.
        matters = max(hold.options.ttl, mutex.TOMBSTONE_MS / 1000, hold.deadline - now + drift(hold.options.ttl))
        if not self.cleanups:
            self._cleanups_by = now + LONGEST_DELAY
        until = now + matters if self.keys_expire else _NEVER
        self.cleanups.append(PendingCleanup(hold, until, not_before))
        self.cleanups_from = min(now + QUIET, self._cleanups_by) if hold.waiter.crowded else now
        if self.wakes_at > self.cleanups_from + CLEANUP_PAUSE or not hold.waiter.crowded:
            self.wakeup.wake()

    def show_presence(self, hold: Hold, now: float) -> None:
        """This waiter sleeps: show the server that it is alive, from now on."""
        if self.crowd.join(hold, now):
            self.wakeup.wake()

    def look_for_crowd(self) -> None:
        """Notifications may have been lost: see at once which waiters of the crowd should ask."""
        if self.crowd.look_at_once():
            self.wakeup.wake()

    def close(self) -> None:
        self.closed = True
        self.wakeup.wake()

    def disown(self, reason: str) -> None:
        """In a forked child: no hold is ours. No waiter is woken, because none is in this process."""
        for hold in self.holds.values():
            hold.disown(reason)
        self.holds.clear()
        self.watched.clear()
        self.monitors.monitored.clear()
        self.crowd.forget()
        self.contacts.forget()
        self.cleanups, self.cleaning = deque(), []


class Round(NamedTuple):
    """What to do now, and when to look again."""

    over: list[Hold]
    due: list[Hold]
    wakes_at: float
    first_deadline: float  # of those that are renewed
    first_end: float  # of all

    def spare(self, registry: LeaseRegistry, longest: float, now: float) -> float:
        """How long a call may take on which no lease depends: renewals come in time, and losses are told in time."""
        return min(longest, max(registry.contacts.least, min((self.first_deadline - now) / 3, self.first_end - now)))


def due_at(hold: Hold) -> float:
    """When the keeper must act: after a third of the ttl, which leaves time for two more tries; at the deadline if the
    hold is not renewed, or a renewal waits for replicas; sooner if ``check_at`` says so."""
    deadline, options = hold.deadline, hold.options
    stays = not options.renew or hold.confirming or deadline >= hold.max_hold_ends
    when = deadline if stays else deadline - options.renewed_with
    when = min(when, hold.check_at)
    return when if when > hold.retry_at else hold.retry_at


def asked_for(hold: Hold, now: float) -> float:
    """How long a renewal should make it last: for what is left of max_hold, plus the drift that will be subtracted.

    If it is not renewed: so little that nothing changes. The step then only shows whether the key exists.
    """
    if not hold.options.renew:
        return 0.001
    return min(hold.options.ttl, (hold.max_hold_ends - now) * 1.02 + 0.003)


def plan(holds: list[Hold], now: float) -> Round:
    """Plan a round. It includes every hold that is due within a twelfth of its ttl."""
    over: list[Hold] = []
    due: list[Hold] = []
    wakes_at = now + LONGEST_SLEEP
    first_deadline = first_end = _NEVER
    for hold in holds:
        if hold.phase is not HELD:
            continue
        if now >= hold.deadline:
            over.append(hold)
            continue
        when, first_end = due_at(hold), min(first_end, hold.deadline)
        if when < hold.deadline:
            first_deadline = min(first_deadline, hold.deadline)
        slack = 0.0 if when == hold.check_at else hold.options.ttl / 12
        if when < hold.deadline and when <= now + slack and hold.retry_at <= now:
            due.append(hold)
        else:
            wakes_at = min(wakes_at, when, hold.deadline)
    return Round(over, due, wakes_at, first_deadline, first_end)


def keep(registry: LeaseRegistry) -> Effects[None]:
    """Run the keeper until the registry is closed, and try the pending clean-ups once more."""
    while True:
        registry.wakeup.clear()
        closing = registry.closed
        now = yield from clock()
        todo = plan(list(registry.holds.values()), now)
        for hold in todo.over:
            yield from _lose(registry, hold, hold.why_over(), now)
        while registry.dropped:
            yield from report(lost_event(registry.dropped.popleft(), now))
        if registry.holds and now >= registry.local_waits_at:
            yield from report_local_waits(registry, now)
        if not closing and todo.due:
            yield from _renew(registry, todo, now)
        candidates = list(registry.holds.values()) if registry.monitors.in_use else []
        looks, check_at = plan_checks(candidates, registry.monitors, now)
        if not closing and looks:
            yield from _look(registry, looks, todo)
        slice_ends = _NEVER if closing else min(todo.wakes_at, now + SLICE)
        cleans = bool(registry.cleanups) and (closing or now >= registry.cleanups_from)
        busy = cleans and (yield from _run_cleanups(registry, slice_ends, todo))
        if closing:
            return
        if (crowd := registry.crowd).is_due(now):
            now = yield from clock()
            yield from show_presence(
                crowd, slice_ends, todo.spare(registry, crowd.call_time(registry.contacts, now), now)
            )
            busy = busy or crowd.is_due(now)
        if not todo.due and not looks and not busy:
            wakes_at = min(todo.wakes_at, check_at, crowd.due_at, registry.local_waits_at if registry.holds else _NEVER)
            if registry.cleanups:
                begins = max(registry.cleanups_from, min(cleanup.not_before for cleanup in list(registry.cleanups)))
                wakes_at = min(wakes_at, max(now + CLEANUP_PAUSE, begins))
            registry.wakes_at = min(wakes_at, registry.wanted_at) if registry.wanted_at > now else wakes_at
            if not registry.closed:
                yield from wait(registry.wakeup, registry.wakes_at)
            registry.wakes_at = _NEVER


def _lose(registry: LeaseRegistry, hold: Hold, reason: str, now: float) -> Effects[None]:
    if hold.lose(reason):
        yield from report_loss(hold)
        if not registry.keys_expire:
            registry.defer_cleanup(hold, now)


def _renew(registry: LeaseRegistry, todo: Round, now: float) -> Effects[None]:
    for start in range(0, len(todo.due), BATCH):
        batch = [hold for hold in todo.due[start : start + BATCH] if hold in registry.holds]
        asked_at = yield from clock()
        confirmed = {hold: asked_for(hold, asked_at) for hold in batch if needs_replicas(hold, asked_at)}
        if confirmed:
            yield from renew_with_replicas(registry, confirmed)
            batch = [hold for hold in batch if hold not in confirmed]
        ttls = [asked_for(hold, asked_at) for hold in batch]
        for hold in batch:
            hold.check_at = _NEVER
            if hold.steps.tracks_key:
                for key in hold.main_keys:
                    registry.watched[key] = hold
        steps = [mutex.renew_step(hold, ttl, watch=True) for hold, ttl in zip(batch, ttls, strict=True)]
        shortest = min((hold.options.ttl for hold in batch), default=1.0)
        # Not beyond the first end of a lease, or its holder would be told late; but long enough for a round trip.
        timeout = min(LONGEST_CALL, shortest / 3, max(registry.contacts.least, todo.first_end - asked_at))
        for hold, ttl in zip(batch, ttls, strict=True):
            hold.ask_to_prolong(ttl, asked_at + timeout)
        replies = (yield from call_each(steps, timeout)) if steps else []
        now = yield from clock()
        lost: list[tuple[Hold, int]] = []
        for hold, ttl, reply in zip(batch, ttls, replies, strict=True):
            if hold not in registry.holds:
                registry.unwatch(hold)  # released while the renewal was under way
                continue
            if isinstance(reply, StepFailed):
                registry.failed_renewals += 1
                hold.fail_to_renew(reply.sent, now + retry_pause(hold, now))
                yield from report_failed_renewal(hold, now, reply.error)
            elif reply == DONE:
                registry.renewals += 1
                if hold.options.replicas:
                    continue  # it is there, and tracked
                left, late = hold.remaining(now), lateness(hold, now)
                hold.prolong(ttl, asked_at)
                yield from report_renewal(hold, left, late, observed=registry.observed())
            else:
                lost.append((hold, reply))
        yield from _tell(registry, lost, now)
        if replies and all(isinstance(reply, StepFailed) for reply in replies):
            return  # the other batches would have no answer, either, and leases end meanwhile
        yield from _keep_fences(batch, asked_at, timeout)


def _tell(registry: LeaseRegistry, lost: list[tuple[Hold, int]], now: float) -> Effects[None]:
    """Tell the holders that their leases are lost, and why."""
    reasons = (yield from mutex.loss_reasons(lost)) if lost else []
    for (hold, _), reason in zip(lost, reasons, strict=True):
        yield from _lose(registry, hold, reason, now)


def _keep_fences(renewed: list[Hold], now: float, timeout: float) -> Effects[None]:
    """Prolong the records of fences after a third of the retention, or at once if the ttl is longer than that."""
    steps: list[Step] = []
    for hold in renewed:
        options, since = hold.options, hold.fence_kept_at
        hold.fence_kept_at = since or now
        due = now - since > mutex.fence_kept_for(options) / 3 if since else options.fence_retention < options.ttl
        if due and hold.steps.tracks_key:
            hold.fence_kept_at = now
            steps += mutex.keep_fence_steps(hold)
    if steps:
        yield from call_each(steps, timeout)  # a failure does not matter: the next call is still in time


def _look(registry: LeaseRegistry, looks: list[MembershipCheck], todo: Round) -> Effects[None]:
    """See which of our holds are still in those permit pools, and have the pools watched from now on."""
    for start in range(0, len(looks), BATCH):
        batch = looks[start : start + BATCH]
        now = yield from clock()
        for look in batch:
            registry.monitors.monitored.setdefault(look.key, MembershipMonitor()).begin(now)
        asked = [part for look in batch for part in check_steps(look)]
        replies = yield from call_each([step for step, _ in asked], todo.spare(registry, LONGEST_CALL, now))
        lost: list[tuple[Hold, int]] = []
        for (step, holds), reply in zip(asked, replies, strict=True):
            if isinstance(reply, StepFailed) or len(reply) != len(holds):
                registry.check_key(step.keys[0])
                continue
            # A hold that has left meanwhile has released its permit, or is about to.
            missing = [hold for hold, found in zip(holds, reply, strict=True) if not found]
            lost += [(hold, GONE) for hold in missing if hold in registry.holds]
        yield from _tell(registry, lost, now)


def _run_cleanups(registry: LeaseRegistry, until: float, todo: Round) -> Effects[bool]:
    """Try each pending clean-up once, until that time; returns whether to continue after a check of the leases."""
    for start in range(0, len(registry.cleanups), BATCH):
        now = yield from clock()
        if start and now >= until:  # each round sends one batch at least, however long the renewals take
            return True
        cleanups = [registry.cleanups.popleft() for _ in range(min(BATCH, len(registry.cleanups)))]
        registry.cleanups.extend(cleanup for cleanup in cleanups if now < cleanup.not_before)
        cleanups = [cleanup for cleanup in cleanups if cleanup.not_before <= now < cleanup.until]
        steps: list[Step] = [mutex.abandon_step(cleanup.hold) for cleanup in cleanups]
        registry.cleaning = cleanups
        timeout = todo.spare(registry, registry.crowd.call_time(registry.contacts, now), now)
        replies = (yield from call_each(steps, timeout)) if steps else []
        registry.cleaning = []
        for cleanup, step, reply in zip(cleanups, steps, replies, strict=True):
            if isinstance(reply, StepFailed) or not reply.buried:
                registry.cleanups.append(cleanup)
            registry.monitors.recheck(step.keys[0])  # our own write ended client tracking; re-arm it
        if replies and isinstance(replies[-1], StepFailed):
            return False  # the other batches would have no answer, either
    return False
