"""The cost of ten thousand leases: one process, one keeper, two minutes, none lost.

    python -m benchmarks.keeper [--leases 10000] [--seconds 120] [--json FILE]

The leases have a ttl of 30 s, so within 120 s each of them must be renewed several times. At the end each lease is
checked twice: by its own clock (``lease.held``), and on the server, whose key must still have the token of the lease.

CPU is the time of this process while it only renews (``time.process_time``), and that of the server (INFO). Memory is
what tracemalloc reports as allocated between the first acquire and the last, per lease: the lease, its hold, its keys
and its entry in the lease registry, as Python objects.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import redis
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.servers import Server

import holdfast
from benchmarks.report import Figure, conclude, console, new_table
from holdfast.engines.redis.protocol import Op

TTL = 30.0
CHECK_EVERY = 2.0
BATCH = 1000


class ServerSeen(NamedTuple):
    """Counters of the server."""

    evalsha: int
    cpu: float

    @classmethod
    def now(cls, asked: redis.Redis) -> ServerSeen:
        info: dict[str, Any] = asked.info("everything")
        commands = info.get("cmdstat_evalsha", {"calls": 0})["calls"]
        return cls(commands, info["used_cpu_user"] + info["used_cpu_sys"])


def count_batches(client: holdfast.Client) -> Callable[[], int]:
    """Count the batches that the keeper sends from now on; the server only sees single renewals."""
    engine = client._driver.shared
    send = engine.call_each
    sent = 0

    def call_each(steps: Sequence[Op], timeout: float) -> list[Any]:
        nonlocal sent
        sent += 1
        return send(steps, timeout)

    setattr(engine, "call_each", call_each)  # noqa: B010 (an assignment to a method, which mypy would refuse)
    return lambda: sent


def new_progress(what: str) -> Progress:
    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def acquire_all(client: holdfast.Client, total: int) -> list[holdfast.Lease]:
    leases = []
    with new_progress("acquiring") as progress:
        task = progress.add_task("", total=total, note="")
        for number in range(total):
            lease = client.lock(f"bench:keeper:{number}", ttl=TTL).acquire(blocking=False)
            if lease is None:
                raise RuntimeError(f"another client holds bench:keeper:{number}")
            leases.append(lease)
            progress.advance(task)
    return leases


def keep_for(seconds: float, leases: list[holdfast.Lease]) -> int:
    """Check the leases again and again; returns the smallest number that was held at any check."""
    started = time.monotonic()
    fewest = len(leases)
    with new_progress("renewing ") as progress:
        task = progress.add_task("", total=round(seconds), note="")
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(min(CHECK_EVERY, seconds - elapsed))
            held = sum(lease.held for lease in leases)
            fewest = min(fewest, held)
            progress.update(task, completed=round(time.monotonic() - started), note=f"{held:,} held")
    return fewest


def count_on_server(asked: redis.Redis, leases: list[holdfast.Lease]) -> int:
    """The number of keys that still have the token of their lease."""
    found = 0
    for start in range(0, len(leases), BATCH):
        some = leases[start : start + BATCH]
        tokens = asked.mget([lease.name for lease in some])
        found += sum(token == lease.token.encode() for token, lease in zip(tokens, some, strict=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeper", description=__doc__.partition("\n")[0])
    parser.add_argument("--leases", type=int, default=10_000, help="leases held at once (default 10000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the run (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()
    total: int = asked.leases

    with ExitStack() as stack:
        server = stack.enter_context(Server())
        stats = server.client()
        client = stack.enter_context(holdfast.connect(server.url))
        with client.lock("bench:warm-up"):
            pass  # a warm-up, so that connections and keeper exist before memory is measured
        gc.collect()
        tracemalloc.start()
        empty, _ = tracemalloc.get_traced_memory()
        leases = acquire_all(client, total)
        gc.collect()
        full, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()  # it slows everything down, so it must not run while CPU is measured
        bytes_per_lease = (full - empty) / total

        batches = count_batches(client)
        before, cpu_before, began = ServerSeen.now(stats), time.process_time(), time.monotonic()
        fewest_held = keep_for(asked.seconds, leases)
        cpu, lasted = time.process_time() - cpu_before, time.monotonic() - began
        after = ServerSeen.now(stats)
        on_server = count_on_server(stats, leases)
        still_held = sum(lease.held for lease in leases)
        for lease in leases:
            lease.release()

    renewals = after.evalsha - before.evalsha
    share, server_share = cpu / lasted, (after.cpu - before.cpu) / lasted
    table = new_table(f"One keeper, {total:,} leases, ttl {TTL:g} s, {lasted:.0f} s")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    table.add_row("renewals that the server ran", f"{renewals:,}")
    table.add_row("renewals of each lease", f"{renewals / total:.1f}")
    table.add_row("batches in which the keeper sent them", f"{batches():,}")
    table.add_row("CPU of this process", f"{share:.2%} of one core")
    table.add_row("CPU of the server", f"{server_share:.2%} of one core")
    table.add_row("CPU of this process per renewal", f"{cpu / renewals * 1e6:.1f} us" if renewals else "")
    table.add_row("memory per lease (tracemalloc)", f"{bytes_per_lease:,.0f} bytes")
    console.print(table)

    kept = min(fewest_held, still_held, on_server)
    figure = Figure(
        f"{total:,} leases kept for {lasted:.0f} s by one keeper",
        f"{total - kept:,} lost, CPU share {share:.2%}, {bytes_per_lease:,.0f} bytes per lease",
        "none lost",
        kept == total,
    )
    details = {
        "leases": total,
        "seconds": lasted,
        "renewals": renewals,
        "cpu_share": share,
        "server_cpu_share": server_share,
        "bytes_per_lease": bytes_per_lease,
        "fewest_held": fewest_held,
        "held_on_server": on_server,
    }
    return conclude([figure], details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
