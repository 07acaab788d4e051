"""The lock object, whose methods are protocols: the faces only run them.

Invariant. A Lock object has at most one lease, whoever shares the object: its gate (see cohort.py) is shut from before
the server is asked until that lease is released. So a lost lease occupies its object until ``release()`` has reported
the loss. Whoever takes the hold out of the keeper's book ends it and opens the gate; everybody else finds it not held.

``with`` releases the lease that it obtained, not the object's current one, because another thread may have released
the first and obtained the second meanwhile. So leases obtained by ``with`` are kept by caller (thread or task).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import ref

from holdfast.errors import AcquireTimeout, HoldfastError, LeaseLost, NotAcquired, NotHeld, Unavailable, rounded
from holdfast.holder import holder_of
from holdfast.lease import ENDED, TRYING, BaseLease, Hold, Terms
from holdfast.names import Keys
from holdfast.protocol import mutex
from holdfast.protocol.bells import Switchboard
from holdfast.protocol.cohort import Cohorts, Gate, may_inherit, moment_for_others, wants_renewal
from holdfast.protocol.effects import (
    STOPPED,
    Command,
    Effects,
    Step,
    StepFailed,
    attach,
    call,
    caller,
    clock,
    detach,
    new_token,
    tell,
    wait,
)
from holdfast.protocol.keepalive import Book
from holdfast.protocol.replies import FREED, Refused
from holdfast.protocol.retry import SHORTEST_CALL, outage, until_answered

__all__ = [
    "COME_BACK",
    "BaseLock",
    "BaseLost",
    "Driver",
    "extend_lease",
    "held_by",
    "release_lease",
    "wait_until_lost",
    "weakly",
]

L = TypeVar("L", bound=BaseLease)

_NEVER: Final = float("inf")
# A hold has a weak reference to its caller, for a task may keep its lease alive. One that has ended equals no other.
weakly: Final = ref
COME_BACK: Final = "Wait longer (wait=), or catch AcquireTimeout and come back later"


class Driver(Protocol):
    """What a lock needs of the driver that runs it, beside running it."""

    address: str
    book: Book
    board: Switchboard
    cohorts: Cohorts
    life: int

    def now(self) -> float: ...
    def admit(self, hold: Hold) -> None: ...


class BaseLost:
    """Whether a lease is lost, as an event."""

    __slots__ = ("_driver", "_hold")

    def __init__(self, driver: Any, hold: Hold) -> None:
        self._driver = driver
        self._hold = hold

    def is_set(self) -> bool:
        """Whether it is lost. It stays so, also after ``release()`` has reported it."""
        return bool(self._hold.reason or self._hold.why_lost(self._driver.now()))

    def __repr__(self) -> str:
        state = f"set: {self._hold.why_lost(self._driver.now())}" if self.is_set() else "unset"
        return f"<{type(self).__module__}.Lost of {self._hold.name!r} [{state}]>"


class BaseLock(Generic[L]):
    """One lock, asked for on given terms."""

    __slots__ = (
        "__weakref__",
        "_driver",
        "_entered",
        "_gate",
        "_keys",
        "_lease",
        "_lease_class",
        "_life",
        "_terms",
    )

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L]) -> None:
        self._driver = driver
        self._keys = keys
        self._terms = terms
        self._lease_class = lease_class
        self._entered: list[tuple[Hashable, L, Any]] = []  # caller, lease, block; oldest first
        self._begin_life()

    def _begin_life(self) -> None:
        """Here, and again in a forked child, where whoever held or was about to hold it is gone."""
        self._life: int = self._driver.life
        self._gate = Gate()
        self._gate.cohorts = self._driver.cohorts
        self._lease: L | None = None

    @property
    def name(self) -> str:
        return self._keys.name

    def _mains(self) -> tuple[str, ...]:
        """The keys that are there while somebody has it."""
        return (self._keys.main,)

    def _new_hold(self) -> Hold:
        return Hold(self._keys, self._terms, self._gate)

    def _acquire(self, patience: float | None) -> Effects[L | None]:
        """As ``_obtain``, with None in place of AcquireTimeout."""
        try:
            return (yield from self._obtain(patience, weakly((yield from caller()))))
        except AcquireTimeout:
            return None

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        """A lease; AcquireTimeout if another holder has it, or others are before us; Unavailable without an answer.

        ``asker``: the thread or task, weakly; None if that is noted later (``_enter`` learns it for nothing).
        """
        now: float | None = None
        until = answer_by = _NEVER
        if patience is not None:
            now = yield from clock()
            # One that does not wait for the lock still waits for an answer.
            until, answer_by = now + patience, now + (patience or self._terms.timeout)
        if self._life != self._driver.life:
            self._begin_life()
        driver: Driver = self._driver
        refuse_closed(driver)
        cohorts = driver.cohorts
        while True:
            hold = self._new_hold()
            try:
                if not cohorts.sit_down(hold) and (patience != 0.0 or not cohorts.sit_apart(hold)):
                    now = yield from cohorts.stand_in_line(hold, until)
                    if now is None:
                        break
                    if hold.passed and not hold.valid(now):
                        yield from self._withdraw(hold)  # it was passed on to us, and we slept beyond its end
                        continue
                    if now >= until and hold.outcome is not None:  # that of the waiter whose place it has taken
                        yield from self._withdraw(hold)
                        break
                    if moment := moment_for_others(hold, now) if not hold.passed else 0.0:
                        now = yield from wait(None, min(now + moment, until))
                if not hold.passed:
                    if not hold.token:  # else it was another's, who has given up waiting
                        hold.token = yield from new_token(self._terms.label)
                    refuse_closed(driver)  # from here on close() finds our token, and gives back what it brings
                    if now is None:
                        now = yield from clock()
                    if not (yield from mutex.acquire(hold, now, until, answer_by, driver.board)):
                        yield from self._withdraw(hold)
                        break
                    refuse_closed(
                        driver
                    )  # before it is in the book, where it would lose its seat, by which close() finds it
                    driver.admit(hold)
                    refuse_closed(driver)
                hold.caller = asker
                self._lease = lease = self._lease_class(driver, hold)
                if self._terms.on_lost == "cancel":
                    yield from attach(hold)
                return lease
            except STOPPED as error:
                yield from self._withdraw(hold)
                if isinstance(error, NotAcquired):
                    refuse_closed(driver)  # it was close() that gave this attempt up
                raise
        raise (yield from self._timeout_error(hold, patience or 0.0))

    def _timeout_error(self, hold: Hold, waited: float) -> Effects[HoldfastError]:
        """Why this hold did not come about, though nothing has failed: the last step was refused.

        One that only stood in the local queue has sent none. The last step of the active waiter of its process decides.
        """
        now = yield from clock()
        outcome, active = hold.outcome, self._driver.cohorts.active(hold)
        if outcome is None and active is not None and active.phase is TRYING:
            outcome = active.outcome
            if outcome is None and waited >= SHORTEST_CALL:
                silence = {self._driver.address: f"it did not answer within {rounded(waited)} s"}
                outcome = Unavailable(silence, "It may be hung or far away; see timeout= of connect")
        if isinstance(outcome, Unavailable):
            return Unavailable(outcome.causes, outcome.advice, f"lock {self.name!r}")
        holder = None
        if isinstance(outcome, Refused) and outcome.holder:
            mode = "reserved" if outcome.reserved else ""
            holder = holder_of(outcome.holder, max(0, outcome.left_ms) / 1000, mode)
        elif outcome is None and active is not None and active.fence:
            holder = holder_of(active.token.encode(), max(0.0, active.lasts - now))
        refused = hold.name_of(outcome.key) if isinstance(outcome, Refused) and outcome.key else ""
        return AcquireTimeout(self.name, waited, self._why_not(now, (yield from caller())), holder, refused)

    def _note(self, lease: L, me: Hashable) -> None:
        """This lease has come from elsewhere, for that caller: it is this object's from now on."""
        self._lease = lease

    def _withdraw(self, hold: Hold) -> Effects[None]:
        """No lease came of it, or none that anybody will have: leave nothing behind, neither here nor on the server."""
        cohorts: Cohorts = self._driver.cohorts
        try:
            yield from cohorts.withdraw(hold)
            self._driver.book.leave(hold)
            if not mutex.is_settled(hold) and not (hold.fence == 0 and cohorts.hand_on(hold)):
                yield from mutex.settle(hold)
        except STOPPED:
            if hold.heir is not None:
                cohorts.hand_on(hold)  # interrupted on the way to the next: it is theirs already
            raise
        finally:
            self._driver.board.asks.end(hold)  # once more: an interrupt may have struck where that is done
            if hold.heir is None:
                try:
                    cohorts.leave(hold)
                except STOPPED:  # a signal handler struck on the threshold
                    cohorts.leave(hold)
                    raise

    def _release(self) -> Effects[None]:
        lease = self._lease
        if lease is None:
            raise NotHeld(self.name)
        return release_lease(lease)

    def _locked(self) -> Effects[bool]:
        return bool((yield from self._ask_server(Command(("EXISTS", *self._mains())))))

    def _ask_server(self, step: Step | Command) -> Effects[Any]:
        """The reply to a step that changes nothing."""
        try:
            reply, *_ = yield from until_answered(lambda: step, self._terms, jitter=self.name)
        except StepFailed as failed:
            raise outage(failed, f"lock {self.name!r}", self._terms.timeout) from failed.__cause__
        return reply

    def _enter(self) -> Effects[L]:
        lease = yield from self._obtain(self._terms.wait)
        try:
            if self._terms.cancels or self._terms.on_lost is None:
                me, block = yield from attach(lease._hold)
            else:
                me, block = (yield from caller()), None
            lease._hold.caller = weakly(me)
            self._entered.append((me, lease, block))
        except STOPPED:  # interrupted on the threshold: the body will not run, so nobody else would release it
            yield from release_lease(lease)
            raise
        return lease

    def _held_here(self, now: float) -> dict[str, Hashable]:
        """The keys, of those asked for, that are held through this client, each with the thread or task that has it."""
        holds = [
            *self._driver.book.holds,
            *([] if self._lease is None else [self._lease._hold]),
        ]  # a recipe's is not there
        mains = self._mains()
        # Most hold another name; and where many waits time out together, this is asked for each (benchmarks.crowd).
        holds = [hold for hold in holds if hold.keys.main in mains or hold.kind is not None]
        held = {main: hold.caller for hold in holds if hold.valid(now) for main in hold.mains}
        return {main: held[main] for main in mains if main in held}

    def _why_not(self, now: float, me: Hashable) -> str:
        """Why that caller could not have it; empty if no thread or task of this client has it."""
        if self._lease is not None and self._lease._hold.why_lost(now):
            return "the last lease of this Lock object was lost. Call its release(), which says so, and start again"
        held = self._held_here(now)
        return held_by(weakly(me), next(iter(held.values()))) if held else ""

    def _leave(self, error: BaseException | None) -> Effects[None] | None:
        """Leave ``with``: what is to be run for that, or None if it was done at once.

        Where many wait, most leases are passed on, which takes nothing that would have to be waited for, not even a
        protocol: its hundred small steps would cost as much as the pass.
        """
        driver: Driver = self._driver
        if error is not None or not driver.cohorts.lines or len(self._entered) != 1:
            return self._leave_in_order(error)
        try:
            entered = self._entered[0]
            hold = entered[1]._hold
            if not driver.cohorts.pass_at_once(hold, driver.book, driver.now()):
                return self._leave_in_order(error)
            hold.notify = None
            if hold.bells:
                for bell in list(hold.bells):
                    bell.ring()
            self._entered.remove(entered)
        except STOPPED as struck:  # it may be half done: what is to be run sees to the rest
            return self._leave_in_order(error, struck)
        return None

    def _leave_in_order(self, error: BaseException | None, struck: BaseException | None = None) -> Effects[None]:
        """An error of the body stays the one that is raised; what release says is noted on it."""
        if struck is not None and not self._entered:
            raise struck  # by then it was done
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
            if left_with is not None and left_with is not error:  # cancelled by somebody else on the way out
                raise left_with
            if cut_short:
                raise LeaseLost(hold.name, hold.fence, hold.reason)
        except STOPPED:
            # Interrupted before the release had begun, it must be begun here: nobody else will.
            _, lease, _ = entered = entered or self._find_entered((yield from caller()))
            if lease._hold in self._driver.book.holds:
                yield from release_lease(lease)
            raise
        finally:
            try:
                self._entered.remove(entered)  # type: ignore[arg-type]
            except ValueError:
                pass  # there was none, or an interrupt has brought us here twice

    def _find_entered(self, me: Hashable) -> tuple[Hashable, L, Any]:
        """What this ``with`` obtained. It may be left in another thread or task than it was entered in (a generator
        that is closed elsewhere, a framework that moves work about): then it is the oldest one."""
        entered = list(self._entered)
        if not entered:
            raise NotHeld(self.name)
        return next((entry for entry in reversed(entered) if entry[0] == me), entered[0])

    def __reduce__(self) -> Any:
        raise TypeError("a Lock cannot be pickled: connect and name the lock anew in the other process")

    def __repr__(self) -> str:
        state = "locked" if self._gate else "unlocked"
        return f"<{state} {type(self).__module__}.Lock object {self.name!r} at {id(self):#x}>"


def held_by(me: Hashable, holder: Hashable, refused: str = "") -> str:
    """Why a caller could not have what that caller has; of several names ``refused``."""
    what = repr(refused) if refused else "it"
    if me == holder:
        advice = "Lock all names at once" if refused else "Pass the lease down, or use client.rlock"
        return f"this thread or task holds {what}. Nested by mistake? {advice}"
    return f"another thread or task of this process holds {what}. {COME_BACK}"


def refuse_closed(driver: Driver) -> None:
    if driver.book.closed:
        raise Unavailable({driver.address: "this client was closed"}, "Connect again, or close it later")


def release_lease(lease: BaseLease, struck: BaseException | None = None) -> Effects[None]:
    """Give it back; or, struck by that interrupt while it was passed on at once, finish what was begun."""
    hold = lease._hold
    driver: Driver = lease._driver
    book, cohorts = driver.book, driver.cohorts
    if not hold.mine:
        raise LeaseLost(hold.name, hold.fence, hold.reason)
    if hold not in book.holds and struck is None:
        raise hold.ended()
    ours = True
    try:
        if struck is not None:
            raise struck
        now = yield from clock()
        ours = book.leave(hold)
        if not ours:  # two released it at once, and the other was first
            raise hold.ended()
        heir = cohorts.first_in_line(hold) if cohorts.lines else None
        if heir is not None and wants_renewal(heir, hold, now):
            now = yield from _renew_for(heir, hold, now)
        if not (
            heir is not None
            and hold.valid(now)
            and may_inherit(heir, hold, now)
            and cohorts.pass_on(hold, heir, book, now)
        ):
            yield from mutex.release(hold, now)
    except STOPPED:
        if hold.heir is not None:  # interrupted on the way to the next holder: it is theirs already
            cohorts.pass_on(hold, hold.heir, book, (yield from clock()))
        elif ours and hold.phase is not ENDED:  # interrupted before the release had begun
            book.leave(hold)
            yield from mutex.settle(hold)
        raise
    finally:
        if ours:
            if hold.heir is None:
                try:
                    cohorts.leave(hold)
                except STOPPED:  # a signal handler struck on the threshold; of a function for this, too, if it were one
                    cohorts.leave(hold)
                    raise
            if hold.bells:
                for bell in list(hold.bells):
                    bell.ring()


def _renew_for(heir: Hold, hold: Hold, now: float) -> Effects[float]:
    """What is passed on should last as long as the heir has asked for. If that cannot be had, the server decides."""
    timeout = hold.terms.first_try
    hold.ask_to_prolong(heir.terms.ttl, now + timeout)
    try:
        if (yield from call(mutex.renew_step(hold, heir.terms.ttl), timeout, shielded=True)) == FREED:
            hold.prolong(heir.terms.ttl, now)
    except StepFailed:
        pass
    return (yield from clock())


def extend_lease(lease: BaseLease, seconds: float) -> Effects[None]:
    hold = lease._hold
    if hold.phase is ENDED:
        raise hold.ended()
    yield from mutex.extend(hold, seconds)


def wait_until_lost(hold: Hold, timeout: float | None) -> Effects[bool]:
    """Wait until the hold is lost; whether it is. The deadline counts, whether or not anybody has noticed it."""
    now = yield from clock()
    until = float("inf") if timeout is None else now + timeout
    bell = hold.gate.cohorts.new_bell()
    hold.bells.append(bell)
    try:
        while not (reason := hold.why_lost(now)):
            if now >= until or hold.phase is ENDED:
                return False
            now = yield from wait(bell, min(until, hold.deadline))
        if hold.lose(reason):  # we noticed before the keeper did
            yield from tell(hold)
        return True
    finally:
        hold.bells.remove(bell)
