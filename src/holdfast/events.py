"""What happens to the locks of a client, as values. Logs, metrics and traces are built on these events alone.

``connect(..., on_event=hook)`` calls the hook with each event. Events of acquire and release come in the thread or task
of the caller. What the keeper reports, such as renewals, comes in the keeper's task under asyncio, and in a separate
thread otherwise. So a hook must be quick, and must not wait for a lock. An error of a hook is logged and not raised. No
event has a token or a password.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from inspect import iscoroutinefunction
from typing import Any

from holdfast.errors import HoldfastError, InvalidConfig
from holdfast.holder import Holder

__all__ = [
    "Abandoned",
    "Acquired",
    "Broken",
    "Event",
    "Lost",
    "PassedOn",
    "Released",
    "RenewalFailed",
    "Renewed",
    "Waiting",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to one lock."""

    name: str  # of the lock; several names are joined by ", "
    key: str = ""  # the name with its namespace, as messages show it
    kind: str  # "lock", "rlock", "rwlock", "semaphore" or "cache"; an election is a "lock"
    mode: str = ""  # of a rwlock: "read" or "write"
    label: str = ""
    fence: int | None = None  # of the hold; None before it is granted

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON has them, and the event's own name as ``event``."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in found.items():
            if isinstance(value, Holder):
                found[name] = value.as_json()
            elif isinstance(value, BaseException):
                found[name] = str(value) or type(value).__name__
        return {"event": type(self).__name__, **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Another holder has it: this caller waits. Reported again after 10 s, 20 s, 40 s and so on."""

    waited: float = 0.0  # seconds so far
    holder: Holder | None = None  # None if it is not known
    local: bool = False  # the holder, or a waiter before this one, belongs to the same client
    deadlock: str = ""  # why this wait may never end; empty if nothing suggests that


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired(Event):
    """The caller holds it."""

    waited: float  # seconds from the call of acquire
    tries: int  # acquire steps that were sent; 0 if it was passed on within the client
    passed: bool = False  # it came from another holder of the same client, without the network
    queued: bool = False  # it had to wait: Waiting was reported before


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOn(Event):
    """The holder released it, and a waiter of the same client has it now, without the network."""

    held: float  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(Event):
    """The server has renewed it."""

    remaining: float  # seconds of validity that were left before
    validity: float  # seconds of validity that a renewed lease has
    late: float = 0.0  # seconds after it was due, which is when a third of its ttl is over
    slow: bool = False  # late by a third of the validity: the next delay of this kind may lose the lease


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalFailed(Event):
    """A renewal was not answered, or answered with an error. It is tried again until the lease ends."""

    remaining: float  # seconds of validity that are left
    tries: int  # failed renewals of this hold in a row
    error: HoldfastError
    outage: bool = False  # contact with the server is lost, which is logged once for all leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """The holder has lost it."""

    held: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Event):
    """The holder released it."""

    held: float
    error: HoldfastError | None = None  # the outcome of the release is unknown, or it was lost before


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(Event):
    """The caller gave up: its wait was over, the server could not be used, or it was interrupted."""

    waited: float
    tries: int
    queued: bool = False  # it had to wait: Waiting was reported before
    holder: Holder | None = None  # the holder because of which the lock was refused, if it is known
    error: BaseException | None = None  # None if the wait was over


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Event):
    """This client broke the hold of another holder, by ``break_lock``. ``fence`` is that of the broken hold."""

    reason: str
    holder: Holder | None = None


Hook = Callable[[Event], object]


def checked_hooks(on_event: Any) -> tuple[Hook, ...]:
    """The hooks that ``on_event=`` gives: None, a callable, or several."""
    if on_event is None:
        return ()
    hooks = tuple(on_event) if isinstance(on_event, Iterable) and not callable(on_event) else (on_event,)
    for hook in hooks:
        if not callable(hook) or iscoroutinefunction(hook):
            problem = "give a callable that takes an event, or a list of them; no coroutine function"
            raise InvalidConfig(f"on_event={hook!r:.60}", problem)
    return hooks
