"""A client that waits for very many locks must still renew its leases, and end each wait in time.

    python -m benchmarks.crowd [--waits 20000] [--threads 1500] [--leases 50] [--seconds 60] [--json FILE]

One asyncio client waits for 20,000 locks, which another holder keeps for the whole run, and holds 50 leases with a ttl
of 3 s. Then one blocking client does the same with 1,500 threads, which wait with timeout=8 again and again, so that
they also give up together. Promised: no lease is lost, and no wait ends more than half a second after its timeout.

CPU is that of this process (``time.process_time``) and of the server (INFO), as a share of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import redis
from tests.servers import Server

import holdfast
import holdfast.aio
from benchmarks.report import Figure, conclude, console, new_table

TTL = 3.0
LATEST = 0.5  # seconds; no wait may end later than this after its timeout
THREADS_WAIT = 8.0


class Seen(NamedTuple):
    """The results of one client."""

    lost: int
    latest: float  # the longest time from a timeout to the end of its wait, in seconds
    waits: int
    errors: int
    cpu: float
    server_cpu: float


class Meter:
    """CPU of this process and of the server since this object was made, as shares of one core."""

    def __init__(self, admin: redis.Redis) -> None:
        self._admin = admin
        self._began = time.monotonic()
        self._before = self._used()

    def _used(self) -> tuple[float, float]:
        info = self._admin.info("cpu")
        return time.process_time(), info["used_cpu_user"] + info["used_cpu_sys"]

    def shares(self) -> tuple[float, float]:
        lasted = time.monotonic() - self._began
        mine, servers = (after - before for after, before in zip(self._used(), self._before, strict=True))
        return mine / lasted, servers / lasted


def hold_elsewhere(admin: redis.Redis, names: list[str]) -> None:
    """Let another holder have these locks for ten minutes."""
    for start in range(0, len(names), 1000):
        pipeline = admin.pipeline(transaction=False)
        for name in names[start : start + 1000]:
            pipeline.set(name, f"elsewhere-1-.{secrets.token_hex(16)}", px=600_000)
        pipeline.execute()


async def with_tasks(server: Server, waits: int, leases: int, seconds: float) -> Seen:
    admin = server.client()
    names = [f"crowd:{number}" for number in range(waits)]
    hold_elsewhere(admin, names)
    latest, errors = 0.0, 0
    async with holdfast.aio.connect(server.url) as client:
        held = [await client.lock(f"mine:{number}", ttl=TTL, on_lost="ignore").acquire() for number in range(leases)]

        async def wait_for(name: str) -> None:
            nonlocal latest, errors
            due = time.monotonic() + seconds
            try:
                if await client.lock(name).acquire(timeout=seconds) is not None:
                    errors += 1  # it is held by another holder, so this grant is wrong
            except holdfast.HoldfastError:
                errors += 1
            latest = max(latest, time.monotonic() - due)

        meter = Meter(admin)
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(wait_for(name))
        lost = sum(lease is None or not lease.held for lease in held)
        cpu, server_cpu = meter.shares()
        for lease in held:
            if lease is not None and lease.held:
                await lease.release()
    return Seen(lost, latest, waits, errors, cpu, server_cpu)


def with_threads(server: Server, threads: int, leases: int, seconds: float) -> Seen:
    admin = server.client()
    names = [f"crowd:{number}" for number in range(threads)]
    hold_elsewhere(admin, names)
    late: list[float] = []
    errors: list[BaseException | None] = []
    with holdfast.connect(server.url) as client:
        held = [client.lock(f"mine:{number}", ttl=TTL).acquire() for number in range(leases)]
        until = time.monotonic() + seconds

        def wait_for(name: str) -> None:
            while time.monotonic() < until:
                due = time.monotonic() + THREADS_WAIT
                try:
                    if client.lock(name).acquire(timeout=THREADS_WAIT) is not None:
                        errors.append(None)  # it is held by another holder, so this grant is wrong
                except holdfast.HoldfastError as error:
                    errors.append(error)
                late.append(time.monotonic() - due)

        meter = Meter(admin)
        before, _ = threading.stack_size(256 * 1024), None
        workers = [threading.Thread(target=wait_for, args=(name,)) for name in names]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        threading.stack_size(before)
        lost = sum(lease is None or not lease.held for lease in held)
        cpu, server_cpu = meter.shares()
        for lease in held:
            if lease is not None and lease.held:
                lease.release()
    return Seen(lost, max(late), len(late), len(errors), cpu, server_cpu)


def in_its_own_server(measure: Callable[[Server], Seen]) -> Seen:
    with Server() as server:
        return measure(server)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crowd", description=__doc__.partition("\n")[0])
    parser.add_argument("--waits", type=int, default=20_000, help="of the asyncio client (default 20000; 0: none)")
    parser.add_argument("--threads", type=int, default=1500, help="of the blocking client (default 1500; 0: none)")
    parser.add_argument("--leases", type=int, default=50, help="leases that each client holds (default 50)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the run (default 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()
    seen: dict[str, Seen] = {}
    if asked.waits:
        seen[f"asyncio, {asked.waits:,} waits"] = in_its_own_server(
            lambda server: asyncio.run(with_tasks(server, asked.waits, asked.leases, asked.seconds))
        )
    if asked.threads:
        seen[f"blocking, {asked.threads:,} threads"] = in_its_own_server(
            lambda server: with_threads(server, asked.threads, asked.leases, asked.seconds)
        )

    table = new_table(f"Many waits beside {asked.leases} leases, ttl {TTL:g} s, {asked.seconds:g} s")
    for title in ("client", "waits ended", "errors", "leases lost", "latest end", "CPU", "CPU of the server"):
        table.add_column(title, justify="left" if title == "client" else "right")
    figures = []
    for name, one in seen.items():
        table.add_row(
            name, f"{one.waits:,}", f"{one.errors:,}", str(one.lost), f"{one.latest:+.2f} s", f"{one.cpu:.0%}",
            f"{one.server_cpu:.0%}",
        )  # fmt: skip
        figures.append(
            Figure(
                f"{name}, {asked.leases} leases",
                f"{one.lost} lost, {one.errors:,} errors, latest end {one.latest:+.2f} s",
                f"none lost, no errors, within {LATEST:g} s",
                one.lost == 0 and one.errors == 0 and one.latest < LATEST,
            )
        )
    console.print(table)
    details = {"leases": asked.leases, "seconds": asked.seconds, **{name: one._asdict() for name, one in seen.items()}}
    return conclude(figures, details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
