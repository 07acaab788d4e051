"""The blocking face: every method runs a protocol to its end in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Never, ParamSpec, TypeVar, Unpack, overload

from holdfast.decorated import (
    SKIPPED,
    BaseCached,
    Skipped,
    exclusive_wait,
    finished,
    holding,
    refuse_bare,
    refuse_result,
)
from holdfast.drivers.blocking import Driver
from holdfast.drivers.traces import cut_short
from holdfast.engines.target import aim
from holdfast.errors import AcquireTimeout, HoldfastError
from holdfast.face import FENCED, BaseClient, N_co, fenced_options
from holdfast.lease import BaseLease
from holdfast.options import LockOptions, Options, client_terms, patience, seconds, whole
from holdfast.protocol.election import BaseElection, BaseTerms, Leader, use_lead_or_terms
from holdfast.protocol.entries import Entry, Policy, Serializer
from holdfast.protocol.handover import adopt, hand_over
from holdfast.protocol.latch import BaseLatch
from holdfast.protocol.lock import BaseLock, BaseLost, extend_lease, release_lease, wait_until_lost
from holdfast.protocol.multi import BaseMultiLock
from holdfast.protocol.recipes.base import BaseRecipe, FencelessLease, refuse_to_extend, release_turn
from holdfast.protocol.rlock import BaseRLock, ReentrantLease, hand_over_level, release_level
from holdfast.protocol.rwlock import BaseReader, BaseRWLock, BaseWriteLease, BaseWriter, downgrade_lease, use_a_side
from holdfast.protocol.semaphore import BasePermit, BaseSemaphore
from holdfast.protocol.stampede import ask, forget

__all__ = [
    "Cached",
    "Client",
    "Election",
    "Latch",
    "Leader",
    "Lease",
    "Lock",
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


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
D = TypeVar("D")


class Lost(BaseLost):
    """An event that is set once the lease is lost."""

    __slots__ = ()
    _driver: Driver

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost, at most that long; whether it is."""
        return self._driver.run(wait_until_lost(self._hold, timeout))


class Lease(BaseLease):
    """A hold on a lock."""

    __slots__ = ()
    _driver: Driver

    @property
    def lost(self) -> Lost:
        """An event: ``is_set()``, ``wait(timeout)``."""
        return Lost(self._driver, self._hold)

    def extend(self, n: float) -> None:
        """Make it last at least n seconds from now. It never gets shorter."""
        self._driver.run(extend_lease(self, seconds("extend", n, least=0.01)))

    def release(self) -> None:
        """Give it back. LeaseLost if it was lost before, NotHeld if it was given back already."""
        self._driver.run(release_lease(self))

    def hand_over(self) -> str:
        """A ticket with which another process can go on with this hold (``client.adopt``); this lease ends here.

        There is one ttl from now for that. Whoever has the ticket can have the lock: keep it out of logs.
        """
        return self._driver.run(hand_over(self))


OnLost = Callable[[Lease], object] | None


class Lock(BaseLock[Lease], Generic[N_co]):
    """A lock, used like threading.Lock; ``with`` gives the Lease."""

    __slots__ = ()
    _driver: Driver

    @overload
    def acquire(self, blocking: Literal[True] = True, timeout: Literal[-1] = -1) -> Lease | N_co: ...

    @overload
    def acquire(self, blocking: bool = True, timeout: float = -1) -> Lease | None: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> Lease | None:
        """A Lease, or None if the lock was not free in time. Without a timeout it waits for the lock's ``wait``."""
        return self._driver.run(self._acquire(patience(blocking, timeout, self._terms.wait)))

    def release(self) -> None:
        """Release what this object holds, from whichever thread. NotHeld if that is nothing."""
        self._driver.run(self._release())

    def locked(self) -> bool:
        """Whether anybody holds the lock, asked of the server."""
        return self._driver.run(self._locked())

    def __enter__(self) -> Lease:
        return self._driver.run(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        rest = self._leave(error)
        if rest is not None:
            self._driver.run(rest)


class MultiLock(BaseMultiLock[Lease], Lock[N_co]):
    """A lock on several names, used like any other lock."""

    __slots__ = ()


class RLease(ReentrantLease, Lease):
    """A hold on a reentrant lock."""

    __slots__ = ()

    def release(self) -> None:
        """Give it back once, of as many times as it was taken. NotHeld if another thread has it."""
        self._driver.run(release_level(self))

    def hand_over(self) -> str:
        """As of any lease; but Unsupported while it is taken more than once."""
        return self._driver.run(hand_over_level(self))


class RLock(BaseRLock[RLease], Lock[N_co]):
    """A lock that its holder may take again, used like threading.RLock; by thread and name, not by object."""

    __slots__ = ()


class Latch(BaseLatch):
    """A latch: it opens when it was counted down to nothing, and stays open."""

    __slots__ = ()
    _driver: Driver

    def count_down(self, n: int = 1) -> int:
        """Count it down; what is left then. At 0 it is open, and to count on changes nothing."""
        return self._driver.run(self._count_down(whole("n", n, least=1)))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open, at most that long (None: for ever); whether it is."""
        return self._driver.run(self._wait(None if timeout is None else seconds("timeout", timeout)))

    def count(self) -> int:
        """What is left, asked of the server."""
        return self._driver.run(self._look())


class Terms(BaseTerms[Lease]):
    """Terms as leader, one after the other, until they are closed: a loop has the lease of each."""

    __slots__ = ("_thread",)
    _driver: Driver
    _thread: object  # that iterates

    def __iter__(self) -> Terms:
        return self

    def __next__(self) -> Lease:
        self._thread = self._driver.caller()
        lease = self._driver.run(self._begin())
        if lease is None:
            raise StopIteration
        return lease

    def close(self) -> None:
        """Step down, if it leads, from whichever thread; the loop ends when it comes round."""
        self._driver.run(self._close())

    def __del__(self) -> None:
        # The loop was left. Collected by chance in whatever thread, that one must not be made to wait for a server.
        try:
            if self._lease is not None:
                if self._thread is self._driver.caller():
                    self.close()
                else:
                    self._drop()
        except (AttributeError, TypeError):  # the interpreter is on its way out
            pass


class Election(BaseElection[Lease]):
    """An election. This object is one candidate: it leads at most once at a time."""

    __slots__ = ()
    _driver: Driver
    _lock: Lock

    def lead(self) -> Lock:
        """The lock whose holder leads: ``with election.lead() as lease``."""
        return self._lock

    def leader(self) -> Leader | None:
        """Who leads, asked of the server; None if nobody does. One need not be a candidate to ask."""
        return self._driver.run(self._leader())

    def resign(self) -> None:
        """Step down before the time, from whichever thread. NotHeld if this candidate does not lead."""
        self._driver.run(self._resign())

    def terms(self) -> Terms:
        """Lead, again and again: ``for lease in election.terms()``. Each round campaigns, and ends a term."""
        return Terms(self._driver, self._lock)

    if not TYPE_CHECKING:  # a type checker finds by itself that there is no way in
        __enter__ = __exit__ = __iter__ = use_lead_or_terms


class Permit(BasePermit, Lease):
    """A hold on one permit of a semaphore."""

    __slots__ = ()


OnPermitLost = Callable[[Permit], object] | None


class Semaphore(BaseSemaphore[Permit], Lock[N_co]):
    """A semaphore, used like threading.BoundedSemaphore; ``with`` gives the Permit.

    One object may hold many.
    """

    __slots__ = ()

    @overload
    def acquire(self, blocking: Literal[True] = True, timeout: Literal[-1] = -1) -> Permit | N_co: ...

    @overload
    def acquire(self, blocking: bool = True, timeout: float = -1) -> Permit | None: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> Permit | None:
        """A Permit, or None if no permit was free in time. Without a timeout it waits for the lock's ``wait``."""
        return self._driver.run(self._acquire(patience(blocking, timeout, self._terms.wait)))

    def release(self, n: int = 1) -> None:
        """Release n permits: the calling thread's latest first, then the oldest. OverRelease if fewer are held."""
        self._driver.run(self._release(whole("n", n, least=1)))

    def adopt(self, ticket: str) -> Permit:
        """Go on with a permit that another process has handed over: the same slot, on the terms of this object."""
        return self._driver.run(self._adopt(ticket))

    def locked(self) -> bool:
        """Whether all permits are taken, asked of the server."""
        return self._driver.run(self._locked())

    def __enter__(self) -> Permit:
        return self._driver.run(self._enter())


class WriteLease(BaseWriteLease, Lease):
    """A hold on the writing side of a lock."""

    __slots__ = ()

    def downgrade(self) -> None:
        """From now on it only reads, beside others; no writer can get in between. It is given back as before."""
        self._driver.run(downgrade_lease(self))


class ReadLock(BaseReader[Lease], Lock[N_co]):
    """The reading side of a lock. One object may hold many leases; ``locked()``: whether anybody reads."""

    __slots__ = ()

    def adopt(self, ticket: str) -> Lease:
        """Go on with the reading that another process has handed over, on the terms of this object."""
        return self._driver.run(self._adopt(ticket))


class WriteLock(BaseWriter[WriteLease], Lock[N_co]):
    """The writing side of a lock; ``locked()``: whether anybody writes."""

    __slots__ = ()

    @overload
    def acquire(self, blocking: Literal[True] = True, timeout: Literal[-1] = -1) -> WriteLease | N_co: ...

    @overload
    def acquire(self, blocking: bool = True, timeout: float = -1) -> WriteLease | None: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> WriteLease | None:
        """A WriteLease, or None if the lock was not free in time. Without a timeout: the lock's ``wait``."""
        return self._driver.run(self._acquire(patience(blocking, timeout, self._terms.wait)))

    def adopt(self, ticket: str) -> WriteLease:
        """Go on with the writing that another process has handed over, on the terms of this object."""
        return self._driver.run(self._adopt(ticket))

    def __enter__(self) -> WriteLease:
        return self._driver.run(self._enter())


class RWLock(BaseRWLock[ReadLock[N_co], WriteLock[N_co]], Generic[N_co]):
    """A readers-writer lock: ``read`` and ``write`` are its two sides, each a lock."""

    __slots__ = ()
    if not TYPE_CHECKING:  # a type checker finds by itself that there is no way in
        __enter__ = __exit__ = use_a_side


class RecipeLease(FencelessLease, Lease):
    """A hold on a lock of history: no fence, no renewal."""

    __slots__ = ()

    def extend(self, n: float) -> None:
        """Unsupported: no lock of history can."""
        self._driver.run(refuse_to_extend(self._hold))

    def release(self) -> None:
        """Give it back as the recipe does. LeaseLost if the recipe finds that it was not its own any more."""
        self._driver.run(release_turn(self._hold))


class Recipe(BaseRecipe[Lease], Lock):
    """A lock of history, used like any other lock."""

    __slots__ = ()


class Cached(BaseCached, Generic[P, R]):
    """A function whose results are cached: what ``@client.cached`` makes of it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._client._fetch(*self._request(args, kwargs))
        return result

    def invalidate(self, *args: Any, **kwargs: Any) -> bool:
        """Forget the result of that call; whether there was one. What the key does not depend on may be left out."""
        forgotten: bool = self._client.invalidate(self.key(*args, **kwargs))
        return forgotten

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Cached[P, R]: ...

    @overload
    def __get__(self: Cached[Concatenate[S, Q], R], instance: S, owner: Any = None) -> Cached[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._bind(instance)


class Client(BaseClient):
    """Locks on one server. Any thread may use it; a forked child may, too, and holds nothing."""

    _driver: Driver

    @overload
    def lock(self, *names: str, wait: None = None, **options: Unpack[LockOptions[OnLost]]) -> Lock[Never]: ...

    @overload
    def lock(self, *names: str, wait: float | None, **options: Unpack[LockOptions[OnLost]]) -> Lock: ...

    def lock(
        self,
        *names: str,
        ttl: float = 30.0,
        wait: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
        cohort: int = 64,
    ) -> Lock:
        """A lock of that name; or of several, all or none, which cannot deadlock in whatever order they are named.

        ttl: seconds after which the lock is free again if its holder falls silent; renewed while it does not.
        wait: seconds to wait (None: for ever, 0: one try). Then ``with`` raises AcquireTimeout, and
            ``acquire()`` returns None.
        renew: whether the lease is renewed in the background.
        max_hold: seconds after which it is no longer renewed, and its holder is told.
        on_lost: called with the lease, in a thread of its own, when it is lost.
        label: a word for people who look at who holds what.
        cohort: how often in a row waiters of this process may pass it on among themselves; no more than the client's.
        """
        if len(names) > 1:
            several, terms = self._ask_all(names, (ttl, wait, renew, max_hold, on_lost, label, cohort))
            return MultiLock(self._driver, several, terms, Lease)
        keys, terms = self._ask(names, (ttl, wait, renew, max_hold, on_lost, label, cohort))
        return Lock(self._driver, keys, terms, Lease)

    def get_or_compute(
        self,
        key: str,
        fn: Callable[[], R],
        ttl: float = 60.0,
        *,
        stale: float = 0.0,
        errors: float = 0.0,
        early: float = 0.0,
        compute_ttl: float = 10.0,
        max_compute: float | None = None,
        wait: float | None = None,
        serializer: Serializer | None = None,
    ) -> R:
        """The value of that key; if there is none, one caller computes it by ``fn()`` and all the others get it.

        ttl: seconds for which it is fresh.
        stale: seconds after that for which the old one is served, while one caller, and only that, computes a new one.
        errors: seconds for which a failure is remembered. Who was waiting when it happened shares it anyway, as
            ComputeFailed.
        early: refresh before the time, by chance: 1 is a good number, 0 never. See docs/cache.md.
        compute_ttl: seconds after which another takes over if whoever computes falls silent; renewed while it does not.
        max_compute: seconds after which another takes over even so.
        wait: seconds to wait for another's computation before ComputeTimeout (None: for ever, 0: not at all).
        serializer: what has ``dumps`` and ``loads``. JSON if nothing is given, with bytes as they are.
        """
        policy = self._policy((ttl, stale, errors, early, compute_ttl, max_compute, wait, serializer))
        refuse_result(fn, key)
        value: R = self._fetch(self._entry(key), policy, fn)
        return value

    def _fetch(self, entry: Entry, policy: Policy, fn: Callable[[], Any]) -> Any:
        turn = self._driver.run(ask(self._desk, entry, policy))
        if turn.hold is None:
            return turn.read()
        try:
            data = turn.pack(finished(fn(), f"get_or_compute({entry.name!r})"))
        except BaseException as error:
            if not self._driver.run(turn.fail(error)):
                del turn  # it knows the error, and the error this frame
                raise
            self._served_old(entry.name, error)
            return turn.read()
        return self._driver.run(turn.store(data))

    def cached(
        self,
        key: str,
        ttl: float = 60.0,
        *,
        stale: float = 0.0,
        errors: float = 0.0,
        early: float = 0.0,
        compute_ttl: float = 10.0,
        max_compute: float | None = None,
        wait: float | None = None,
        serializer: Serializer | None = None,
    ) -> Callable[[Callable[P, R]], Cached[P, R]]:
        """Decorate a function so that its results are cached: ``@client.cached("user:{user_id}")``.

        The key names the arguments on which the result depends. Options are those of ``get_or_compute``. The decorated
        function has ``.key(...)``, the key of a call, and ``.invalidate(...)``, which makes it forgotten.
        """
        refuse_bare(key, "cached")
        policy = self._policy((ttl, stale, errors, early, compute_ttl, max_compute, wait, serializer))

        def decorate(function: Callable[P, R]) -> Cached[P, R]:
            return Cached(self, function, self._template(key, function, "cached"), policy)

        return decorate

    def invalidate(self, key: str) -> bool:
        """Forget the value of that key; whether there was one. Nothing that was begun before is stored after it."""
        return self._driver.run(forget(self._desk, self._entry(key), self._shared))

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["raise", "wait"] = "raise", **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["skip"], **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R | Skipped]]: ...

    @overload
    def exclusive(
        self, name: str, *, busy: Literal["skip"], default: D, **options: Unpack[Options]
    ) -> Callable[[Callable[P, R]], Callable[P, R | D]]: ...

    def exclusive(
        self,
        name: str,
        *,
        wait: float | None = 0.0,
        busy: str = "raise",
        default: Any = SKIPPED,
        ttl: float = 30.0,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
        cohort: int = 64,
    ) -> Callable[[Callable[..., Any]], Any]:
        """Let one caller at a time run a function: ``@client.exclusive("report:{user_id}", busy="skip")``.

        The name may depend on arguments: calls with different names run side by side.

        wait: seconds to wait for the turn before it counts as busy (None: for ever).
        busy: what then: "raise" AcquireTimeout, or "skip" the call and return ``default`` (holdfast.SKIPPED, which is
            false). With "wait" it waits for ever, or, if ``wait`` is given, raises AcquireTimeout after that.
        The other options are those of ``lock``. Within the function, ``holdfast.current_lease()`` is its lease.
        """
        refuse_bare(name, "exclusive")
        patience = exclusive_wait(wait, busy, default)
        self._ask(("x",), (ttl, patience, renew, max_hold, on_lost, label, cohort))

        def decorate(function: Callable[..., Any]) -> Any:
            template = self._template(name, function, "exclusive")

            def call(*args: Any, **kwargs: Any) -> Any:
                keys, terms = self._ask(
                    (template.name(args, kwargs),), (ttl, patience, renew, max_hold, on_lost, label, cohort)
                )
                lock = Lock(self._driver, keys, terms, Lease)
                entered = False
                try:
                    with lock as lease, holding(lease):
                        entered = True
                        return finished(function(*args, **kwargs), f"exclusive({name!r})")
                except AcquireTimeout:
                    if entered or busy != "skip":  # entered: it is that of another lock, within the function
                        raise
                    return default

            return update_wrapper(call, function)

        return decorate

    @overload
    def rlock(self, name: str, *, wait: None = None, **options: Unpack[LockOptions[OnLost]]) -> RLock[Never]: ...

    @overload
    def rlock(self, name: str, *, wait: float | None, **options: Unpack[LockOptions[OnLost]]) -> RLock: ...

    def rlock(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        wait: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
        cohort: int = 64,
    ) -> RLock:
        """A reentrant lock of that name: the thread that has it may take it again, and gives it back as often.

        The options are those of ``lock``. Who takes it again gets the same lease, on the terms of the first time.
        """
        keys, terms = self._ask((name,), (ttl, wait, renew, max_hold, on_lost, label, cohort))
        return RLock(self._driver, keys, terms, RLease, self._owned)

    @overload
    def semaphore(
        self, name: str, permits: int, *, wait: None = None, **options: Unpack[LockOptions[OnPermitLost]]
    ) -> Semaphore[Never]: ...

    @overload
    def semaphore(
        self, name: str, permits: int, *, wait: float | None, **options: Unpack[LockOptions[OnPermitLost]]
    ) -> Semaphore: ...

    def semaphore(
        self,
        name: str,
        permits: int,
        *,
        ttl: float = 30.0,
        wait: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Permit], object] | None = None,
        label: str = "",
        cohort: int = 64,
    ) -> Semaphore:
        """A semaphore of that name: at most so many hold at the same time, each a numbered slot (``lease.slot``).

        A smaller number of permits than before takes none back; it holds for those who ask from now on. The options
        are those of ``lock``, but for cohort, which does not apply.
        """
        keys, terms = self._ask_room(name, (ttl, wait, renew, max_hold, on_lost, label, cohort))
        return Semaphore(self._driver, keys, terms, Permit, whole("permits", permits, least=1))

    @overload
    def rwlock(self, name: str, *, wait: None = None, **options: Unpack[LockOptions[OnLost]]) -> RWLock[Never]: ...

    @overload
    def rwlock(self, name: str, *, wait: float | None, **options: Unpack[LockOptions[OnLost]]) -> RWLock: ...

    def rwlock(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        wait: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
        cohort: int = 64,
    ) -> RWLock:
        """A readers-writer lock of that name: ``read`` for any number at the same time, ``write`` for one alone.

        Both are locks. A thread that reads cannot ask for ``write``: WouldDeadlock. The options are those of ``lock``,
        but for cohort, which does not apply.
        """
        keys, terms = self._ask_room(name, (ttl, wait, renew, max_hold, on_lost, label, cohort))
        return RWLock(
            ReadLock(self._driver, keys, terms, Lease, self._insiders),
            WriteLock(self._driver, keys, terms, WriteLease, self._insiders),
        )

    def latch(self, name: str, count: int, *, retention: float = 3600.0) -> Latch:
        """A latch of that name, which opens when it was counted down so many times.

        count: how often; all who use the latch must say the same.
        retention: seconds for which it is remembered after it has opened, and until then after it was last used.
        """
        latch: Latch = self._make_latch(Latch, name, count, retention)
        return latch

    def election(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        wait: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
    ) -> Election:
        """An election of that name, in which one leads at a time: whoever holds the lock of that name.

        The options are those of ``lock``: ``ttl`` is how long nobody may lead once a leader has fallen silent, ``wait``
        how long one campaigns, ``max_hold`` how long a term may be, ``label`` what others see of the leader.
        """
        lock = self.lock(
            name, ttl=ttl, wait=wait, renew=renew, max_hold=max_hold, on_lost=on_lost, label=label, cohort=0
        )
        return Election(self._driver, lock)

    def adopt(
        self,
        ticket: str,
        *,
        ttl: float = 30.0,
        renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        label: str = "",
    ) -> Lease:
        """Go on with a hold that another process has handed over: a lease with a token and a fence of its own.

        It is a lease of what was handed over: of a semaphore a Permit, with the same slot; of several names one with
        the fence of each; of an rlock one that the caller may take again. NotAcquired if the ticket was adopted before,
        or its time ran out. The options are those of ``lock``.
        """
        offer, lock = self._read(ticket, (ttl, None, renew, max_hold, on_lost, label, 0))
        lease: Lease = self._driver.run(adopt(lock, offer))
        return lease

    def recipe(self, name: str, key: str, **options: Any) -> Lock:
        """A lock of history, word for word as it is still deployed. docs/recipes.md has their options and their pits.

        Each warns once per process, but for "holdfast", which is ``lock`` itself.
        """
        if name == FENCED:
            return self.lock(key, **fenced_options(options))
        recipe: Lock = self._recall(name, key, options, Recipe, RecipeLease)
        return recipe

    def close(self) -> None:
        """Let go of connections and threads. What is still held is lost: on_lost is called, then it is given back.

        It takes at most the client's ``timeout``. Leaving the ``with`` of such a lock raises LeaseLost.
        """
        self._driver.close(self._shared.timeout)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def connect(
    target: Any = None,
    *,
    namespace: str = "",
    timeout: float = 5.0,
    fence_retention: float = 3600.0,
    cohort: int = 64,
    on_lost: OnLost = None,
) -> Client:
    """A client of the server at a URL, of a redis.Redis, or (with neither) of HOLDFAST_URL or local://.

    Nothing is contacted until the first lock is. Close it, or use it as a context manager. ``on_lost`` is for all locks
    that have none of their own.
    """
    shared = client_terms(
        timeout=timeout, fence_retention=fence_retention, cohort=cohort, on_lost=on_lost, words=Client._words
    )
    try:
        aimed = aim(target, aio=False)
    except HoldfastError as error:
        cut_short(error)  # error reporters show the locals of frames, and the URL may hold a password
        raise
    return Client(Driver(aimed, namespace=namespace), namespace=namespace, shared=shared)


_default: Client | None = None
_default_lock = threading.Lock()


@overload
def lock(*names: str, wait: None = None, **options: Unpack[LockOptions[OnLost]]) -> Lock[Never]: ...


@overload
def lock(*names: str, wait: float | None, **options: Unpack[LockOptions[OnLost]]) -> Lock: ...


def lock(*names: str, **options: Any) -> Lock[Any]:
    """A lock of a client that is made on first use: ``with holdfast.lock("nightly"): ...``"""
    global _default  # noqa: PLW0603 (that is what a default client is)
    if _default is None:
        with _default_lock:
            _default = _default or connect()
    return _default.lock(*names, **options)
