"""The client of the asyncio face."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import update_wrapper
from types import TracebackType
from typing import Any, Literal, Never, TypeVar, Unpack, overload

from holdfast.aio.cache import Cached
from holdfast.aio.differences import Caching, Excluding, OnLost, finished
from holdfast.aio.election import Election
from holdfast.aio.inspection import Locks
from holdfast.aio.latch import Latch
from holdfast.aio.leases import Lease, Permit, RecipeLease, RLease, WriteLease
from holdfast.aio.locks import Lock, MultiLock, ReadLock, Recipe, RLock, RWLock, Semaphore, WriteLock
from holdfast.decorated import (
    SKIPPED,
    CacheKeywords,
    Skipped,
    exclusive_wait,
    holding,
    refuse_bare,
    refuse_result,
    refuse_skipped,
)
from holdfast.drivers.aio import Driver
from holdfast.errors import AcquireTimeout
from holdfast.face import FENCED, BaseClient, fenced_options, policy_of
from holdfast.holder import Broken, LockInfo
from holdfast.options import (
    CommonKeywords,
    HoldKeywords,
    LockKeywords,
    Seconds,
    checked_label,
    lock_options,
    whole,
    with_fixed,
    with_options_of,
)
from holdfast.protocol.cache.entry import Entry, Policy
from holdfast.protocol.cache.lookup import ask, forget
from holdfast.protocol.inspection.breaking import break_lock, check_break
from holdfast.protocol.inspection.locks import history, inspect
from holdfast.protocol.kinds.handover import adopt
from holdfast.statistics import Statistics, count

__all__ = ["Client"]

R = TypeVar("R")
D = TypeVar("D")


class Client(BaseClient):
    """Locks on one server, for the tasks of one event loop at a time."""

    _driver: Driver
    _on_lost_choices = ("cancel", "ignore")  # aio only
    _awaits = True  # aio only

    @overload
    def lock(self, *names: str, wait: None = None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> Lock[Never]: ...

    @overload
    def lock(self, *names: str, wait: Seconds | None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> Lock: ...

    @with_options_of(lock_options)
    def lock(self, *names: str, **options: Any) -> Lock[Any]:
        """A lock on a name; or on several names, all or none, which cannot deadlock in any order.

        ttl: seconds until the lock is free again if its holder crashes or is cut off; otherwise the lease is renewed.
        wait: seconds to wait for the lock: forever by default (None); 0 is one try, the default of ``exclusive``.
            After the wait ``async with`` raises AcquireTimeout, and ``acquire()`` returns None.
        renew: whether the lease is renewed in the background.
        max_hold: seconds after which the lease is no longer renewed, and its holder is notified.
        on_lost: what to do when the lease is lost. A callable or coroutine function gets the lease. "cancel", the
            default of ``async with``, cancels its body and raises LeaseLost; "ignore" leaves the body alone.
        label: text of at most 64 characters, embedded in the token to identify the holder.
        cohort: how many times in a row waiters of this process may pass the lock on locally, at most the client's.
        outage_wait: for this lock, instead of that of the client.
        """
        if len(names) > 1:
            return MultiLock(self._driver, *self._check_several(names, options), Lease)
        return Lock(self._driver, *self._check(names, options), Lease)

    @overload  # aio only
    async def get_or_compute(
        self, key: str, fn: Callable[[], Awaitable[R]], ttl: Seconds = 60.0, **options: Unpack[CacheKeywords]
    ) -> R: ...

    @overload  # aio only
    async def get_or_compute(
        self, key: str, fn: Callable[[], R], ttl: Seconds = 60.0, **options: Unpack[CacheKeywords]
    ) -> R: ...

    @with_options_of(policy_of)
    async def get_or_compute(
        self, key: str, fn: Callable[[], R | Awaitable[R]], ttl: Seconds = 60.0, **options: Unpack[CacheKeywords]
    ) -> R:
        """The value of a key. If there is none, one caller computes it by ``fn()``, and the others wait for it.

        ttl: seconds for which a value is fresh.
        stale: seconds after that in which the old value is served while one caller computes a new one.
        errors: seconds for which a failure is remembered. Callers that are waiting when it happens always get it, as
            ComputeFailed.
        early: how eagerly a value is refreshed, by chance, before its ttl ends: 0 never, 1 is a good choice. See
            docs/cache.md.
        compute_ttl: seconds until another caller takes over if the computing one crashes or is cut off.
        max_compute: seconds until another caller takes over although the first is still computing.
        wait: seconds to wait for another caller's value before ComputeTimeout (None: forever, 0: not at all).
        serializer: an object with ``dumps`` and ``loads``. The default is JSON, with bytes stored as they are.
        """
        policy = self._policy(ttl, options)
        refuse_result(fn, key)
        value: R = await self._fetch(self._entry(key), policy, fn)
        return value

    async def _fetch(self, entry: Entry, policy: Policy, fn: Callable[[], Any]) -> Any:
        computation = await self._driver.run(ask(self._singleflight, entry, policy))
        if computation.hold is None:
            return computation.read()
        try:
            value = refuse_skipped(await finished(fn(), f"get_or_compute({entry.key!r})"), entry.key)
            data = computation.pack(value)
        except GeneratorExit:  # aio only: the event loop was closed, and nothing can be awaited any more
            raise
        except BaseException as error:
            if not await self._driver.run(computation.fail(error)):
                del computation  # else there is a reference cycle: computation, error, traceback, this frame
                raise
            self._log_stale(entry.key, error)
            return computation.read()
        return await self._driver.run(computation.store(data))

    @with_options_of(policy_of)
    def cached(self, key: str, ttl: Seconds = 60.0, **options: Unpack[CacheKeywords]) -> Caching:
        """Decorate a function so that its results are cached: ``@client.cached("user:{user_id}")``.

        The key names the arguments on which the result depends. The options are those of ``get_or_compute``. The
        decorated function has ``.key(...)``, the key of a call, and ``.invalidate(...)``, which forgets its result.
        """
        refuse_bare(key, "cached")
        policy = self._policy(ttl, options)

        def decorate(function: Callable[..., Any]) -> Any:
            return Cached(self, function, self._template(key, function, "cached"), policy)

        return decorate

    async def invalidate(self, key: str) -> bool:
        """Forget the value of a key; True if there was one. A computation that has begun before is not stored."""
        self._driver.require("get_or_compute")
        return await self._driver.run(forget(self._singleflight, self._entry(key), self._shared))

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["raise", "wait"] = "raise", **options: Unpack[CommonKeywords]
    ) -> Excluding[Never]: ...

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["skip"], **options: Unpack[CommonKeywords]
    ) -> Excluding[Skipped]: ...

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["skip"], default: D, **options: Unpack[CommonKeywords]
    ) -> Excluding[D]: ...

    @with_options_of(lock_options)
    def exclusive(
        self, name: str, *, wait: Seconds | None = 0.0, busy: str = "raise", default: Any = SKIPPED, **options: Any
    ) -> Callable[[Callable[..., Any]], Any]:
        """Let one caller at a time run a function: ``@client.exclusive("report:{user_id}", busy="skip")``.

        The name may depend on arguments; calls with different names run at the same time.

        wait: seconds to wait before the function counts as busy: 0 by default, which is one try, unlike a lock, which
            waits forever by default (None).
        busy: what to do then. "raise" raises AcquireTimeout. "skip" skips the call and returns ``default``
            (holdfast.SKIPPED, which is false). "wait" waits forever or, if ``wait`` is given, raises AcquireTimeout
            after it.
        The other options are those of ``lock``. Within the function, ``holdfast.current_lease()`` is its lease.
        """
        refuse_bare(name, "exclusive")
        options["wait"] = exclusive_wait(wait, busy, default)
        self._check(("x",), options)

        def decorate(function: Callable[..., Any]) -> Any:
            template = self._template(name, function, "exclusive")

            async def call(*args: Any, **kwargs: Any) -> Any:
                lock = Lock(self._driver, *self._check((template.name(args, kwargs),), options), Lease)
                entered = False
                try:
                    async with lock as lease:
                        entered = True
                        with holding(lease):
                            return await finished(function(*args, **kwargs), f"exclusive({name!r})")
                except AcquireTimeout:
                    if entered or busy != "skip":  # entered: raised by another lock, within the function
                        raise
                    return default

            return update_wrapper(call, function)

        return decorate

    @overload
    def rlock(
        self, name: str, *, wait: None = None, **options: Unpack[LockKeywords[OnLost[Lease]]]
    ) -> RLock[Never]: ...

    @overload
    def rlock(self, name: str, *, wait: Seconds | None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> RLock: ...

    @with_options_of(lock_options)
    def rlock(self, name: str, **options: Any) -> RLock[Any]:
        """A reentrant lock on a name: the task that holds it may acquire it again, and releases it equally often.

        The options are those of ``lock``. Acquiring it again gives the same lease, with the options of the first time.
        """
        self._driver.require("rlock")
        return RLock(self._driver, *self._check((name,), options), RLease, self._owned)

    @overload
    def semaphore(
        self, name: str, permits: int, *, wait: None = None, **options: Unpack[LockKeywords[OnLost[Permit]]]
    ) -> Semaphore[Never]: ...

    @overload
    def semaphore(
        self, name: str, permits: int, *, wait: Seconds | None, **options: Unpack[LockKeywords[OnLost[Permit]]]
    ) -> Semaphore: ...

    @with_options_of(lock_options)
    def semaphore(self, name: str, permits: int, **options: Any) -> Semaphore[Any]:
        """A semaphore on a name: at most ``permits`` holders at the same time, each in a slot (``lease.slot``).

        A smaller number than before takes no permit from a holder; it limits later requests. The options are those of
        ``lock``; cohort has no effect.
        """
        self._driver.require("semaphore")
        return Semaphore(
            self._driver, *self._check((name,), options, cohort=False), Permit, whole("permits", permits, least=1)
        )

    @overload
    def rwlock(
        self, name: str, *, wait: None = None, **options: Unpack[LockKeywords[OnLost[Lease]]]
    ) -> RWLock[Never]: ...

    @overload
    def rwlock(self, name: str, *, wait: Seconds | None, **options: Unpack[LockKeywords[OnLost[Lease]]]) -> RWLock: ...

    @with_options_of(lock_options)
    def rwlock(self, name: str, **options: Any) -> RWLock[Any]:
        """A readers-writer lock on a name: ``read`` for any number of holders at the same time, ``write`` for one.

        Both are locks. A task that holds ``read`` and asks for ``write`` gets WouldDeadlock. The options are those of
        ``lock``; cohort has no effect.
        """
        self._driver.require("rwlock")
        asked = self._check((name,), options, cohort=False)
        return RWLock(
            ReadLock(self._driver, *asked, Lease, self._holds_by_caller),
            WriteLock(self._driver, *asked, WriteLease, self._holds_by_caller),
        )

    def latch(self, name: str, count: int, *, retention: Seconds = 3600.0) -> Latch:
        """A latch on a name, which opens once it is counted down ``count`` times.

        count: the same number in every program that uses the latch.
        retention: seconds for which the server remembers the latch after it opened, or after its last use before that.
        """
        latch: Latch = self._make_latch(Latch, name, count, retention)
        return latch

    @with_options_of(lock_options, without=("cohort",))
    def election(
        self, name: str, *, wait: Seconds | None = None, **options: Unpack[HoldKeywords[OnLost[Lease]]]
    ) -> Election:
        """An election on a name, with one leader at a time: the holder of the lock on that name.

        The options are those of ``lock``. ``ttl``: seconds until a leader that crashed is replaced. ``wait``: how long
        to campaign. ``max_hold``: the longest term. ``label``: what other programs see of the leader.
        """
        self._driver.require("election")
        return Election(self._driver, self.lock(name, wait=wait, **with_fixed("an election", options, cohort=0)))

    @with_options_of(lock_options, without=("wait", "cohort"))
    async def adopt(self, ticket: str, **options: Unpack[HoldKeywords[OnLost[Lease]]]) -> Lease:
        """A lease for a hold that another process handed over, with a new token and a new fence.

        Its kind is that of the hold: for a semaphore, a Permit with the same slot; for several names, a lease with the
        fence of each; for an rlock, a lease that the caller may acquire again. NotAcquired if the ticket was adopted
        before or has expired. The options are those of ``lock``.
        """
        offer, lock = self._check_ticket(ticket, with_fixed("adopt()", options, wait=None, cohort=0))
        lease: Lease = await self._driver.run(adopt(lock, offer))
        return lease

    def recipe(self, name: str, key: str, **options: Any) -> Lock:
        """A recipe: a lock exactly as older clients deploy it. docs/recipes.md lists their options and their flaws.

        Each recipe warns once per process, except "holdfast", which is ``lock`` itself.
        """
        if name == FENCED:
            return self.lock(key, **fenced_options(options))
        recipe: Lock = self._make_recipe(name, key, options, Recipe, RecipeLease)
        return recipe

    def locks(self, pattern: str = "*") -> Locks:
        """The locks whose names match a pattern, one after the other: ``async for info in client.locks("order:*")``.

        In a pattern ``*`` matches any text, ``?`` any character, and ``[ab]`` one of these characters; a backslash
        makes the next character literal. The iterator goes through all keys of the server in small parts, so the server
        stays responsive. A lock is listed if a client holds it or waits for it.
        """
        self._driver.require("locks")
        return Locks(self._driver, self._namespace, self._check_pattern(pattern), self._shared)

    async def inspect(self, name: str, *, limit: int = 100) -> LockInfo | None:
        """The holders and waiters of a lock of any kind; None if it is free and no client waits for it.

        limit: how many holders and waiters are read; both are counted in any case.
        """
        self._driver.require("inspect")
        return await self._driver.run(inspect(self._keys(name), self._shared, whole("limit", limit, least=1)))

    async def break_lock(
        self, name: str, *, fence: int | None = None, holder_id: str | None = None, reason: str, label: str = ""
    ) -> Broken:
        """End the hold of a stuck holder: exactly the hold that was inspected. NotHeld if that hold has ended.

        The lock goes to the next waiter. The holder is told, and its fence is lower than all later ones. It may go on
        working until it notices: stop it first if you can.

        fence: that of the holder, from ``inspect``. holder_id: its ``id``, for a holder without a fence.
        reason: for the holder (``lease.reason``) and the history. label: identifies you in the history.
        """
        self._driver.require("break_lock")
        keys, wanted = self._keys(name), check_break(name, fence, holder_id, reason, checked_label(label))
        return await self._driver.run(break_lock(self._driver, keys, self._shared, wanted))

    async def history(self, name: str) -> list[Broken]:
        """How a lock was broken, the latest first: at most 100 times, and for 30 days."""
        self._driver.require("break_lock")
        return await self._driver.run(history(self._keys(name), self._shared))

    def statistics(self) -> Statistics:
        """Counts of what this client has and does now: holds, waiters, local queues, renewals, connections by server.

        It contacts no server. Any thread may call it, also after the client is closed.
        """
        return count(self._driver, self._singleflight.calls, self._latch_waiters)

    async def aclose(self) -> None:
        """Close connections and end tasks. Leases still held are lost: on_lost is called, then they are released.

        This takes at most the client's ``timeout``. Leaving the ``async with`` of such a lock raises LeaseLost.
        """
        await self._driver.close(self._shared.timeout)

    close = aclose  # aio only

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
