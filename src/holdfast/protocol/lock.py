"""The lock object. Its methods are protocols, which the faces run.

Invariant. A Lock object has at most one lease, also if threads or tasks share the object: its object slot (see
cohort.py) is taken from before the server is asked until that lease is released. So a lost lease occupies its object
until ``release()`` has reported the loss.

``with`` releases the lease that it obtained, not the object's current one, because another thread may have released
the first and obtained the second meanwhile. So leases obtained by ``with`` are kept by caller (thread or task).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from holdfast.errors import AcquireTimeout, HoldfastError, LeaseLost, NotAcquired, NotHeld, Unavailable
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol import mutex
from holdfast.protocol.effects import STOPPED, Command, Effects, Step, attach, caller, clock, detach, new_token, wait
from holdfast.protocol.hold import ENDED, Hold
from holdfast.protocol.leases import Driver, release_lease
from holdfast.protocol.refusals import TimedOut, held_by, holder_here, refuse_closed, timeout_error, why_refused
from holdfast.protocol.replication import confirm
from holdfast.protocol.reporting import note_attempt, observe_acquire, report_wait
from holdfast.protocol.retry import ask_server, begin_in_outage, let_keeper_ask
from holdfast.protocol.wait.cohort import Cohorts, ObjectSlot, yield_window
from holdfast.protocol.wait.contact import Probe

L = TypeVar("L", bound=BaseLease)

_NEVER: Final = float("inf")
# A hold refers to its caller weakly, because a task may itself refer to the lease. The reference to an ended caller
# equals no other reference.
weakly: Final = ref


class BaseLost:
    """Whether a lease is lost, as an event."""

    __slots__ = ("_driver", "_hold")

    def __init__(self, driver: Any, hold: Hold) -> None:
        self._driver = driver
        self._hold = hold

    def is_set(self) -> bool:
        """Whether the lease is lost. This stays True after ``release()`` has reported the loss."""
        return bool(self._hold.reason or self._hold.why_lost(self._driver.now()))

    def __repr__(self) -> str:
        state = f"set: {self._hold.why_lost(self._driver.now())}" if self.is_set() else "unset"
        return f"<{type(self).__module__}.Lost of {self._hold.key!r} [{state}]>"


class BaseLock(Generic[L]):
    """One lock, with its options."""

    __slots__ = (
        "__weakref__",
        "_driver",
        "_entered",
        "_generation",
        "_keys",
        "_lease",
        "_lease_class",
        "_object_slot",
        "_options",
    )

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L]) -> None:
        self._driver = driver
        self._keys = keys
        self._options = options
        self._lease_class = lease_class
        self._entered: list[tuple[Hashable, L, Any]] = []  # caller, lease, block; oldest first
        self._begin_generation()

    def _begin_generation(self) -> None:
        """Start without a hold: when the object is made, and again after a fork or in a new event loop."""
        self._generation: int = self._driver.generation
        self._object_slot = ObjectSlot(self._driver.cohorts)
        self._lease: L | None = None

    @property
    def name(self) -> str:
        return self._keys.name

    @property
    def key(self) -> str:
        """The name with its namespace, as messages show it."""
        return self._keys.key

    def _mains(self) -> tuple[str, ...]:
        """The keys that exist while the lock is held."""
        return (self._keys.main,)

    def _new_hold(self) -> Hold:
        return Hold(self._keys, self._options, self._object_slot)

    def _acquire(self, patience: float | None) -> Effects[L | None]:
        """Like ``_obtain``, but returns None instead of raising TimedOut."""
        try:
            return (yield from self._obtain(patience, weakly((yield from caller()))))
        except (TimedOut, AcquireTimeout):  # a recipe raises the latter
            return None

    def _demand(self) -> Effects[L]:
        """Like ``_obtain``, but waits as long as the option ``wait`` says, and raises AcquireTimeout, not TimedOut."""
        try:
            return (yield from self._obtain(self._options.wait))
        except TimedOut as timed_out:
            raise (yield from self._timeout_error(timed_out.hold)) from None

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        """A lease; TimedOut if the wait is over. The outcome is reported if events are wanted."""
        if not self._driver.registry.observed():
            return self._obtain_lease(patience, asker)
        tried: list[Hold] = []
        return observe_acquire(self._obtain_lease(patience, asker, tried), tried, self)

    def _obtain_lease(  # noqa: PLR0915 (hot path, so one function)
        self, patience: float | None, asker: Hashable, tried: list[Hold] | None = None
    ) -> Effects[L]:
        """A lease; TimedOut if another holder has the lock, or other waiters come first; Unavailable without an answer.

        ``asker``: a weak reference to the calling thread or task. ``_enter`` passes None and sets ``hold.caller``
        itself: it needs the caller for its own entry anyway, so one effect is saved.
        """
        now: float | None = None
        began, until, answer_by = 0.0, _NEVER, _NEVER
        if self._generation != self._driver.generation:
            self._begin_generation()
        driver: Driver = self._driver
        probe: Probe | None = None
        if patience is not None:
            began = now = yield from clock()
            # A caller that does not wait for the lock still waits for an answer of the server.
            until, answer_by = now + patience, now + (patience or self._options.timeout)
            contacts = driver.registry.contacts
            if not contacts.calm and (contact := contacts.of(*self._mains())).lost_at is not None:
                probe = yield from begin_in_outage(driver, contact, self._options, f"lock {self.key!r}")
                now = yield from clock()
        refuse_closed(driver)
        cohorts = driver.cohorts
        while True:
            hold = self._new_hold()
            hold.began, hold.patience, hold.probe = began, answer_by - began, probe
            if tried is not None:
                note_attempt(tried, hold)
            try:
                alone = patience == 0.0 or probe is not None
                if not cohorts.try_activate(hold) and not (alone and cohorts.activate_beside(hold)):
                    if probe is not None:
                        refused = why_refused(driver, hold, until)
                        break  # a hold of this process has it, so nothing can be asked
                    if tried is not None and patience != 0.0:
                        yield from report_wait(hold, holder_here(driver, hold, driver.now()))
                    ends = partial(hold.wait_ends, until)
                    now = yield from cohorts.wait_in_local_queue(hold, ends, driver.now())
                    if now is None:
                        refused = why_refused(driver, hold, until)
                        break
                    if hold.passed and not hold.valid(now):
                        yield from self._withdraw(hold)  # it was passed on to us, but its deadline passed as we slept
                        continue
                    if not hold.passed and now >= ends() and (hold.found_busy or now < until):
                        refused = why_refused(driver, hold, until)  # before the clean-up, which may take a while
                        yield from self._withdraw(hold)
                        break
                    if moment := yield_window(hold, now) if not hold.passed else 0.0:
                        now = yield from wait(None, min(now + moment, until))
                if not hold.passed:
                    if not hold.token:  # else we continue with the token of a waiter that gave up
                        hold.token = yield from new_token(self._options.label)
                    refuse_closed(driver)  # from here on close() finds our token, and abandons what we acquire with it
                    if now is None:
                        now = yield from clock()
                    if not (yield from mutex.acquire(hold, now, until, answer_by, driver.router)):
                        refused = why_refused(driver, hold, until)  # before the clean-up, which may take a while
                        yield from self._withdraw(hold)
                        break
                    if self._options.replicas:
                        yield from confirm(hold, driver)
                    refuse_closed(driver)  # before admit(): until then close() finds this hold among the active holds
                    driver.admit(hold)
                    refuse_closed(driver)
                hold.caller = asker
                self._lease = lease = self._lease_class(driver, hold)
                if self._options.on_lost == "cancel":
                    yield from attach(hold)
                return lease
            except STOPPED as error:
                yield from self._withdraw(hold)
                if isinstance(error, NotAcquired):
                    refuse_closed(driver)  # if close() abandoned this attempt, say so instead
                yield from let_keeper_ask(driver, self._new_hold())
                raise
            finally:
                if probe is not None:
                    probe.end()
        try:
            if isinstance(refused, Unavailable):
                yield from let_keeper_ask(driver, self._new_hold())
            raise refused
        finally:
            del refused  # its traceback refers to this frame: a cycle

    def _timeout_error(self, hold: Hold) -> Effects[AcquireTimeout]:
        now = yield from clock()
        why = self._why_not(now, (yield from caller()))
        return timeout_error(self._driver, hold, self._options.wait or 0.0, why, now)

    def _note(self, lease: L, me: Hashable) -> None:
        """Make this lease, acquired for the caller ``me``, the lease of this object."""
        self._lease = lease

    def _withdraw(self, hold: Hold) -> Effects[None]:
        """The caller gets no lease: leave nothing behind, here or on the server."""
        cohorts: Cohorts = self._driver.cohorts
        try:
            yield from cohorts.withdraw(hold)
            self._driver.registry.leave(hold)
            if not mutex.is_settled(hold) and not (hold.fence == 0 and cohorts.pass_queue_place(hold)):
                yield from mutex.settle(hold)
        except STOPPED:
            if hold.successor is not None:
                cohorts.pass_queue_place(hold)  # interrupted while it was passed on: the successor has it already
            raise
        finally:
            self._driver.router.asks.end(hold)  # again: an interrupt may have prevented the call in mutex.acquire
            if hold.successor is None:
                try:
                    cohorts.leave(hold)
                except STOPPED:  # interrupted as the call began: repeat it
                    cohorts.leave(hold)
                    raise

    def _release(self) -> Effects[None]:
        lease = self._lease
        if lease is None:
            raise NotHeld(self.name, key=self.key)
        return release_lease(lease)

    def _locked(self) -> Effects[bool]:
        return bool((yield from self._ask_server(Command(("EXISTS", *self._mains())))))

    def _ask_server(self, step: Step | Command) -> Effects[Any]:
        """The reply to a step that changes nothing."""
        return ask_server(self._driver, self._new_hold(), step, f"lock {self.key!r}")

    def _enter(self) -> Effects[L]:
        try:
            lease = yield from self._obtain(self._options.wait)  # not _demand(): one generator less on the hot path
        except TimedOut as timed_out:
            raise (yield from self._timeout_error(timed_out.hold)) from None
        try:
            if self._options.cancels or self._options.on_lost is None:
                me, block = yield from attach(lease._hold)
            else:
                me, block = (yield from caller()), None
            lease._hold.caller = weakly(me)
            self._entered.append((me, lease, block))
        except STOPPED:  # interrupted before the body: nothing else would release it
            yield from release_lease(lease)
            raise
        return lease

    def _held_here(self, now: float) -> dict[str, Hashable]:
        """The keys of this lock that this client holds, each with the thread or task that holds it."""
        holds = [
            *self._driver.registry.holds,
            *([] if self._lease is None else [self._lease._hold]),
        ]  # the registry has no hold of a recipe
        mains = self._mains()
        held = {main: hold.caller for hold in holds if hold.valid(now) for main in hold.main_keys}
        return {main: held[main] for main in mains if main in held}

    def _why_not(self, now: float, me: Hashable) -> str:
        """Why the caller ``me`` could not get the lock; empty if no thread or task of this client holds it."""
        if self._lease is not None and self._lease._hold.why_lost(now):
            return "the last lease of this Lock object was lost. Call its release(), which says so, and start again"
        held = self._held_here(now)
        return held_by(weakly(me), next(iter(held.values()))) if held else ""

    def _leave(self, error: BaseException | None) -> Effects[None] | None:
        """Leave ``with``: returns a protocol to run, or None if the lease was passed on at once.

        If many holds wait in the local queue, most leases are passed on. That needs no effect, so it is done here,
        without a protocol (benchmarks.shortcuts).
        """
        driver: Driver = self._driver
        if (
            error is not None
            or not driver.cohorts.local_queues
            or len(self._entered) != 1
            or driver.registry.observed()
        ):
            return self._leave_in_order(error)
        try:
            entered = self._entered[0]
            hold = entered[1]._hold
            if not driver.cohorts.pass_at_once(hold, driver.registry, driver.now()):
                return self._leave_in_order(error)
            hold.notify = None
            if hold.loss_wakeups:
                hold.wake_loss_waiters()
            self._entered.remove(entered)
        except STOPPED as struck:  # interrupted: the protocol finishes what is half done, and raises this again
            return self._leave_in_order(error, struck)
        return None

    def _leave_in_order(self, error: BaseException | None, struck: BaseException | None = None) -> Effects[None]:
        """Leave ``with`` by a protocol. An error of the body is raised, with a note about an error of release.

        ``struck``: an interrupt during ``_leave``, raised once the lease is released.
        """
        if struck is not None and not self._entered:
            raise struck  # it came when the lease had been passed on already
        entered = None
        try:
            entered = self._entered[0] if len(self._entered) == 1 else self._find_entered((yield from caller()))
            _, lease, block = entered
            hold = lease._hold
            if struck is not None:
                yield from release_lease(lease, struck)
            left_with, cut_short = error, False
            if block is not None:
                left_with, cut_short = yield from detach(hold, block, error)
            try:
                if hold.phase is not ENDED:  # else it was released within the body
                    yield from release_lease(lease)
            except HoldfastError as failed:
                if left_with is None:
                    raise
                if not isinstance(left_with, LeaseLost):
                    left_with.add_note(f"Leaving the lock failed as well: {type(failed).__name__}: {failed}")
            if left_with is not None and left_with is not error:  # cancelled by another task while leaving the block
                raise left_with
            if cut_short:
                raise hold.lost_error()
        except STOPPED:
            # Interrupted before the release had begun: begin it here.
            _, lease, _ = entered = entered or self._find_entered((yield from caller()))
            if lease._hold in self._driver.registry.holds:
                yield from release_lease(lease)
            raise
        finally:
            try:
                self._entered.remove(entered)  # type: ignore[arg-type]
            except ValueError:
                pass  # there is no such entry, or an interrupt made this run twice

    def _leave_after_all(self, entered: list[tuple[Hashable, L, Any]] | None, error: BaseException) -> Effects[None]:
        """Leave ``with``, if that had not begun when the caller was interrupted.

        ``entered``: the entries before the caller began to leave; None if it was interrupted before it knew them.
        """
        me = yield from caller()
        if entered is None:
            entered = list(self._entered)
        block = _entry_of(me, entered) if entered else None
        # Nested blocks of a reentrant lock have equal entries, so they are counted.
        if block is not None and self._entered.count(block) == entered.count(block):
            rest = self._leave(error)
            if rest is not None:
                yield from rest

    def _find_entered(self, me: Hashable) -> tuple[Hashable, L, Any]:
        """The entry of the ``with`` block that is left."""
        entered = list(self._entered)
        if not entered:
            raise NotHeld(self.name, key=self.key)
        return _entry_of(me, entered)

    def __reduce__(self) -> Any:
        raise TypeError("a Lock cannot be pickled: connect in the other process, and make a lock of the same name")

    def __repr__(self) -> str:
        state = "locked" if self._object_slot else "unlocked"
        return f"<{state} {type(self).__module__}.Lock object {self.key!r} at {id(self):#x}>"


def _entry_of(me: Hashable, entered: list[tuple[Hashable, L, Any]]) -> tuple[Hashable, L, Any]:
    """The caller's latest entry.

    A block may be left in another thread or task than it was entered in: a generator may be closed elsewhere, or a
    framework may move work. Then the oldest entry is taken.
    """
    return next((entry for entry in reversed(entered) if entry[0] == me), entered[0])
