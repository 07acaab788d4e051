# Derived from holdfast/aio/election.py by scripts/derive_blocking.py: edit that file, then run this script.
"""Elections of the blocking face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.blocking.differences import DroppedTerms
from holdfast.blocking.leases import Lease
from holdfast.blocking.locks import Lock
from holdfast.drivers.blocking import Driver
from holdfast.protocol.kinds.election import BaseElection, Leader, use_lead_or_terms

__all__ = ["Election", "Terms"]


class Terms(DroppedTerms[Lease]):
    """Terms as leader, one after the other, until closed. A loop gets the lease of each term."""

    __slots__ = ()
    _driver: Driver

    def __iter__(self) -> Terms:
        return self

    def __next__(self) -> Lease:
        lease = self._driver.run(self._begin())
        if lease is None:
            raise StopIteration
        return lease

    def close(self) -> None:
        """Step down if this candidate leads, from any thread. The loop ends at its next round."""
        self._driver.run(self._close())


class Election(BaseElection[Lease]):
    """An election. Each object is one candidate, and leads at most once at a time."""

    __slots__ = ()
    _driver: Driver
    _lock: Lock

    def lead(self) -> Lock:
        """The lock whose holder leads: ``with election.lead() as lease``."""
        return self._lock

    def leader(self) -> Leader | None:
        """The current leader, asked of the server; None if there is none. Also for programs that are no candidate."""
        return self._driver.run(self._leader())

    def resign(self) -> None:
        """Step down, from any thread. NotHeld if this candidate does not lead."""
        self._driver.run(self._resign())

    def terms(self) -> Terms:
        """Lead again and again: ``for lease in election.terms()``. Each round ends a term and campaigns again."""
        return Terms(self._driver, self._lock)

    if not TYPE_CHECKING:  # a type checker must see that it cannot be entered
        __enter__ = __exit__ = __iter__ = use_lead_or_terms
