"""The object of a lock of history: the same face as any lock, around whatever the recipe does.

Invariant. An object has at most one lease, whoever shares it. Its gate is shut from before the server is asked until
that lease is given back; meanwhile others who want this very object find out without asking the server. What is sent is
what the recipe sends: an acquire that was interrupted, or whose reply was lost, cleans nothing up, and a release that
comes late is sent all the same. That being so in the originals is what there is to be seen.

Why not behave better where it would cost nothing? Because a fleet that still runs the original must meet here exactly
what it meets there.

``held``, ``remaining()`` and ``lost`` follow the ttl on our own clock, as a help to the holder; no recipe heeds them.
``release()`` raises LeaseLost where the recipe itself finds out that the lock is not its own any more.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, Final, TypeVar

from holdfast.errors import AcquireTimeout, HoldfastError, LeaseLost, NotHeld, OutcomeUnknown, Unsupported, rounded
from holdfast.lease import ENDED, BaseLease, Terms
from holdfast.names import Keys
from holdfast.protocol.effects import STOPPED, Effects, StepFailed, caller, clock, wait
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.recipes.scheme import AGAIN, FORKED, LOST, WON, Outcome, Scheme, Turn, hang_up

__all__ = ["BaseRecipe", "FencelessLease", "refuse_to_extend", "release_turn"]

SHORTEST_CALL: Final = 0.1  # even the last try before a deadline gets time for a round trip

log = logging.getLogger("holdfast.recipes")

L = TypeVar("L", bound=BaseLease)


class FencelessLease(BaseLease):
    """A hold on a lock of history."""

    __slots__ = ()
    _hold: Turn

    @property
    def fence(self) -> None:  # type: ignore[override]
        """None: nothing that it guards can tell a late holder from the present one."""
        return None

    def __repr__(self) -> str:
        return super().__repr__().replace(", fence None", "")


class BaseRecipe(BaseLock[L]):
    """A lock of history, by its recipe."""

    __slots__ = ("_scheme", "_trouble")

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L], scheme: Scheme) -> None:
        self._scheme = scheme
        self._trouble: HoldfastError | None = None  # why the last try failed, if not because of another holder
        super().__init__(driver, keys, terms, lease_class)

    @property
    def key(self) -> str:
        """The key on the server, with namespace and prefix."""
        return self._keys.main

    def deadline_us(self, value: bytes, expires_us: int | None) -> int | None:
        """Until when a key with that value and expiry keeps others out, in microseconds since 1970; None: for ever."""
        return self._scheme.deadline_us(value, expires_us)

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        until = None if patience is None else (yield from clock()) + patience
        if self._life != self._driver.life:
            self._begin_life()
        turn = Turn(self._keys, self._terms, self._gate, self._driver, self._scheme)
        turn.caller = weakly((yield from caller())) if asker is None else asker
        try:
            if not (yield from self._strive(turn, until)):
                if self._trouble is not None:
                    raise _named(turn, self._trouble)
                why = self._why_not((yield from clock()), (yield from caller()))
                raise AcquireTimeout(self.name, patience or 0.0, why)
            yield from hang_up(turn)
            self._lease = lease = self._lease_class(self._driver, turn)
            return lease
        except STOPPED:
            yield from hang_up(turn)
            _leave_gate(turn)
            raise

    def _strive(self, turn: Turn, until: float | None) -> Effects[bool]:
        """Try until that time (None: for ever), at least once; whether it was won."""
        scheme, gate = self._scheme, self._gate
        tries = 0
        while True:
            asked_at = yield from clock()
            outcome: Outcome = LOST
            if gate.setdefault(None, turn) is turn:
                tries += 1
                timeout = self._terms.timeout
                if tries > 1 or (until is not None and until > asked_at):  # else it is not the lock that is waited for
                    timeout = _call_timeout(timeout, until, asked_at)
                outcome = yield from self._try(turn, timeout)
            now = yield from clock()
            if outcome is WON:
                turn.begin(asked_at, now)
                if tries > 1 and scheme.forgiving:
                    log.info("lock %r, try count: %d", self.name, tries)
                return True
            if until is not None and now >= until:
                return False
            if outcome is not AGAIN:
                yield from wait(None, now + scheme.sleep if until is None else min(now + scheme.sleep, until))

    def _try(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        self._trouble = None
        try:
            return (yield from self._scheme.attempt(turn, timeout))
        except StepFailed as failed:
            # What no further try can change (no permission, a closed client) is not tried for ever by any recipe; nor
            # is a server that has let the very first end in silence.
            hopeless = not (failed.retry or failed.sent or isinstance(failed.error, Unsupported))
            hopeless = hopeless or not (failed.met or failed.prompt)
            if hopeless or not self._scheme.forgiving:
                raise _named(turn, failed.error) from failed.__cause__
            log.error("lock %r: a try failed: %s", self.name, failed.error)
            self._trouble = failed.error
            return LOST

    def _release(self) -> Effects[None]:
        lease = self._lease
        if lease is None:
            raise NotHeld(self.name)
        assert isinstance(lease._hold, Turn)
        return release_turn(lease._hold)

    def _locked(self) -> Effects[bool]:
        for attempt in range(2):
            try:
                return (yield from self._scheme.locked(self.key, self._terms.timeout))
            except StepFailed as failed:
                # A connection may have died while idle; asking changes nothing, so it may be asked again.
                if attempt or not failed.prompt:
                    raise failed.error from failed.__cause__
        raise AssertionError("unreachable")

    def _enter(self) -> Effects[L]:
        lease = yield from self._obtain(self._terms.wait)
        try:
            self._entered.append(((yield from caller()), lease, None))
        except STOPPED:  # interrupted on the threshold: the body will not run, so nobody else would release it
            assert isinstance(lease._hold, Turn)
            yield from release_turn(lease._hold)
            raise
        return lease

    def _leave(self, error: BaseException | None) -> Effects[None]:
        """Leave ``with``. An error of the body stays the one that is raised; what release says is noted on it."""
        entered = None
        try:
            entered = self._find_entered((yield from caller()))
            hold = entered[1]._hold
            assert isinstance(hold, Turn)
            if hold.phase is not ENDED:  # else it was released within the body
                yield from release_turn(hold)
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
        state = "locked" if self._gate else "unlocked"
        kind = type(self._scheme).__name__
        return f"<{state} {type(self).__module__}.Recipe object {self.name!r} ({kind}) at {id(self):#x}>"


def release_turn(turn: Turn) -> Effects[None]:
    """Give it back as the recipe does. The hold is over whatever comes of it."""
    if turn.is_abroad():
        raise LeaseLost(turn.name, None, FORKED)
    if not turn.end():
        raise NotHeld(turn.name)
    scheme, timeout = turn.scheme, turn.terms.timeout
    ours = True
    try:
        ours = yield from scheme.free(turn, timeout)
        yield from hang_up(turn)
    except StepFailed as failed:
        yield from hang_up(turn)
        if not scheme.forgiving:
            raise _unreleased(turn, failed) from failed.__cause__
        log.error("lock %r: its release failed: %s", turn.name, failed.error)
    except STOPPED:
        yield from hang_up(turn)
        if scheme.compares:
            yield from _free_after_all(turn, timeout)
        raise
    finally:
        turn.phase = ENDED
        _leave_gate(turn)
        for bell in list(turn.bells):
            bell.ring()
    if not ours:
        raise LeaseLost(turn.name, None, "its key is gone, or is now another holder's")


def _free_after_all(turn: Turn, timeout: float) -> Effects[None]:
    """Its caller was interrupted in the middle of release, and nobody will come back for it.

    Not where release is a bare DEL, for by the second time the lock may be another's.
    """
    try:
        yield from turn.scheme.free(turn, timeout)
    except StepFailed:
        pass  # it ends by its ttl
    yield from hang_up(turn)


def refuse_to_extend(turn: Turn) -> Effects[None]:
    yield from ()
    raise Unsupported(
        f"lock {turn.name!r}: a lock of history cannot be extended",
        "use client.lock, whose leases are renewed and can be",
    )


def _leave_gate(turn: Turn) -> None:
    if turn.gate.get(None) is turn:
        turn.gate.pop(None, None)


def _call_timeout(timeout: float, until: float | None, now: float) -> float:
    return timeout if until is None else max(SHORTEST_CALL, min(timeout, until - now))


def _named(turn: Turn, error: HoldfastError) -> HoldfastError:
    """An engine knows of keys; whose lock it is about is known here."""
    return Unsupported(f"lock {turn.name!r}: {error.what}", error.advice) if isinstance(error, Unsupported) else error


def _unreleased(turn: Turn, failed: StepFailed) -> HoldfastError:
    if not failed.sent:
        return _named(turn, failed.error)
    lasts = turn.scheme.lasts
    ends = (
        f"it ends by itself after its ttl of {rounded(lasts)} s" if lasts < float("inf") else "it never ends by itself"
    )
    return OutcomeUnknown(turn.name, "a release", f"a lock of history does not try again, and {ends}")
