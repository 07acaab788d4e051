"""One process of a team: ``python work.py URL NAMESPACE``, with the tree to be measured first on PYTHONPATH.

For each job it reads one JSON line (name, begin, end on the monotonic clock that all processes share), and writes one
(the number of cycles between begin and end, and the CPU seconds of this process). The first line that it writes says
which holdfast it has imported.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from time import monotonic, process_time, sleep
from typing import Any, Final, NamedTuple

import holdfast
import holdfast.aio

Cycle = Callable[[], object]
AioCycle = Callable[[], Awaitable[object]]


class Work(NamedTuple):
    """What each process does, in how many threads or tasks. ``make(client, index)`` returns a function: one cycle."""

    processes: int
    each: int
    make: Callable[[Any, int], Any]
    is_aio: bool = False


def locked(client: Any, name: str) -> Cycle:
    def cycle() -> None:
        with client.lock(name):
            pass

    return cycle


def locked_aio(client: Any, name: str) -> AioCycle:
    async def cycle() -> None:
        async with client.lock(name):
            pass

    return cycle


def entered(guard: Any) -> Cycle:
    def cycle() -> None:
        with guard:
            pass

    return cycle


def refused(client: Any, index: int) -> Cycle:
    holder = client.lock("before:held", ttl=60, cohort=0)
    holder.acquire(blocking=False)

    def cycle() -> None:
        client.lock("before:held", cohort=0).acquire(blocking=False)

    return cycle


def cached(client: Any, index: int) -> Cycle:
    return lambda: client.get_or_compute("before:value", lambda: "value", ttl=60)


WORK: Final = {
    "uncontended": Work(1, 1, lambda client, index: locked(client, "before:alone")),
    "uncontended, asyncio": Work(1, 1, lambda client, index: locked_aio(client, "before:alone"), is_aio=True),
    "64 tasks, 64 locks": Work(1, 64, lambda client, index: locked_aio(client, f"before:{index}"), is_aio=True),
    "64 tasks, one lock": Work(1, 64, lambda client, index: locked_aio(client, "before:one"), is_aio=True),
    "16 threads, 16 locks": Work(1, 16, lambda client, index: locked(client, f"before:{index}")),
    "16 threads, one lock": Work(1, 16, lambda client, index: locked(client, "before:one")),
    "8 processes, one lock": Work(8, 1, lambda client, index: locked(client, "before:one")),
    "4 processes of 8 threads, one lock": Work(4, 8, lambda client, index: locked(client, "before:one")),
    "two names": Work(1, 1, lambda client, index: entered(client.lock("before:a", "before:b"))),
    "rlock": Work(1, 1, lambda client, index: entered(client.rlock("before:rlock"))),
    "semaphore of 4, 8 threads": Work(1, 8, lambda client, index: entered(client.semaphore("before:pool", 4))),
    "readers, 2 processes of 4": Work(2, 4, lambda client, index: entered(client.rwlock("before:rw").read)),
    "try a held lock": Work(1, 1, refused),
    "cached value": Work(1, 1, cached),
}


class Job(NamedTuple):
    name: str
    begin: float
    end: float


def count(cycle: Cycle, job: Job) -> int:
    while monotonic() < job.begin:
        sleep(max(0.0, job.begin - monotonic()))
    done = 0
    while monotonic() < job.end:
        cycle()
        done += 1
    return done


async def count_aio(cycle: AioCycle, job: Job) -> int:
    await asyncio.sleep(max(0.0, job.begin - monotonic()))
    done = 0
    while monotonic() < job.end:
        await cycle()
        done += 1
    return done


def run_threads(client: Any, work: Work, job: Job) -> int:
    counts = [0] * work.each

    def one(index: int, cycle: Cycle) -> None:
        counts[index] = count(cycle, job)

    threads = [threading.Thread(target=one, args=(index, work.make(client, index))) for index in range(work.each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


async def run_tasks(client: Any, work: Work, job: Job) -> int:
    return sum(await asyncio.gather(*(count_aio(work.make(client, index), job) for index in range(work.each))))


def main(url: str, namespace: str) -> None:
    with holdfast.connect(url, namespace=namespace) as client, asyncio.Runner() as loop:
        aio = holdfast.aio.connect(url, namespace=namespace)
        print(json.dumps(holdfast.__file__), flush=True)
        for line in sys.stdin:
            job = Job(*json.loads(line))
            work, used = WORK[job.name], process_time()
            done = loop.run(run_tasks(aio, work, job)) if work.is_aio else run_threads(client, work, job)
            print(json.dumps((done, process_time() - used)), flush=True)
        loop.run(aio.aclose())


if __name__ == "__main__":
    main(*sys.argv[1:])
