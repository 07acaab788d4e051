"""An in-memory model of one memcached server, as far as a lock needs it. Its owner moves its clock.

It has the interface of ``store.Store``, so a search can use either. It knows these commands:

    add <key> <flags> <exptime> <data>    STORED, or NOT_STORED if the item exists
    cas <key> <flags> <exptime> <cas> <data>    STORED; EXISTS if the cas of the item differs; NOT_FOUND
    gets <key>                            data and cas of the item, or nothing
    md <key> [C<cas>]                     HD if it was deleted, NF if it does not exist, EX if its cas differs
    version
    stats                                 the clock, in seconds since 1970; of all statistics this one
    clock                                 the same, asked over two new connections, one after the other

What matters for a lock on memcached:

- An exptime is in whole seconds: 0 means forever; a negative one has expired already; up to thirty days count from
  now; a larger number is a time since 1970.
- The clock ticks once a second, and an item expires at a tick. So an exptime of one second may end almost at once.
- A server that was stopped answers the requests that have waited before it reads its clock again: until then, the
  clock stands where it stood (``stop_clock``, ``read_clock``). One thread accepts connections and reads the clock, in
  turn, so the second of two new connections finds the clock read: ``clock`` reads it.
- Each write of an item gives the item a new cas. After a restart the count of cas starts again.
- When memory is short, the server evicts items: ``remove`` does that.

A real server counts seconds on a clock that cannot be set; here, as in ``Store``, the owner sets the time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from holdfast.lab.servers.commands.arguments import encode
from holdfast.lab.servers.replies import Reply, ReplyError, Status
from holdfast.lab.servers.store import START_US

LONGEST_KEY: Final = 250
LONGEST_DELTA: Final = 60 * 60 * 24 * 30  # seconds; more than that is a time since 1970
VERSION: Final = "1.6.38"

BAD_LINE: Final = "CLIENT_ERROR bad command line format"
BAD_TOKEN: Final = "CLIENT_ERROR bad token in command line format"


class Memcached:
    """One server. Items are kept as bytes and their cas beside them, so that a copy costs three small dicts."""

    slot = None  # it is not a node of a cluster
    stopped_us = 0  # how long it was stopped, right before it is made
    waited = 0  # how many requests it answers after that, before it reads its clock
    __slots__ = (
        "_left", "_now_us", "_stands_at_us", "connections", "deadlines", "outbox", "stamp", "stamps", "subscribed",
        "values", "written",
    )  # fmt: skip

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self._left = self.waited
        self._stands_at_us = now_us - self.stopped_us if self.waited else None  # what a clock shows that was not read
        self.values: dict[bytes, bytes] = {}
        self.stamps: dict[bytes, int] = {}  # the cas of each item
        self.stamp = 0  # the latest cas
        self.deadlines: dict[bytes, int] = {}  # the last millisecond since 1970 of items that have one
        self.written: set[bytes] = set()  # keys written since the owner last cleared this set
        # A Store has these; here they stay empty.
        self.connections: dict[Hashable, object] = {}
        self.outbox: list[tuple[bytes, bytes]] = []
        self.subscribed: frozenset[bytes] = frozenset()

    @property
    def now_us(self) -> int:
        """The server's clock, in microseconds since 1970. Set it freely, also backwards."""
        return self._now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self._now_us = now_us
        self._expire()

    @property
    def _clock_us(self) -> int:
        return self._now_us if self._stands_at_us is None else self._stands_at_us

    def stop_clock(self) -> None:
        """The server is stopped, or only its clock has not been read again after that."""
        self._stands_at_us = self._clock_us

    def read_clock(self) -> None:
        self._stands_at_us = None
        self._expire()

    def _expire(self) -> None:
        for key in [key for key, deadline in self.deadlines.items() if self._clock_us // 1000 > deadline]:
            self.remove(key)

    def execute(self, *words: bytes | str | int) -> Reply:
        """Execute one command. An error is a value like any other reply."""
        command, *rest = (encode(word) for word in words)
        if self._left:
            self._left -= 1
        elif self.waited:
            self.read_clock()
        try:
            match command, rest:
                case b"add", [key, flags, exptime, data]:
                    return self._add(_key(key), _number(flags), _number(exptime), data)
                case b"cas", [key, flags, exptime, stamp, data]:
                    return self._swap(_key(key), _number(flags), _number(exptime), _number(stamp), data)
                case b"gets", [key]:
                    return [self.values[key], self.stamps[key]] if _key(key) in self.values else None
                case b"md", [key, *flags]:
                    return self._delete(_key(key), flags)
                case b"version", []:
                    return Status(f"VERSION {VERSION}")
                case b"stats", []:
                    return self._clock_us // 1_000_000
                case b"clock", [] | [b"again"]:
                    self.read_clock()
                    return self._clock_us // 1_000_000
            raise ReplyError("ERROR")
        except ReplyError as error:
            return error.with_traceback(None)

    def _add(self, key: bytes, flags: int, exptime: int, data: bytes) -> Reply:
        if flags < 0:
            raise ReplyError(BAD_LINE)
        if key in self.values:
            return Status("NOT_STORED")
        return self._store(key, exptime, data)

    def _swap(self, key: bytes, flags: int, exptime: int, stamp: int, data: bytes) -> Reply:
        if flags < 0:
            raise ReplyError(BAD_LINE)
        if key not in self.values:
            return Status("NOT_FOUND")
        return self._store(key, exptime, data) if stamp == self.stamps[key] else Status("EXISTS")

    def _store(self, key: bytes, exptime: int, data: bytes) -> Reply:
        tick = self._clock_us // 1_000_000
        ends = exptime if exptime > LONGEST_DELTA else tick + exptime
        self.remove(key)
        self.stamp += 1
        if exptime == 0 or ends > tick:  # if not, it has expired already; memcached answers STORED in this case too
            self.values[key] = data
            self.stamps[key] = self.stamp
            self.written.add(key)
            if exptime:
                self.deadlines[key] = ends * 1000 - 1
        return Status("STORED")

    def _delete(self, key: bytes, flags: list[bytes]) -> Reply:
        stamp = None
        for flag in flags:
            if flag[:1] != b"C" or not flag[1:].isdigit():
                raise ReplyError(BAD_TOKEN)
            stamp = int(flag[1:])
        if key not in self.values:
            return Status("NF")
        if stamp is not None and stamp != self.stamps[key]:
            return Status("EX")
        self.remove(key)
        return Status("HD")

    def remove(self, key: bytes) -> bool:
        """Remove an item that was deleted, has expired, or is evicted."""
        if self.values.pop(key, None) is None:
            return False
        del self.stamps[key]
        self.deadlines.pop(key, None)
        self.written.add(key)
        return True

    def copy(self) -> Memcached:
        """A server that behaves the same and shares nothing that can change."""
        twin = type(self)(self._now_us)
        twin._left, twin._stands_at_us = self._left, self._stands_at_us
        twin.values = self.values.copy()
        twin.stamps = self.stamps.copy()
        twin.stamp = self.stamp
        twin.deadlines = self.deadlines.copy()
        twin.written = self.written.copy()
        return twin

    def fingerprint(self) -> Hashable:
        """Equal for servers that behave the same from now on. Deadlines count from now, and so does the next tick."""
        now_us, deadlines = self._now_us, self.deadlines
        return (
            frozenset(
                (key, value, self.stamps[key], deadlines[key] * 1000 - now_us if key in deadlines else None)
                for key, value in self.values.items()
            ),
            now_us % 1_000_000,
            self.stamp,
            self._left,
            None if self._stands_at_us is None else now_us - self._stands_at_us,
        )


def _key(word: bytes) -> bytes:
    if not 0 < len(word) <= LONGEST_KEY or any(byte <= 32 or byte == 127 for byte in word):
        raise ReplyError(BAD_LINE)
    return word


def _number(word: bytes) -> int:
    try:
        return int(word)
    except ValueError:
        raise ReplyError(BAD_LINE) from None
