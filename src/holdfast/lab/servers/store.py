"""An in-memory model of one Redis server. Its owner moves its clock.

It runs the same Lua files that production sends to real servers, so the lab explores the deployed code.
tests/lab/test_store_matches_server.py checks that the model behaves like a server: it sends the same random commands
to both.

Three decisions make the model suitable for an explorer that takes millions of steps:

- Values are immutable (see ``values``), and so is the state of connections. So a copy costs a few small dicts.
- When the clock is moved, every key whose deadline has passed expires at once. A real server expires keys lazily and
  in the background, but only DBSIZE shows the difference. With expiry at once, two stores with the same fingerprint
  stay the same even if the clock is then set back. A key is gone once the clock is *past* its deadline, as on the
  server: in the millisecond of the deadline itself the key still exists, with a PTTL of 0.
- Replies that a real server gives in no particular order (KEYS, SMEMBERS, HGETALL) are sorted.

``slot`` makes the store a node of a cluster that is moving the only slot of its keys away: it then refuses scripts as
such a node does.

Not modelled: more than one database, blocking commands, eviction, replication, and RESP3.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from holdfast.lab.servers.commands import look_up
from holdfast.lab.servers.commands.arguments import encode
from holdfast.lab.servers.replies import OOM, WRONG_TYPE, Reply, ReplyError, Status
from holdfast.lab.servers.session import Connection, Session
from holdfast.lab.servers.values import Collection, Value, freeze

__all__ = ["Connection", "Reply", "ReplyError", "Session", "Status", "Store"]

C = TypeVar("C", bound=Collection)

START_US = 1_700_000_000_000_000  # A time in 2023, so that times have as many digits as in production.


class Store:
    """One server. ``execute`` runs a command that needs no state of a connection; ``session`` has such state."""

    __slots__ = (
        "_now_us",
        "connections",
        "deadlines",
        "oom",
        "outbox",
        "scripts",
        "slot",
        "subscribed",
        "values",
        "written",
    )

    def __init__(self, now_us: int = START_US) -> None:
        self._now_us = now_us
        self.values: dict[bytes, Value] = {}
        self.deadlines: dict[bytes, int] = {}  # In milliseconds since 1970, for keys that have one.
        self.scripts: frozenset[bytes] = frozenset()  # The digests that EVALSHA knows.
        self.connections: dict[Hashable, Connection] = {}  # Only those with state: watched keys, or MULTI.
        self.outbox: list[tuple[bytes, bytes]] = []  # (channel, message), for the owner to deliver and clear.
        self.subscribed: frozenset[bytes] = frozenset()  # The channels that have a subscriber, one each.
        self.written: set[bytes] = set()  # The keys written since the owner last cleared this set.
        self.oom = False  # Memory is full: commands that may need more memory are refused.
        self.slot = ""  # The slot of all keys, on a cluster: "moving" away, "divided" between two nodes, or settled.

    @property
    def now_us(self) -> int:
        """The server's clock, in microseconds since 1970. Set it freely, also backwards."""
        return self._now_us

    @now_us.setter
    def now_us(self, now_us: int) -> None:
        self._now_us = now_us
        if self.deadlines:
            now_ms = now_us // 1000
            for key in [key for key, deadline in self.deadlines.items() if now_ms > deadline]:
                self.remove(key)

    @property
    def now_ms(self) -> int:
        return self._now_us // 1000

    def execute(self, *words: bytes | str | int) -> Reply:
        """Execute one command, as a client would send it. An error is a value like any other reply."""
        return self.run([encode(word) for word in words])

    def run(self, words: Sequence[bytes]) -> Reply:
        try:
            command = look_up(words)
            if self.oom and command.deny_oom:
                raise ReplyError(OOM)
            return command.run(self, *words[command.skip :])
        except ReplyError as error:
            return error.with_traceback(None)

    def session(self, name: Hashable = None) -> Session:
        """The connection of that name, new or existing, with WATCH and MULTI; without a name, always a new one.

        Its state is part of the store and of copies of the store and, if it has a name, of the fingerprint.
        """
        return Session(self, object() if name is None else name)

    def copy(self) -> Store:
        """A store that behaves the same and shares nothing that can change."""
        twin = Store.__new__(Store)
        twin._now_us = self._now_us
        twin.values = self.values.copy()
        twin.deadlines = self.deadlines.copy()
        twin.scripts = self.scripts
        twin.connections = self.connections.copy()
        twin.outbox = self.outbox.copy()
        twin.subscribed = self.subscribed
        twin.written = self.written.copy()
        twin.oom = self.oom
        twin.slot = self.slot
        return twin

    def fingerprint(self) -> Hashable:
        """Equal for stores that behave the same from now on, except for replies to TIME.

        Deadlines count from now. The part of the clock below a millisecond counts too, because it decides in
        which millisecond the next ttl will end.
        """
        now_us = self._now_us
        deadlines = self.deadlines
        return (
            frozenset(
                (key, freeze(value), deadlines[key] * 1000 - now_us if key in deadlines else None)
                for key, value in self.values.items()
            ),
            now_us % 1000,
            self.scripts,
            frozenset(self.connections.items()),
            tuple(self.outbox),
            self.subscribed,
            self.oom,
            self.slot,
        )

    # The following methods are for commands.

    def string(self, key: bytes) -> bytes | None:
        value = self.values.get(key)
        if value is None or isinstance(value, bytes):
            return value
        raise ReplyError(WRONG_TYPE)

    def collection(self, key: bytes, kind: type[C]) -> C:
        """The value of the key; for a missing key, an empty collection of that kind."""
        value = self.values.get(key)
        if value is None:
            return kind()
        if isinstance(value, kind):
            return value
        raise ReplyError(WRONG_TYPE)

    def write(self, key: bytes, value: Value) -> None:
        """Change the value of the key and keep its ttl. If the new value is an empty collection, delete the key."""
        if not value and not isinstance(value, bytes):
            self.remove(key)
        else:
            self.values[key] = value
            self._touch(key)

    def replace(self, key: bytes, value: Value, deadline: int | None = None) -> None:
        """Write the key as if it were new: an old ttl is removed."""
        self.values[key] = value
        if deadline is None:
            self.deadlines.pop(key, None)
        else:
            self.deadlines[key] = deadline
        self._touch(key)

    def expire(self, key: bytes, deadline: int) -> None:
        """Give the key a deadline. If that is not in the future, delete the key now, perhaps a millisecond early."""
        if deadline <= self.now_ms:
            self.remove(key)
        else:
            self.replace(key, self.values[key], deadline)

    def remove(self, key: bytes) -> bool:
        if self.values.pop(key, None) is None:
            return False
        self.deadlines.pop(key, None)
        self._touch(key)
        return True

    def _touch(self, key: bytes) -> None:
        """Mark all connections that watch the key: their EXEC will do nothing, even if the value is the same."""
        self.written.add(key)
        for name, connection in self.connections.items():
            if key in connection.watched:
                self.connections[name] = connection._replace(watched=frozenset(), spoiled=True)
