"""The computation of a cached value: its right to compute, and how it ends.

Invariant. However a computation ends (a value, a failure, an interrupt, a lost server), its claim is given up: by the
step that stores, by the keeper, or by its ttl. Then the waiting callers of this process go on. They also go on if the
claim is lost during the computation. The caller gets what it has computed even if that can no longer be stored.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Any, Final, NamedTuple, cast

from holdfast.protocol import mutex
from holdfast.protocol.cache.entry import ComputeFailure, Entry, Policy, compute_failure_of, pack
from holdfast.protocol.cache.singleflight import CompleteOnLoss, Group, Participant
from holdfast.protocol.effects import STOPPED, Effects, Step, StepFailed, clock, defer_cleanup, report, warn
from holdfast.protocol.hold import ENDED, HELD, Hold
from holdfast.protocol.reporting import released_event
from holdfast.protocol.retry import until_answered

TOLD_FOR_MS: Final = 2000  # how long a failure stays on the server for its waiters


class Packed(NamedTuple):
    """A value: as it is stored, and as it is read back."""

    data: bytes
    value: Any


class Computation:
    """The outcome of a look-up: a value, a failure, or the right to compute the value."""

    __slots__ = ("_began", "_entry", "_group", "_participant", "_policy", "_value", "found", "hold")

    def __init__(self, group: Group, entry: Entry, policy: Policy, found: bytes | ComputeFailure | None) -> None:
        self.found = found  # the stale value, if it is to be refreshed
        self.hold: Hold | None = None  # the claim; None if there is nothing to compute
        self._group = group
        self._entry = entry
        self._policy = policy
        self._participant: Participant | None = None  # the leader of the callers that wait for it
        self._began = 0.0
        self._value: Any = None  # ``found``, deserialized by ``load``

    def begin(self, hold: Hold, participant: Participant | None, now: float) -> None:
        self.hold, self._participant, self._began = hold, participant, now
        if participant is not None:
            hold.loss_watchers().append(CompleteOnLoss(self._group, participant.shared_call))
        self._group.driver.admit(hold)

    def load(self) -> Effects[bool]:
        """Deserialize what was found; False, after a warning, if the serializer cannot: then there is no value."""
        if not isinstance(self.found, bytes):
            return self.found is not None
        try:
            self._value = self._policy.serializer.loads(self.found)
            return True
        except Exception as error:  # its text is not shown because it may quote the value
            unreadable = type(error).__name__
        if self._group.first_warning(self._entry.name):
            yield from warn(
                f"the cached value of {self._entry.key!r} cannot be loaded ({unreadable}), so it counts as missing "
                "and is computed again. If another program writes it with a different serializer, give each its own key"
            )
        return False

    def digest(self) -> str:
        """The digest by which the server recognises the value that was found."""
        return sha1(self.found, usedforsecurity=False).hexdigest() if isinstance(self.found, bytes) else ""

    def read(self) -> Any:
        """The loaded value; raises ComputeFailed if the computation failed."""
        if isinstance(self.found, ComputeFailure):
            raise self.found.as_error(self._entry)
        return self._value

    def pack(self, value: Any) -> Packed:
        """The value, serialized and read back: a value that cannot be read is not stored."""
        key, serializer = self._entry.key, self._policy.serializer
        data = pack(key, value, serializer)
        try:
            return Packed(data, serializer.loads(data))
        except Exception as error:
            error.add_note(f"This serializer cannot read what it wrote for {key!r}. Give another serializer=")
            raise

    def store(self, packed: Packed) -> Effects[Any]:
        """Store what was computed; the value as all callers get it. Only this caller gets it if it cannot be stored."""
        policy = self._policy
        cost_us = max(0, round(((yield from clock()) - self._began) * 1e6))
        data = packed.data
        yield from self._finish("value", data, policy.ttl_ms, policy.ttl_ms + policy.stale_ms, cost_us, answer=data)
        return packed.value

    def fail(self, error: BaseException) -> Effects[bool]:
        """Report a failed computation. Returns whether there is a stale value to return instead.

        A cancellation or Ctrl-C says nothing about the value: it is not shared, and the next caller computes.
        """
        if not isinstance(error, Exception):
            yield from self._finish("nothing", "", 0, 0, 0)
            return False
        failure = compute_failure_of(error)
        errors_ms = self._policy.errors_ms
        yield from self._finish("failure", failure.text(), errors_ms, max(errors_ms, TOLD_FOR_MS), 0, answer=failure)
        return (yield from self.load())

    def _finish(self, what: str, content: str | bytes, *numbers: int, answer: Any = None) -> Effects[None]:
        """Store the outcome, give up the claim and answer waiters. The keeper cleans up if the server is silent."""
        hold, driver, participant = self.hold, self._group.driver, self._participant
        assert hold is not None
        served, told, was_held = 0, None, hold.phase is HELD
        try:
            if not hold.mine or hold.phase is ENDED:  # in a forked child: the claim is the parent's
                return
            driver.registry.leave(hold)
            hold.end()
            tombstone_ms = mutex.TOMBSTONE_MS if hold.outcome_unknown else 0
            # Values may be bytes, which are sent as they are; all other arguments are text.
            args = (hold.token, what, cast("str", content), *map(str, numbers), str(tombstone_ms))
            step = Step("cache_store", (*self._entry.shared, hold.keys.tombstone(hold.token)), args)
            served = participant.shared_call.next_number() if participant is not None else 0
            stored = yield from self._send(step)
            if stored is None:
                yield from defer_cleanup(hold)
            elif stored:  # else the claim had ended, perhaps by an invalidation: other callers must not get this value
                told = answer
        except STOPPED:
            yield from defer_cleanup(hold)
            raise
        finally:
            if participant is not None:
                if not participant.shared_call.completed:
                    self._group.complete(participant.shared_call, told, served if told is not None else 0)
                self._group.leave(participant)
            if was_held and driver.registry.observed():
                yield from report(released_event(hold, (yield from clock())))

    def _send(self, step: Step) -> Effects[int | None]:
        """Whether the value was stored; None if that is not known."""
        try:
            stored, *_ = yield from until_answered(lambda: step, self._policy.options, shielded=True)
        except StepFailed:
            return None
        return int(stored)

    def __del__(self) -> None:
        # Dropped between the claim and the computation, by Ctrl-C or a closed loop: it will not be computed.
        try:
            hold, participant = self.hold, self._participant
            if hold is not None:
                hold.drop(self._group.driver.registry)
            if participant is not None:
                self._group.leave(participant)
        except (AttributeError, TypeError):
            pass  # the interpreter is shutting down
