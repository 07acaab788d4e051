"""The process that runs beside an embedded server and ends it when it is no longer needed.

It is run as a script by ``python -I -S``, so it imports only the standard library. server.py says how it is
started and why; this module ends the server.

A server is needed while a client is connected or something is held: a holder may be between two connections,
or may have handed its lease to a process that has not started yet. When the server has not been needed for
``linger`` seconds, the warden shuts it down, in an order that loses no acknowledged write:

1. Lock the file ``lock``. From here on no process starts a server or moves the socket.
2. Rename the socket. New connections fail, and processes that want one wait for the lock.
3. Pause writes. A client that found the socket just before step 2 may connect, but gets no write acknowledged.
4. Let the server run its event loop twice, so that at least one client of its backlog is accepted and counted,
   then check connections and keys again. If there are any, undo 3 and 2, and stay.
5. Shut the server down, wait until its process has ended, remove the files, and only then unlock.

A server that no process can find any more ends at once, whatever is held: its directory was removed or renamed, or its
log was removed, so the next process that looks for a server starts another one beside it. The holders lose their
connections, find the other server, and learn from it that their leases are lost.

A warden that is killed on the way leaves a running server, a socket under one of two names, and its own lock
free. The next starter renames the socket back and starts another warden.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

SOCKET = "holdfast.sock"
ASIDE = "leaving.sock"  # not longer than SOCKET, so its path is short enough if that of SOCKET is
LOCK = "lock"
LOG = "log"
WARDEN = "warden"

# Purposes of side keys that are not holds. The permits of a semaphore and the readers of a rwlock are in side keys,
# so every purpose that is not listed here counts as a hold. An unknown key that is wrongly kept costs memory until it
# expires; the opposite mistake would cost mutual exclusion. Fences may be lost, because they grow with the server's
# clock. Queues may be lost, because no waiter is connected any more. Tombstones may be lost, because the steps that
# they refuse come over connections that end with the server.
NOT_HOLDS = frozenset({b"fence", b"queue", b"waiters", b"gone"})

_PAUSE_S = 3.0
_TICKS_PER_LINGER = 4
_TICK_MAX_S = 0.5
_GONE_S = 10.0
_REFRESH_S = 3600.0  # cleaners of temporary files remove what was not used for days


class Gone(Exception):
    """The server has closed the connection."""


class Refused(Exception):
    """The server answered with an error."""


class Replaced(Exception):
    """The file that shows that a warden runs was removed, and another warden has been started since."""


class Connection:
    """One connection to the server, with the part of RESP that a warden needs."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._replies = self._socket.makefile("rb")

    def ask(self, *parts: str) -> object:
        encoded = [part.encode() for part in parts]
        frame = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded)
        try:
            self._socket.sendall(frame)
            return self._reply()
        except OSError as error:
            raise Gone from error

    def _reply(self) -> object:
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            raise Gone
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise Refused(rest.decode(errors="replace"))
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._replies.read(size + 2)[:-2]
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        return rest

    def info(self, section: str) -> dict[str, str]:
        text = self.ask("INFO", section)
        assert isinstance(text, bytes)
        pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines())
        return {key: value for key, colon, value in pairs if colon}

    def every_key(self) -> Iterator[bytes]:
        """Every key of every database that has not expired."""
        for database in self.info("keyspace"):
            self.ask("SELECT", database.removeprefix("db"))
            cursor = "0"
            while True:
                page = self.ask("SCAN", cursor, "COUNT", "1000")
                assert isinstance(page, list)
                yield from page[1]
                cursor = page[0].decode()
                if cursor == "0":
                    break

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def ends_within(self, seconds: float) -> bool:
        """Wait; True if the connection ends meanwhile. Readable means closed, because no request is open."""
        return bool(select.select([self._socket], [], [], seconds)[0])


def is_hold(key: bytes) -> bool:
    """Whether a key may stand for a hold."""
    _, mark, rest = key.partition(b":hf")
    while mark:
        if rest[:1].isdigit() and rest[1:2] == b":":
            return rest[2:].split(b":", 1)[0] not in NOT_HOLDS
        _, mark, rest = rest.partition(b":hf")
    return True


def try_lock(path: str) -> int | None:
    """An open file, locked until all copies of it are closed; None if another process has locked it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A leaving warden may have removed the file between the two calls. Then this lock would not exclude other
        # processes.
        if os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def is_locked(path: str) -> bool:
    """Whether a process has locked this file. The check locks it for a moment, so try_lock is repeated."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Unlock explicitly: a process that is forked at this moment shares the open file, and would keep it locked.
        fcntl.flock(handle, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def connect() -> Connection | None:
    """A connection to the server in the working directory. Waits if that is starting; None if it has ended."""
    pause_s = 0.01
    while True:
        try:
            return Connection(SOCKET)
        except OSError:
            if not is_locked(LOG):
                return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _TICK_MAX_S)


def visits(connection: Connection) -> tuple[int, int]:
    """The number of other connections now, and of all connections so far."""
    return (
        int(connection.info("clients")["connected_clients"]) - 1,
        int(connection.info("stats")["total_connections_received"]),
    )


def anything_held(connection: Connection) -> bool:
    return any(is_hold(key) for key in connection.every_key())


def leave(connection: Connection, seen: int) -> bool:
    """End the server, unless a client is connected, a key is held, or more than `seen` connections were made.
    False: the server stays."""
    try:
        lock = try_lock(LOCK)
    except FileNotFoundError:
        return False  # the directory was removed: the next tick ends the server
    if lock is None:
        return False
    left = False
    try:
        move(SOCKET, ASIDE)
        left = shut_down(connection, seen) and has_ended()
        return left
    finally:
        if left:
            for name in (ASIDE, LOG, WARDEN, LOCK):
                remove(name)
        else:
            move(ASIDE, SOCKET)
        os.close(lock)


def shut_down(connection: Connection, seen: int) -> bool:
    paused_at = time.monotonic()
    attempt(connection, "CLIENT", "PAUSE", str(int(_PAUSE_S * 1000)), "WRITE")
    connection.ask("PING")
    connection.ask("PING")
    needed = visits(connection) != (0, seen) or anything_held(connection)
    # If this process or the machine was suspended meanwhile, the pause may be over and the count out of date.
    if not needed and time.monotonic() - paused_at < _PAUSE_S / 2:
        try:
            connection.ask("SHUTDOWN", "NOSAVE")
        except Gone:
            return True
        except Refused:
            pass
    attempt(connection, "CLIENT", "UNPAUSE")
    return False


def has_ended() -> bool:
    deadline = time.monotonic() + _GONE_S
    while is_locked(LOG):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def attempt(connection: Connection, *parts: str) -> None:
    """Send a command that servers before 6.2 may not know. Without step 3 a write can be lost in a tiny window."""
    try:
        connection.ask(*parts)
    except Refused:
        pass


def kill(server: int) -> None:
    """End a server that no process can find any more. SHUTDOWN, and SIGTERM, would also remove what is at the path of
    its socket by then: the socket of the next server."""
    try:
        os.kill(server, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def move(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except FileNotFoundError:
        pass  # The file was removed by hand. No new client can connect, which is what the renaming is for.


def remove(name: str) -> None:
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass


class Place:
    """The directory and the files by which a process finds the server of this warden."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._log = self._stat(LOG)
        self._shown = 0  # the open file whose lock shows that a warden runs: standard input, or one made since
        self._refreshed_at = time.monotonic()

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_found(self) -> bool:
        """Whether a process that looks for a server here finds this one, or at least that there is one."""
        try:
            for path, ours in ((self._directory, os.stat(".")), (LOG, self._log)):
                found = self._stat(path)
                if found is None or ours is None or not os.path.samestat(found, ours):
                    return False
        except OSError:
            pass  # an error of the disk, or of access, says nothing
        return True

    def show_warden(self) -> None:
        """Lock the file again if it was removed. Replaced, if another warden has done so."""
        found = self._stat(WARDEN)
        if found is None or not os.path.samestat(found, os.fstat(self._shown)):
            try:
                shown = try_lock(WARDEN)
            except OSError:
                return  # for example a full disk: at the next tick again
            if shown is None:
                raise Replaced
            self._shown = shown

    def refresh(self) -> None:
        """Let the files look used, to programs that remove old files."""
        if time.monotonic() - self._refreshed_at > _REFRESH_S:
            self._refreshed_at = time.monotonic()
            for name in (SOCKET, LOG, WARDEN, "."):
                try:
                    os.utime(name, follow_symlinks=False)
                except OSError:
                    pass  # it was removed, or the disk is read-only now


def watch(connection: Connection, linger_s: float, place: Place) -> None:
    """Return when the server has been shut down. Raise Gone if the server, or the connection to it, ended otherwise."""
    tick_s = min(_TICK_MAX_S, linger_s / _TICKS_PER_LINGER)
    idle_since: float | None = None
    seen = -1
    while not connection.ends_within(tick_s):
        if not place.is_found():
            kill(int(connection.info("server")["process_id"]))
        place.show_warden()
        place.refresh()
        others, total = visits(connection)
        if others or anything_held(connection):
            idle_since = None
        elif idle_since is None or total != seen:
            # A client that connected and left between two checks is about to connect again: it needs one connection
            # to find the server, and another one to use it.
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since >= linger_s and leave(connection, seen):
            return
        seen = total
    raise Gone


def main(directory: str, linger: str, server: str = "") -> None:
    """``server``: the pid of the server, if it was started with this warden. It is a child of this process then."""
    while (connection := connect()) is not None:
        try:
            watch(connection, float(linger), Place(directory))
            break
        except Replaced:
            return
        except Gone:
            # The server was killed or shut down by hand: then the socket is stale, and the next client starts
            # another server. Or all connections were cut, this one among them.
            connection.close()
    else:
        if server and not Place(directory).is_found():
            kill(int(server))  # its directory was removed before this process could connect
    try:
        os.wait()
    except ChildProcessError:
        pass  # A server that is older than this warden is not its child.


if __name__ == "__main__":
    # The working directory is that of the server, even if it was renamed since. Standard input is the file whose lock
    # shows that a warden runs. It stays open until the warden ends.
    main(*sys.argv[1:])
