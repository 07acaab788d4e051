"""Threads of one process on different locks: one connection for each, or one shared connection?

    python -m benchmarks.combining [--seconds 0.4] [--rounds 5] [--threads 1,2,4,16,64]

While one thread waits for a reply, another thread could give its request to the first thread instead of using its own
connection. That saves system calls, and reads of the server. This benchmark tries it on the public interface, with
different engines:

    pooled         what Holdfast does: one connection for each thread that is waiting for a reply
    combining      flat combining (Hendler, Incze, Shavit and Tzafrir, 2010): a thread that finds the connection free
                   leads, and also sends, in the same write, the requests of the threads that found it in use
    combining x 2  the same over two connections, so that two threads need not wait for each other
    sharing        one connection: each thread writes its own request, and one of the waiting threads reads for all
    shared         one connection with a thread that writes and reads for all; see
                   engines/redis/blocking/shared_connection.py

Each thread acquires and releases a lock of its own. All contenders run in each of several rounds, in shuffled order;
the ratio within a round is compared, because the speed of a machine changes. CPU is the time of client and server
together, per cycle.
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
from holdfast.engines.redis.blocking.pooled_connection import PooledConnection
from holdfast.engines.redis.protocol import MORE, Op, pack
from holdfast.engines.redis.target import resolve
from holdfast.lua import SCRIPTS

POOLED, COMBINING, COMBINING_TWO, SHARING, SHARED = "pooled", "combining", "combining x 2", "sharing", "shared"
NAMES = (POOLED, COMBINING, COMBINING_TWO, SHARING, SHARED)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


class Slot:
    """A request. Its thread waits on it for the reply, or until it must lead."""

    __slots__ = ("_wakeup", "data", "is_answered", "reply")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reply: Any = None
        self.is_answered = False
        self._wakeup = allocate_lock()
        self._wakeup.acquire()

    def answer(self, reply: Any) -> None:
        self.reply = reply
        self.is_answered = True
        self.wake()

    def wake(self) -> None:
        try:
            self._wakeup.release()
        except RuntimeError:
            pass  # already woken

    def wait(self) -> None:
        self._wakeup.acquire()


class Combining:
    """A thread that finds a free connection leads: it also sends the requests of the threads that found none."""

    def __init__(self, url: str, *, connections: int) -> None:
        self._connections = [PooledConnection(resolve(url, aio=False), 5.0) for _ in range(connections)]
        self._free = deque(self._connections)
        self._waiting: deque[Slot] = deque()

    def call(self, op: Op, timeout: float) -> Any:
        slot = None
        data = pack(op)
        while slot is None or not slot.is_answered:
            try:
                connection = self._free.pop()
            except IndexError:
                if slot is None:
                    slot = Slot(data)
                    self._waiting.append(slot)  # then look again: a connection may have become free just before
                else:
                    slot.wait()
                continue
            try:
                reply = self._lead(connection, data if slot is None else None, timeout)
            finally:
                self._free.append(connection)
                self._promote_next()
            if slot is None:
                return reply
        return slot.reply

    def _lead(self, connection: PooledConnection, own: bytes | None, timeout: float) -> Any:
        batch = []
        try:
            while True:
                batch.append(self._waiting.popleft())
        except IndexError:
            pass
        if not batch:
            return None if own is None else connection.ask(own, time.monotonic() + timeout)
        requests = [slot.data for slot in batch]
        replies = connection.ask_all(requests if own is None else [own, *requests], timeout)
        for slot, reply in zip(reversed(batch), reversed(replies), strict=False):
            slot.answer(reply)
        return replies[0]

    def _promote_next(self) -> None:
        try:
            self._waiting[0].wake()
        except IndexError:
            pass  # no thread waits

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Sharing:
    """Requests follow each other without waiting. A thread that finds no reader reads until it has its own reply."""

    def __init__(self, url: str) -> None:
        self._connection = PooledConnection(resolve(url, aio=False), 5.0)
        self._asked: deque[Slot] = deque()
        self._writing = allocate_lock()
        self._reading = allocate_lock()

    def call(self, op: Op, timeout: float) -> Any:
        slot = Slot(pack(op))
        deadline = time.monotonic() + timeout
        with self._writing:
            self._asked.append(slot)
            self._connection._send(slot.data, deadline)
        while not slot.is_answered:
            if self._reading.acquire(blocking=False):
                try:
                    self._read_until(slot, deadline)
                finally:
                    self._reading.release()
                self._promote_next()
            else:
                slot.wait()
        return slot.reply

    def _read_until(self, own: Slot, deadline: float) -> None:
        parser = self._connection._parser
        while not own.is_answered:
            reply = parser.next()
            if reply is MORE:
                reply = self._connection._receive(deadline)
            self._asked.popleft().answer(reply)

    def _promote_next(self) -> None:
        try:
            self._asked[0].wake()
        except IndexError:
            pass  # no thread waits

    def close(self) -> None:
        self._connection.close()


class Contender(NamedTuple):
    name: str
    client: holdfast.Client


class Sample(NamedTuple):
    per_second: float
    cpu_us: float  # of client and server together, per cycle


def contenders(server: Server, stack: ExitStack) -> list[Contender]:
    opened = []
    for name in NAMES:
        client = stack.enter_context(holdfast.connect(server.url))
        driver: Any = client._driver
        if name == SHARING:
            driver.engine = Sharing(server.url)
        elif name == SHARED:
            driver.engine = driver.shared
        elif name != POOLED:
            driver.engine = Combining(server.url, connections=1 if name == COMBINING else 2)
        opened.append(Contender(name, client))
    return opened


def run(client: holdfast.Client, threads: int, seconds: float, cpu: Callable[[], float]) -> Sample:
    """All threads start together; the time is measured until the last has finished its cycle."""
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
    """Put server and client on a core each, or let the kernel decide; returns whether that was possible."""
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

        opened = contenders(server, stack)
        for _, client in opened:
            run(client, max(counts), 0.05, cpu)  # a warm-up, which makes the connections
        turns = [(count, one) for _ in range(rounds) for count in counts for one in random.sample(opened, len(opened))]
        for count, (name, client) in track(turns, console=console, transient=True, disable=not console.is_terminal):
            samples.setdefault((name, count), []).append(run(client, count, seconds, cpu))
    return samples


def show(samples: dict[tuple[str, int], list[Sample]], counts: list[int], title: str) -> None:
    table = new_table(title)
    table.add_column("threads", justify="right")
    table.add_column("", no_wrap=True)
    for head in ("cycles/s", "p10 .. p90", "times pooled", "CPU us/cycle"):
        table.add_column(head, justify="right", no_wrap=True)
    for count in counts:
        for name in NAMES:
            mine, pooled = samples[name, count], samples[POOLED, count]
            rate = spread_of([sample.per_second for sample in mine])
            ratio = spread_of([a.per_second / b.per_second for a, b in zip(mine, pooled, strict=True)])
            table.add_row(
                str(count) if name == POOLED else "",
                name,
                f"{rate.median:,.0f}",
                f"{rate.p10:,.0f} .. {rate.p90:,.0f}",
                "" if name == POOLED else f"{ratio.median:.2f} ({ratio.p10:.2f}..{ratio.p90:.2f})",
                f"{spread_of([sample.cpu_us for sample in mine]).median:.0f}",
                end_section=name == SHARED,
            )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.combining", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds for each measurement (default 0.4)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default 5)")
    parser.add_argument("--threads", default="1,2,4,16,64", help="numbers of threads, separated by commas")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.threads.split(",")]
    for apart in (True, False):
        with Server() as server:
            if place(server, apart):
                where = "server and client on a core each" if apart else "where the kernel puts them"
                show(
                    measure(server, counts, asked.rounds, asked.seconds),
                    counts,
                    f"Threads on locks of their own, {where}",
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
