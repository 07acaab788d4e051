"""A web service whose lock server goes away: how long its answers take, and when it works again.

    python -m benchmarks.outage [--page FILE] [--json FILE]

FastAPI under uvicorn with two workers, one endpoint that takes a lock with ``wait=5``, and 80 requests at once on 8
locks: just after the server is gone (*first*), and 4 s later (*later*). Then the server comes back: a request is sent
every 50 ms until one succeeds, and 20 requests that begin 1.5 s after it came back must all succeed. Faults: the server
is killed; it is stopped (SIGSTOP); a proxy before it swallows everything; it is killed and restarted at once. The same
app with redis-py's Lock, with its defaults, stands beside it. A request without an answer after 20 s counts as 20 s.

Threads in use: of the 40 of a worker's pool, as its own endpoint tells every 50 ms; the greatest number. How long an
answer takes at most is asserted in virtual time (tests/outages/test_outage_wait_simulated.py), not here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from tests.proxy import Proxy
from tests.servers import Server, free_port

from benchmarks.report import Figure, conclude, console, new_table

REQUESTS: Final = 80
LOCKS: Final = 8
PATIENCE: Final = 20.0
BEGIN: Final = "<!-- outage: written by make bench-outage -->"
END: Final = "<!-- outage end -->"
COLUMNS: Final = (
    *("lock server", "lock", "first answers", "later answers", "threads in use, first / later"),
    *("first success after it is back", "requests 1.5 s after it is back"),
)


class Answer(NamedTuple):
    status: int  # 0: no answer
    began: float
    took: float


class Scene:
    """A server behind a proxy, and the service."""

    def __init__(self, server: Server, proxy: Proxy, base: str) -> None:
        self.server, self.proxy, self.base = server, proxy, base


FAULTS: Final[dict[str, tuple[Callable[[Scene], None], Callable[[Scene], None]]]] = {
    "killed": (lambda scene: scene.server.kill(), lambda scene: scene.server.restart()),
    "stopped": (lambda scene: scene.server.pause(), lambda scene: scene.server.resume()),
    "swallowed": (lambda scene: scene.proxy.blackhole(), lambda scene: scene.proxy.heal()),
    "restarted": (lambda scene: scene.server.restart(), lambda scene: None),
}


@contextmanager
def service(lock: str, url: str) -> Iterator[str]:
    """The app under uvicorn; its base URL."""
    port = free_port()
    environment = {**os.environ, "BENCH_URL": url, "BENCH_LOCK": lock}
    command = [sys.executable, "-m", "uvicorn", "benchmarks.outage.app:app", "--port", str(port), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--log-level", "error", "--timeout-keep-alive", "60"], env=environment, stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                if httpx.get(f"{base}/work/warm", timeout=5.0).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield base
    finally:
        process.terminate()
        process.wait(10)


async def ask(client: httpx.AsyncClient, base: str, name: str) -> Answer:
    began = time.monotonic()
    try:
        status = (await client.get(f"{base}/work/{name}", timeout=PATIENCE)).status_code
    except httpx.HTTPError:
        status = 0
    return Answer(status, began, time.monotonic() - began)


async def crowd(client: httpx.AsyncClient, base: str) -> tuple[list[Answer], int]:
    """The answers to 80 requests at once, and how many threads of a pool were in use at most."""
    used = 0
    asked = [asyncio.create_task(ask(client, base, f"lock{number % LOCKS}")) for number in range(REQUESTS)]
    while not all(task.done() for task in asked):
        try:
            used = max(used, int((await client.get(f"{base}/pool", timeout=1.0)).json()["used"]))
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.05)
    return [await task for task in asked], used


async def warm(base: str) -> None:
    """Ask until both workers have had contact with the server. Each new connection reaches one of them."""
    workers = set()
    while len(workers) < 2:
        async with httpx.AsyncClient() as client:
            workers.add((await client.get(f"{base}/work/warm")).json()["worker"])


class Row(NamedTuple):
    first: list[Answer]
    later: list[Answer]
    pool: int
    pool_later: int
    back_after: float
    after_back: list[Answer]


async def measure(scene: Scene, fault: str) -> Row:
    begin, end = FAULTS[fault]
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        await warm(scene.base)
        await asyncio.to_thread(begin, scene)
        first, pool = await crowd(client, scene.base)
        await asyncio.sleep(4.0)
        later, pool_later = await crowd(client, scene.base)
        await asyncio.to_thread(end, scene)
        back = time.monotonic()
        while (await ask(client, scene.base, "lock0")).status != 200 and time.monotonic() < back + PATIENCE:
            await asyncio.sleep(0.05)
        back_after = time.monotonic() - back
        await asyncio.sleep(max(0.0, back + 1.5 - time.monotonic()))
        after = [await ask(client, scene.base, f"lock{number % LOCKS}") for number in range(20)]
    return Row(first, later, pool, pool_later, back_after, after)


def _span(answers: list[Answer]) -> str:
    took = sorted(answer.took for answer in answers)
    kinds = " ".join(
        f"{sum(one.status == status for one in answers)}x{status or 'none'}"
        for status in sorted({one.status for one in answers})
    )
    return f"{took[0]:.2f} to {took[-1]:.2f} s ({kinds})"


def play(lock: str, fault: str) -> Row:
    with Server() as server, Proxy(server.port) as proxy, service(lock, proxy.url) as base:
        return asyncio.run(measure(Scene(server, proxy, base), fault))


def cells(lock: str, fault: str, row: Row) -> list[str]:
    good = sum(answer.status == 200 for answer in row.after_back)
    return [
        *(fault, lock, _span(row.first), _span(row.later), f"{row.pool} / {row.pool_later}"),
        *(f"{row.back_after:.2f} s", f"{good} of {len(row.after_back)}"),
    ]


def promises(fault: str, row: Row) -> list[Figure]:
    good = sum(answer.status == 200 for answer in row.after_back)
    name = f"{fault}: requests that begin 1.5 s after the server is back and succeed"
    figures = [Figure(name, f"{good} of 20", "20", good == 20)]
    if fault != "restarted":
        first, later = (max(answer.took for answer in answers) for answers in (row.first, row.later))
        figures.append(Figure(f"{fault}: slowest first answer", f"{first:.2f} s", "sooner than wait=5", first < 5))
        figures.append(Figure(f"{fault}: slowest later answer", f"{later:.2f} s", "sooner than that", later < first))
    return figures


def write_table(page: Path, rows: list[list[str]]) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    table = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    page.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + rest.partition(END)[2])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outage", description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = new_table(f"{REQUESTS} requests at once, wait=5, while the lock server is away")
    for column in COLUMNS:
        table.add_column(column)
    figures: list[Figure] = []
    rows: list[list[str]] = []
    for fault in FAULTS:
        for lock in ("holdfast", "redis-py"):
            row = play(lock, fault)
            rows.append(cells(lock, fault, row))
            table.add_row(*rows[-1])
            if lock == "holdfast":
                figures += promises(fault, row)
    console.print(table)
    if arguments.page is not None:
        write_table(arguments.page, rows)
    return conclude(figures, details={"rows": rows}, json_file=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
