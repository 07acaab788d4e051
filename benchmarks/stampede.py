"""The cache storm: how often a value is computed, and how long its readers wait, with and without protection.

    python -m benchmarks.stampede [--seconds 6] [--json FILE] [--svg FILE]

The readers are threads of four processes. Behind the cache is a database that takes 0.1 s for the value and answers ten
queries at a time, so each needless query makes the other readers wait. Two scenes:

- *cold*: 500 readers miss at the same moment. One computation is needed.
- *hot*: 128 readers read again and again, and the value lives for a second. One computation per second is needed.

All contenders use one server. *No protection* is GET; after a miss, compute and SET. *redis-py's Lock* does the same
inside a lock, and reads again once it has the lock: all readers that missed get the lock one after the other. *stale*
returns the old value while one reader computes the new one; for a cold cache this makes no difference. *dogpile.cache*
always returns the old value in this way, so compare it with *stale* for a hot value. It uses its backend for Redis and
``distributed_lock``, as its documentation advises for several processes. If there is no value yet, its readers take a
lock of redis-py one after the other, and poll for it every 0.1 s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis
from dogpile.cache import make_region
from tests.servers import Server

import holdfast
from benchmarks.chart import Column, Group, Line, draw, in_ms, of_time
from benchmarks.report import Figure, conclude, console, new_table

PROCESSES: Final = 4
TTL: Final = 1.0
QUERY: Final = 0.1
AT_ONCE: Final = 10
PAUSE: Final = (0.02, 0.18)
MOST_CONNECTIONS: Final = 1000  # redis-py uses one for each thread, and its default limit is 100
KEY: Final = "offers"
VALUE: Final = "x" * 500

Read = Callable[[], Any]


# ---- ways to read ----------------------------------------------------------------------------------------------------


class Database:
    """A database with ten connections, which counts its queries."""

    def __init__(self, context: Any) -> None:
        self.queries = context.Value("i", 0)
        self._connections = context.BoundedSemaphore(AT_ONCE)

    def compute(self) -> str:
        with self.queries.get_lock():
            self.queries.value += 1
        with self._connections:
            time.sleep(QUERY)
        return VALUE


@contextmanager
def no_protection(url: str, database: Database) -> Iterator[Read]:
    with redis.Redis.from_url(url, max_connections=MOST_CONNECTIONS) as server:

        def read() -> Any:
            found = server.get(KEY)
            if found is None:
                found = database.compute()
                server.set(KEY, found, px=round(TTL * 1000))
            return found

        yield read


@contextmanager
def lock_around(url: str, database: Database) -> Iterator[Read]:
    with redis.Redis.from_url(url, max_connections=MOST_CONNECTIONS) as server:

        def read() -> Any:
            found = server.get(KEY)
            if found is None:
                with server.lock(f"{KEY}:lock", timeout=10):
                    found = server.get(KEY)
                    if found is None:
                        found = database.compute()
                        server.set(KEY, found, px=round(TTL * 1000))
            return found

        yield read


@contextmanager
def dogpile(url: str, database: Database) -> Iterator[Read]:
    arguments = {
        "url": url,
        "redis_expiration_time": 60,
        "distributed_lock": True,
        "thread_local_lock": False,
        "lock_timeout": 10,
        "connection_kwargs": {"max_connections": MOST_CONNECTIONS},
    }
    region = make_region().configure("dogpile.cache.redis", expiration_time=TTL, arguments=arguments)
    try:
        yield lambda: region.get_or_create(KEY, database.compute)
    finally:
        region.backend.writer_client.close()


@contextmanager
def get_or_compute(url: str, database: Database, **options: Any) -> Iterator[Read]:
    with holdfast.connect(url) as client:
        yield lambda: client.get_or_compute(KEY, database.compute, ttl=TTL, **options)


class Way(NamedTuple):
    name: str
    title: str
    opens: Any
    options: dict[str, Any]
    is_ours: bool


WAYS: Final = [
    Way("holdfast", "Holdfast", get_or_compute, {}, True),
    Way("stale", "Holdfast, stale=", get_or_compute, {"stale": 60.0}, True),
    Way("dogpile", "dogpile.cache", dogpile, {}, False),
    Way("lock", "redis-py's Lock", lock_around, {}, False),
    Way("none", "no protection", no_protection, {}, False),
]


# ---- scenes ----------------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    name: str
    title: str
    readers: int  # in each process
    seconds: float  # 0: each reads once


class Tally(NamedTuple):
    way: str
    scene: str
    reads: int
    computed: int
    median: float
    p99: float
    slowest: float


class Stage(NamedTuple):
    url: str
    database: Database
    start: Any
    waits: Any


def work(way: str, scene: Scene, stage: Stage) -> None:
    """One process with its readers."""
    _, _, opens, options, _ = next(one for one in WAYS if one.name == way)
    seen: list[float] = []
    with opens(stage.url, stage.database, **options) as read:
        go = threading.Barrier(scene.readers + 1)
        until = 0.0

        def reader() -> None:
            go.wait()
            while True:
                came = time.perf_counter()
                read()
                seen.append(time.perf_counter() - came)
                if time.perf_counter() >= until:
                    return
                time.sleep(random.uniform(*PAUSE))

        readers = [threading.Thread(target=reader, daemon=True) for _ in range(scene.readers)]
        for one in readers:
            one.start()
        stage.start.wait()
        if scene.seconds:
            read()  # so that the hot value exists at the start
            stage.start.wait()
            until = time.perf_counter() + scene.seconds
        go.wait()
        for one in readers:
            one.join()
    stage.waits.put(seen)


def play(way: Way, scene: Scene, server: Server) -> Tally:
    with server.client() as admin:
        admin.flushall()
    context = multiprocessing.get_context("spawn")
    stage = Stage(server.url, Database(context), context.Barrier(PROCESSES, timeout=60), context.Queue())
    processes = [context.Process(target=work, args=(way.name, scene, stage), daemon=True) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    seen = sorted(wait for _ in processes for wait in stage.waits.get(timeout=scene.seconds + 300))
    for process in processes:
        process.join()
    count = len(seen)
    if not scene.seconds and count != scene.readers * PROCESSES:
        raise RuntimeError(f"{way.title}: only {count} of {scene.readers * PROCESSES} readers finished")
    computed: int = stage.database.queries.value
    return Tally(way.name, scene.name, count, computed, seen[count // 2], seen[count * 99 // 100], seen[-1])


# ---- results ---------------------------------------------------------------------------------------------------------

COLUMNS: Final = [
    Column(
        "computations",
        "less is better, log scale",
        is_logarithmic=True,
        ticks=[(10.0**n, f"{10**n:,}") for n in range(5)],
    ),
    of_time("wait, 99th percentile"),
    of_time("slowest read"),
]


def picture(scenes: list[Scene], tallies: list[Tally]) -> str:
    groups = []
    for scene in scenes:
        of = {tally.way: tally for tally in tallies if tally.scene == scene.name}
        lines = [
            Line(
                way.title,
                [
                    (tally.computed, f"{tally.computed:,}"),
                    (tally.p99, in_ms(tally.p99)),
                    (tally.slowest, in_ms(tally.slowest)),
                ],
                way.is_ours,
            )
            for way in WAYS
            if (tally := of.get(way.name))
        ]
        ours, none = of["holdfast"].computed, of["none"].computed
        groups.append(Group(scene.title, f"{ours:,} computation{'s' * (ours != 1)} instead of {none:,}", lines))
    subtitle = (
        f"Readers in {PROCESSES} processes; the database takes {QUERY:g} s and answers {AT_ONCE} at a time; one server"
    )
    return draw("A cache storm", subtitle, COLUMNS, groups)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stampede", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="length of the hot scene (default 6)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, default=Path("docs/stampede.svg"), help="the picture (docs/stampede.svg)")
    given = parser.parse_args()
    scenes = [
        Scene("cold", "Cold: 500 misses at once", 125, 0.0),
        Scene("hot", f"Hot: 128 readers for {given.seconds:g} s, a value that lives for {TTL:g} s", 32, given.seconds),
    ]
    tallies: list[Tally] = []
    with Server() as server:
        for scene in scenes:
            table = new_table(scene.title)
            for column in ("", "reads", "computed", "median", "99 %", "slowest"):
                table.add_column(column, justify="right" if column else "left")
            for way in WAYS:
                if scene.name == "cold" and way.name == "stale":
                    continue
                tally = play(way, scene, server)
                tallies.append(tally)
                numbers = (tally.reads, tally.computed)
                waits = (tally.median, tally.p99, tally.slowest)
                table.add_row(way.title, *[f"{number:,}" for number in numbers], *map(in_ms, waits))
            console.print(table)
    given.svg.write_text(picture(scenes, tallies))
    by = {(tally.scene, tally.way): tally for tally in tallies}
    cold, hot, stale = by["cold", "holdfast"], by["hot", "holdfast"], by["hot", "stale"]
    most = 2 + given.seconds / TTL
    figures = [
        Figure("computations for 500 misses at once", f"{cold.computed}", "1", cold.computed == 1),
        Figure("computations of a hot value", f"{hot.computed}", f"at most {most:g}", hot.computed <= most),
        Figure("the same with stale=", f"{stale.computed}", f"at most {most:g}", stale.computed <= most),
    ]
    details = {"tallies": [tally._asdict() for tally in tallies]}
    return conclude(figures, details=details, json_file=given.json)


if __name__ == "__main__":
    sys.exit(main())
