"""Holdfast: distributed locks for Python.

    import holdfast

    with holdfast.connect().lock("order:42", wait=5) as lease:
        ...  # no other process is here; lease.fence proves it to the resource that you write to

``holdfast.aio`` has the same names for asyncio. ``holdfast.guard`` lets a resource refuse late writes. Both are
imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from holdfast.blocking import Client, Lease, Lock, connect, lock
from holdfast.decorated import SKIPPED, current_lease
from holdfast.errors import (
    AcquireTimeout,
    ComputeFailed,
    ComputeTimeout,
    HoldfastError,
    InvalidConfig,
    InvalidName,
    LeaseLost,
    LocalOnlyWarning,
    NotAcquired,
    NotHeld,
    OutcomeUnknown,
    OverRelease,
    StaleFence,
    Unavailable,
    UnknownOption,
    UnsafeRecipeWarning,
    Unsupported,
    WouldDeadlock,
)

__all__ = [
    "SKIPPED",
    "AcquireTimeout",
    "Client",
    "ComputeFailed",
    "ComputeTimeout",
    "HoldfastError",
    "InvalidConfig",
    "InvalidName",
    "Lease",
    "LeaseLost",
    "LocalOnlyWarning",
    "Lock",
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
    "connect",
    "current_lease",
    "lock",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast import aio as aio
    from holdfast import guard as guard
    from holdfast import metrics as metrics
    from holdfast import otel as otel
else:  # hidden from type checkers, which would believe that every name exists

    def __getattr__(name: str) -> object:
        if name in ("aio", "guard", "metrics", "otel"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
