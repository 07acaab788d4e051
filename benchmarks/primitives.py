"""The cost of the other primitives, compared with the lock and with other libraries.

    python -m benchmarks.primitives [--rounds 40] [--cycles 100] [--json FILE]

Rounds, order and cores are as in benchmarks.uncontended: the ratio within a round is compared. The other libraries:

- Semaphore: redis-semaphore, which takes its tokens from a list with BLPOP (with the option that frees the tokens of a
  dead client after a ttl, as Holdfast does); and the usual handwritten code on redis-py: a sorted set with a member for
  each holder, scored by the time of its machine, where the first N members hold a permit (Redis in Action, 6.3.1). That
  code does not wait, has neither order nor fence, and trusts the clocks of its clients.
- Readers-writer lock: redis-rw-lock, which is made of five locks of python-redis-lock and two counters.
- Reentrant lock and hand-over: we know of no other library. They are compared with the lock.

In the second table there are more threads than permits, and the handwritten code tries again every millisecond.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import redis_rw_lock  # type: ignore[import-untyped]
import redis_semaphore  # type: ignore[import-untyped]
from tests.servers import Server

import holdfast
from benchmarks.report import Figure, conclude, console, new_table, spread_of
from benchmarks.uncontended import TTL, Contender, measure, place, ratio, timed

LOCK, REENTRANT, HANDED = "Holdfast, lock", "Holdfast, rlock taken twice", "Holdfast, lock handed over"
SEMAPHORE, READ, WRITE = "Holdfast, semaphore of 5", "Holdfast, read", "Holdfast, write"
BY_HAND, LIST = "sorted set by hand, redis-py", "redis-semaphore"
THEIR_READ, THEIR_WRITE = "redis-rw-lock, read", "redis-rw-lock, write"
MOST_TIMES_LOCK = 2.0  # the same round trips, and more work for the server
PERMITS = 2
SECONDS = 1.5


class ByHand:
    """The semaphore of Redis in Action, 6.3.1."""

    def __init__(self, client: Any, name: str, permits: int) -> None:
        self._client, self._name, self._permits = client, name, permits
        self._holder = ""

    def acquire(self) -> bool:
        self._holder = secrets.token_urlsafe(16)
        now = time.time()
        steps = self._client.pipeline()
        steps.zremrangebyscore(self._name, "-inf", now - TTL)
        steps.zadd(self._name, {self._holder: now})
        steps.zrank(self._name, self._holder)
        if steps.execute()[-1] < self._permits:
            return True
        self.release()
        return False

    def release(self) -> None:
        self._client.zrem(self._name, self._holder)


class ByList:
    """The semaphore of redis-semaphore; its ``acquire`` returns a token or None."""

    def __init__(self, client: Any, name: str, permits: int) -> None:
        self._inner = redis_semaphore.Semaphore(client, permits, name, stale_client_timeout=TTL)

    def acquire(self) -> bool:
        return self._inner.acquire() is not None

    def release(self) -> None:
        self._inner.release()


def cycle_of(make: Callable[[], Any]) -> Callable[[], None]:
    def cycle() -> None:
        lock = make()
        if lock.acquire() is False:  # redis-rw-lock returns None
            raise RuntimeError("another holder has the lock")
        lock.release()

    return cycle


def contenders(server: Server, stack: ExitStack) -> list[Contender]:
    ours, theirs = stack.enter_context(holdfast.connect(server.url)), server.client()

    def take_twice() -> None:
        lock = ours.rlock("bench:rlock", ttl=TTL)
        with lock, lock:
            pass

    def hand_over() -> None:
        lease = ours.lock("bench:handed", ttl=TTL).acquire()
        assert lease is not None
        ours.adopt(lease.hand_over(), ttl=TTL).release()

    def their_side(mode: str) -> Any:
        return redis_rw_lock.RWLock(theirs, "bench:their-rw", mode, expire=int(TTL))

    cycles: dict[str, tuple[Callable[[], None], str]] = {
        LOCK: (cycle_of(lambda: ours.lock("bench:lock", ttl=TTL)), LOCK),
        REENTRANT: (take_twice, LOCK),
        HANDED: (hand_over, LOCK),
        SEMAPHORE: (cycle_of(lambda: ours.semaphore("bench:semaphore", 5, ttl=TTL)), LOCK),
        BY_HAND: (cycle_of(lambda: ByHand(theirs, "bench:by-hand", 5)), SEMAPHORE),
        LIST: (cycle_of(lambda: ByList(theirs, "bench:list", 5)), SEMAPHORE),
        READ: (cycle_of(lambda: ours.rwlock("bench:rw", ttl=TTL).read), LOCK),
        THEIR_READ: (cycle_of(lambda: their_side("R")), READ),
        WRITE: (cycle_of(lambda: ours.rwlock("bench:rw", ttl=TTL).write), LOCK),
        THEIR_WRITE: (cycle_of(lambda: their_side("W")), WRITE),
    }
    return [Contender(name, timed(cycle), beside) for name, (cycle, beside) in cycles.items()]


def crowd(visit: Callable[[], None], threads: int) -> tuple[float, list[int]]:
    """Let this many threads contend; returns acquisitions per second, and the acquisitions of each thread."""
    stop = threading.Event()
    counts = [0] * threads

    def work(number: int) -> None:
        while not stop.is_set():
            visit()
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    started = perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(SECONDS)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(counts) / (perf_counter() - started), counts


def fairness(counts: list[int]) -> float:
    """Jain's index: 1 if all have the same share."""
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


def contended(server: Server, threads: int) -> dict[str, tuple[float, float]]:
    found = {}
    with holdfast.connect(server.url) as client:
        semaphore = client.semaphore("bench:contended", PERMITS, ttl=TTL)

        def ours() -> None:
            with semaphore:
                pass

        rate, counts = crowd(ours, threads)
        found[f"Holdfast, semaphore of {PERMITS}"] = rate, fairness(counts)
    plain = server.client()

    def by_hand() -> None:
        semaphore = ByHand(plain, "bench:contended-by-hand", PERMITS)
        while not semaphore.acquire():
            time.sleep(0.001)
        semaphore.release()

    def by_list() -> None:
        semaphore = ByList(plain, "bench:contended-list", PERMITS)
        semaphore.acquire()
        semaphore.release()

    for name, visit in ((BY_HAND, by_hand), (LIST, by_list)):
        rate, counts = crowd(visit, threads)
        found[name] = rate, fairness(counts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primitives", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="number of rounds (default 40)")
    parser.add_argument("--cycles", type=int, default=100, help="acquire + release per contender and round (100)")
    parser.add_argument("--threads", type=int, default=8, help="threads that want a permit at once (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()

    with ExitStack() as stack:
        server = stack.enter_context(Server())
        opened = contenders(server, stack)
        where = place(server, "apart")
        took = measure(opened, asked.rounds, asked.cycles)
        crowded = contended(server, asked.threads)

    table = new_table(f"Uncontended acquire + release, server {where}")
    for column in ("", "cycles/s", "us", "time, compared"):
        table.add_column(column, justify="left" if column in ("", "time, compared") else "right", no_wrap=True)
    for name, _, beside in opened:
        seconds = spread_of(took[name]).median
        compared = "" if name == beside else f"{ratio(took, name, beside).median:.2f} x {beside.partition(', ')[2]}"
        table.add_row(name, f"{1 / seconds:,.0f}", f"{seconds * 1e6:.0f}", compared)
    console.print(table)
    table = new_table(f"{asked.threads} threads contend for {PERMITS} permits")
    for column in ("", "acquisitions/s", "Jain's fairness index"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, (rate, fair) in crowded.items():
        table.add_row(name, f"{rate:,.0f}", f"{fair:.3f}")
    console.print(table)

    slowest = max((ratio(took, name, LOCK) for name in (SEMAPHORE, READ, WRITE)), key=lambda spread: spread.median)
    fair = next(iter(crowded.values()))[1]
    figures = [
        Figure(
            "the slowest of semaphore, read and write",
            f"{slowest.median:.2f} times the lock's time, p10..p90 {slowest.p10:.2f}..{slowest.p90:.2f}",
            f"at most {MOST_TIMES_LOCK:g}",
            slowest.median <= MOST_TIMES_LOCK,
        ),
        Figure("fairness of the semaphore", f"Jain's index {fair:.3f}", "at least 0.95", fair >= 0.95),
    ]
    details = {"server": where, "seconds_per_cycle": took, "contended": crowded}
    return conclude(figures, details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
