"""etcd and memcached: what a cycle of acquire and release costs there, in one run.

    python -m benchmarks.etcd [--rounds 25] [--seconds 3]

- *put + delete*: the lowest possible cost of a lock on etcd: two requests over the same JSON gateway, with the same
  HTTP client. The cluster has three members on this machine, which sync each write to disk.
- *uncontended*: one client takes and releases one lock, with Holdfast and with tooz (etcd3gw), which uses the same
  gateway. All take turns, round by round; a ratio is the median of the ratios of single rounds.
- *hand-over*: eight processes want the same lock. The result is the time from one grant to the next.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from tests.fleet_etcd import EtcdFleet, coded
from tests.server_memcached import MemcachedServer

import holdfast
from benchmarks.report import Figure, conclude, console, new_table

_LIMIT: Final = 1.3
_CYCLES: Final = 20
_PROCESSES: Final = 8
_LEAST: Final = "put + delete"


def timed(cycle: Callable[[], object]) -> Callable[[], float]:
    """A function that runs some cycles and returns the seconds of one."""

    def run() -> float:
        began = time.perf_counter()
        for _ in range(_CYCLES):
            cycle()
        return (time.perf_counter() - began) / _CYCLES

    return run


def put_and_delete(url: str) -> Callable[[], float]:
    client = httpx.Client(verify=False, trust_env=False)
    key = coded("bench:plain")

    def cycle() -> None:
        client.post(f"{url}/v3/kv/put", json={"key": key, "value": key}).raise_for_status()
        client.post(f"{url}/v3/kv/deleterange", json={"key": key}).raise_for_status()

    return timed(cycle)


def by_holdfast(url: str) -> Callable[[], float]:
    lock = holdfast.connect(url).lock("bench:own")

    def cycle() -> None:
        lock.acquire()
        lock.release()

    return timed(cycle)


def by_tooz(port: int) -> tuple[Callable[[], float], Callable[[], None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tooz import coordination
    coordinator = coordination.get_coordinator(f"etcd3+http://127.0.0.1:{port}", b"bench")
    coordinator.start()
    lock = coordinator.get_lock(b"bench:tooz")

    def cycle() -> None:
        lock.acquire()
        lock.release()

    return timed(cycle), coordinator.stop


def contend(library: str, where: Any, seconds: float, start: Any, results: Any) -> None:
    if library == "tooz":
        from tooz import coordination

        coordinator = coordination.get_coordinator(f"etcd3+http://127.0.0.1:{where}", f"{id(start)}".encode())
        coordinator.start()
        lock: Any = coordinator.get_lock(b"bench:shared:tooz")
    else:
        lock = holdfast.connect(where).lock("bench:shared", wait=60)
    start.wait()
    grants, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        lock.acquire()
        grants += time.monotonic() < until
        lock.release()
    results.put(grants)


def handover(library: str, where: Any, seconds: float) -> tuple[float, int, int]:
    """Seconds from one grant to the next, among eight processes; and the fewest and the most grants of one process."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(_PROCESSES), context.Queue()
    workers = [
        context.Process(target=contend, args=(library, where, seconds, start, results), daemon=True)
        for _ in range(_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    grants = [results.get(timeout=120 + seconds) for _ in workers]
    for worker in workers:
        worker.join(timeout=10)
        if worker.is_alive():
            worker.kill()
    return seconds / max(1, sum(grants)), min(grants), max(grants)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.etcd")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with EtcdFleet(safe=True) as fleet, MemcachedServer() as memcached:
        port = fleet.members[0].client_port
        tooz, stop = by_tooz(port)
        runs = {
            _LEAST: put_and_delete(fleet.members[0].url),
            "Holdfast": by_holdfast(fleet.url),
            "tooz (etcd3gw)": tooz,
            "Holdfast on memcached": by_holdfast(memcached.url),
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for number in range(options.rounds):
            order = list(runs.items())
            for name, run in order if number % 2 else reversed(order):
                taken[name].append(run())
        stop()
        passing = {
            "Holdfast": handover("holdfast", fleet.url, options.seconds),
            "tooz (etcd3gw)": handover("tooz", port, options.seconds),
        }
    table = new_table("etcd, three members: milliseconds of a cycle (median of rounds)")
    for head in ("", "a cycle", f"ratio to {_LEAST}", "from grant to grant, 8 processes", "fewest to most grants"):
        table.add_column(head, justify="right" if head else "left")
    ratios = {name: median(own / least for own, least in zip(taken[name], taken[_LEAST], strict=True)) for name in runs}
    for name in runs:
        seconds, fewest, most = passing.get(name, (0.0, 0, 0))
        shared = (f"{seconds * 1e3:.2f}", f"{fewest} to {most}") if name in passing else ("", "")
        table.add_row(name, f"{median(taken[name]) * 1e3:.2f}", f"{ratios[name]:.2f}", *shared)
    console.print(table)
    ours, theirs = ratios["Holdfast"], ratios["tooz (etcd3gw)"]
    figures = [
        Figure(f"etcd, uncontended, to {_LEAST}", f"{ours:.2f}", f"at most {_LIMIT}", ours <= _LIMIT),
        Figure("etcd, uncontended, to tooz", f"{ours / theirs:.2f}", "below 1", ours < theirs),
    ]
    return conclude(figures, details={"cycles": taken, "handover": passing}, json_file=options.json)


if __name__ == "__main__":
    sys.exit(main())
