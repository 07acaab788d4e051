"""One connection to a store, with WATCH and MULTI.

The store keeps the state of a connection, as a server does, so copies and fingerprints of the store include it. A
session is only a name for that state: after ``twin = store.copy()``, ``twin.session(name)`` continues with the state
that the original had.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from holdfast.lab.servers.commands import look_up
from holdfast.lab.servers.commands.arguments import encode
from holdfast.lab.servers.replies import OK, OOM, Reply, ReplyError, Status

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store

QUEUED = Status("QUEUED")


class Connection(NamedTuple):
    """What the server remembers of one connection."""

    watched: frozenset[bytes] = frozenset()
    spoiled: bool = False  # A watched key was written. EXEC will do nothing, so further watched keys do not matter.
    queue: tuple[tuple[bytes, ...], ...] | None = None  # None outside MULTI.
    refused: bool = False  # A command could not be queued: all commands are dropped, and EXEC fails.


_IDLE = Connection()


class Session:
    __slots__ = ("_name", "_store")

    def __init__(self, store: Store, name: Hashable) -> None:
        self._store = store
        self._name = name

    def execute(self, *words: bytes | str | int) -> Reply:
        """Execute one command, or queue it after MULTI."""
        line = tuple(encode(word) for word in words)
        try:
            return self._execute(line)
        except ReplyError as error:
            return error.with_traceback(None)

    def close(self) -> None:
        """Forget the connection, with its watched keys and queued commands."""
        self._state = _IDLE

    @property
    def _state(self) -> Connection:
        return self._store.connections.get(self._name, _IDLE)

    @_state.setter
    def _state(self, state: Connection) -> None:
        if state == _IDLE:
            self._store.connections.pop(self._name, None)
        else:
            self._store.connections[self._name] = state

    def _execute(self, line: tuple[bytes, ...]) -> Reply:
        name = line[0].lower()
        queue = self._state.queue
        if queue is not None and name not in {b"exec", b"discard"}:
            return self._queue(queue, line)
        match name:
            case b"multi":
                look_up(line)
                self._state = self._state._replace(queue=())
                return OK
            case b"exec":
                return self._exec(line)
            case b"discard":
                return self._discard(line)
            case b"watch":
                look_up(line)
                if not self._state.spoiled:
                    self._state = self._state._replace(watched=self._state.watched.union(line[1:]))
                return OK
            case b"unwatch":
                look_up(line)
                self._state = _IDLE
                return OK
        return self._store.run(line)

    def _queue(self, queue: tuple[tuple[bytes, ...], ...], line: tuple[bytes, ...]) -> Reply:
        try:
            command = look_up(line)
            if command.name in {"multi", "watch"}:
                raise ReplyError(f"ERR Command '{command.name}' not allowed inside a transaction")
            if self._store.oom and command.deny_oom:
                raise ReplyError(OOM)
        except ReplyError:
            self._state = self._state._replace(queue=(), refused=True)
            raise
        if not (self._state.refused or self._state.spoiled):  # If not, EXEC will run nothing anyway.
            self._state = self._state._replace(queue=(*queue, line))
        return QUEUED

    def _exec(self, line: tuple[bytes, ...]) -> Reply:
        state = self._state
        try:
            look_up(line)
            if self._store.oom and any(look_up(queued).deny_oom for queued in state.queue or ()):
                raise ReplyError(OOM)
        except ReplyError as error:
            self._state = _IDLE
            reason = error.message.removeprefix("ERR ")
            raise ReplyError(f"EXECABORT Transaction discarded because of: {reason}") from None
        if state.queue is None:
            raise ReplyError("ERR EXEC without MULTI")
        # After EXEC nothing is watched, whatever its outcome. If a command fails, the following ones still run.
        self._state = _IDLE
        if state.refused:
            raise ReplyError("EXECABORT Transaction discarded because of previous errors.")
        if state.spoiled:
            return None
        return [self._store.run(queued) for queued in state.queue]

    def _discard(self, line: tuple[bytes, ...]) -> Reply:
        state = self._state
        try:
            look_up(line)
        except ReplyError:
            if state.queue is not None:
                self._state = state._replace(queue=(), refused=True)
            raise
        if state.queue is None:
            raise ReplyError("ERR DISCARD without MULTI")
        self._state = _IDLE
        return OK
