"""Everything that Holdfast raises.

    HoldfastError
    ├── NotAcquired                  the lock was not obtained
    │   ├── AcquireTimeout           another holder had it until the wait was over (also a TimeoutError)
    │   └── WouldDeadlock            waiting for it could last forever (also a RuntimeError)
    ├── LeaseLost                    the lease ended before it was released
    ├── NotHeld                      release() of a lock that is not held (also a RuntimeError)
    │   └── OverRelease              more permits were released than are held (also a ValueError)
    ├── ComputeFailed                another caller failed to compute the value
    ├── ComputeTimeout               another caller was still computing when the wait was over (also a TimeoutError)
    ├── StaleFence                   the resource has seen a later holder, and refused the write
    ├── OutcomeUnknown               a request was sent, and may or may not have taken effect
    ├── Unavailable                  no server could be used (also a ConnectionError)
    ├── Unsupported                  this server, engine, kind of lock or ticket cannot do that
    ├── InvalidName                  a lock name that is not allowed (also a ValueError)
    └── InvalidConfig                an option, argument or URL that is not allowed (also a ValueError)
        └── UnknownOption            there is no option of that name (also a TypeError)

``name`` of an error is the name that the program used; messages show ``key``, the name with its namespace. An error
keeps facts as attributes and computes its message from them, so a message always matches the facts and never contains a
token or a password. Each message says what happened, to which lock, and what to do next. Exceptions of other libraries
never leave Holdfast; they are chained as causes. Every error can be pickled, because work guarded by a lock is often
done in a process pool; ``args`` are JSON, because a task queue may send them as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
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
    "UnknownOption",
    "UnsafeRecipeWarning",
    "Unsupported",
    "WouldDeadlock",
]


def rounded(seconds: float) -> str:
    """Seconds as text for a message: 0.5, not 0.5000001; 86400, not 8.64e+04."""
    if seconds >= 999.5:
        return f"{seconds:.0f}"
    return f"{seconds:.3g}" if seconds >= 0.01 else f"{seconds:.1g}"


def shown(value: object) -> str:
    """A value as short text for a message."""
    try:
        return f"{value!r:.60}"
    except ValueError:  # an int with more digits than Python converts to text
        return "a number too large to show"


def how_to_install(extra: str) -> str:
    """The commands that install an extra, for a message."""
    return f"pip install 'holdfast[{extra}]', or in a clone: pip install -e '.[{extra}]'"


class HoldfastError(Exception):
    """Base class of all errors of Holdfast. ``type(error)(*error.args)`` has the same message."""

    def __init__(self, *args: Any) -> None:
        super().__init__()  # without args: a subclass that is an OSError would read them as an errno
        self.args = args

    def __str__(self) -> str:
        return self._message()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"  # logs and exception groups show only the repr

    def _message(self) -> str:
        return Exception.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[HoldfastError], args: tuple[Any, ...], facts: dict[str, Any]) -> HoldfastError:
    error = cls.__new__(cls)
    error.args = args
    if "name" in facts and not issubclass(cls, InvalidName):
        error.__dict__["key"] = facts["name"]  # of an error that an older version pickled
    error.__dict__.update(facts)
    return error


def _unless_same(key: str, name: str) -> tuple[str, ...]:
    """The last of ``args``: the key, unless it is the name, so that older versions can read most errors."""
    return (key,) if key and key != name else ()


class NotAcquired(HoldfastError):
    """The lock was not obtained."""

    def __init__(self, name: str, reason: str = "another holder has it", key: str = "") -> None:
        super().__init__(name, reason, *_unless_same(key, name))
        self.name = name
        self.reason = reason
        self.key = key or name

    def _message(self) -> str:
        return f"lock {self.key!r} was not acquired: {self.reason}"


class AcquireTimeout(NotAcquired, TimeoutError):
    """The lock was not obtained within the wait: another client holds it or is ahead in the queue.

    ``holder`` is that client, or None if other waiters are first or the lock is left free for polling clients. If its
    ``mode`` is "reserved", the lock is kept for a waiter that needs other names too. ``refused`` is the name that was
    refused. A server that does not answer raises Unavailable, never AcquireTimeout.
    """

    def __init__(  # noqa: PLR0917 (they are ``args``, from which a task queue builds the error again)
        self,
        name: str,
        waited: float,
        reason: str = "",
        holder: Holder | Mapping[str, Any] | None = None,  # a mapping if ``args`` come from JSON
        refused: str = "",
        key: str = "",
    ) -> None:
        if isinstance(holder, Mapping):
            known = {field.name for field in fields(Holder)}  # a later version may add some
            holder = Holder(**{name: value for name, value in holder.items() if name in known})
        super().__init__(name, reason or why_busy(holder, refused), key)
        self.waited = waited
        self.holder = holder
        self.refused = refused or name  # of several names, the one that was refused
        facts = None if holder is None else holder.as_json()
        self.args = name, waited, self.reason, facts, self.refused, *_unless_same(key, name)

    def _message(self) -> str:
        waited = f"within {rounded(self.waited)} s" if self.waited else "at the first try"
        return f"lock {self.key!r} was not acquired {waited}: {self.reason}"


def why_busy(holder: Holder | None, refused: str = "") -> str:
    """Why a lock was refused, and what to do. ``refused``: of several names, the one that was refused."""
    it = repr(refused) if refused else "it"
    if holder is None:
        by = f"another client holds {it}, or is ahead in its queue"
    elif holder.mode == "reserved":
        by = f"{it} is reserved for {holder}, which also waits for other names"
    else:
        by = f"{holder} holds {it}"
    return f"{by}. Wait longer (wait=), or catch AcquireTimeout and try again later"


class WouldDeadlock(NotAcquired, RuntimeError):
    """A reader asked for the write side of the lock that it holds, or a writer for the read side."""

    def __init__(self, name: str, reason: str = "", key: str = "") -> None:
        super().__init__(
            name,
            reason
            or "this thread or task holds its read side, and two readers that both wait to write would wait forever. "
            "Release the read side, acquire the write side, and read the data again",
            key,
        )


class LeaseLost(HoldfastError):
    """The lease ended before its holder released it. Another holder may have run at the same time."""

    def __init__(self, name: str, fence: int | None, reason: str, key: str = "") -> None:
        super().__init__(name, fence, reason, *_unless_same(key, name))
        self.name = name
        self.fence = fence
        self.reason = reason
        self.key = key or name

    def _message(self) -> str:
        if self.fence is None:  # a recipe has none
            return f"the lease on {self.key!r} was lost: {self.reason}. Stop the guarded work, and check what it wrote"
        return (
            f"the lease on {self.key!r} (fence {self.fence}) was lost: {self.reason}. Stop the guarded work, and "
            "let the resource refuse writes with this fence (holdfast.guard)"
        )


class NotHeld(HoldfastError, RuntimeError):
    """release() was called for a lock that is not held."""

    def __init__(self, name: str, reason: str = "", key: str = "") -> None:
        reason = reason or "is not held through this object: acquire it first, and release it once"
        super().__init__(name, reason, *_unless_same(key, name))
        self.name = name
        self.reason = reason
        self.key = key or name

    def _message(self) -> str:
        return f"lock {self.key!r} {self.reason}"


class OverRelease(NotHeld, ValueError):
    """More permits of a semaphore were released than this object holds. None was released."""

    def __init__(self, name: str, reason: str = "", held: int = 0, released: int = 1, key: str = "") -> None:
        super().__init__(name, reason, key)
        self.reason = reason
        self.held = held
        self.released = released
        self.args = name, reason, held, released, *_unless_same(key, name)

    def _message(self) -> str:
        if self.reason:
            return f"the permit of {self.key!r} {self.reason}"
        if not self.held:
            return f"no permit of {self.key!r} is held through this object: release each permit once"
        return (
            f"{self.released} permits of {self.key!r} cannot be released, because this object holds "
            f"{self.held}: release each permit once"
        )


class ComputeFailed(HoldfastError):
    """Another caller computed this value for all callers, and failed. ``kind`` names the type of its exception."""

    def __init__(self, name: str, kind: str, message: str, key: str = "") -> None:
        super().__init__(name, kind, message, *_unless_same(key, name))
        self.name = name
        self.kind = kind
        self.message = message
        self.key = key or name

    def _message(self) -> str:
        failure = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"the value of {self.key!r} could not be computed: {failure}. Mend the cause, or try again later"


class ComputeTimeout(HoldfastError, TimeoutError):
    """Another caller was still computing the value when the wait was over."""

    def __init__(self, name: str, waited: float, key: str = "") -> None:
        super().__init__(name, waited, *_unless_same(key, name))
        self.name = name
        self.waited = waited
        self.key = key or name

    def _message(self) -> str:
        waited = f"after {rounded(self.waited)} s" if self.waited else "at the first try"
        return (
            f"another caller was still computing the value of {self.key!r} {waited}. Wait longer (wait=), or serve "
            "old values meanwhile (stale=)"
        )


class StaleFence(HoldfastError):
    """A write was refused, because a later holder has written there. ``stored`` is the fence of that holder."""

    def __init__(self, name: str, fence: int, stored: int | None, resource: str, key: str = "") -> None:
        super().__init__(name, fence, stored, resource, *_unless_same(key, name))
        self.name = name
        self.fence = fence
        self.stored = stored
        self.resource = resource
        self.key = key or name

    def _message(self) -> str:
        resource = self.resource if len(self.resource) <= 60 else f"{self.resource[:57]}..."
        seen = "another holder" if self.stored == self.fence else "a later holder"
        record = "" if self.stored is None else f" (fence {self.stored})"
        return (
            f"a write to {resource} under lock {self.key!r:.60} (fence {self.fence}) was refused, because "
            f"{seen}{record} has written there. Discard this work, and start over under a new lease"
        )


class OutcomeUnknown(HoldfastError):
    """A request was sent, and no reply says what it did: it may or may not have taken effect."""

    def __init__(self, name: str, action: str, advice: str, key: str = "") -> None:
        super().__init__(name, action, advice, *_unless_same(key, name))
        self.name = name
        self.action = action
        self.advice = advice
        self.key = key or name

    def _message(self) -> str:
        return f"{self.action} of {self.key!r} was sent and not answered, so its outcome is unknown: {self.advice}"


class Unavailable(HoldfastError, ConnectionError):
    """No server could be used. ``causes`` has the reason for each server; addresses contain no credentials."""

    def __init__(self, causes: Mapping[str, str], advice: str, subject: str = "") -> None:
        super().__init__(dict(causes), advice, subject)
        self.causes = dict(causes)
        self.advice = advice
        self.subject = subject  # what the server was needed for, such as "lock 'x'"

    def _message(self) -> str:
        why = "; ".join(f"{server}: {cause}" for server, cause in self.causes.items())
        subject = f"{self.subject}: " if self.subject else ""
        return f"{subject}cannot use {why}. {self.advice}"


class Unsupported(HoldfastError):
    """This server, engine, kind of lock or ticket cannot do what was asked."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what, advice)
        self.what = what
        self.advice = advice

    def _message(self) -> str:
        return f"{self.what}: {self.advice}"


class InvalidName(HoldfastError, ValueError):
    """A lock name that is not allowed."""

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
    """An option, argument or URL that is not allowed."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    def _message(self) -> str:
        return f"{self.what}: {self.problem}"


class UnknownOption(InvalidConfig, TypeError):
    """An option that does not exist, or that has another name here than in another library."""


class LocalOnlyWarning(UserWarning):
    """No URL was given, so locks only work between processes of this machine."""


class UnsafeRecipeWarning(UserWarning):
    """A recipe is in use that has known pitfalls."""
