"""What a guard costs: the same write with and without one.

    python -m benchmarks.guard [--rounds 10] [--json FILE]

Each guarded write is compared with the usual write without a guard, to the same resource, by the same client or
connection: ``SET``; an upsert and its commit (synced by SQLite; the PostgreSQL of the tests does not sync); a file that
is written to a temporary name, synced and renamed. The guard of a file syncs twice as often, because the fence must be
on the disk before the data. Rounds of both kinds alternate, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.guard.postgres import Postgres, why_not
from tests.servers import Server

import holdfast
from benchmarks.report import Figure, conclude, console, new_table, spread_of
from holdfast import guard

CREATE: Final = "CREATE TABLE notes (id INTEGER PRIMARY KEY, body TEXT, fence BIGINT, holder TEXT)"
UPSERT: Final = "INSERT INTO notes (id, body) VALUES (1, {}) ON CONFLICT (id) DO UPDATE SET body = excluded.body"

notes = guard.Table("notes", key="id")


class Resource(NamedTuple):
    """One resource, and its two kinds of write."""

    name: str
    writes: int  # in a round
    plain: Callable[[str], object]
    guarded: Callable[[str], object]


def sql(name: str, writes: int, connection: Any, mark: str, lease: holdfast.Lease) -> Resource:
    connection.cursor().execute(CREATE)
    connection.commit()

    def plain(body: str) -> None:
        connection.cursor().execute(UPSERT.format(mark), (body,))
        connection.commit()

    def guarded(body: str) -> None:
        notes.put(connection, {"id": 1, "body": body}, lease)
        connection.commit()

    return Resource(name, writes, plain, guarded)


def file(folder: Path, lease: holdfast.Lease) -> Resource:
    def plain(body: str) -> None:
        fresh = folder / "plain.tmp"
        with fresh.open("w") as written:
            written.write(body)
            written.flush()
            os.fsync(written.fileno())
        fresh.replace(folder / "plain")
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    return Resource("a file", 20, plain, lambda body: guard.replace_file(folder / "guarded", body, lease))


def measure(write: Callable[[str], object], writes: int) -> float:
    start = time.perf_counter()
    for number in range(writes):
        write(f"body {number}")
    return (time.perf_counter() - start) / writes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()

    with ExitStack() as stack:
        server = stack.enter_context(Server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-bench-")))
        client = stack.enter_context(holdfast.connect(server.url))
        lease = stack.enter_context(client.lock("note"))
        store = server.client()
        guarded = guard.RedisGuard(store)
        resources = [
            Resource(
                "a Redis key", 200, lambda body: store.set("plain", body), lambda body: guarded.set("a", body, lease)
            ),
            sql("a row in SQLite", 20, sqlite3.connect(folder / "notes.db"), "?", lease),
            file(folder, lease),
        ]
        if reason := why_not():
            console.print(f"without PostgreSQL: {reason}")
        else:
            import psycopg

            postgres = stack.enter_context(Postgres())
            connection = stack.enter_context(psycopg.connect(postgres.dsn))
            resources.insert(2, sql("a row in PostgreSQL", 100, connection, "%s", lease))

        took: dict[str, tuple[list[float], list[float]]] = {resource.name: ([], []) for resource in resources}
        sent = store.info("commandstats")["cmdstat_evalsha"]["calls"]
        for _ in range(asked.rounds):
            for resource in resources:
                for times, write in zip(took[resource.name], (resource.plain, resource.guarded), strict=True):
                    times.append(measure(write, resource.writes))
        sent = store.info("commandstats")["cmdstat_evalsha"]["calls"] - sent

    table = new_table(f"a write, without a guard and with one ({asked.rounds} rounds)")
    for column in ("", "plain", "guarded", "p10", "p90", "times"):
        table.add_column(column, justify="right" if column else "left")
    for name, (plain, with_guard) in took.items():
        before, after = spread_of(plain), spread_of(with_guard)
        shown = [f"{value * 1e6:,.0f} us" for value in (before.median, after.median, after.p10, after.p90)]
        table.add_row(name, *shown, f"{after.median / before.median:.1f}")
    console.print(table)
    requests = sent / (asked.rounds * resources[0].writes)  # includes some renewals of the lease
    figures = [Figure("requests of a guarded write to Redis", f"{requests:.2f}", "1", requests < 1.05)]
    return conclude(figures, details={"seconds": took}, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
