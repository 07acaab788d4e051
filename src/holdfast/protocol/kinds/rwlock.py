"""The readers-writer lock: many readers, or one writer.

Invariant. While a writer holds the lock, there is no other holder. Readers and writers wait in one queue: adjacent
readers enter as a batch, and a reader that arrives behind a waiting writer waits behind it. So neither side can starve
the other.

A writer becomes a reader (``downgrade``) in one step: no other writer can enter in between, so the new reader reads
what it wrote. It keeps its lease and its fence; readers that enter later have greater fences.

A reader cannot become a writer: two readers that both wanted to would each wait for the other. So a thread or task that
asks for ``write`` while it reads is refused at once (WouldDeadlock), whether or not there is a second reader: release
the reading side first, acquire the writing side, and read again what may have changed. Readers are known by client,
name and caller, not by object. The caller is the thread or task that acquired: a lease that was passed to another
thread still counts as the first thread's. A writer that asks to read without a time limit would wait for itself, and is
refused as well.

Atomic and clocks: as in pool.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Generic, Never, TypeVar
from weakref import WeakSet, WeakValueDictionary

from holdfast.errors import WouldDeadlock
from holdfast.lease import BaseLease
from holdfast.names import Keys
from holdfast.options import LockOptions
from holdfast.protocol import mutex
from holdfast.protocol.effects import Effects, Step, caller
from holdfast.protocol.hold import HELD
from holdfast.protocol.kinds.pool import ALL, ANY, BasePool, PoolHold
from holdfast.protocol.wait.cohort import ObjectSlot

L = TypeVar("L", bound=BaseLease)
R = TypeVar("R", bound=BasePool[Any])
W = TypeVar("W", bound=BasePool[Any])

_WRITES: Final = (
    "this thread or task writes it, and would wait for itself forever. A writer may read, too; to let "
    "others read beside it, call downgrade() on its lease"
)

# By key and caller. Weak: each hold keeps its own set alive, so callers without holds are forgotten.
HoldsByCaller = WeakValueDictionary[tuple[str, Hashable], WeakSet[PoolHold]]


class BaseSide(BasePool[L]):
    """What both sides of a lock have in common: they know which side the caller holds."""

    __slots__ = ("_holds_by_caller",)

    _kind = "rwlock"

    def __init__(self, driver: Any, keys: Keys, options: LockOptions, lease_class: type[L], own: HoldsByCaller) -> None:
        self._holds_by_caller = own
        super().__init__(driver, keys, options, lease_class)

    def _note(self, lease: L, me: Hashable) -> None:
        super()._note(lease, me)
        hold = lease._hold
        assert isinstance(hold, PoolHold)
        hold.among = holds = self._holds_by_caller.setdefault((hold.keys.main, hold.owner), WeakSet())
        holds.add(hold)

    def _holds(self, mode: str, me: Hashable) -> bool:
        """Whether that thread or task holds this lock in that mode."""
        holds = list(self._holds_by_caller.get((self._keys.main, me), ()))
        return any(hold.mode == mode and hold.phase is HELD for hold in holds)


class BaseReader(BaseSide[L]):
    """The reading side of a lock."""

    __slots__ = ()

    def _mode(self) -> str:
        return ANY

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        if patience is None and self._holds(ALL, me):
            raise WouldDeadlock(self.name, _WRITES, key=self.key)
        return (yield from super()._obtain(patience, asker))

    def _locked(self) -> Effects[bool]:
        inside, alone = yield from self._look()
        return inside > 0 and not alone

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._holds(ALL, me):
            return _WRITES
        return "a writer holds it, or waits before us. Wait longer (wait=), or catch AcquireTimeout and try again later"


class BaseWriter(BaseSide[L]):
    """The writing side of a lock. Like any lock, the object has at most one lease."""

    __slots__ = ()

    def _mode(self) -> str:
        return ALL

    def _new_object_slot(self) -> ObjectSlot:
        return self._object_slot

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        if self._holds(ANY, me):
            raise WouldDeadlock(self.name, key=self.key)
        return (yield from super()._obtain(patience, asker))

    def _locked(self) -> Effects[bool]:
        _, alone = yield from self._look()
        return alone

    def _why_not(self, now: float, me: Hashable) -> str:
        if self._holds(ALL, me):
            return "this thread or task writes it already. Nested by mistake? Pass the lease down instead"
        return "others read or write it. Wait longer (wait=), or catch AcquireTimeout and try again later"


class BaseWriteLease(BaseLease):
    """A hold on the writing side, until it is downgraded."""

    __slots__ = ()


def downgrade_lease(lease: BaseWriteLease) -> Effects[None]:
    """Turn a writing hold into a reading one. May be repeated."""
    hold = lease._hold
    assert isinstance(hold, PoolHold)
    hold.mode = ANY  # even if this fails: other readers may have entered
    try:
        yield from mutex.step_as_holder(hold, Step("pool_share", hold.pool, (hold.token,)))
    finally:
        if hold.monitors is not None:
            hold.monitors.recheck(hold.pool[0])  # our own write ended client tracking: re-arm it


def use_a_side(both: object, *_: object) -> Never:
    """Raise TypeError, for a readers-writer lock that is entered itself."""
    raise TypeError("a readers-writer lock is acquired through one of its sides: use rw.read or rw.write")


class BaseRWLock(Generic[R, W]):
    """Both sides of one lock."""

    __slots__ = ("_read", "_write")

    def __init__(self, read: R, write: W) -> None:
        self._read = read
        self._write = write

    @property
    def name(self) -> str:
        return self._read.name

    @property
    def key(self) -> str:
        """The name with its namespace, as messages show it."""
        return self._read.key

    @property
    def read(self) -> R:
        """The side for readers: any number of them at the same time."""
        return self._read

    @property
    def write(self) -> W:
        """The side for writers: one, and no other holder."""
        return self._write

    if not TYPE_CHECKING:  # a type checker itself finds that there is no acquire

        def __getattr__(self, name: str) -> Never:
            text = f"{type(self).__name__!r} object has no attribute {name!r}: its sides are the locks, read and write"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.RWLock object {self.key!r} at {id(self):#x}>"
