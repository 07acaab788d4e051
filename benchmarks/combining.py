"""Threads of one process on different locks: a connection for each, or one that they share?

    python -m benchmarks.combining [--seconds 0.4] [--rounds 5] [--threads 1,2,4,16,64]

A thread that asks for something while the round trip of another is under way could hand its request to that other one
instead of using a connection of its own: fewer system calls, and fewer requests that the server has to pick up one by
one. That is what is tried here, on the real face, with the engine exchanged underneath:

    lines          what Holdfast does: a connection for each thread that is waiting for a reply
    combining      flat combining (Hendler, Incze, Shavit and Tzafrir, 2010): whoever finds the connection free leads,
                   and sends along, in one write, what those who found it taken have asked for
    combining x 2  the same over two connections, so that two threads need not wait for each other
    sharing        one connection: everybody writes for itself, and one of those who wait reads for all
    the wire       one connection with a thread of its own, which writes and reads for all; see engines/redis_wire.py

Each thread acquires and releases a lock of its own. All contenders run in each of several rounds, in shuffled order, so
that what is compared is the ratio within a round: the speed of a machine wanders. CPU is what client and server
take together, per cycle.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import redis
from rich.progress import track
from tests.servers import Server

import holdfast
from benchmarks.report import console, new_table, spread_of
from holdfast.engines.redis import Line
from holdfast.engines.target import aim
from holdfast.engines.wire import Op, pack
from holdfast.lua import SCRIPTS

LINES, COMBINING, COMBINING_TWO, SHARING, WIRE = "lines", "combining", "combining x 2", "sharing", "the wire"
NAMES = (LINES, COMBINING, COMBINING_TWO, SHARING, WIRE)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


class Slot:
    """A request, and where its thread waits for the reply, or for being called to work."""

    __slots__ = ("_bell", "data", "is_answered", "reply")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reply: Any = None
        self.is_answered = False
        self._bell = allocate_lock()
        self._bell.acquire()

    def answer(self, reply: Any) -> None:
        self.reply = reply
        self.is_answered = True
        self.ring()

    def ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it has rung already

    def wait(self) -> None:
        self._bell.acquire()


class Combining:
    """Whoever finds a line free leads: it takes along what those who found none have asked for."""

    def __init__(self, url: str, *, lines: int) -> None:
        self._lines = [Line(aim(url, aio=False), 5.0) for _ in range(lines)]
        self._resting = deque(self._lines)
        self._waiting: deque[Slot] = deque()

    def call(self, op: Op, timeout: float) -> Any:
        slot = None
        data = pack(op)
        while slot is None or not slot.is_answered:
            try:
                line = self._resting.pop()
            except IndexError:
                if slot is None:
                    slot = Slot(data)
                    self._waiting.append(slot)  # and look once more: a line may have become free just before
                else:
                    slot.wait()
                continue
            try:
                reply = self._lead(line, data if slot is None else None, timeout)
            finally:
                self._resting.append(line)
                self._call_next()
            if slot is None:
                return reply
        return slot.reply

    def _lead(self, line: Line, own: bytes | None, timeout: float) -> Any:
        batch = []
        try:
            while True:
                batch.append(self._waiting.popleft())
        except IndexError:
            pass
        if not batch:
            return None if own is None else line.ask(own, time.monotonic() + timeout)
        requests = [slot.data for slot in batch]
        replies = line.ask_all(requests if own is None else [own, *requests], timeout)
        for slot, reply in zip(reversed(batch), reversed(replies), strict=False):
            slot.answer(reply)
        return replies[0]

    def _call_next(self) -> None:
        try:
            self._waiting[0].ring()
        except IndexError:
            pass  # nobody waits

    def close(self) -> None:
        for line in self._lines:
            line.close()


class Sharing:
    """Requests follow each other without waiting; whoever finds nobody reading reads, until it has its own reply."""

    def __init__(self, url: str) -> None:
        self._line = Line(aim(url, aio=False), 5.0)
        self._asked: deque[Slot] = deque()
        self._writing = allocate_lock()
        self._reading = allocate_lock()

    def call(self, op: Op, timeout: float) -> Any:
        slot = Slot(pack(op))
        deadline = time.monotonic() + timeout
        with self._writing:
            self._asked.append(slot)
            self._line._send(slot.data, deadline)
        while not slot.is_answered:
            if self._reading.acquire(blocking=False):
                try:
                    self._read_until(slot, deadline)
                finally:
                    self._reading.release()
                self._call_next()
            else:
                slot.wait()
        return slot.reply

    def _read_until(self, own: Slot, deadline: float) -> None:
        reader = self._line._reader
        while not own.is_answered:
            reply = reader.gets()
            if reply is False:
                reader.feed(self._line._read(deadline))
            else:
                self._asked.popleft().answer(reply)

    def _call_next(self) -> None:
        try:
            self._asked[0].ring()
        except IndexError:
            pass  # nobody waits

    def close(self) -> None:
        self._line.close()


class Contender(NamedTuple):
    name: str
    client: holdfast.Client


class Sample(NamedTuple):
    per_second: float
    cpu_us: float  # of client and server together, per cycle


def contenders(server: Server, stack: ExitStack) -> list[Contender]:
    those = []
    for name in NAMES:
        client = stack.enter_context(holdfast.connect(server.url))
        driver: Any = client._driver
        if name == SHARING:
            driver.engine = Sharing(server.url)
        elif name == WIRE:
            driver.engine = driver.wire
        elif name != LINES:
            driver.engine = Combining(server.url, lines=1 if name == COMBINING else 2)
        those.append(Contender(name, client))
    return those


def run(client: holdfast.Client, threads: int, seconds: float, cpu: Callable[[], float]) -> Sample:
    """All threads start together; the time counts from there until the last has finished its cycle."""
    done = [0] * threads
    ready = threading.Barrier(threads + 1)
    ends = float("inf")

    def work(number: int) -> None:
        lock = client.lock(f"bench:{number}")
        with lock:
            pass
        ready.wait()
        while time.perf_counter() < ends:
            with lock:
                done[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    ends = time.perf_counter() + seconds + 60.0
    ready.wait()
    spent, started = cpu(), time.perf_counter()
    ends = started + seconds
    for worker in workers:
        worker.join()
    took, spent = time.perf_counter() - started, cpu() - spent
    return Sample(sum(done) / took, spent / sum(done) * 1e6)


def place(server: Server, apart: bool) -> bool:
    """Put server and client on cores of their own, or let the kernel decide; whether that could be done."""
    if len(CORES) < 2:
        return not apart
    os.sched_setaffinity(server.pid, {CORES[0]} if apart else set(CORES))
    os.sched_setaffinity(0, set(CORES[1:]) if apart else set(CORES))
    return True


def measure(server: Server, counts: list[int], rounds: int, seconds: float) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    with ExitStack() as stack:
        admin: redis.Redis = stack.enter_context(server.client())
        for script in SCRIPTS.values():
            admin.script_load(script.source)

        def cpu() -> float:
            used = admin.info("cpu")
            return float(time.process_time() + used["used_cpu_user"] + used["used_cpu_sys"])

        those = contenders(server, stack)
        for _, client in those:
            run(client, max(counts), 0.05, cpu)  # connections are made before anything counts
        turns = [(count, each) for _ in range(rounds) for count in counts for each in random.sample(those, len(those))]
        for count, (name, client) in track(turns, console=console, transient=True, disable=not console.is_terminal):
            samples.setdefault((name, count), []).append(run(client, count, seconds, cpu))
    return samples


def show(samples: dict[tuple[str, int], list[Sample]], counts: list[int], title: str) -> None:
    table = new_table(title)
    table.add_column("threads", justify="right")
    table.add_column("", no_wrap=True)
    for head in ("cycles/s", "p10 .. p90", "times lines", "CPU us/cycle"):
        table.add_column(head, justify="right", no_wrap=True)
    for count in counts:
        for name in NAMES:
            mine, lines = samples[name, count], samples[LINES, count]
            rate = spread_of([sample.per_second for sample in mine])
            ratio = spread_of([a.per_second / b.per_second for a, b in zip(mine, lines, strict=True)])
            table.add_row(
                str(count) if name == LINES else "",
                name,
                f"{rate.median:,.0f}",
                f"{rate.p10:,.0f} .. {rate.p90:,.0f}",
                "" if name == LINES else f"{ratio.median:.2f} ({ratio.p10:.2f}..{ratio.p90:.2f})",
                f"{spread_of([sample.cpu_us for sample in mine]).median:.0f}",
                end_section=name == WIRE,
            )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.combining", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement (default 0.4)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default 5)")
    parser.add_argument("--threads", default="1,2,4,16,64", help="how many, separated by commas")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.threads.split(",")]
    for apart in (True, False):
        with Server() as server:
            if place(server, apart):
                where = "server and client on a core each" if apart else "wherever the kernel puts them"
                show(
                    measure(server, counts, asked.rounds, asked.seconds),
                    counts,
                    f"Threads on locks of their own, {where}",
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
