"""The process that stays beside an embedded server and ends it once nobody needs it.

It is run as a script, by ``python -I -S``, so it imports the standard library alone. `local` says how it is
started and why; this is how it ends.

A server is needed while anybody but the warden is connected, and while anything is held, for a holder may be
between two connections, or may have handed its lease to a process that is not there yet. When it has not been
needed for a linger, the warden leaves, in an order in which no acknowledged write can be lost:

1. Take the lock of the starters. From here on nobody starts a server and nobody else moves the socket.
2. Rename the socket. New connections fail, and those who wanted one queue for the lock.
3. Pause writes. Whoever found the socket just before step 2 may still get in, but nothing acknowledged.
4. Let the server run its loop twice, so that of those who wait in its backlog at least one is accepted and
   counted, then look again at connections and keys. If anyone is there, undo 3 and 2, and stay.
5. Shut the server down, wait until its process is gone, remove the files, and only then give the lock up.

A warden that is killed on the way leaves a server that runs, a socket under one of two names, and its own
lock free; the next starter puts the socket back and starts another warden.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
import time
from collections.abc import Iterator

SOCKET = "holdfast.sock"
ASIDE = "leaving.sock"  # Not longer than SOCKET: whatever limit on paths that one meets, this one meets too.
LOCK = "lock"
LOG = "log"
WARDEN = "warden"

# Side keys that are no hold. A mutex is held in a key of its own, but the permits of a semaphore and the
# readers of a rwlock are in side keys, so a kind that is not listed here counts as held: an unknown kind
# costs some memory until it expires, the opposite mistake costs mutual exclusion. Fences may go, because they
# grow with the server's clock; queues, because everyone in them was connected; tombstones, because the steps
# they refuse came over connections that end with the server.
NOT_HOLDS = frozenset({b"fence", b"queue", b"waiters", b"gone"})

_PAUSE_S = 3.0
_TICKS_PER_LINGER = 4
_TICK_MAX_S = 0.5
_GONE_S = 10.0


class Gone(Exception):
    """The server has closed the connection."""


class Refused(Exception):
    """The server answered with an error."""


class Link:
    """One connection to the server, and as much of its protocol as a warden needs."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._replies = self._socket.makefile("rb")

    def ask(self, *words: str) -> object:
        parts = [word.encode() for word in words]
        frame = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
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
        """Wait, but no longer than the connection lives: nothing comes unasked, so readable means closed."""
        return bool(select.select([self._socket], [], [], seconds)[0])


def is_hold(key: bytes) -> bool:
    """Whether a key may stand for something that somebody holds."""
    _, mark, rest = key.partition(b":hf")
    while mark:
        if rest[:1].isdigit() and rest[1:2] == b":":
            return rest[2:].split(b":", 1)[0] not in NOT_HOLDS
        _, mark, rest = rest.partition(b":hf")
    return True


def try_lock(path: str) -> int | None:
    """An open file that this process alone has locked, until all copies are closed; None if another has."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A warden that left removed the file between the two calls: a lock on a file without a name excludes
        # nobody.
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
    """Whether a process has this file locked. To ask is to lock it for a moment, so takers try again."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Given up by name, for a process forked in this moment has the same open file and would keep it
        # locked.
        fcntl.flock(handle, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def connect() -> Link | None:
    """The server in the working directory, which may still be starting; None when its process is no more."""
    pause_s = 0.01
    while True:
        try:
            return Link(SOCKET)
        except OSError:
            if not is_locked(LOG):
                return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _TICK_MAX_S)


def visits(link: Link) -> tuple[int, int]:
    """How many others are connected, and how many connections there ever were."""
    return (
        int(link.info("clients")["connected_clients"]) - 1,
        int(link.info("stats")["total_connections_received"]),
    )


def anything_held(link: Link) -> bool:
    return any(is_hold(key) for key in link.every_key())


def leave(link: Link, seen: int) -> bool:
    """End the server, unless somebody is there or was there since `seen` connections. False: it lives on."""
    try:
        lock = try_lock(LOCK)
    except FileNotFoundError:  # the whole directory was removed, and with it the way in
        return shut_down(link, seen)
    if lock is None:
        return False
    left = False
    try:
        move(SOCKET, ASIDE)
        left = shut_down(link, seen) and has_ended()
        return left
    finally:
        if left:
            for name in (ASIDE, LOG, WARDEN, LOCK):
                remove(name)
        else:
            move(ASIDE, SOCKET)
        os.close(lock)


def shut_down(link: Link, seen: int) -> bool:
    paused_at = time.monotonic()
    attempt(link, "CLIENT", "PAUSE", str(int(_PAUSE_S * 1000)), "WRITE")
    link.ask("PING")
    link.ask("PING")
    needed = visits(link) != (0, seen) or anything_held(link)
    # If this process, or the whole machine, was stopped meanwhile, the pause may be over and the count out of
    # date.
    if not needed and time.monotonic() - paused_at < _PAUSE_S / 2:
        try:
            link.ask("SHUTDOWN", "NOSAVE")
        except Gone:
            return True
        except Refused:
            pass
    attempt(link, "CLIENT", "UNPAUSE")
    return False


def has_ended() -> bool:
    deadline = time.monotonic() + _GONE_S
    while is_locked(LOG):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def attempt(link: Link, *words: str) -> None:
    """Ask for what servers before 6.2 do not know. Without step 3 the others leave but a hair's breadth."""
    try:
        link.ask(*words)
    except Refused:
        pass


def move(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except FileNotFoundError:
        pass  # Somebody tidied up the directory. Nobody new can connect, which is what the renaming is for.


def remove(name: str) -> None:
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass


def watch(link: Link, linger_s: float) -> None:
    """Return when the server has been ended; raise Gone when it, or the connection to it, ended by itself."""
    tick_s = min(_TICK_MAX_S, linger_s / _TICKS_PER_LINGER)
    idle_since: float | None = None
    seen = -1
    while not link.ends_within(tick_s):
        others, total = visits(link)
        if others or anything_held(link):
            idle_since = None
        elif idle_since is None or total != seen:
            # Someone who came and went between two looks is about to come again: to find a server takes one
            # connection, to use it takes the next.
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since >= linger_s and leave(link, seen):
            return
        seen = total
    raise Gone


def main(directory: str, linger: str) -> None:
    os.chdir(directory)
    while (link := connect()) is not None:
        try:
            watch(link, float(linger))
            break
        except Gone:
            # Killed, or shut down by hand: then the socket is stale and whoever comes next starts another
            # server. Or somebody cut all connections, this one among them.
            link.close()
    try:
        os.wait()
    except ChildProcessError:
        pass  # A server that was here before this warden is another process's child.


if __name__ == "__main__":
    # Standard input is the locked file that tells everyone that there is a warden. It stays open for life.
    main(*sys.argv[1:])
