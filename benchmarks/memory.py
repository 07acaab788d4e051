"""The memory that names use on the server: a million names, each locked once, must all be gone later.

    python -m benchmarks.memory [--names 1000000] [--json FILE]

A name that was locked and released leaves its last fence on the server for ``fence_retention``. With a retention of one
second, the server must be empty shortly after the last of a million names. The memory per name before that is measured
with ten thousand names and a retention of an hour: used_memory of the server, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import redis
from rich.progress import Progress
from tests.servers import Server

import holdfast.aio
from benchmarks.report import Figure, conclude, console

TASKS = 256
SAMPLE = 10_000
EMPTY_WITHIN = 60.0


async def lock_each(url: str, names: range, retention: float) -> None:
    """Lock and release every name once, over one connection."""
    todo = iter(names)
    async with holdfast.aio.connect(url, fence_retention=retention) as client:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("names", total=len(names))

            async def work() -> None:
                for number in todo:
                    async with client.lock(f"item:{number}"):
                        pass
                    if number % 1000 == 0:
                        progress.advance(task, 1000)

            await asyncio.gather(*(work() for _ in range(TASKS)))


def bytes_per_name(url: str, asked: redis.Redis) -> float:
    asyncio.run(lock_each(url, range(TASKS), 1.0))  # a warm-up, so that buffers and scripts exist
    while asked.dbsize():
        time.sleep(0.1)
    before = asked.info("memory")["used_memory"]
    asyncio.run(lock_each(url, range(SAMPLE), 3600.0))
    used = asked.info("memory")["used_memory"] - before
    asked.flushall()
    return used / SAMPLE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    asked_for = parser.parse_args()
    server = Server()
    try:
        asked = server.client()
        each = bytes_per_name(server.url, asked)
        started = time.monotonic()
        asyncio.run(lock_each(server.url, range(asked_for.names), 1.0))
        took = time.monotonic() - started
        left = asked.dbsize()
        ended = time.monotonic()
        while asked.dbsize() and time.monotonic() < ended + EMPTY_WITHIN:
            time.sleep(0.1)
        remaining, later = asked.dbsize(), time.monotonic() - ended
    finally:
        server.stop()
    console.print(f"{asked_for.names:,} names in {took:.0f} s; {each:.0f} bytes for each name until it expires")
    measured = f"{left:,} keys at the end, {remaining:,} after {later:.1f} s"
    figure = Figure("keys left by a million names", measured, f"none within {EMPTY_WITHIN:.0f} s", remaining == 0)
    return conclude([figure], details={"bytes_per_name": each, "seconds": took}, json_file=asked_for.json)


if __name__ == "__main__":
    sys.exit(main())
