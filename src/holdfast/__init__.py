"""Holdfast: distributed locks for Python.

    import holdfast

    with holdfast.connect().lock("order:42", wait=5) as lease:
        ...  # nobody else is here; lease.fence proves it to what you write to

The same names under asyncio are in ``holdfast.aio``.
"""

from holdfast.blocking import Client, Lease, Lock, connect, lock
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
    ServerSilent,
    StaleFence,
    Unavailable,
    UnsafeRecipeWarning,
    Unsupported,
    WouldDeadlock,
)

__all__ = [
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
    "ServerSilent",
    "StaleFence",
    "Unavailable",
    "UnsafeRecipeWarning",
    "Unsupported",
    "WouldDeadlock",
    "connect",
    "lock",
]

__version__ = "0.1.0"
