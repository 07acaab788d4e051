"""The readers-writer lock: many readers, or one writer.

Invariant. While a writer holds, nobody else does. Readers and writers stand in one queue: readers next to each other
come in as a batch, and a reader that arrives behind a waiting writer waits behind it. So neither side can starve the
other.

From writing to reading (``downgrade``) is one step: there is no moment in which another writer could get in, so what
was written is what is then read. It stays the same lease, with the same fence; readers who come in beside it have
greater ones.

From reading to writing there is no way, and none can be had: two readers who both wanted that would each wait for the
other to leave. So a thread or task that asks for ``write`` while it reads is refused at once (WouldDeadlock), whether
or not there is a second one today: give the reading back first, take the writing, and read again what may have changed
meanwhile. Who reads is known by client, name and caller, not by object; the caller is who has acquired it, so a lease
that was passed to another thread counts as the first one's. Whoever writes and asks to read, without a limit of time,
would wait for itself, and is refused likewise.

Atomic and clocks: as in room.py.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Generic, Never, TypeVar
from weakref import WeakSet, WeakValueDictionary

from holdfast.errors import WouldDeadlock
from holdfast.lease import HELD, BaseLease, Terms
from holdfast.names import Keys
from holdfast.protocol import mutex
from holdfast.protocol.cohort import Gate
from holdfast.protocol.effects import Effects, Step, caller
from holdfast.protocol.room import ALL, ANY, BaseRoom, RoomHold

__all__ = ["BaseRWLock", "BaseReader", "BaseWriteLease", "BaseWriter", "Insiders", "downgrade_lease", "use_a_side"]

L = TypeVar("L", bound=BaseLease)
R = TypeVar("R", bound=BaseRoom[Any])
W = TypeVar("W", bound=BaseRoom[Any])

_WRITES: Final = (
    "this thread or task writes it, and would wait for itself, for ever. What it writes it may read as well; to let "
    "others read beside it, call downgrade() on its lease"
)

# By key and caller: what it has. Weak, so that what nobody holds is forgotten: a set lives by the holds in it.
Insiders = WeakValueDictionary[tuple[str, Hashable], WeakSet[RoomHold]]


def note_insider(insiders: Insiders, hold: RoomHold) -> None:
    hold.among = holds = insiders.setdefault((hold.keys.main, hold.owner), WeakSet())
    holds.add(hold)


def has(wanted: str, insiders: Insiders, main: str, me: Hashable) -> bool:
    return any(hold.wanted == wanted and hold.phase is HELD for hold in list(insiders.get((main, me), ())))


class BaseReader(BaseRoom[L]):
    """The reading side of a lock."""

    __slots__ = ("_insiders",)

    _species = "rwlock"

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L], insiders: Insiders) -> None:
        self._insiders = insiders
        super().__init__(driver, keys, terms, lease_class)

    def _wanted(self) -> str:
        return ANY

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        if patience is None and has(ALL, self._insiders, self._keys.main, me):
            raise WouldDeadlock(self.name, _WRITES)
        return (yield from super()._obtain(patience, asker))

    def _note(self, lease: L, me: Hashable) -> None:
        super()._note(lease, me)
        note_insider(self._insiders, lease._hold)  # type: ignore[arg-type]

    def _locked(self) -> Effects[bool]:
        inside, alone = yield from self._look()
        return inside > 0 and not alone

    def _why_not(self, now: float, me: Hashable) -> str:
        if has(ALL, self._insiders, self._keys.main, me):
            return _WRITES
        return "a writer holds it, or is before us. Wait longer (wait=), or catch AcquireTimeout and come back later"


class BaseWriter(BaseRoom[L]):
    """The writing side of a lock. Like any lock, an object of it has at most one lease."""

    __slots__ = ("_insiders",)

    _species = "rwlock"

    def __init__(self, driver: Any, keys: Keys, terms: Terms, lease_class: type[L], insiders: Insiders) -> None:
        self._insiders = insiders
        super().__init__(driver, keys, terms, lease_class)

    def _wanted(self) -> str:
        return ALL

    def _new_gate(self) -> Gate:
        return self._gate

    def _obtain(self, patience: float | None, asker: Hashable = None) -> Effects[L]:
        me = yield from caller()
        if has(ANY, self._insiders, self._keys.main, me):
            raise WouldDeadlock(self.name)
        return (yield from super()._obtain(patience, asker))

    def _note(self, lease: L, me: Hashable) -> None:
        super()._note(lease, me)
        note_insider(self._insiders, lease._hold)  # type: ignore[arg-type]

    def _locked(self) -> Effects[bool]:
        _, alone = yield from self._look()
        return alone

    def _why_not(self, now: float, me: Hashable) -> str:
        if has(ALL, self._insiders, self._keys.main, me):
            return "this thread or task writes it already. Nested by mistake? Pass the lease down instead"
        return "others read or write it. Wait longer (wait=), or catch AcquireTimeout and come back later"


class BaseWriteLease(BaseLease):
    """A hold on the writing side, until it is downgraded."""

    __slots__ = ()


def downgrade_lease(lease: BaseWriteLease) -> Effects[None]:
    """From writing to reading. Done twice it is as if done once."""
    hold = lease._hold
    assert isinstance(hold, RoomHold)
    hold.wanted = ANY  # whatever comes of it: by the time we know, others may be inside
    try:
        yield from mutex.insist(hold, Step("room_share", hold.room, (hold.token,)))
    finally:
        if hold.lookouts is not None:
            hold.lookouts.stir(hold.room[0])  # it was we who wrote there, and a watch has ended by that


def use_a_side(both: object, *_: object) -> Never:
    """What entering both sides comes to."""
    raise TypeError("a readers-writer lock is taken by one of its sides: use rw.read or rw.write")


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
    def read(self) -> R:
        """The side of those who only look: any number of them at the same time."""
        return self._read

    @property
    def write(self) -> W:
        """The side of those who change something: one, and nobody else."""
        return self._write

    if not TYPE_CHECKING:  # a type checker finds by itself that it has no acquire

        def __getattr__(self, name: str) -> Never:
            said = f"{type(self).__name__!r} object has no attribute {name!r}: its sides are the locks, read and write"
            raise AttributeError(said, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.RWLock object {self.name!r} at {id(self):#x}>"
