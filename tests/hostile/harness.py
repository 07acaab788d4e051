"""Runs a plan: a real server, worker processes, a proxy for each, and a monitor that samples the server's keys."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import redis

from tests.hostile.garble import BROKEN, Garbler
from tests.hostile.history import Event, Recorder, read_history
from tests.hostile.judges import RECOVERY, SETTLED, SLACK
from tests.hostile.plan import WORKERS, Fault, make_plan
from tests.hostile.proxy import Proxy
from tests.hostile.worker import NAMES, PERMITS
from tests.servers import Server
from tests.support import ROOT

__all__ = ["Harness", "pool_keys", "tokens_in"]

_TOKEN = re.compile(rb".+-(\d+)(?:-.*)?\.[0-9a-f]{32}")
_NO_HOLD = (b"fence", b"gone", b"waiters")
LONGEST_CALL = 8.0


def tokens_in(admin: Any, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
    """The tokens of holders and waiters, with the key that each is in; not those whose time is over."""
    now_us = int(time.time() * 1e6)
    for key in admin.keys(pattern):
        if b":hf1:" in key and key.split(b":hf1:")[1].split(b":")[0] in _NO_HOLD:
            continue
        with contextlib.suppress(redis.ResponseError):  # it ended between the two requests, or is no lock
            kind = admin.type(key)
            if kind == b"string":
                yield key.decode(), admin.get(key) or b""
            elif kind == b"zset":
                for token, score in admin.zrange(key, 0, -1, withscores=True):
                    if b":queue" in key or score > now_us:  # of a pool: when the lease ends
                        yield key.decode(), token
            elif kind == b"hash":
                for token in admin.hkeys(key):
                    yield key.decode(), token


def pool_keys(admin: Any, name: str) -> list[bytes]:
    """The side keys of a name that say which tokens hold it."""
    return [
        key for key in admin.keys(f"{name}:hf1:*") if key.split(b":hf1:")[1].split(b":")[0] not in (*_NO_HOLD, b"queue")
    ]


class Place:
    """A place for one worker process at a time, with a proxy of its own."""

    def __init__(self, harness: Harness, name: str) -> None:
        self.name = name
        self.proxy = Proxy(harness.server.port)
        self._harness = harness
        self._generation = 0
        self.replacing = threading.Lock()
        self.start()

    def start(self) -> None:
        self.label = f"{self.name}.{self._generation}"
        self._generation += 1
        harness = self._harness
        face = "blocking" if self.name.startswith("b") else "asyncio"
        seed = f"{harness.seed}"
        arguments = [face, self.proxy.url, str(harness.folder), self.label, seed, harness.mistake]
        with (harness.folder / f"{self.label}.stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            )

    def hear(self, expected: bytes, timeout: float) -> None:
        """Wait for a line; a worker that does not say it is ended, and the history shows why."""
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        timer.cancel()
        if line != expected:
            self._harness.recorder.note("foreign", text=f"{self.label} did not say {expected!r} within {timeout:g} s")

    def say(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Harness:
    """One run. ``run`` returns its history."""

    def __init__(self, seed: int, seconds: float, folder: Path, *, only: Sequence[str] = (), mistake: str = "") -> None:
        self.seed = seed
        self.only = only
        self.seconds = seconds
        self.folder = folder
        self.mistake = mistake
        self.recorder = Recorder(folder, "harness")
        self._over = threading.Event()
        self._busy = threading.RLock()  # while the server is restarted

    def run(self) -> list[Event]:
        plan = make_plan(self.seed, self.seconds, NAMES, self.only)
        with Server() as self.server:
            self._admin: Any = self.server.client(client_name="harness", socket_timeout=5.0)
            self.recorder.note("permits", s=PERMITS)
            self.places = {name: Place(self, name) for name in WORKERS}
            try:
                for place in self.places.values():
                    place.hear(b"ready", 30.0)
                monitor = threading.Thread(target=self._monitor)
                monitor.start()
                self._strike_all(plan)
                self._over.set()
                monitor.join()
                self._settle()
            finally:
                self._over.set()
                for place in self.places.values():
                    place.kill()
                    place.proxy.close()
        self.recorder.close()
        return read_history(self.folder)

    def _strike_all(self, plan: list[Fault]) -> None:
        """Each fault in a thread of its own, for it may last while the next ones strike."""
        begun = monotonic()
        threads = []
        for fault in plan:
            time.sleep(max(0.0, begun + fault.at - monotonic()))
            threads.append(threading.Thread(target=self._strike, args=(fault,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        # On a busy machine a fault may have ended late.
        quiet = RECOVERY + 0.1 if plan else 0.0
        time.sleep(max(quiet, begun + self.seconds - monotonic()))

    def _strike(self, fault: Fault) -> None:
        begun = monotonic()
        act = getattr(self, "_" + fault.name.replace(" ", "_"))
        try:
            noted = act(fault) or {}
        except redis.RedisError as error:  # the server is just down for another fault
            noted = {"failed": str(error), **({"displaces": ["*"]} if fault.name == "delete key" else {})}
        target = noted.pop("target", fault.target)
        self.recorder.note("fault", name=fault.name, begun=begun, target=target, **noted)

    def _kill_worker(self, fault: Fault) -> None:
        place = self.places[fault.target]
        with place.replacing:
            place.kill()
            self.recorder.note("killed", target=place.label)
            place.start()
            place.hear(b"ready", 60.0)

    def _stop_worker(self, fault: Fault) -> dict[str, object]:
        place = self.places[fault.target]
        process, label = place.process, place.label
        process.send_signal(signal.SIGSTOP)
        time.sleep(fault.seconds)
        process.send_signal(signal.SIGCONT)  # does nothing if it was killed meanwhile
        return {"target": label}

    def _cut_connections(self, fault: Fault) -> None:
        self.places[fault.target].proxy.cut()

    def _refuse_connections(self, fault: Fault) -> None:
        self._afflict(fault, self.places[fault.target].proxy.refuse)

    def _black_hole(self, fault: Fault) -> None:
        self._afflict(fault, self.places[fault.target].proxy.black_hole)

    def _garble_replies(self, fault: Fault) -> None:
        proxy = self.places[fault.target].proxy
        garbler = Garbler(f"{self.seed} {fault.at}", rate=0.2, kinds=BROKEN)
        self._afflict(fault, lambda: setattr(proxy, "garbler", garbler))

    def _slow_link(self, fault: Fault) -> None:
        proxy = self.places[fault.target].proxy
        self._afflict(fault, lambda: setattr(proxy, "latency", 0.03))

    def _afflict(self, fault: Fault, begin: object) -> None:
        assert callable(begin)
        begin()
        time.sleep(fault.seconds)
        self.places[fault.target].proxy.heal()

    def _kill_listeners(self, fault: Fault) -> None:
        self._admin.client_kill_filter(_type="pubsub")

    def _kill_connections(self, fault: Fault) -> None:
        self._admin.client_kill_filter(_type="normal", skipme=True)
        self._admin.client_kill_filter(_type="pubsub", skipme=True)

    def _delete_key(self, fault: Fault) -> dict[str, object]:
        name = fault.target
        deleted = self._admin.delete(name, *pool_keys(self._admin, name))
        return {"displaces": [name], "certain": bool(deleted)}

    def _delete_side_keys(self, fault: Fault) -> dict[str, object]:
        """One key of a name that is not its main key: of a pool that displaces its holders, of a lock it never does."""
        name = fault.target
        keys = sorted(self._admin.keys(f"{name}:hf1:*"))
        pool = pool_keys(self._admin, name)
        if not keys:
            return {}
        key = keys[int(fault.at * 1000) % len(keys)]
        self._admin.delete(key)
        return {"key": key.decode(), "displaces": [name] if key in pool else [], "certain": key in pool}

    def _pause_clients(self, fault: Fault) -> None:
        self._admin.execute_command("CLIENT", "PAUSE", int(fault.seconds * 1000), "ALL")
        time.sleep(fault.seconds)

    def _stop_server(self, fault: Fault) -> None:
        with self._busy:
            self.server.pause()
            time.sleep(fault.seconds)
            self.server.resume()

    def _restart_with_data(self, fault: Fault) -> dict[str, object]:
        with self._busy:
            self.server.restart(empty=False)
        # What was acknowledged between the save and the kill is lost.
        return {"displaces": ["*"]}

    def _restart_without_data(self, fault: Fault) -> dict[str, object]:
        with self._busy:
            self.server.restart()
        return {"displaces": ["*"], "certain": True}

    def _flush_scripts(self, fault: Fault) -> None:
        self._admin.script_flush()

    def _monitor(self) -> None:
        """Sample which names are taken. While the server is away there are no samples."""
        admin = self.server.client(client_name="harness", socket_timeout=1.0)
        while not self._over.wait(0.1):
            with contextlib.suppress(redis.RedisError), self._busy:
                taken = {key.partition(":hf1:")[0] for key, _ in tokens_in(admin) if ":hf1:queue" not in key}
                self.recorder.note("sample", taken=sorted(taken))

    def _settle(self) -> None:
        """Have the workers release everything, look at what is left, then have them close, and look again."""
        for place in self.places.values():
            place.say()
        for place in self.places.values():
            place.hear(b"idle", LONGEST_CALL + SLACK + 5.0)
        idle = monotonic()
        alive = [place.process.pid for place in self.places.values() if place.process.poll() is None]
        while tokens := self._tokens_left(alive):
            if monotonic() - idle > SETTLED:
                break
            time.sleep(0.1)
        self.recorder.note("left", tokens=tokens, alive=alive, after=monotonic() - idle)
        for place in self.places.values():
            place.say()
        for place in self.places.values():
            place.hear(b"closed", LONGEST_CALL + SLACK)
        until = monotonic() + SETTLED
        while (others := self._other_connections()) and monotonic() < until:
            time.sleep(0.05)
        self.recorder.note("connections", count=len(others), list=others)

    def _tokens_left(self, alive: list[int]) -> list[tuple[str, int]]:
        found = ((key, _TOKEN.fullmatch(token)) for key, token in tokens_in(self._admin))
        return [(key, int(match[1])) for key, match in found if match and int(match[1]) in alive]

    def _other_connections(self) -> list[str]:
        return [each["addr"] + " " + each["cmd"] for each in self._admin.client_list() if each["name"] != "harness"]
