"""The lock object of a recipe: the interface of any lock, around the recipe's algorithm.

Invariant. An object has at most one lease. Its object slot is taken from before the server is asked until that lease is
released; meanwhile other callers of this object are refused without asking the server. Only the recipe's own commands
are sent, as by the originals: an acquire that was interrupted, or whose reply was lost, is not cleaned up, and a late
release is still sent.

Why not behave better where that is easy? Programs that run the original must meet the same behaviour here.

``held``, ``remaining()`` and ``lost`` follow the ttl on our own clock, to help the holder; no recipe uses them.
``release()`` raises LeaseLost where the recipe itself finds that the lock is no longer its own.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, Final, TypeVar

from holdfast.errors import AcquireTimeout, HoldfastError, LeaseLost, NotHeld, OutcomeUnknown, Unsupported, rounded
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol.effects import STOPPED, Effects, StepFailed, caller, clock, wait
from holdfast.protocol.hold import ENDED
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.recipes.algorithm import AGAIN, FORKED, LOST, WON, Algorithm, Outcome, RecipeHold, disconnect

SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip

log = logging.getLogger("holdfast.recipes")

L = TypeVar("L", bound=BaseLease)


class FencelessLease(BaseLease):
    """A hold on a recipe."""

    __slots__ = ()
    _hold: RecipeHold

    @property
    def fence(self) -> None:  # type: ignore[override]
        """None: the guarded resource cannot tell a late holder from the present one."""
        return None


class BaseRecipe(BaseLock[L]):
    """The lock object of a recipe."""

    __slots__ = ("_algorithm", "_last_error")

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L], rules: Algorithm) -> None:
        self._algorithm = rules
        self._last_error: HoldfastError | None = None  # why the last try failed, if not because of another holder
        super().__init__(driver, keys, options, lease_class)

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        """Until when a key with that value and expiry excludes others, in microseconds since 1970; None: forever."""
        return self._algorithm.deadline_us(value, expires_us)

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        until = None if patience is None else (yield from clock()) + patience
        if self._generation != self._driver.generation:
            self._begin_generation()
        hold = RecipeHold(self._keys, self._options, self._object_slot, self._driver, self._algorithm)
        hold.caller = weakly((yield from caller())) if asker is None else asker
        try:
            if not (yield from self._poll(hold, until)):
                if self._last_error is not None:
                    raise _with_lock_name(hold, self._last_error)
                why = self._why_not((yield from clock()), (yield from caller()))
                raise AcquireTimeout(self.name, patience or 0.0, why, key=self.key)
            yield from disconnect(hold)
            self._lease = lease = self._lease_class(self._driver, hold)
            return lease
        except STOPPED:
            yield from disconnect(hold)
            _leave_object_slot(hold)
            raise

    def _poll(self, hold: RecipeHold, until: float | None) -> Effects[bool]:
        """Try until that time (None: forever), at least once. Returns whether it was acquired."""
        algorithm, object_slot = self._algorithm, self._object_slot
        tries = 0
        while True:
            asked_at = yield from clock()
            outcome: Outcome = LOST
            if object_slot.setdefault(None, hold) is hold:
                tries += 1
                timeout = self._options.timeout
                if tries > 1 or (until is not None and until > asked_at):  # else it is the only try: the whole timeout
                    timeout = _call_timeout(timeout, until, asked_at)
                outcome = yield from self._try(hold, timeout)
            now = yield from clock()
            if outcome is WON:
                hold.begin(asked_at, now)
                if tries > 1 and algorithm.logs_errors:
                    log.info("lock %r, try count: %d", self.key, tries)
                return True
            if until is not None and now >= until:
                return False
            if outcome is not AGAIN:
                yield from wait(None, now + algorithm.sleep if until is None else min(now + algorithm.sleep, until))

    def _try(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        self._last_error = None
        try:
            return (yield from self._algorithm.attempt(hold, timeout))
        except StepFailed as failed:
            # No recipe retries what no further try can change (no permission, a closed client), or a server that has
            # never answered.
            hopeless = not (failed.retry or failed.sent or isinstance(failed.error, Unsupported))
            hopeless = hopeless or not (failed.ever_answered or failed.connection_broke)
            if hopeless or not self._algorithm.logs_errors:
                raise _with_lock_name(hold, failed.error) from failed.__cause__
            log.error("lock %r: acquire failed: %s", self.key, failed.error)
            self._last_error = failed.error
            return LOST

    def _release(self) -> Effects[None]:
        lease = self._lease
        if lease is None:
            raise NotHeld(self.name, key=self.key)
        assert isinstance(lease._hold, RecipeHold)
        return release_recipe(lease._hold)

    def _locked(self) -> Effects[bool]:
        for attempt in range(2):
            try:
                return (yield from self._algorithm.locked(self.key, self._options.timeout))
            except StepFailed as failed:
                # A connection may have died while idle; this command writes nothing, so it may be sent again.
                if attempt or not failed.connection_broke:
                    raise failed.error from failed.__cause__
        raise AssertionError("unreachable")

    def _enter(self) -> Effects[L]:
        lease = yield from self._obtain(self._options.wait)
        try:
            self._entered.append(((yield from caller()), lease, None))
        except STOPPED:  # interrupted before the body runs, so __exit__ would not release it
            assert isinstance(lease._hold, RecipeHold)
            yield from release_recipe(lease._hold)
            raise
        return lease

    def _leave(self, error: BaseException | None) -> Effects[None]:
        """Leave ``with``. An error of the body is raised, with a note about an error of release."""
        entered = None
        try:
            entered = self._find_entered((yield from caller()))
            hold = entered[1]._hold
            assert isinstance(hold, RecipeHold)
            if hold.phase is not ENDED:  # else it was released within the body
                yield from release_recipe(hold)
        except HoldfastError as failed:
            if error is None:
                raise
            if not isinstance(error, LeaseLost):
                error.add_note(f"Leaving the lock failed as well: {type(failed).__name__}: {failed}")
        finally:
            try:
                self._entered.remove(entered)  # type: ignore[arg-type]
            except ValueError:
                pass  # there was none

    def __repr__(self) -> str:
        state = "locked" if self._object_slot else "unlocked"
        kind = type(self._algorithm).__name__
        return f"<{state} {type(self).__module__}.Recipe object {self.key!r} ({kind}) at {id(self):#x}>"


def release_recipe(hold: RecipeHold) -> Effects[None]:
    """Release it as the recipe does. The hold is over even if that fails."""
    if hold.is_inherited():
        raise hold.lost_error(FORKED)
    if not hold.claim_release():
        raise NotHeld(hold.name, key=hold.key)
    algorithm, timeout = hold.algorithm, hold.options.timeout
    ours = True
    try:
        ours = yield from algorithm.free(hold, timeout)
        yield from disconnect(hold)
    except StepFailed as failed:
        yield from disconnect(hold)
        if not algorithm.logs_errors:
            raise _release_error(hold, failed) from failed.__cause__
        log.error("lock %r: release failed: %s", hold.key, failed.error)
    except STOPPED:
        yield from disconnect(hold)
        if algorithm.checks_owner:
            yield from _free_again(hold, timeout)
        raise
    finally:
        hold.end()
        _leave_object_slot(hold)
        hold.wake_loss_waiters()
    if not ours:
        raise hold.lost_error("its key is gone, or belongs to another holder")


def _free_again(hold: RecipeHold, timeout: float) -> Effects[None]:
    """Release again after an interrupt. Not for a bare DEL: by then it may delete another holder's key."""
    try:
        yield from hold.algorithm.free(hold, timeout)
    except StepFailed:
        pass  # it ends by its ttl
    yield from disconnect(hold)


def refuse_to_extend(hold: RecipeHold) -> Effects[None]:
    yield from ()
    raise Unsupported(
        f"lock {hold.key!r}: a recipe cannot be extended",
        "use client.lock, whose leases can be extended and are renewed",
    )


def _leave_object_slot(hold: RecipeHold) -> None:
    if hold.object_slot.get(None) is hold:
        hold.object_slot.pop(None, None)


def _call_timeout(timeout: float, until: float | None, now: float) -> float:
    return timeout if until is None else max(SHORTEST_CALL, min(timeout, until - now))


def _with_lock_name(hold: RecipeHold, error: HoldfastError) -> HoldfastError:
    """The error with the lock's name: an engine knows only keys."""
    return Unsupported(f"lock {hold.key!r}: {error.what}", error.advice) if isinstance(error, Unsupported) else error


def _release_error(hold: RecipeHold, failed: StepFailed) -> HoldfastError:
    if not failed.sent:
        return _with_lock_name(hold, failed.error)
    lasts = hold.algorithm.valid_for
    ends = (
        f"it ends by itself after its ttl of {rounded(lasts)} s" if lasts < float("inf") else "it never ends by itself"
    )
    return OutcomeUnknown(hold.name, "a release", f"a recipe does not try again, and {ends}", key=hold.key)
