"""One run: some processes of participants, a window of time, and the outcome.

The processes are forked from one that has loaded the libraries and has never opened a connection (multiprocessing's
``forkserver``). So sixty-four of them start quickly, and nothing of one run is left in the next.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.servers import Server

import holdfast
from benchmarks.contention.contenders import HOLDFAST, Contender
from benchmarks.contention.ground import Ground
from benchmarks.contention.monitor import Monitor, Turns, count_out_of_turn
from benchmarks.contention.relay import Figures, Relay
from benchmarks.contention.workers import ASKED, GO, READY, Job, Outcome, work

__all__ = ["Field", "Run", "Setting", "Waiting"]

CORES: Final = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
PATIENCE_S: Final = 60.0
PATIENCE_TO_LEAVE_S: Final = 5.0
RAMP_S: Final = 0.3
SETTLE_S: Final = 2.0
FIRST_FEW: Final = 3  # the order of these first acquisitions of each participant is ignored, because it subscribes then


class Setting(NamedTuple):
    """How many participants want how many locks, and over which link."""

    is_aio: bool
    processes: int
    participants: int  # of each process
    locks: int
    is_far: bool = False  # through the relay, which delays every chunk


@dataclass
class Run:
    seconds: float
    counts: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # sorted
    acquisitions: int = 0
    overlaps: int = 0
    errors: list[str] = field(default_factory=list)
    changes: float | None = None  # the share of acquisitions by another participant than the previous one
    connections: int | None = None
    requests: Counter[str] | None = None  # by command
    turns: Turns | None = None
    relayed: Figures | None = None

    @property
    def handovers(self) -> int:
        return sum(self.counts)

    @property
    def rate(self) -> float:
        return self.handovers / self.seconds

    @property
    def change_rate(self) -> float | None:
        """Changes of owner per second: acquisitions by another participant than the previous holder."""
        return None if self.changes is None else self.rate * self.changes

    @property
    def jain(self) -> float:
        """Jain's index: 1 if all have equally many acquisitions, 1/n if one has all."""
        squares = sum(count * count for count in self.counts)
        return sum(self.counts) ** 2 / (len(self.counts) * squares) if squares else 0.0

    @property
    def requests_per_handover(self) -> float | None:
        if self.requests is None or not self.handovers:
            return None
        return self.requests.total() / self.handovers

    def wait(self, share: float) -> float:
        """The quantile of the waits: this share of all waits is not longer."""
        return self.waits[min(len(self.waits) - 1, int(share * len(self.waits)))] if self.waits else self.seconds


class Waiting(NamedTuple):
    """What waiters sent while another client held the lock."""

    waiters: int
    seconds: float
    refreshes: Counter[str]  # by address
    kinds: Counter[str]  # all requests, by command
    scripts: int  # how many different ones
    errors: list[str]


class Field:
    def __init__(self, server: Server, relay: Relay) -> None:
        self._server = server
        self._relay = relay
        self._admin = server.client()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([work.__module__])
        self._wall = time.time() - time.monotonic()

    def run(
        self,
        contender: Contender,
        setting: Setting,
        window: float,
        *,
        dwell: float | None = None,
        monitored: bool = False,
        in_turn: bool = False,
    ) -> Run:
        """Let all participants contend for ``window`` seconds."""
        run = Run(window)
        self._admin.flushall()
        before = self._clients()
        with self._ground(setting.locks) as (path, ground):
            jobs = self._jobs(contender, setting, path, dwell=dwell, with_tokens=in_turn)
            monitor = Monitor(self._server.port) if monitored else None
            with self._workers(jobs) as pipes:
                try:
                    self._expect(pipes, READY)
                    self._send(pipes, GO)
                    self._expect(pipes, ASKED)
                    begin = time.monotonic() + RAMP_S
                    self._relay.figures()
                    self._send(pipes, (begin, begin + window))
                    if not monitored:
                        # This sends one request in the window. MONITOR would count it.
                        time.sleep(RAMP_S + window / 2)
                        run.connections = len(self._clients() - before)
                    outcomes = self._receive(pipes, window + PATIENCE_S)
                    run.relayed = self._relay.figures() if setting.is_far else None
                except (TimeoutError, EOFError) as error:
                    run.errors.append(f"{type(error).__name__}: {error}")
                    return run
                finally:
                    if monitor is not None:
                        monitor.stop()
            self._sum_up(run, setting, outcomes, ground)
            if monitor is not None:
                sent = list(monitor.requests(begin + self._wall, begin + window + self._wall))
                run.requests = Counter(request.arguments[0].decode().upper() for request in sent)
            if monitor is not None and in_turn:
                granted = granted_in_order(ground.order(), [tokens for one in outcomes for tokens in one.tokens])
                run.turns = count_out_of_turn(monitor.requests(0, begin + window + self._wall), granted)
        return run

    def watch_waiters(self, waiters: int, seconds: float) -> Waiting:
        """Hold a lock that this many processes wait for, and record what they send meanwhile."""
        self._admin.flushall()
        with self._ground(1) as (path, _), holdfast.connect(self._server.url) as client:
            lease = client.lock("bench:0", ttl=600).acquire(blocking=False)
            assert lease is not None
            time.sleep(0.5)  # until the holder has opened all its connections
            ours = [one["addr"] for one in self._admin.client_list()]
            setting = Setting(is_aio=False, processes=waiters, participants=1, locks=1)
            with self._workers(self._jobs(Contender(HOLDFAST), setting, path)) as pipes:
                self._expect(pipes, READY)
                self._send(pipes, GO)
                self._expect(pipes, ASKED)
                time.sleep(SETTLE_S)
                with Monitor(self._server.port) as monitor:
                    begin = time.time()
                    time.sleep(seconds)
                    end = time.time()
                lease.release()
                self._send(pipes, (0.0, 0.0))  # the window is closed: each waiter is granted the lock once, and ends
                outcomes = self._receive(pipes, PATIENCE_S)
        sent = list(monitor.requests(begin, end, but=ours))
        scripts = [request for request in sent if request.arguments[0].upper() in (b"EVALSHA", b"EVAL")]
        return Waiting(
            waiters=waiters,
            seconds=end - begin,
            refreshes=Counter(request.client for request in scripts),
            kinds=Counter(kind_of(request.arguments) for request in sent),
            scripts=len({request.arguments[1] for request in scripts}),
            errors=[error for outcome in outcomes for error in outcome.errors],
        )

    def _sum_up(self, run: Run, setting: Setting, outcomes: list[Outcome], ground: Ground) -> None:
        waits = array("d")
        for outcome in outcomes:
            run.counts += outcome.counts
            waits.frombytes(outcome.waits)
            run.acquisitions += outcome.acquisitions
            run.overlaps += outcome.violations
            run.errors += outcome.errors
        run.waits = sorted(waits)
        order = ground.order()
        if setting.locks == 1 and len(order) > 1:
            run.changes = sum(one != other for one, other in itertools.pairwise(order)) / (len(order) - 1)
        if not run.errors:  # a participant that failed while it released has entered without being counted
            run.overlaps += abs(ground.entered - run.acquisitions)

    def _jobs(
        self,
        contender: Contender,
        setting: Setting,
        path: Path,
        *,
        dwell: float | None = None,
        with_tokens: bool = False,
    ) -> list[Job]:
        self._place(setting)
        job = Job(
            contender=contender,
            url=self._relay.url if setting.is_far else self._server.url,
            ground=path,
            is_aio=setting.is_aio,
            participants=setting.participants,
            locks=setting.locks,
            first=1,
            cores=frozenset(CORES[1:]) if setting.is_aio else frozenset(),
            dwell=dwell,
            with_tokens=with_tokens,
        )
        return [job._replace(first=1 + number * setting.participants) for number in range(setting.processes)]

    def _place(self, setting: Setting) -> None:
        """If the participants share an event loop, give the server its own core; otherwise let the kernel choose."""
        if len(CORES) > 1:
            cores = CORES[:1] if setting.is_aio else CORES
            os.sched_setaffinity(self._server.pid, cores)
            self._relay.place(cores)

    def _clients(self) -> set[str]:
        return {one["id"] for one in self._admin.client_list()}

    @contextmanager
    def _ground(self, locks: int) -> Iterator[tuple[Path, Ground]]:
        with tempfile.TemporaryDirectory(prefix="hf-") as folder:
            path = Path(folder) / "ground"
            ground = Ground(path, locks)
            try:
                yield path, ground
            finally:
                ground.close()

    @contextmanager
    def _workers(self, jobs: Sequence[Job]) -> Iterator[list[Connection]]:
        started: list[tuple[Any, Connection]] = []
        try:
            for job in jobs:
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=work, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
            yield [pipe for _, pipe in started]
            deadline = time.monotonic() + PATIENCE_TO_LEAVE_S
            for process, _ in started:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process, pipe in started:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
                pipe.close()

    @staticmethod
    def _send(pipes: list[Connection], message: object) -> None:
        for pipe in pipes:
            pipe.send(message)

    @staticmethod
    def _receive(pipes: list[Connection], within: float) -> list[Any]:
        deadline = time.monotonic() + within
        messages = []
        for pipe in pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"a worker sent nothing for {within:.0f} s")
            messages.append(pipe.recv())
        return messages

    def _expect(self, pipes: list[Connection], message: str) -> None:
        if any(received != message for received in self._receive(pipes, PATIENCE_S)):
            raise RuntimeError(f"a worker did not send {message!r}")


def granted_in_order(order: Sequence[int], tokens: Sequence[Sequence[str]]) -> list[str]:
    """The tokens of all acquisitions in the order of the grants, without the first few of each participant."""
    counters = [itertools.count() for _ in tokens]
    granted = []
    for participant in order:
        number = next(counters[participant - 1])
        if FIRST_FEW <= number < len(tokens[participant - 1]):
            granted.append(tokens[participant - 1][number])
    return granted


def kind_of(arguments: Sequence[bytes]) -> str:
    words = arguments[:2] if arguments[0].upper() == b"CLIENT" else arguments[:1]
    return b" ".join(words).decode().upper()
