"""Cohorts: the holds of one client on one lock share one local queue, and one of them talks to the server.

Invariant. For each lock at most one hold of a client is *active*: it asks the server, waits in the server's queue, or
holds. All other holds of the client wait in the *local queue*, in the order of arrival, and cost the server nothing.
If no hold is active, the first waiter that may become active is promoted.

A hold that is released passes to the first waiter without the network, at most ``cohort`` times and
0.1 s in a row; then it goes back to the server, which serves other clients. What is passed on is the key with its
token, the rest of its ttl (renewed first if that is too little) and the next fence of those that the server has set
aside. After Dice, Marathe and Shavit, "Lock Cohorting" (2012).

A client that is alone would ask for the lock again as soon as it has released it, and a polling client would never
find it free. So it leaves a yield window now and then, as the server does for its queue (lua/include/grant.lua).

A Lock object has an object slot of its own: it has at most one lease, and a lost lease occupies the slot until
release() has reported the loss, although another hold may be active by then. With ``cohort=0`` the local queue is that
of the object slot alone.

Atomic: single dict and deque operations, in an order in which any thread may be interrupted, by another or by Ctrl-C,
between any two of them. ``setdefault`` decides which hold is active, and whether a waiter was promoted or had left.
After an interrupt the same caller repeats the operation, each part of which is idempotent. A mutex would be easier to
read, but would stay locked if Ctrl-C arrives between taking it and noting that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from holdfast.protocol.effects import Effects, Wakeup, clock, wait
from holdfast.protocol.hold import ENDED, LOST, TRYING, Hold
from holdfast.protocol.wait.waiter import IS_ACTIVE, LEFT, POLLING_REMEMBERED, WAITING

if TYPE_CHECKING:
    from holdfast.protocol.keepalive import LeaseRegistry
    from holdfast.protocol.wait.contact import Contacts

ENOUGH: Final = 0.8  # of its validity must be left for a hold to be passed on as it is
# Yield windows for polling clients; must match lua/include/grant.lua, which says why.
LONGEST_YIELD: Final = 0.1
SHORTEST_YIELD: Final = 0.005
YIELD_AFTER: Final = 0.05
YIELD_AFTER_TURNS: Final = 8
POLLED_YIELD_AFTER: Final = 0.04
POLLED_FADING: Final = 10

_LOSER: Final = "loser"
_ENDER: Final = "ender"
_NEVER: Final = float("inf")


class ObjectSlot(dict[None, Hold]):
    """Contains at most one Hold: the one that uses its Lock object."""

    __slots__ = ("cohorts",)
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, cohorts: Cohorts) -> None:
        self.cohorts = cohorts

    def deactivate(self, hold: Hold) -> None:
        self.cohorts.deactivate(hold, _LOSER)

    def leave(self, hold: Hold) -> None:
        self.cohorts.leave(hold)


class Cohorts:
    """The active hold and the local queue of each lock, in one client."""

    def __init__(self, new_wakeup: Callable[[], Wakeup], contacts: Contacts) -> None:
        self.new_wakeup = new_wakeup
        self.contacts = contacts  # of the client
        self.active_holds: dict[Hashable, Hold] = {}
        self.local_queues: dict[Hashable, deque[Hold]] = {}
        self._deactivating: dict[Hold, str] = {}

    def try_activate(self, hold: Hold) -> bool:
        """Become the active hold at once; False if it has to wait in the local queue."""
        if self.active_holds.setdefault(hold.local_key, hold) is not hold:
            return False
        if hold.object_slot.setdefault(None, hold) is hold:
            return True
        self.deactivate(hold)  # its object is occupied by a lease that was lost
        return False

    def active(self, hold: Hold) -> Hold | None:
        """The active hold, for which this one waits in the local queue."""
        return self.active_holds.get(hold.local_key) or hold.object_slot.get(None)

    def activate_beside(self, hold: Hold) -> bool:
        """Let a hold that does not wait ask the server, although another hold of its client is active and waits.

        False if a hold of this process has the lock, or the Lock object is in use: then it is busy.
        """
        local_key, active = hold.local_key, self.active_holds.get(hold.local_key)
        if local_key is hold.object_slot or active is None or active.phase is not TRYING:
            return False
        hold.local_key = hold.object_slot
        if self.try_activate(hold):
            return True
        hold.local_key = local_key
        return False

    def wait_in_local_queue(self, hold: Hold, ends: Callable[[], float], now: float) -> Effects[float | None]:
        """Wait until it is active, and return that time, or None if its wait ends first. It may be held by then.

        ``ends``: when its wait ends, as far as is known; asked again after each wake-up.
        """
        local_key = hold.local_key
        wakeup = self.new_wakeup()
        decided = hold.wait_locally(wakeup, now).decided
        self._enqueue(local_key, hold)
        active = self.active_holds.get(local_key)
        if active is None or not (active.waiter.decided is IS_ACTIVE or active.waiter.notified):
            self._promote_next(local_key, hold)
        else:
            hold.follow(active)
        until = ends()
        while True:
            now = yield from wait(wakeup, _NEVER if decided else until)
            if decided and self._is_active(hold):
                return now
            until = ends()  # contact may have been lost meanwhile, or may be back
            if now >= until and self._leave_local_queue(local_key, hold):
                return None

    def _is_active(self, hold: Hold) -> bool:
        """Whether it was made the active hold. True, too, if a lease was passed on to it and lost before it woke up."""
        if self.active_holds.get(hold.local_key) is hold:
            hold.object_slot[None] = hold
        elif hold.phase is not LOST:
            return False
        if not hold.passed:
            giver = hold.waiter.decided.get(None)
            if isinstance(giver, Hold):
                hold.follow(giver)
                hold.failures = giver.failures
                if giver.phase is ENDED:
                    hold.continue_run(giver)
        hold.activate()
        return True

    def _enqueue(self, local_key: Hashable, hold: Hold) -> None:
        while True:
            queue = self.local_queues.get(local_key)
            if queue is None:
                queue = self.local_queues.setdefault(local_key, deque())
            queue.append(hold)
            if self.local_queues.get(local_key) is queue:  # else it was found empty and removed just then
                return

    def _leave_local_queue(self, local_key: Hashable, hold: Hold) -> bool:
        """Leave the local queue; False if it has just been promoted."""
        if hold.waiter.decided.setdefault(None, LEFT) is not LEFT:
            return False
        _remove(self.local_queues.get(local_key), hold)
        return True

    def withdraw(self, hold: Hold) -> Effects[None]:
        """Leave the local queue after an interrupt. If the hold was just promoted, wait until it is active."""
        local_key = hold.local_key
        if hold.waiter.decided is IS_ACTIVE or self._leave_local_queue(local_key, hold):
            return
        while not self._is_active(hold):
            yield from wait(hold.waiter.wakeup, (yield from clock()) + 0.01)

    def _promote_next(self, local_key: Hashable, by: Hold) -> None:
        """If no hold is active, promote the first waiter that may be."""
        while queue := self.local_queues.get(local_key):
            active = self.active_holds.get(local_key)
            if active is None:
                successor = _first(queue, by)
                if successor is None:
                    return
                active = self.active_holds.setdefault(local_key, successor)
            waiter = active.waiter
            if waiter.decided is IS_ACTIVE:
                return
            # Promoted but not notified, by us or by an interrupted caller: notify it.
            if waiter.decided.setdefault(None, by) is not LEFT:
                waiter.wake()
                waiter.notified = True
                _remove(queue, active)
                return
            self.deactivate(active)

    def deactivate(self, hold: Hold, party: str = _ENDER) -> None:
        """Make the hold inactive, and promote the next. One thread may find it lost while another releases it."""
        local_key = hold.local_key
        if self._deactivating.setdefault(hold, party) is not party:
            return
        if self.active_holds.get(local_key) is hold:
            del self.active_holds[local_key]
        self._deactivating.pop(hold, None)
        if local_key in self.local_queues:
            self._tidy(local_key)
            self._promote_next(local_key, hold)

    def leave(self, hold: Hold) -> None:
        """It is over, or was not granted: free its object slot, and promote the next."""
        if hold.object_slot.get(None) is hold:
            hold.object_slot.pop(None, None)
        self.deactivate(hold)
        if hold.local_key is hold.object_slot and hold.keys.main in self.local_queues:
            self._promote_next(hold.keys.main, hold)  # a waiter there may need its Lock object

    def _tidy(self, local_key: Hashable) -> None:
        """Remove an empty local queue. A hold that joins it meanwhile is moved to the new one."""
        queue = self.local_queues.get(local_key)
        if queue is not None and not queue and self.local_queues.pop(local_key, None) is queue:
            while queue:
                try:
                    self._enqueue(local_key, queue.popleft())
                except IndexError:
                    return  # that hold has moved itself: see _enqueue

    def first_waiter(self, hold: Hold) -> Hold | None:
        """The waiter to which this hold could be passed on."""
        queue = self.local_queues.get(hold.local_key)
        return _first(queue, hold) if queue else None

    def pass_at_once(self, hold: Hold, registry: LeaseRegistry, now: float) -> bool:
        """Release the hold by passing it on, if that needs no renewal; else False, and it is still held."""
        queue = self.local_queues.get(hold.local_key)
        successor = _first(queue, hold) if queue else None
        if successor is None:
            return False
        assert successor.waiter.wakeup is not None
        successor.waiter.wakeup.prewake()
        if not hold.valid(now) or not may_inherit(successor, hold, now) or not registry.leave(hold):
            return False
        if self.pass_on(hold, successor, registry, now):
            return True
        registry.enter(hold)  # that waiter is just leaving, or the keeper has just found the hold lost
        return False

    def pass_on(self, hold: Hold, successor: Hold, registry: LeaseRegistry, now: float) -> bool:
        """Pass the hold on to a waiter that ``may_inherit`` it; False if the waiter has left, or the hold was lost.

        The hold was taken out of the registry before. After an interrupt it can be called again.
        """
        if hold.successor is None and not self._promote(successor, hold):
            return False
        local_key = hold.local_key
        if self.active_holds.get(local_key) is hold:
            successor.inherit(hold, now)
            registry.enter(successor)
            hold.end()
            hold.object_slot.pop(None, None)  # it is ours: an active hold has its object slot
            self.active_holds[local_key] = successor  # from here on it is the successor's
        self._finish_promotion(successor, hold)
        return True

    def pass_queue_place(self, hold: Hold) -> bool:
        """It gives up waiting: the first local waiter takes its place in the server's queue. False if there is none.

        So a process keeps its turn although one of its threads has given up. After an interrupt it can be called again.
        """
        successor = hold.successor or self.first_waiter(hold)
        if successor is None or (
            hold.successor is None and not (may_follow(successor, hold) and self._promote(successor, hold))
        ):
            return False
        local_key = hold.local_key
        if self.active_holds.get(local_key) is hold:
            successor.take_queue_place(hold)
            hold.end()
            hold.object_slot.pop(None, None)
            self.active_holds[local_key] = successor
        self._finish_promotion(successor, hold)
        return True

    def _promote(self, successor: Hold, hold: Hold) -> bool:
        """Promote the successor; False if it is just leaving. ``_finish_promotion`` wakes it."""
        if self._deactivating.setdefault(hold, _ENDER) is not _ENDER:
            return False  # the keeper has just found the hold lost
        # Checked second: from here on the keeper cannot deactivate the hold, but it may have done so before.
        if self.active_holds.get(hold.local_key) is not hold:
            self._deactivating.pop(hold, None)
            return False
        if successor.waiter.decided.setdefault(None, hold) is not hold:
            self._deactivating.pop(hold, None)
            return False  # no other waiter is tried: the release goes to the server
        hold.successor = successor
        return True

    def _finish_promotion(self, successor: Hold, hold: Hold) -> None:
        """The successor is active: wake it."""
        self._deactivating.pop(hold, None)
        _remove(self.local_queues.get(hold.local_key), successor)
        waiter = successor.waiter
        if waiter.wakeup is not None:  # else its caller has noticed already
            waiter.wakeup.wake()  # last, because it may switch to another thread
            waiter.notified = True

    def wake_local_waiters(self) -> None:
        """Wake the waiters whose wait may end early, so that they see that contact with the server is lost."""
        for queue in list(self.local_queues.values()):
            for hold in list(queue):
                if hold.options.outage_wait is not None:
                    hold.waiter.wake()

    def forget(self) -> None:
        """Forget all holds, after a fork or in a new event loop."""
        self.active_holds.clear()
        self.local_queues.clear()
        self._deactivating.clear()


def yield_window(hold: Hold, now: float) -> float:
    """Seconds for which to leave the lock free for polling clients before we ask for it again; mostly 0."""
    *_, since, turns, polling_seen_at = hold.budget
    if not since:
        return 0.0
    unseen = now - polling_seen_at
    polled = unseen <= POLLING_REMEMBERED
    after = POLLED_YIELD_AFTER + unseen / POLLED_FADING if polled else YIELD_AFTER
    if now < since + after + since * 1e6 % 1000 / 10_000 or (turns < YIELD_AFTER_TURNS and not polled):
        return 0.0
    hold.budget = hold.budget.ended()
    return LONGEST_YIELD if polled else min(LONGEST_YIELD, max(SHORTEST_YIELD, (now - since) / 20))


def may_inherit(successor: Hold, hold: Hold, now: float) -> bool:
    """Whether a pass would give the successor what a grant gives: its own label and its whole ttl."""
    if hold.outcome_unknown or not hold.budget.allows_pass(hold.fence, now):
        return False
    options = successor.options
    if options is not hold.options and options.label != hold.options.label:
        return False
    return ENOUGH * options.validity <= hold.lasts_until - now <= options.validity


def may_follow(successor: Hold, hold: Hold) -> bool:
    """Whether the successor can use the token of the hold that gives up: same label, ttl and number of fences."""
    ours, theirs = successor.options, hold.options
    return (ours.label, ours.ttl_ms, ours.fences) == (theirs.label, theirs.ttl_ms, theirs.fences)


def wants_renewal(successor: Hold, hold: Hold, now: float) -> bool:
    """Whether it could be passed on if it lasted longer."""
    return hold.lasts_until - now < ENOUGH * successor.options.validity and (
        hold.budget.allows_pass(hold.fence, now)
        and not hold.outcome_unknown
        and successor.options.label == hold.options.label
    )


def _first(queue: deque[Hold], by: Hold) -> Hold | None:
    """The first waiter that may become active: its object is free, or will be as soon as ``by`` has left it."""
    while queue:
        try:
            first = queue[0]
        except IndexError:
            return None
        if (not first.waiter.decided and not first.object_slot) or _may_activate(first, by):
            return first
        if first.waiter.state is WAITING:  # its object is in use
            return next((hold for hold in list(queue) if _may_activate(hold, by)), None)
        _remove(queue, first)  # left over: its removal was interrupted, or it joined a queue that was thrown away
    return None


def _may_activate(hold: Hold, by: Hold) -> bool:
    decided = hold.waiter.decided
    if decided and decided.get(None) is not by:
        return False
    inside = hold.object_slot.get(None)
    # A hold that ends frees its object slot as well. A lost hold keeps the slot until release() has reported the loss.
    return inside is None or inside is hold or (inside is by and by.phase is not LOST)


def _remove(queue: deque[Hold] | None, hold: Hold) -> None:
    try:
        if queue is not None:
            queue.remove(hold)
    except ValueError:
        pass  # it is not there any more
