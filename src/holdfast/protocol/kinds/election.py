"""Elections: one of many candidates leads, until it steps down or falls silent; then another candidate does.

Invariant. To lead is to hold the lock of the election's name. So all guarantees of a lease are guarantees of a term: no
two terms overlap, each has a greater fence than all before it, and a leader knows by its own clock that its term is
over before the server can grant the next one.

Atomic: the steps of the mutex, and the look at the leader, which writes nothing.

Candidates of one process form no cohort: each queues on the server. A leader stays for long, so passing leadership on
within a process would gain nothing; and the server's token and fence are always those of the leader.

Terms. ``terms()`` campaigns, yields the lease, and releases it when the loop comes round. A lost term ends like any
other, and the loop goes on until the terms are closed, from any place. A loop can also be left unnoticed, by ``break``
or by an error in its body. So the lease is also released when the last reference to the terms is gone; by the keeper,
where waiting is impossible.

Clocks. The start of a term is read from its fence. A fence is the server's time in microseconds, or the last fence plus
one if that is greater.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Generic, NamedTuple, Never, TypeVar

from holdfast.errors import HoldfastError, LeaseLost, NotHeld, Unsupported
from holdfast.holder import holder_of
from holdfast.lease import BaseLease
from holdfast.protocol.effects import STOPPED, Effects, Step
from holdfast.protocol.hold import ENDED
from holdfast.protocol.leases import release_lease
from holdfast.protocol.lock import BaseLock

L = TypeVar("L", bound=BaseLease)
log = logging.getLogger("holdfast")

NOT_LED: Final = "is not led by this candidate: only the Election object that leads can resign"


class Leader(NamedTuple):
    """The leader, as far as the server knows."""

    host: str
    pid: int | None
    label: str
    fence: int | None  # None if it took none: a recipe, or a waiter that the lock is reserved for
    since: float | None  # seconds since 1970, by the server's clock; None if the engine does not keep it

    def __str__(self) -> str:
        return "-".join(part for part in (self.host, str(self.pid or ""), self.label) if part) or "unknown"


def leader_of(token: bytes, fence: int | None, *, is_time: bool = True) -> Leader:
    """The leader that a token names. A token of another library names none, and has no fence.

    ``is_time``: whether the fence is the server's time.
    """
    holder = holder_of(token)
    if not holder.host:
        return Leader("", None, "", None, None)
    return Leader(holder.host, holder.pid, holder.label, fence, fence / 1e6 if fence is not None and is_time else None)


def use_lead_or_terms(election: object, *_: object) -> Never:
    """Raise TypeError, for an election that is entered or looped over."""
    raise TypeError("an election is neither a lock nor a loop: enter election.lead(), or loop over election.terms()")


class BaseElection(Generic[L]):
    """One election, in which this object is one candidate."""

    __slots__ = ("_driver", "_lock")

    def __init__(self, driver: Any, lock: BaseLock[L]) -> None:
        self._driver = driver
        self._lock = lock

    @property
    def name(self) -> str:
        return self._lock.name

    @property
    def key(self) -> str:
        """The name with its namespace, as messages show it."""
        return self._lock.key

    def _leader(self) -> Effects[Leader | None]:
        main, last, _, waiters = self._lock._keys.shared
        token, fence, kind, is_time = yield from self._lock._ask_server(
            Step("election_leader", (main, last, waiters), ())
        )
        if kind:
            problem = f"election {self.key!r}: it is in use as a {kind}"
            raise Unsupported(problem, "choose another name for one of the two")
        return leader_of(token, fence, is_time=is_time) if token else None

    def _resign(self) -> Effects[None]:
        try:
            yield from self._lock._release()
        except NotHeld:
            raise NotHeld(self.name, NOT_LED, key=self.key) from None

    def __reduce__(self) -> Any:
        raise TypeError("an Election cannot be pickled: connect in the other process and name the election there")

    def __repr__(self) -> str:
        state = "leading" if self._lock._lease is not None and self._lock._lease.held else "not leading"
        return f"<{state} {type(self).__module__}.Election object {self.key!r} at {id(self):#x}>"


class BaseTerms(Generic[L]):
    """The successive terms of one candidate."""

    __slots__ = ("__weakref__", "_closed", "_driver", "_lease", "_lock")

    def __init__(self, driver: Any, lock: BaseLock[L]) -> None:
        self._driver = driver
        self._lock = lock
        self._lease: L | None = None  # of the current term
        self._closed = False  # then there are no further terms

    def _begin(self) -> Effects[L | None]:
        """End the current term and campaign for the next; None if the terms are closed."""
        yield from self._end()
        if self._closed:
            return None
        lock = self._lock
        try:
            lease = self._lease = yield from lock._demand()
            if self._closed:  # by another caller during the campaign
                yield from self._end()
                return None
            return lease
        except STOPPED:  # perhaps interrupted between the grant and the return
            yield from self._end()
            raise

    def _close(self) -> Effects[None]:
        """End the current term, and begin no other."""
        self._closed = True
        yield from self._end()

    def _end(self) -> Effects[None]:
        """Release the lease. The term is over even if that fails."""
        lease = self._lease
        if lease is not None and lease._hold.phase is not ENDED:  # else it resigned
            try:
                yield from release_lease(lease)
            except NotHeld:
                pass  # another caller has resigned at the same time
            except LeaseLost as lost:
                log.info("lost the lead of %r: %s", self._lock.key, lost.reason)
            except HoldfastError as failed:
                # As text: a log may keep the error, whose traceback would keep these terms alive.
                log.warning("resigning from %r continues in the background: %s", self._lock.key, str(failed))
        self._lease = None

    def _drop(self) -> None:
        """End the current term where waiting is impossible: the keeper releases the lease."""
        lease = self._lease
        if lease is None:
            return
        hold, driver = lease._hold, lease._driver
        if hold.mine and driver.registry.leave(hold):
            hold.end()
            driver.registry.defer_cleanup(hold, driver.now())
            driver.keep()
            hold.object_slot.leave(hold)
            hold.wake_loss_waiters()
        self._lease = None

    def __reduce__(self) -> Any:
        raise TypeError("the terms of an election cannot be pickled: campaign in the other process")
