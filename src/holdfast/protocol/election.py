"""Elections: one of many leads, until it steps down or falls silent; then another does.

Invariant. To lead is to hold the lock of the election's name. So everything that is true of a lease is true of a term:
no two overlap, each has a greater fence than all before it, and a leader knows by its own clock that its term is over
before the server can give the next one away.

Atomic: the steps of the mutex, and the look at who leads, which writes nothing.

Candidates of one process are no cohort: each queues on the server by itself. A leader stays for long, so nothing would
be gained by passing the office on without the network; and what the server knows, one token and one fence, is then
always what the leader has.

Terms. ``terms()`` campaigns, hands the lease out, and gives it back when the loop comes round. A lost term ends as a
term, and the loop goes on, until the terms are closed, from wherever. A loop can be left without a word to us, by
``break`` or by an error in its body. So the lease is also given back when the last reference to the terms is gone;
where nothing may be waited for, by the keeper.

Clocks. Since when somebody leads is read off the fence, which is the server's time in microseconds, unless it had to be
greater than that in order to rise.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Generic, NamedTuple, Never, TypeVar

from holdfast.errors import HoldfastError, LeaseLost, NotHeld, Unsupported
from holdfast.holder import holder_of
from holdfast.lease import ENDED, BaseLease
from holdfast.protocol.effects import STOPPED, Effects, Step
from holdfast.protocol.lock import BaseLock, release_lease

__all__ = ["BaseElection", "BaseTerms", "Leader", "leader_of", "use_lead_or_terms"]

L = TypeVar("L", bound=BaseLease)
log = logging.getLogger("holdfast")

NOT_LED: Final = "is not led by this candidate: only the Election object that leads can resign"


class Leader(NamedTuple):
    """Who leads, as far as the server knows."""

    host: str
    pid: int | None
    label: str
    fence: int | None  # the last one given out; that of its lease, unless a plain lock of this name is what is held
    since: float | None  # seconds since 1970, by the server's clock

    def __str__(self) -> str:
        return "-".join(part for part in (self.host, str(self.pid or ""), self.label) if part) or "somebody"


def leader_of(token: bytes, fence: int | None) -> Leader:
    """What may be shown of a token. That of another library has no readable part, and no fence."""
    holder = holder_of(token)
    if not holder.host:
        return Leader("", None, "", None, None)
    return Leader(holder.host, holder.pid, holder.label, fence, None if fence is None else fence / 1e6)


def use_lead_or_terms(election: object, *_: object) -> Never:
    """What entering an election, or a loop over it, comes to."""
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

    def _leader(self) -> Effects[Leader | None]:
        main, last, _, waiters = self._lock._keys.shared
        token, fence, kind = yield from self._lock._ask_server(Step("election_leader", (main, last, waiters), ()))
        if kind:
            said = f"election {self.name!r}: it is in use as a {kind}"
            raise Unsupported(said, "choose another name for one of the two")
        return leader_of(token, fence) if token else None

    def _resign(self) -> Effects[None]:
        try:
            yield from self._lock._release()
        except NotHeld:
            raise NotHeld(self.name, NOT_LED) from None

    def __reduce__(self) -> Any:
        raise TypeError("an Election cannot be pickled: connect and name it anew in the other process")

    def __repr__(self) -> str:
        state = "leading" if self._lock._lease is not None and self._lock._lease.held else "not leading"
        return f"<{state} {type(self).__module__}.Election object {self.name!r} at {id(self):#x}>"


class BaseTerms(Generic[L]):
    """The terms of one candidate, one after the other."""

    __slots__ = ("__weakref__", "_closed", "_driver", "_lease", "_lock")

    def __init__(self, driver: Any, lock: BaseLock[L]) -> None:
        self._driver = driver
        self._lock = lock
        self._lease: L | None = None  # of the term that is under way
        self._closed = False  # there are no more, like those of a generator that was closed

    def _begin(self) -> Effects[L | None]:
        """End the term that was, and campaign until there is another; None if there is to be none."""
        yield from self._end()
        if self._closed:
            return None
        lock = self._lock
        try:
            lease = self._lease = yield from lock._obtain(lock._terms.wait)
            if self._closed:  # by somebody else, while it campaigned
                yield from self._end()
                return None
            return lease
        except STOPPED:  # a signal handler may have struck on the threshold
            yield from self._end()
            raise

    def _close(self) -> Effects[None]:
        """End the term that is under way. There is no other."""
        self._closed = True
        yield from self._end()

    def _end(self) -> Effects[None]:
        """Give the lease back. Whatever comes of that, the term is over."""
        lease = self._lease
        if lease is not None and lease._hold.phase is not ENDED:  # else it resigned
            try:
                yield from release_lease(lease)
            except NotHeld:
                pass  # somebody resigns for it at this very moment
            except LeaseLost as lost:
                log.info("a term as leader of %r was lost: %s", self._lock.name, lost.reason)
            except HoldfastError as failed:
                # As text, for a log may keep what it is given, and an error keeps us alive by its traceback.
                log.warning("stepping down as leader of %r goes on in the background: %s", self._lock.name, str(failed))
        self._lease = None

    def _drop(self) -> None:
        """The same where nothing can be waited for: the keeper gives it back."""
        lease = self._lease
        if lease is None:
            return
        hold, driver = lease._hold, lease._driver
        if hold.mine and driver.book.leave(hold):
            hold.phase = ENDED
            driver.book.entrust(hold, driver.now())
            driver.keep()
            hold.gate.leave(hold)
            for bell in list(hold.bells):
                bell.ring()
        self._lease = None

    def __reduce__(self) -> Any:
        raise TypeError("the terms of an election cannot be pickled: campaign anew in the other process")
