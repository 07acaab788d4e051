"""An in-memory model of one memcached server, as far as a lock needs it. Its owner moves its clock.

It has the interface of ``store.Store``, so a search can use either. It knows these commands:

    add <key> <flags> <exptime> <data>    STORED, or NOT_STORED if the item exists
    gets <key>                            data and cas of the item, or nothing
    md <key> [C<cas>]                     HD if it was deleted, NF if it does not exist, EX if its cas differs
    version

What matters for a lock on memcached:

- An exptime is in whole seconds: 0 means forever; a negative one has expired already; up to thirty days count from
  now; a larger number is a time since 1970.
- The clock ticks once a second, and an item expires at a tick. So an exptime of one second may end almost at once.
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
    __slots__ = ("_now_us", "connections", "deadlines", "outbox", "stamp", "stamps", "subscribed", "values", "written")

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
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
        for key in [key for key, deadline in self.deadlines.items() if now_us // 1000 > deadline]:
            self.remove(key)

    def execute(self, *words: bytes | str | int) -> Reply:
        """Execute one command. An error is a value like any other reply."""
        command, *rest = (encode(word) for word in words)
        try:
            match command, rest:
                case b"add", [key, flags, exptime, data]:
                    return self._add(_key(key), _number(flags), _number(exptime), data)
                case b"gets", [key]:
                    return [self.values[key], self.stamps[key]] if _key(key) in self.values else None
                case b"md", [key, *flags]:
                    return self._delete(_key(key), flags)
                case b"version", []:
                    return Status(f"VERSION {VERSION}")
            raise ReplyError("ERROR")
        except ReplyError as error:
            return error.with_traceback(None)

    def _add(self, key: bytes, flags: int, exptime: int, data: bytes) -> Reply:
        if flags < 0:
            raise ReplyError(BAD_LINE)
        if key in self.values:
            return Status("NOT_STORED")
        tick = self._now_us // 1_000_000
        ends = exptime if exptime > LONGEST_DELTA else tick + exptime
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
        twin = Memcached(self._now_us)
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
