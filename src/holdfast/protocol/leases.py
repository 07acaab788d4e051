"""What a holder does with its lease: release it, extend it, wait for its loss.

Invariant. The caller that takes the hold out of the keeper's registry ends it, and frees its object slot; every other
caller finds it not held. If a release may pass the hold on to a waiter of this process, it does; otherwise it goes to
the server.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.lease import BaseLease
from holdfast.protocol import mutex
from holdfast.protocol.effects import STOPPED, Effects, StepFailed, call, clock, report_loss, wait
from holdfast.protocol.hold import ENDED, Hold
from holdfast.protocol.keepalive import LeaseRegistry
from holdfast.protocol.replication import confirm_renewal
from holdfast.protocol.replies import DONE
from holdfast.protocol.reporting import observe_release
from holdfast.protocol.wait.cohort import Cohorts, may_inherit, wants_renewal
from holdfast.protocol.wait.notifications import NotificationRouter


class Driver(Protocol):
    """What a lock needs of its driver, in addition to running protocols."""

    address: str
    registry: LeaseRegistry
    router: NotificationRouter
    cohorts: Cohorts
    generation: int

    def now(self) -> float: ...
    def admit(self, hold: Hold) -> None: ...


def release_lease(lease: BaseLease, struck: BaseException | None = None) -> Effects[None]:
    """Release the lease.

    ``struck``: an interrupt during ``Cohorts.pass_at_once``. Then finish what that call began, and raise the interrupt.
    """
    release = _release_lease(lease, struck)
    return observe_release(release, lease._hold) if lease._driver.registry.observed() else release


def _release_lease(lease: BaseLease, struck: BaseException | None) -> Effects[None]:
    hold = lease._hold
    driver: Driver = lease._driver
    registry, cohorts = driver.registry, driver.cohorts
    if not hold.mine:
        raise hold.lost_error()
    if hold not in registry.holds and struck is None:
        raise hold.not_held_error()
    ours = True
    try:
        if struck is not None:
            raise struck
        now = yield from clock()
        ours = registry.leave(hold)
        if not ours:  # another caller released it at the same time, and was first
            raise hold.not_held_error()
        successor = cohorts.first_waiter(hold) if cohorts.local_queues else None
        if successor is not None and wants_renewal(successor, hold, now):
            now = yield from _renew_for(successor, hold, now, driver)
        if not (
            successor is not None
            and hold.valid(now)
            and may_inherit(successor, hold, now)
            and cohorts.pass_on(hold, successor, registry, now)
        ):
            yield from mutex.release(hold, now)
    except STOPPED:
        if hold.successor is not None:  # interrupted while it was passed on: it is the successor's already
            cohorts.pass_on(hold, hold.successor, registry, (yield from clock()))
        elif ours and hold.phase is not ENDED:  # interrupted before the release had begun
            registry.leave(hold)
            yield from mutex.settle(hold)
        raise
    finally:
        if ours:
            if hold.successor is None:
                try:
                    cohorts.leave(hold)
                except STOPPED:  # interrupted as the call began: repeat it (a helper could be interrupted as well)
                    cohorts.leave(hold)
                    raise
            if hold.loss_wakeups:
                hold.wake_loss_waiters()


def _renew_for(successor: Hold, hold: Hold, now: float, driver: Driver) -> Effects[float]:
    """Renew the hold for the ttl of the successor; returns the time. If that fails, it is released, not passed on."""
    timeout = hold.options.first_try
    hold.ask_to_prolong(successor.options.ttl, now + timeout)
    try:
        if hold.options.replicas:
            yield from confirm_renewal(hold, successor.options.ttl, driver)
        elif (yield from call(mutex.renew_step(hold, successor.options.ttl), timeout, shielded=True)) == DONE:
            hold.prolong(successor.options.ttl, now)
    except (StepFailed, HoldfastError):
        pass
    return (yield from clock())


def extend_lease(lease: BaseLease, seconds: float) -> Effects[None]:
    hold = lease._hold
    if hold.phase is ENDED:
        raise hold.not_held_error()
    yield from mutex.extend(hold, seconds)
    if hold.options.replicas:
        yield from confirm_renewal(hold, seconds, lease._driver, "extension")


def leave_lease(lease: BaseLease, seconds: float) -> Effects[None]:
    """End this lease now, but let the lock stay taken for that time. It is not renewed, so it is free afterwards.

    If the server does not answer, the lock is free after its ttl or after that time, whichever is later.
    """
    hold = lease._hold
    driver: Driver = lease._driver
    if not hold.mine:
        raise hold.lost_error()
    hold.check((yield from clock()))
    if not driver.registry.leave(hold):  # before the step: a renewal after it would make the lock last longer
        raise hold.not_held_error()
    try:
        yield from mutex.step_as_holder(hold, hold.steps.leave_step(hold, max(1, round(seconds * 1000))))
    finally:
        hold.end()
        driver.cohorts.leave(hold)
        hold.wake_loss_waiters()


def wait_until_lost(hold: Hold, timeout: float | None) -> Effects[bool]:
    """Wait until the hold is lost. Returns whether it is. It is lost at its deadline, even if the keeper is late."""
    now = yield from clock()
    until = float("inf") if timeout is None else now + timeout
    wakeup = hold.object_slot.cohorts.new_wakeup()
    hold.loss_watchers().append(wakeup)
    try:
        while not (reason := hold.why_lost(now)):
            if now >= until or hold.phase is ENDED:
                return False
            now = yield from wait(wakeup, min(until, hold.deadline))
        if hold.lose(reason):  # we noticed before the keeper did
            yield from report_loss(hold)
        return True
    finally:
        hold.loss_watchers().remove(wakeup)
