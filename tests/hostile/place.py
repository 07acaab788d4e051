"""Places of a run: each has one worker process at a time, and a route of its own to the servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.hostile.grounds import Noted, Route
from tests.hostile.grounds.base import during
from tests.hostile.history import Recorder
from tests.hostile.plan import Fault
from tests.hostile.proxy import Proxy
from tests.support import ROOT

__all__ = ["Place"]


class Place:
    """A place for one worker process at a time. A fault of a worker is a method, as with a Ground."""

    def __init__(self, name: str, route: Route, folder: Path, recorder: Recorder, terms: dict[str, object]) -> None:
        """``terms`` go to each worker."""
        self.name = name
        self.route = route
        self._folder, self._recorder = folder, recorder
        self._terms = terms
        self._generation = 0
        self._replacing = threading.Lock()
        self._start()

    def _start(self, **terms: object) -> None:
        self.label = f"{self.name}.{self._generation}"
        self._generation += 1
        face = "blocking" if self.name.startswith("b") else "asyncio"
        arguments = {"face": face, "url": self.route.url, "process": self.label, **self._terms, **terms}
        with (self._folder / f"{self.label}.stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker", str(self._folder), json.dumps(arguments)],
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
            self._recorder.note("foreign", text=f"{self.label} did not say {expected!r} within {timeout:g} s")

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

    def _replace(self, **terms: object) -> None:
        with self._replacing:
            self.kill()
            self._recorder.note("killed", target=self.label)
            self._start(**terms)
            self.hear(b"ready", 60.0)

    def kill_worker(self, fault: Fault) -> None:
        self._replace()

    def fork_worker(self, fault: Fault) -> None:
        """A new process forks that long after its first grant, while its client may still be starting up."""
        self._replace(fork_after=fault.seconds)

    def stop_worker(self, fault: Fault) -> Noted:
        process, label = self.process, self.label
        process.send_signal(signal.SIGSTOP)
        time.sleep(fault.seconds)
        process.send_signal(signal.SIGCONT)  # does nothing if it was killed meanwhile
        return {"target": label}

    def cut_connections(self, fault: Fault) -> None:
        for proxy in self.route.proxies:
            proxy.cut()

    def refuse_connections(self, fault: Fault) -> None:
        during(fault.seconds, self.route.proxies, Proxy.refuse)

    def black_hole(self, fault: Fault) -> None:
        during(fault.seconds, self.route.proxies, Proxy.black_hole)

    def slow_link(self, fault: Fault) -> None:
        during(fault.seconds, self.route.proxies, lambda proxy: setattr(proxy, "latency", 0.03))

    def stall_one_link(self, fault: Fault) -> None:
        """What is sent to one of the servers arrives late, though its sender may have asked another one since."""
        proxies = self.route.proxies
        during(fault.seconds, [proxies[int(fault.at * 1000) % len(proxies)]], Proxy.stall, Proxy.resume)
