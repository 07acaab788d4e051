"""The reentrant lock: its owner may acquire it again, and has to release it equally often.

Invariant. A lease of a reentrant lock has one owner, a thread or an asyncio task, and a depth: how often its owner has
acquired it and not yet released it. Only the owner changes the depth. The server knows no depths: it sees one acquire
before the first and one release after the last, so all guarantees of the mutex apply.

Ownership is kept by client, name and owner, not by object: locks are known by their names, and a function that acquires
the lock "a" again should not need its caller's object. Each acquire gives the same lease, with the options (ttl,
max_hold, on_lost) of the first. An owner is an object that lives at least as long as what it owns, never a number: the
number of an ended thread is given to another thread.

A lost lease stays its owner's until it was released equally often: a further acquire raises LeaseLost, and so does each
release, as the guarded work should stop early. In a forked child nothing is owned.

Atomic: only its owner changes a depth, by assignments that may be repeated. So an interrupt between any two bytecodes
finds the depth before or after the change.

Why not count on the server? It would put a hash in the key, which no other library understands, and a resent acquire
could be counted twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from holdfast.errors import NotHeld, Unsupported
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol.effects import STOPPED, Effects, attach, caller, clock, detach
from holdfast.protocol.hold import ENDED, Hold
from holdfast.protocol.kinds.handover import Ticket, hand_over
from holdfast.protocol.leases import release_lease
from holdfast.protocol.lock import BaseLock, weakly
from holdfast.protocol.refusals import TRY_LATER

ANOTHERS: Final = (
    "belongs to another thread or task, and only its owner can release it (asyncio.gather, and before Python 3.12 "
    "asyncio.wait_for, acquire it in a task of their own: use acquire(timeout=...))"
)

HELD_BY_A_LOCK: Final = (
    "this thread or task holds it through a Lock object, which is not reentrant. Nested by mistake? Use client.rlock "
    "for both"
)
HELD_HERE: Final = (
    f"another thread or task of this process holds it (asyncio.gather starts tasks of its own). {TRY_LATER}"
)


class ReentrantLease(BaseLease):
    """A hold on a reentrant lock, the same for each acquire of its owner."""

    __slots__ = ("_depth", "_owner")

    def __init__(self, driver: Any, hold: Hold) -> None:
        super().__init__(driver, hold)
        self._depth = 1
        self._owner: Hashable = None


L = TypeVar("L", bound=ReentrantLease)
# By key and owner. Weak: a lease without other references counts as dropped.
Owned = WeakValueDictionary[tuple[str, Hashable], Any]


class BaseRLock(BaseLock[L]):
    """One reentrant lock, with its options."""

    __slots__ = ("_owned",)

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L], owned: Owned) -> None:
        self._owned = owned
        super().__init__(driver, keys, options, lease_class)

    def _new_hold(self) -> Hold:
        hold = super()._new_hold()
        hold.kind = "rlock"
        return hold

    def _note(self, lease: L, me: Hashable) -> None:
        """Record the owner, which may then acquire it again."""
        super()._note(lease, me)
        lease._owner = me
        self._owned[self._keys.main, me] = lease

    def _find(self, me: Hashable) -> L | None:
        """This owner's lease, through any object; it may be lost."""
        lease: L | None = self._owned.get((self._keys.main, me))
        return None if lease is None or lease._hold.phase is ENDED else lease

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        mine = self._find(me)
        if mine is None or not mine._hold.mine:
            return (yield from self._take(me, patience))
        hold, depth = mine._hold, mine._depth
        if reason := hold.why_lost((yield from clock())):
            raise hold.lost_error(reason)
        try:
            mine._depth = depth + 1
            self._lease = mine
            return mine
        except STOPPED:
            mine._depth = depth
            raise

    def _take(self, me: Hashable, patience: float | None) -> Effects[L]:
        """Acquire it for the first time."""
        lease = yield from super()._obtain(patience, weakly(me))
        try:
            self._note(lease, me)
            return lease
        except STOPPED:  # interrupted: the caller does not get the lease
            yield from release_lease(lease)
            raise

    def _release(self) -> Effects[None]:
        lease = self._find((yield from caller()))
        if lease is None:
            if self._lease is None:
                raise NotHeld(self.name, key=self.key)
            hold = self._lease._hold
            raise hold.not_held_error() if hold.phase is ENDED else NotHeld(self.name, ANOTHERS, key=self.key)
        yield from release_level(lease)

    def _enter(self) -> Effects[L]:
        lease = yield from self._demand()
        entry = None
        try:
            hold = lease._hold
            # A loss cancels only the outermost body, and with it the inner ones.
            cancels = self._options.cancels or self._options.on_lost is None
            if cancels and (lease._depth == 1 or hold.notify is None):
                me, block = yield from attach(hold)
            else:
                me, block = (yield from caller()), None
            entry = me, lease, block
            self._entered.append(entry)
            return lease
        except STOPPED:  # interrupted before the body runs, so __exit__ would not release it
            if entry is not None and self._entered and self._entered[-1] is entry:
                self._entered.pop()
            yield from _give_back(lease)
            raise

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._lease is not None and self._lease._hold.why_lost(now):
            return "the last lease of this RLock object was lost. Its owner must call release(), which raises LeaseLost"
        held = self._held_here(now)
        if not held:
            return ""
        return HELD_BY_A_LOCK if weakly(me) in held.values() else HELD_HERE

    def _leave(self, error: BaseException | None) -> Effects[None] | None:
        if len(self._entered) == 1 and self._entered[0][1]._depth == 1:
            return super()._leave(error)
        return self._leave_level(error)

    def _leave_level(self, error: BaseException | None) -> Effects[None]:
        """Leave one of several nested blocks; the outermost is left like that of any lock."""
        struck: BaseException | None = None
        try:
            entered = self._find_entered((yield from caller()))
        except NotHeld:
            raise
        except STOPPED as interrupt:  # leave the block first, then raise the interrupt
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
                if left_with is not error:  # cancelled by another task while leaving the block
                    raise left_with
                return
            reason = hold.why_lost((yield from clock())) or (hold.reason if cut_short else "")
            if reason:
                raise hold.lost_error(reason)
        except STOPPED:
            lease._depth = depth - 1
            raise
        finally:
            try:
                self._entered.remove(entered)
            except ValueError:
                pass  # after an interrupt this runs twice

    def __repr__(self) -> str:
        taken = self._object_slot or (self._lease is not None and self._lease._hold.phase is not ENDED)
        state = "locked" if taken else "unlocked"
        return f"<{state} {type(self).__module__}.RLock object {self.key!r} at {id(self):#x}>"


def release_level(lease: ReentrantLease) -> Effects[None]:
    """Release one level; NotHeld if the caller does not own it, LeaseLost if it was lost before."""
    me = yield from caller()
    hold = lease._hold
    if not hold.mine:
        raise hold.lost_error()
    if hold.phase is ENDED:
        raise hold.not_held_error()
    if lease._owner != me:
        raise NotHeld(hold.name, ANOTHERS, key=hold.key)
    yield from _give_back(lease)


def hand_over_level(lease: ReentrantLease) -> Effects[Ticket]:
    """Hand it over, unless it is nested: the outer levels would go on without it."""
    me = yield from caller()
    hold = lease._hold
    if hold.mine and lease._owner != me:
        raise NotHeld(hold.name, ANOTHERS, key=hold.key)
    if lease._depth > 1:
        raise Unsupported(
            f"hand_over of {hold.key!r}, which its owner has acquired {lease._depth} times",
            "release the inner levels first",
        )
    return (yield from hand_over(lease))


def _give_back(lease: ReentrantLease) -> Effects[None]:
    hold, depth = lease._hold, lease._depth
    lease._depth = depth - 1
    if depth > 1:
        if reason := hold.why_lost((yield from clock())):
            raise hold.lost_error(reason)
        return
    yield from release_lease(lease)
