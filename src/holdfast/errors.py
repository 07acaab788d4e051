"""Everything that Holdfast raises.

    HoldfastError
    ├── NotAcquired                  the lock was not obtained
    │   ├── AcquireTimeout           ... within the wait: another holder has it (also a TimeoutError)
    │   └── WouldDeadlock            ... because to wait for it could last for ever (also a RuntimeError)
    ├── LeaseLost                    it was held, and no longer is
    ├── NotHeld                      a release of what is not held (also a RuntimeError)
    │   └── OverRelease              ... of a semaphore (also a ValueError)
    ├── ComputeFailed                a value could not be computed, says whoever tried
    ├── ComputeTimeout               somebody was still computing it when the wait was over (also a TimeoutError)
    ├── StaleFence                   what was written to has seen a later holder, and refused
    ├── OutcomeUnknown               sent, but nobody can say whether it took effect
    ├── Unavailable                  no server could be used (also a ConnectionError)
    ├── Unsupported                  this server or engine cannot do that
    ├── InvalidName                  (also a ValueError)
    └── InvalidConfig                (also a ValueError)

Strategy: an error keeps facts as attributes and computes its message from them, so that a message can neither
drift from the facts nor carry a token or a password. Each says what happened, to which lock, and what to do next.
Exceptions of other libraries never leave Holdfast; they are chained as causes. All of them survive pickling,
because work guarded by a lock is often done in a process pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.holder import Holder

__all__ = [
    "AcquireTimeout",
    "ComputeFailed",
    "ComputeTimeout",
    "HoldfastError",
    "InvalidConfig",
    "InvalidName",
    "LeaseLost",
    "LocalOnlyWarning",
    "NotAcquired",
    "NotHeld",
    "OutcomeUnknown",
    "OverRelease",
    "StaleFence",
    "Unavailable",
    "UnsafeRecipeWarning",
    "Unsupported",
    "WouldDeadlock",
]


def rounded(seconds: float) -> str:
    """A time as people write it: 0.5 rather than 0.5000001, 86400 rather than 8.64e+04."""
    if seconds >= 999.5:
        return f"{seconds:.0f}"
    return f"{seconds:.3g}" if seconds >= 0.01 else f"{seconds:.1g}"


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped, so that a terminal shows them instead of obeying them."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


class HoldfastError(Exception):
    """Base class of all errors of Holdfast. ``args`` are what its constructor takes to give the same message again."""

    def __init__(self, *args: Any) -> None:
        super().__init__()  # without them: to an OSError, which some of these are, they would be an errno
        self.args = args

    def __str__(self) -> str:
        return self._message()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # a log or a group of errors shows no more than this

    def _message(self) -> str:
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[HoldfastError], args: tuple[Any, ...], facts: dict[str, Any]) -> HoldfastError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


class NotAcquired(HoldfastError):
    """The lock was not obtained."""

    def __init__(self, name: str, reason: str = "another holder has it") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def _message(self) -> str:
        return f"lock {self.name!r} was not acquired: {self.reason}"


class AcquireTimeout(NotAcquired, TimeoutError):
    """The lock was not obtained within the wait, because another holder has it.

    ``holder`` says who, as far as that is known: None behind other waiters, or while the lock is left free for polling
    clients. If its ``mode`` is "reserved", the lock is kept for that waiter, which wants other names too. ``refused``
    is the name that was refused. A server that does not answer is never an AcquireTimeout, but Unavailable.
    """

    def __init__(
        self, name: str, waited: float, reason: str = "", holder: Holder | None = None, refused: str = ""
    ) -> None:
        it = repr(refused) if refused else "it"  # of several names, the one that was refused
        if holder is None:
            by = f"someone else holds {it}, or is before us in its queue"
        elif holder.mode == "reserved":
            by = f"{it} is reserved for {holder}, which waits for other names as well"
        else:
            by = f"{holder} holds {it}"
        super().__init__(name, reason or f"{by}. Wait longer (wait=), or catch AcquireTimeout and come back later")
        self.waited = waited
        self.holder = holder  # not among args, which JSON should be able to carry
        self.refused = refused or name  # of several names, the one that was refused
        self.args = name, waited, self.reason

    def _message(self) -> str:
        waited = f"within {rounded(self.waited)} s" if self.waited else "at the first try"
        return f"lock {self.name!r} was not acquired {waited}: {self.reason}"


class WouldDeadlock(NotAcquired, RuntimeError):
    """A reader has asked for the writing side of the same lock, or a writer for the reading side."""

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(
            name,
            reason
            or "this thread or task reads it, and cannot wait for all readers to leave: a second one that did the same "
            "would wait for this one, both for ever. Release the read first, and look again at what may have changed",
        )


class LeaseLost(HoldfastError):
    """The lease ended before its holder let it go: the guarded work may have run beside another holder."""

    def __init__(self, name: str, fence: int | None, reason: str) -> None:
        super().__init__(name, fence, reason)
        self.name = name
        self.fence = fence
        self.reason = reason

    def _message(self) -> str:
        if self.fence is None:  # a lock of history has none
            return (
                f"the lease on {self.name!r} was lost: {self.reason}. Stop the guarded work, and look at what it wrote"
            )
        return (
            f"the lease on {self.name!r} (fence {self.fence}) was lost: {self.reason}. Stop the guarded work, and let "
            "what it writes to refuse this fence"
        )


class NotHeld(HoldfastError, RuntimeError):
    """A release of a lock that is not held."""

    def __init__(
        self, name: str, reason: str = "is not held through this object: acquire it first, and release it once"
    ) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def _message(self) -> str:
        return f"lock {self.name!r} {self.reason}"


class OverRelease(NotHeld, ValueError):
    """A release of more permits of a semaphore than are held through that object. None was released."""

    def __init__(self, name: str, reason: str = "", held: int = 0, released: int = 1) -> None:
        super().__init__(name, reason)
        self.held = held
        self.released = released
        self.args = name, reason, held, released

    def _message(self) -> str:
        if self.reason:
            return f"the permit of {self.name!r} {self.reason}"
        if not self.held:
            return f"no permit of {self.name!r} is held through this object: release each one once, and no more"
        return (
            f"{self.released} permits of {self.name!r} cannot be released, for this object holds {self.held}: release "
            "each one once, and no more"
        )


class ComputeFailed(HoldfastError):
    """Somebody else computed this value for all, and failed. ``kind`` is the type of their exception, as text."""

    def __init__(self, name: str, kind: str, message: str) -> None:
        super().__init__(name, kind, message)
        self.name = name
        self.kind = kind
        self.message = message

    def _message(self) -> str:
        said = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"the value of {self.name!r} could not be computed: {said}"


class ComputeTimeout(HoldfastError, TimeoutError):
    """The wait was over before the value was there."""

    def __init__(self, name: str, waited: float) -> None:
        super().__init__(name, waited)
        self.name = name
        self.waited = waited

    def _message(self) -> str:
        waited = f"after {rounded(self.waited)} s" if self.waited else "at the first look"
        return (
            f"somebody else was still computing the value of {self.name!r} {waited}. Wait longer (wait=), or serve old "
            "values meanwhile (stale=)"
        )


class StaleFence(HoldfastError):
    """A write was refused, and nothing written: a later holder has written there. ``stored`` is the fence on record."""

    def __init__(self, name: str, fence: int, stored: int | None, resource: str) -> None:
        super().__init__(name, fence, stored, resource)
        self.name = name
        self.fence = fence
        self.stored = stored
        self.resource = resource

    def _message(self) -> str:
        resource = self.resource if len(self.resource) <= 60 else f"{self.resource[:57]}..."
        seen = "another holder" if self.stored == self.fence else "a later holder"
        record = "" if self.stored is None else f" (fence {self.stored})"
        return (
            f"a write to {resource} under lock {self.name!r:.60} (fence {self.fence}) was refused, for {seen}{record} "
            "has written there. Give this work up: read again and start over under a new lease"
        )


class OutcomeUnknown(HoldfastError):
    """A step was sent and no answer came back: it may or may not have taken effect."""

    def __init__(self, name: str, action: str, advice: str) -> None:
        super().__init__(name, action, advice)
        self.name = name
        self.action = action
        self.advice = advice

    def _message(self) -> str:
        return f"whether {self.action} of {self.name!r} took effect is unknown, for no answer came back: {self.advice}"


class Unavailable(HoldfastError, ConnectionError):
    """No server could be used. ``causes`` says why, by server (addresses carry no credentials)."""

    def __init__(self, causes: Mapping[str, str], advice: str, subject: str = "") -> None:
        super().__init__(dict(causes), advice, subject)
        self.causes = dict(causes)
        self.advice = advice
        self.subject = subject  # what it was needed for, such as "lock 'x'"

    def _message(self) -> str:
        why = "; ".join(f"{server}: {cause}" for server, cause in self.causes.items())
        subject = f"{self.subject}: " if self.subject else ""
        return f"{subject}cannot use {why}. {self.advice}"


class Unsupported(HoldfastError):
    """This server or engine cannot do what was asked."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what, advice)
        self.what = what
        self.advice = advice

    def _message(self) -> str:
        return f"{self.what}: {self.advice}"


class InvalidName(HoldfastError, ValueError):
    """A lock name that cannot be used."""

    def __init__(self, name: object, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def _message(self) -> str:
        shown = repr(self.name)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        return f"{shown} cannot be a name: {self.problem}"


class InvalidConfig(HoldfastError, ValueError):
    """An option, argument or URL that cannot be used."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    def _message(self) -> str:
        return f"{self.what}: {self.problem}"


class LocalOnlyWarning(UserWarning):
    """No server was named, so locks reach no further than this machine."""


class UnsafeRecipeWarning(UserWarning):
    """A lock of history was asked for, with the pits that it has."""
