"""A cache storm: two hundred visitors of one page, which is cached for a second and made from a database.

    python -m examples.cache_storm [--seconds 3]

When the page has expired, every visitor finds no page until it is made again, and queries the database for the same
page. The database answers ten queries at a time, so its queue grows, the page is late, and more visitors miss. The
cache should protect the database from the visitors, but it lets all of them through at once.

``visit_with_holdfast`` shows how to do it right: one visitor makes the page, the others wait for it. In its second run,
the other visitors get the old page meanwhile (``stale=``), so they do not wait. You need not set up a server: an
embedded one is started, unless ``HOLDFAST_URL`` names one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import holdfast

SERVER = os.environ.get("HOLDFAST_URL", "local://")
PROCESSES = 4
VISITORS = 50  # in each process
TTL = 1.0
QUERY = 0.1  # seconds that the database takes
AT_ONCE = 10  # queries that it can answer at a time
PAUSE = (0.05, 0.25)  # between two visits, in seconds


# ---- the job ---------------------------------------------------------------------------------------------------------


class Database:
    """A slow database that all processes share."""

    def __init__(self, context: Any) -> None:
        self.queries = context.Value("i", 0)
        self._connections = context.BoundedSemaphore(AT_ONCE)

    def make_page(self) -> str:
        with self.queries.get_lock():
            self.queries.value += 1
        with self._connections:
            time.sleep(QUERY)
        return "<h1>Today's offers</h1>"


class PlainCache:
    """The usual cache, shared by all processes: read, and make the page if there is none."""

    def __init__(self, context: Any) -> None:
        self._until = context.Value("d", 0.0)  # the text of the page does not matter here, only when it expires

    def visit(self, database: Database) -> None:
        if time.monotonic() >= self._until.value:
            database.make_page()
            self._until.value = time.monotonic() + TTL


def visit_with_holdfast(client: holdfast.Client, database: Database, stale: float) -> None:
    client.get_or_compute("page:offers", database.make_page, ttl=TTL, stale=stale)


# ---- many visitors ---------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """What the processes of a run share."""

    database: Database
    cache: PlainCache
    start: Any
    waits: Any


def work(way: str, seconds: float, stage: Stage) -> None:
    """One of the processes: its visitors come again and again until the time is over."""
    database, cache, start, waits = stage
    with holdfast.connect(SERVER) as client:
        stale = 60.0 if way == "stale" else 0.0
        visit: Callable[[], None] = (
            (lambda: cache.visit(database)) if way == "plain" else lambda: visit_with_holdfast(client, database, stale)
        )
        seen: list[float] = []
        start.wait()
        visit()  # so that the page exists at the start
        start.wait()
        until = time.monotonic() + seconds

        def visitor() -> None:
            while (came := time.monotonic()) < until:
                visit()
                seen.append(time.monotonic() - came)
                time.sleep(random.uniform(*PAUSE))

        visitors = [threading.Thread(target=visitor) for _ in range(VISITORS)]
        for one in visitors:
            one.start()
        for one in visitors:
            one.join()
        waits.put(seen)


class Tally(NamedTuple):
    visits: int
    queries: int
    typical: float
    slowest: float  # the slowest of a hundred visits


def run(way: str, seconds: float) -> Tally:
    with holdfast.connect(SERVER) as client:
        client.invalidate("page:offers")  # the page of the last run
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(PROCESSES, timeout=60)
    stage = Stage(Database(context), PlainCache(context), start, context.Queue())
    processes = [context.Process(target=work, args=(way, seconds, stage), daemon=True) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    seen = sorted(wait for _ in processes for wait in stage.waits.get(timeout=seconds + 120))
    for process in processes:
        process.join()
    queries: int = stage.database.queries.value
    return Tally(len(seen), queries, seen[len(seen) // 2], seen[len(seen) * 99 // 100])


# ---- output ----------------------------------------------------------------------------------------------------------

WAYS = {"plain": "a plain cache", "holdfast": "with Holdfast", "stale": "and stale="}


def summarise(console: Console, tallies: dict[str, Tally]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 1))
    table.add_column("")
    for way in tallies:
        table.add_column(WAYS[way], justify="right")
    seen = tallies.values()
    table.add_row("visits", *[str(tally.visits) for tally in seen])
    table.add_row(
        "queries to the database",
        *[Text(str(tally.queries), "bold red" if way == "plain" else "bold green") for way, tally in tallies.items()],
    )
    table.add_row("half took at most", *[f"{tally.typical * 1000:.1f} ms" for tally in seen])
    table.add_row("99 of 100 took at most", *[f"{tally.slowest * 1000:.0f} ms" for tally in seen])
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.cache_storm", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each of the three runs takes (default 3)")
    seconds: float = parser.parse_args().seconds
    if seconds <= 0:
        parser.error("--seconds must be greater than 0")
    console = Console(highlight=False)
    console.print(
        f"{PROCESSES * VISITORS} visitors in {PROCESSES} processes want one page, cached for {TTL:g} s. The database\n"
        f"takes {QUERY:g} s to make it, and can make {AT_ONCE} at a time. Each run takes {seconds:g} s."
    )
    tallies = {}
    for way, title in WAYS.items():
        tallies[way] = run(way, seconds)
        console.print(f"  {title}: {tallies[way].queries} queries to the database")
    console.print()
    summarise(console, tallies)
    most = 2 + seconds / TTL  # one for each second, one at the start, and one for a visit at the very end
    for way in ("holdfast", "stale"):
        if tallies[way].queries > most:
            console.print(f"[bold red]{tallies[way].queries} queries with Holdfast. That is a bug.[/]")
            return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
