"""A real memcached on a loopback port: Debian's, which ``make test-engines`` installs.

It offers what tests/servers.py does. ``client()`` looks at it behind Holdfast's back; for the conformance suite it
understands the few commands of Redis with which those tests look at a lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from types import TracebackType
from typing import Any, Final, Self

from pymemcache.client.base import Client

from tests.servers import free_port, pause_process

__all__ = ["MemcachedAdmin", "MemcachedServer"]

_READY_WITHIN_S: Final = 10.0


class MemcachedServer:
    """One memcached, started when made."""

    def __init__(self, *options: str) -> None:
        binary = shutil.which("memcached") or shutil.which("memcached", path="/usr/bin:/usr/local/bin")
        if binary is None:
            raise FileNotFoundError("no memcached on PATH: apt-get install memcached, or run make test-engines")
        self.port = free_port()
        self._command = [binary, "-l", "127.0.0.1", "-p", str(self.port), "-U", "0", "-u", "root", *options]
        self._watcher: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        # As in tests/servers.py: it ends when this process does, even by SIGKILL.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "memcached did not start"
                time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"memcached://127.0.0.1:{self.port}"

    def client(self, **_: Any) -> MemcachedAdmin:
        return MemcachedAdmin(self.port)

    def pause(self) -> None:
        pause_process(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class MemcachedAdmin:
    """Looks at memcached, and changes it, behind Holdfast's back. Each call has a connection of its own."""

    def __init__(self, port: int) -> None:
        self._where = "127.0.0.1", port

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        with contextlib.closing(Client(self._where, timeout=5.0)) as items:
            return getattr(items, method)(*args, **options)

    def execute_command(self, command: str, *args: Any) -> Any:
        names = [str(arg) for arg in args]
        if command == "EXISTS":
            return sum(self.call("get", name) is not None for name in names)
        if command == "DEL":
            return sum(self.call("delete", name, noreply=False) for name in names)
        if command == "GET":
            return self.call("get", names[0])
        raise NotImplementedError(f"{command} has no meaning on memcached")

    def exists(self, *names: str) -> int:
        return int(self.execute_command("EXISTS", *names))

    def flushall(self) -> None:
        self.call("flush_all", noreply=False)

    def config_set(self, option: str, value: object) -> None:
        """Nothing: options of Redis."""

    def close(self) -> None:
        """Nothing: it has no connection of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
