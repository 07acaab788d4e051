"""A turn at a value: what came of asking for it, and how a computation ends.

Invariant. Whatever becomes of a computation (a value, a failure, an interrupt, a lost server), the claim on it is given
up, by the step that stores, by the keeper, or by its ttl, and whoever waited in this process goes on; also if the claim
is lost before the computation ends, which may take long. The caller gets what it has computed even where that can no
longer be stored.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Any, Final, NamedTuple, cast

from holdfast.lease import ENDED, Hold
from holdfast.protocol import mutex
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, clock, entrust, warn
from holdfast.protocol.entries import Entry, Failure, Policy, failure_of, pack
from holdfast.protocol.flights import Alarm, Desk, Seat
from holdfast.protocol.retry import until_answered

__all__ = ["Turn"]

TOLD_FOR_MS: Final = 2000  # how long a failure stays on the server for those who have waited for it


class Packed(NamedTuple):
    """A value as it is stored, and as it is read back."""

    data: bytes
    value: Any


class Turn:
    """What came of asking: a value, a failure, or the right to compute."""

    __slots__ = ("_began", "_desk", "_entry", "_policy", "_seat", "_value", "found", "hold")

    def __init__(self, desk: Desk, entry: Entry, policy: Policy, found: bytes | Failure | None) -> None:
        self.found = found  # the old value, if it is to be refreshed
        self.hold: Hold | None = None  # the claim, if it is to be computed
        self._desk = desk
        self._entry = entry
        self._policy = policy
        self._seat: Seat | None = None  # of those for whom it is computed
        self._began = 0.0
        self._value: Any = None  # what was found, as ``load`` has read it

    def begin(self, hold: Hold, seat: Seat | None, now: float) -> None:
        self.hold, self._seat, self._began = hold, seat, now
        if seat is not None:
            hold.bells.append(Alarm(self._desk, seat.flight))
        self._desk.driver.admit(hold)

    def load(self) -> Effects[bool]:
        """Deserialize what was found; False, after a warning, if the serializer cannot: then there is no value."""
        if not isinstance(self.found, bytes):
            return self.found is not None
        try:
            self._value = self._policy.serializer.loads(self.found)
            return True
        except Exception as error:  # its text is not shown, for it may quote the value
            unreadable = type(error).__name__
        if self._desk.first_complaint(self._entry.name):
            yield from warn(
                f"the cached value of {self._entry.name!r} cannot be loaded ({unreadable}), so it counts as missing "
                "and is computed again. If another program writes it with a different serializer, give each its own key"
            )
        return False

    def digest(self) -> str:
        """By what the server knows the value that was found."""
        return sha1(self.found, usedforsecurity=False).hexdigest() if isinstance(self.found, bytes) else ""

    def read(self) -> Any:
        """The value, once it is loaded; or raise why there is none."""
        if isinstance(self.found, Failure):
            raise self.found.as_error(self._entry.name)
        return self._value

    def pack(self, value: Any) -> Packed:
        """What was computed, ready to be stored. It is read back before that: what nobody can read is not stored."""
        name, serializer = self._entry.name, self._policy.serializer
        data = pack(name, value, serializer)
        try:
            return Packed(data, serializer.loads(data))
        except Exception as error:
            error.add_note(f"The value of {name!r} was written by this serializer, which cannot read it")
            raise

    def store(self, packed: Packed) -> Effects[Any]:
        """It was computed: the value, as everybody else gets it. If it cannot be stored, it is the caller's alone."""
        policy = self._policy
        cost_us = max(0, round(((yield from clock()) - self._began) * 1e6))
        data = packed.data
        yield from self._finish("value", data, policy.ttl_ms, policy.ttl_ms + policy.stale_ms, cost_us, answer=data)
        return packed.value

    def fail(self, error: BaseException) -> Effects[bool]:
        """It could not be computed; whether there is an old value to be served instead.

        That the caller was cancelled, or Ctrl-C struck, says nothing of the value and is told to nobody: the next one
        computes.
        """
        if not isinstance(error, Exception):
            yield from self._finish("nothing", "", 0, 0, 0)
            return False
        failure = failure_of(error)
        errors_ms = self._policy.errors_ms
        yield from self._finish("failure", failure.text(), errors_ms, max(errors_ms, TOLD_FOR_MS), 0, answer=failure)
        return (yield from self.load())

    def _finish(self, what: str, said: str | bytes, *numbers: int, answer: Any = None) -> Effects[None]:
        """Store it, give the claim up, and tell those who wait. What cannot be done quickly is left to the keeper."""
        hold, driver, seat = self.hold, self._desk.driver, self._seat
        assert hold is not None
        served, told = 0, None
        try:
            if not hold.mine or hold.phase is ENDED:  # we are in a forked child: the claim stayed with the parent
                return
            driver.book.leave(hold)
            hold.phase = ENDED
            stands_ms = mutex.TOMBSTONE_MS if hold.doubtful else 0
            # Values may be bytes, which go over the wire as they are; all that we say ourselves is text.
            args = (hold.token, what, cast("str", said), *map(str, numbers), str(stands_ms))
            step = Step("cache_store", (*self._entry.shared, hold.keys.tombstone(hold.token)), args)
            served = seat.flight.number() if seat is not None else 0
            stored = yield from self._send(step)
            if stored is None:
                yield from entrust(hold)
            elif stored:  # else it had ended, or was begun before an invalidation of which some here may know
                told = answer
        except STOPPED:
            yield from entrust(hold)
            raise
        finally:
            if seat is not None:
                if not seat.flight.over:
                    self._desk.land(seat.flight, told, served if told is not None else 0)
                self._desk.leave(seat)

    def _send(self, step: Step) -> Effects[int | None]:
        """Whether it was stored; None if that is not known."""
        try:
            stored, *_ = yield from until_answered(lambda: step, self._policy.terms, shielded=True)
        except StepFailed:
            return None
        return int(stored)

    def __del__(self) -> None:
        # Dropped between the claim and the computation, by Ctrl-C or a loop that was closed: nobody will compute.
        try:
            hold, seat = self.hold, self._seat
            if hold is not None and hold.phase is not ENDED:
                hold.phase = ENDED
                self._desk.driver.book.leave(hold)
            if seat is not None:
                self._desk.leave(seat)
        except (AttributeError, TypeError):
            pass  # the interpreter is on its way out
