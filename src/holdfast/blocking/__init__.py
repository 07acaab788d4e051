# Derived from holdfast/aio/__init__.py by scripts/derive_blocking.py: edit that file, then run this script.
"""The blocking face: every method blocks its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Never, Unpack, overload

from holdfast.blocking.cache import Cached
from holdfast.blocking.client import Client
from holdfast.blocking.differences import OnLost
from holdfast.blocking.election import Election, Terms
from holdfast.blocking.inspection import Locks
from holdfast.blocking.latch import Latch
from holdfast.blocking.leases import Lease, Lost, Permit, RecipeLease, RLease, WriteLease
from holdfast.blocking.locks import Lock, MultiLock, ReadLock, Recipe, RLock, RWLock, Semaphore, WriteLock
from holdfast.drivers.blocking import Driver
from holdfast.drivers.observing import Observers
from holdfast.drivers.traces import cut_short
from holdfast.engines.redis.target import resolve
from holdfast.errors import HoldfastError
from holdfast.events import Hook, checked_hooks
from holdfast.options import ClientKeywords, LockKeywords, Seconds, client_options, lock_options, with_options_of
from holdfast.protocol.kinds.election import Leader

__all__ = [
    "Cached",
    "Client",
    "Election",
    "Latch",
    "Leader",
    "Lease",
    "Lock",
    "Locks",
    "Lost",
    "MultiLock",
    "Permit",
    "RLease",
    "RLock",
    "RWLock",
    "ReadLock",
    "Recipe",
    "RecipeLease",
    "Semaphore",
    "Terms",
    "WriteLease",
    "WriteLock",
    "connect",
    "lock",
]


@with_options_of(client_options, without=("passes", "fenced", "choices"))
def connect(
    target: Any = None,
    *,
    on_event: Hook | Iterable[Hook] | None = None,
    **options: Unpack[ClientKeywords[OnLost[Lease]]],
) -> Client:
    """A client of the server at a URL, of a redis.Redis, or (with neither) of HOLDFAST_URL or local://.

    It connects when it is first used. Close it, or use it as a context manager. A URL takes all options but on_lost and
    on_event, too: ``redis://h/0?namespace=shop%3A&timeout=2``. An option given here overrides that of the URL.

    namespace: text in front of all names of this client.
    timeout: seconds within which every call ends that does not wait for a lock.
    outage_wait: how long after contact with the server was lost a call with a bounded wait goes on trying; None: as
        long as its wait.
    fence_retention: seconds for which the server remembers the last fence of a name.
    cohort: how many times in a row waiters of this process may pass a lock on locally.
    replicas: how many replicas must have a grant or renewal before it counts; docs/engines.md says what that prevents.
    fence_floor: on etcd, a number that every fence exceeds.
    on_lost: the default of all its locks.
    on_event: called with each event of its locks (``holdfast.events``); a callable, or a list of them.
    """
    try:
        observers = Observers(checked_hooks(on_event))
        resolved = resolve(target, options, aio=False)
        shared = client_options(
            passes=resolved.passes, fenced=resolved.fenced, choices=Client._on_lost_choices, **resolved.options
        )
        namespace = resolved.options.get("namespace", "")
        driver = Driver(resolved, namespace=namespace, observers=observers)
        return Client(driver, namespace=namespace, shared=shared)
    except HoldfastError as error:
        cut_short(error)  # error reporters show the locals of frames, and the URL may hold a password
        raise


_default: Client | None = None
_default_lock = threading.Lock()


@overload
def lock(*names: str, wait: None = None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> Lock[Never]: ...


@overload
def lock(*names: str, wait: Seconds | None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> Lock: ...


@with_options_of(lock_options)
def lock(*names: str, **options: Any) -> Lock[Any]:
    """A lock of the default client, which is made on first use: ``with holdfast.lock("nightly"): ...``"""
    global _default  # noqa: PLW0603 (the default client)
    if _default is None:
        with _default_lock:
            _default = _default or connect()
    return _default.lock(*names, **options)


for _name in __all__:  # reprs, help() and pickles name the place from which these are imported
    if globals()[_name].__module__.startswith(__name__):
        globals()[_name].__module__ = __name__
