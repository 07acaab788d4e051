"""The engine for threads: each step runs in the calling thread, on its own connection from a stack of idle ones."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from pymemcache.exceptions import (
    MemcacheClientError,
    MemcacheError,
    MemcacheIllegalInputError,
    MemcacheServerError,
    MemcacheUnknownCommandError,
    MemcacheUnknownError,
)

from holdfast.engines.memcached.connection import Connection, ReplyTooLong
from holdfast.engines.memcached.target import MemcachedTarget
from holdfast.engines.redis.protocol import LONGEST_REPLY
from holdfast.errors import HoldfastError, InvalidName, Unavailable, Unsupported, rounded
from holdfast.protocol.effects import Command, Step, StepFailed
from holdfast.protocol.memcached import Items, program_of
from holdfast.protocol.wait.notifications import NotificationRouter
from holdfast.untrusted import printable

_LEAST: Final = 0.01  # seconds that the last command of a step gets at least
_MOST_IDLE: Final = 32
_ALLOWED_KEY: Final = "a key of memcached is at most 250 characters of ASCII, without spaces; choose another one"

_NO_PASSWORD: Final = "Holdfast can give none to memcached: start it without -Y, and limit which machines reach it"


class Engine:
    """Runs steps on one server. Any thread may use it; it is also the shared connection of its driver."""

    def __init__(self, target: MemcachedTarget, router: NotificationRouter, now: Callable[[], float]) -> None:
        self.address = target.address
        self._where = target.host, target.port
        self._now = now
        self._items = Items()
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._inherited: list[Any] = []  # from a parent process; if not kept, their sockets would be closed
        self._ever_answered = False
        self._closed = False
        router.no_pubsub = True  # memcached has no notifications

    def call(self, op: Step | Command, timeout: float, given_up: Callable[[], bool] = lambda: False) -> Any:
        """The reply to one step; StepFailed if there is none. No command is sent after it was given up.

        All commands of a step use one connection: a cas number means nothing to a server that was restarted since.
        """
        deadline = monotonic() + timeout
        program = program_of(self._items, op, self._now())
        connection = self._take(deadline, timeout)
        done = sent = False
        try:
            command = program.send(None)
            while True:
                if given_up() or (sent and monotonic() >= deadline):
                    raise self._failure(TimeoutError(), timeout)
                try:
                    if command.args[0] == "clock":
                        reply = self._read_clock(command, timeout, deadline)
                    else:
                        reply = self._perform(connection, command, timeout, deadline)
                except StepFailed as failed:
                    failed.sent = failed.sent or sent
                    raise
                sent = True
                command = program.send(reply)
        except StopIteration as result:
            done = True
            return result.value
        finally:
            program.close()
            if done and not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
            else:
                self._drop(connection)

    def call_each(self, ops: Sequence[Any], timeout: float) -> list[Any]:
        """The reply to each step, or its StepFailed. Stops if the server is silent or unreachable."""
        replies: list[Any] = []
        deadline = monotonic() + timeout
        for op in ops:
            try:
                replies.append(self.call(op, max(_LEAST, deadline - monotonic())))
            except StepFailed as failed:
                if failed.silent or not failed.sent:
                    return replies + [failed] * (len(ops) - len(replies))
                replies.append(failed)
        return replies

    def _read_clock(self, command: Command, timeout: float, deadline: float) -> int | None:
        """The server's clock. Two new connections, one after the other: see protocol/memcached.py.

        None if it was read before, and is not answered in a third of the time that is left.
        """
        is_optional = "again" in command.args
        if is_optional:
            deadline -= (deadline - monotonic()) * 2 / 3
        try:
            for _ in range(2):
                connection = self._connect(deadline, timeout)
                try:
                    time: int = self._perform(connection, command, timeout, deadline)
                finally:
                    self._drop(connection)
        except StepFailed:
            if is_optional:
                return None
            raise
        return time

    def _perform(self, connection: Connection, command: Command, timeout: float, deadline: float) -> Any:
        if self._closed:
            raise self.closed_failure()
        try:
            reply = connection.perform(command, max(deadline, monotonic() + _LEAST))
        except MemcacheIllegalInputError as error:
            # Only of a recipe: other keys are digests if they must be. pymemcache has checked it and sent nothing.
            if "key" not in str(error).lower():
                raise self._failure(error, timeout) from None
            raise self._failed(InvalidName(str(command.args[1]), _ALLOWED_KEY), error, sent=False) from None
        except (OSError, MemcacheError) as error:
            self._items.doubt_clock()
            raise self._failure(error, timeout) from None
        self._ever_answered = True
        return reply

    def closed_failure(self) -> StepFailed:
        error = Unavailable({self.address: "this client was closed"}, "Connect again, or close it later")
        return StepFailed(error, sent=False, retry=False)

    def _take(self, deadline: float, timeout: float) -> Connection:
        """An idle connection, or a new one."""
        if self._closed:
            raise self.closed_failure()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect(deadline, timeout)
            if not connection.is_out_of_step():
                return connection
            self._drop(connection)
            self._items.doubt_clock()  # the server may have been restarted

    def _connect(self, deadline: float, timeout: float) -> Connection:
        try:
            connection = Connection(self._where, max(_LEAST, deadline - monotonic()))
        except OSError as error:
            self._items.doubt_clock()
            raise self._no_connection(error, timeout) from None
        self._open.add(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    def _no_connection(self, error: OSError, timeout: float) -> StepFailed:
        silent = isinstance(error, TimeoutError)
        if silent:
            what, advice = f"it did not answer within {rounded(timeout)} s", "It may be hung or far away"
        elif isinstance(error, socket.gaierror):
            what, advice = "its name cannot be resolved", "Check the host in the URL"
        elif isinstance(error, ConnectionRefusedError):
            what, advice = "nothing listens there", "Start memcached there, or check host and port"
        else:
            what, advice = f"no connection came about ({type(error).__name__})", "Check host and port"
        return self._failed(Unavailable({self.address: what}, advice), error, sent=False, retry=self._ever_answered)

    def _failure(self, error: OSError | MemcacheError, timeout: float) -> StepFailed:
        """The StepFailed for a command that was sent and got no valid reply."""
        if isinstance(error, TimeoutError):
            what, advice = f"it did not answer within {rounded(timeout)} s", "It may be hung or far away"
            failed = self._failed(Unavailable({self.address: what}, advice), error, sent=True, retry=True)
            failed.silent = True
            return failed
        if isinstance(error, (MemcacheClientError, MemcacheServerError)) and error.args:
            return self._refusal(error)
        if isinstance(error, MemcacheUnknownError):
            return self._unreadable(error)
        what, advice = "the connection was lost", "Is the server still running?"
        if isinstance(error, ReplyTooLong):
            what = f"it sent a reply of more than {LONGEST_REPLY // 2**20} MiB"
            advice = "Check that a memcached server answers at this address"
        failed = self._failed(Unavailable({self.address: what}, advice), error, sent=True, retry=True)
        failed.connection_broke = True
        return failed

    def _refusal(self, error: MemcacheError) -> StepFailed:
        """The StepFailed for an error reply. A connection that has ended is an error without a text."""
        reason = error.args[0]
        text = printable(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason))[:80]
        if isinstance(error, MemcacheUnknownCommandError):
            if not text.startswith("md "):
                return self._unreadable(error)  # every memcached knows the other commands
            what = f"the meta commands of memcached 1.6 at {self.address}"
            return self._failed(Unsupported(what, "update the server, or use redis://"), error, sent=False)
        if "unauthenticated" in text:
            wants = Unavailable({self.address: "it wants a password"}, _NO_PASSWORD)
            return self._failed(wants, error, sent=False)
        if isinstance(error, MemcacheClientError):
            return self._failed(Unavailable({self.address: f"it answered: {text}"}, "See its log"), error, sent=True)
        full = "out of memory" in text
        what, advice = ("it is out of memory", "Give it more (-m)") if full else (f"it answered: {text}", "See its log")
        failed = self._failed(Unavailable({self.address: what}, advice), error, sent=not full, retry=True)
        failed.answered = True
        return failed

    def _unreadable(self, error: MemcacheError) -> StepFailed:
        """The StepFailed for a reply that memcached would not send. Retries end with the timeout of the client."""
        what = "it sent something that is no reply of memcached"
        failed = self._failed(Unavailable({self.address: what}, "Check host and port"), error, sent=True, retry=True)
        failed.ever_answered = False
        return failed

    def _failed(self, error: HoldfastError, cause: Exception, *, sent: bool, retry: bool = False) -> StepFailed:
        failed = StepFailed(error, sent=sent, retry=retry, ever_answered=self._ever_answered)
        cause.__traceback__ = None
        failed.__cause__ = cause
        return failed

    # What a driver needs from its shared connection.

    def listen(self, timeout: float, keys: tuple[str, ...]) -> bool:
        return False

    def start(self) -> None:
        """Do nothing: there is no thread except the keeper."""

    def count_connections(self) -> tuple[int, int]:
        """How many connections are open, and how many of them are idle."""
        return len(self._open), len(self._idle)

    def load(self) -> tuple[list[Any], int]:
        return [], 0

    def close(self) -> None:
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            self._drop(connection)

    def forget(self) -> None:
        """In a forked child: start again without connections, and do not touch the parent's sockets."""
        self._inherited.append(self._open)
        self._open, self._idle = set(), deque()
        self._items.forget()
