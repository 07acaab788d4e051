"""The reentrant lock: whoever holds it may take it again, and has to give it back as often.

Invariant. A lease of a reentrant lock has one owner, a thread or an asyncio task, and a depth: how often its owner has
taken it and not yet given it back. Only its owner makes it deeper; the server knows nothing of depths, and sees one
acquire before the first and one release after the last. So all that is promised of the mutex holds here as it is.

Who owns what is kept by client, name and owner, not by object: locks are known by their names, and a function that
takes the lock "a" again should not need the object of its caller. Each taking gives the same lease. The terms (ttl,
max_hold, on_lost) are those of the first. An owner is an object that lives at least as long as what it owns, never a
number: the number of a thread that has ended is given to another thread.

A lost lease stays its owner's until it was given back as often as it was taken: to take it once more raises LeaseLost,
and so does each release, for the sooner the guarded work stops the better. In a forked child nothing is owned.

Atomic: a depth is changed by its owner alone, by assignments that may be done twice, so an interrupt between any two
bytecodes finds it as it was or as it will be.

Why not count on the server? It would put a hash in the key, which no other library understands, and a lost reply
to one more acquire could be counted twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from holdfast.errors import LeaseLost, NotHeld, Unsupported
from holdfast.lease import ENDED, BaseLease, Hold, Terms
from holdfast.names import Keys
from holdfast.protocol.effects import STOPPED, Effects, attach, caller, clock, detach
from holdfast.protocol.handover import Ticket, hand_over
from holdfast.protocol.lock import COME_BACK, BaseLock, release_lease, weakly

__all__ = ["BaseRLock", "Owned", "ReentrantLease", "hand_over_level", "release_level"]


ANOTHERS: Final = (
    "belongs to another thread or task, and only the one that has taken it can give it back (asyncio.gather, and "
    "before Python 3.12 asyncio.wait_for, take it in a task of their own: use acquire(timeout=...))"
)

HELD_BY_A_LOCK: Final = (
    "this thread or task holds it through a Lock object, which is not reentrant. Nested by mistake? Use client.rlock "
    "for both"
)
HELD_HERE: Final = (
    f"another thread or task of this process holds it (asyncio.gather starts tasks of its own). {COME_BACK}"
)


class ReentrantLease(BaseLease):
    """A hold on a reentrant lock, the same for each time that its owner has taken it."""

    __slots__ = ("_depth", "_owner")

    def __init__(self, driver: Any, hold: Hold) -> None:
        super().__init__(driver, hold)
        self._depth = 1
        self._owner: Hashable = None


L = TypeVar("L", bound=ReentrantLease)
# By key and owner. Weak, because a lease that is only remembered here was dropped by everybody else.
Owned = WeakValueDictionary[tuple[str, Hashable], Any]


class BaseRLock(BaseLock[L]):
    """One reentrant lock, asked for on given terms."""

    __slots__ = ("_owned",)

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L], owned: Owned) -> None:
        self._owned = owned
        super().__init__(driver, keys, terms, lease_class)

    def _new_hold(self) -> Hold:
        hold = super()._new_hold()
        hold.species = "rlock"
        return hold

    def _note(self, lease: L, me: Hashable) -> None:
        """It is this caller's from now on, which may take it again."""
        super()._note(lease, me)
        lease._owner = me
        self._owned[self._keys.main, me] = lease

    def _find(self, me: Hashable) -> L | None:
        """What this owner has, through whichever object; it may be lost."""
        lease: L | None = self._owned.get((self._keys.main, me))
        return None if lease is None or lease._hold.phase is ENDED else lease

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        mine = self._find(me)
        if mine is None or not mine._hold.mine:
            return (yield from self._take(me, patience))
        hold, depth = mine._hold, mine._depth
        if reason := hold.why_lost((yield from clock())):
            raise LeaseLost(hold.name, hold.fence, reason)
        try:
            mine._depth = depth + 1
            self._lease = mine
            return mine
        except STOPPED:
            mine._depth = depth
            raise

    def _take(self, me: Hashable, patience: float | None) -> Effects[L]:
        """Take it for the first time."""
        lease = yield from super()._obtain(patience, weakly(me))
        try:
            self._note(lease, me)
            return lease
        except STOPPED:  # a signal handler struck here: nobody will have it
            yield from release_lease(lease)
            raise

    def _release(self) -> Effects[None]:
        lease = self._find((yield from caller()))
        if lease is None:
            if self._lease is None:
                raise NotHeld(self.name)
            hold = self._lease._hold
            raise hold.ended() if hold.phase is ENDED else NotHeld(self.name, ANOTHERS)
        yield from release_level(lease)

    def _enter(self) -> Effects[L]:
        lease = yield from self._obtain(self._terms.wait)
        entry = None
        try:
            hold = lease._hold
            # One body is told of the loss: the outermost, whose inner ones are cancelled with it.
            cancels = self._terms.cancels or self._terms.on_lost is None
            if cancels and (lease._depth == 1 or hold.notify is None):
                me, block = yield from attach(hold)
            else:
                me, block = (yield from caller()), None
            entry = me, lease, block
            self._entered.append(entry)
            return lease
        except STOPPED:  # interrupted on the threshold: the body will not run, so nobody else would release it
            if entry is not None and self._entered and self._entered[-1] is entry:
                self._entered.pop()
            yield from _give_back(lease)
            raise

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._lease is not None and self._lease._hold.why_lost(now):
            return "the last lease of this RLock object was lost. Its owner has to call release(), which says so"
        held = self._held_here(now)
        if not held:
            return ""
        return HELD_BY_A_LOCK if weakly(me) in held.values() else HELD_HERE

    def _leave(self, error: BaseException | None) -> Effects[None] | None:
        if len(self._entered) == 1 and self._entered[0][1]._depth == 1:
            return super()._leave(error)
        return self._leave_level(error)

    def _leave_level(self, error: BaseException | None) -> Effects[None]:
        """Leave one of several blocks; where it is the last one after all, as any lock is left."""
        struck: BaseException | None = None
        try:
            entered = self._find_entered((yield from caller()))
        except NotHeld:
            raise
        except STOPPED as interrupt:  # before anything was done, which nobody else would do
            struck = interrupt
            entered = self._find_entered((yield from caller()))
        _, lease, block = entered
        hold, depth = lease._hold, lease._depth
        if depth <= 1:
            yield from self._leave_in_order(error, struck)
            return
        try:
            lease._depth = depth - 1
            if struck is not None:
                raise struck
            left_with, cut_short = error, False
            if block is not None:
                left_with, cut_short = yield from detach(hold, block, error)
            if left_with is not None:
                if left_with is not error:  # cancelled by somebody else on the way out
                    raise left_with
                return
            reason = hold.why_lost((yield from clock())) or (hold.reason if cut_short else "")
            if reason:
                raise LeaseLost(hold.name, hold.fence, reason)
        except STOPPED:
            lease._depth = depth - 1
            raise
        finally:
            try:
                self._entered.remove(entered)
            except ValueError:
                pass  # an interrupt has brought us here twice

    def __repr__(self) -> str:
        taken = self._gate or (self._lease is not None and self._lease._hold.phase is not ENDED)
        state = "locked" if taken else "unlocked"
        return f"<{state} {type(self).__module__}.RLock object {self.name!r} at {id(self):#x}>"


def release_level(lease: ReentrantLease) -> Effects[None]:
    """Give it back once. NotHeld if the caller does not own it, LeaseLost if it was lost before."""
    me = yield from caller()
    hold = lease._hold
    if not hold.mine:
        raise LeaseLost(hold.name, hold.fence, hold.reason)
    if hold.phase is ENDED:
        raise hold.ended()
    if lease._owner != me:
        raise NotHeld(hold.name, ANOTHERS)
    yield from _give_back(lease)


def hand_over_level(lease: ReentrantLease) -> Effects[Ticket]:
    """Hand it over; not while it is taken more than once, for the inner ones would go on without it."""
    me = yield from caller()
    hold = lease._hold
    if hold.mine and lease._owner != me:
        raise NotHeld(hold.name, ANOTHERS)
    if lease._depth > 1:
        raise Unsupported(
            f"hand_over of {hold.name!r}, which its owner has taken {lease._depth} times",
            "give the inner ones back first",
        )
    return (yield from hand_over(lease))


def _give_back(lease: ReentrantLease) -> Effects[None]:
    hold, depth = lease._hold, lease._depth
    lease._depth = depth - 1
    if depth > 1:
        if reason := hold.why_lost((yield from clock())):
            raise LeaseLost(hold.name, hold.fence, reason)
        return
    yield from release_lease(lease)
