"""Sentinel and Cluster compared with one server: what a cycle of acquire and release costs on each, in one run.

    python -m benchmarks.engines [--rounds 60] [--seconds 0.2]

- *uncontended*: one client takes and releases one lock. *Contended*: four processes want the same lock.
- Each engine is compared with a server that has the same work besides the lock. Cluster, whose primaries have no
  replicas here, is compared with one server; Sentinel, whose primary has two replicas, with one server that has two
  replicas. All servers and all clients run from the first round to the last, so the idle ones cost every engine the
  same.
- The engines take turns in changing order (uncontended: every few cycles), so a slow moment of the machine affects all
  of them. The ratio is the median of the ratios of single rounds, with the range of the middle half of the rounds.
  *Another server* is a copy of the base: its ratio shows the error of this method.
- *throughput*: four processes, each with a lock of its own, on a cluster of one, two and three primaries; and how much
  of the machine the clients and the servers used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from tests.fleet_cluster import ClusterFleet
from tests.fleets import SentinelFleet
from tests.servers import Server

import holdfast
import holdfast.aio
from benchmarks.report import Figure, conclude, console, new_table

_LIMIT: Final = 1.1
_PROCESSES: Final = 4
_CYCLES: Final = 5  # in an uncontended turn; few, so that a slow moment of the machine affects all engines
_TURNS: Final = 20  # in an uncontended round
_WHOLE_CORE: Final = 0.9
_FACES: Final = ("threads", "asyncio")


class Choice(NamedTuple):
    url: str
    base: str = ""  # the choice that it is compared with
    limited: bool = False  # whether a limit is promised


# By scene and choice: the seconds of a cycle, for each round.
Found = dict[str, dict[str, list[float]]]


@contextlib.contextmanager
def cycles(face: str, url: str, name: str) -> Iterator[Callable[[float], tuple[float, int]]]:
    """A function that runs cycles for that many seconds, or _CYCLES cycles if 0; returns the seconds and the count."""
    if face == "threads":
        with holdfast.connect(url) as client:
            lock = client.lock(name, wait=10)

            def run(seconds: float) -> tuple[float, int]:
                count, began = 0, time.perf_counter()
                while (time.perf_counter() - began < seconds) if seconds else (count < _CYCLES):
                    lock.acquire()
                    lock.release()
                    count += 1
                return time.perf_counter() - began, count

            yield run
        return
    with asyncio.Runner() as runner:
        patient = (aio_client := holdfast.aio.connect(url)).lock(name, wait=10)

        async def run_async(seconds: float) -> tuple[float, int]:
            count, began = 0, time.perf_counter()
            while (time.perf_counter() - began < seconds) if seconds else (count < _CYCLES):
                await patient.acquire()
                await patient.release()
                count += 1
            return time.perf_counter() - began, count

        yield lambda seconds: runner.run(run_async(seconds))
        runner.run(aio_client.aclose())


def work(face: str, url: str, name: str, orders: Any) -> None:
    """The main function of a worker process: for each order, run cycles for that many seconds."""
    with cycles(face, url, name) as run:
        run(0.01)
        orders.send(None)
        while seconds := orders.recv():
            used = time.process_time()
            _, count = run(seconds)
            orders.send((count, time.process_time() - used))


class Team:
    """Four processes that want the same lock, or each its own."""

    def __init__(self, face: str, url: str, *, shared: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, self._processes = [], []
        for number in range(_PROCESSES):
            ours, theirs = context.Pipe()
            name = "bench:contended" if shared else f"bench:own:{number}"
            process = context.Process(target=work, args=(face, url, name, theirs), daemon=True)
            process.start()
            self._orders.append(ours)
            self._processes.append(process)
        for orders in self._orders:
            orders.recv()

    def run(self, seconds: float) -> tuple[float, float]:
        """Grants per second, and how many cores the processes used."""
        for orders in self._orders:
            orders.send(seconds)
        counts, used = zip(*(orders.recv() for orders in self._orders), strict=True)
        return sum(counts) / seconds, sum(used) / seconds

    def seconds_together(self, seconds: float) -> float:
        """Seconds of a cycle."""
        return 1 / self.run(seconds)[0]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for orders, process in zip(self._orders, self._processes, strict=True):
            orders.send(0)
            process.join()


def seconds_alone(run: Callable[[float], tuple[float, int]]) -> float:
    """Seconds of a cycle."""
    seconds, count = run(0)
    return seconds / count


def measure(choices: dict[str, Choice], rounds: int, seconds: float) -> Found:
    found: Found = {}
    for face in _FACES:
        with ExitStack() as stack:
            runs = {
                choice: stack.enter_context(cycles(face, at.url, f"bench:engines:{face}"))
                for choice, at in choices.items()
            }
            alone = {choice: partial(seconds_alone, run) for choice, run in runs.items()}
            found[f"uncontended, {face}"] = take_turns(alone, _TURNS * rounds)
    for face in _FACES:
        with ExitStack() as stack:
            teams = {choice: stack.enter_context(Team(face, at.url, shared=True)) for choice, at in choices.items()}
            together = {choice: partial(team.seconds_together, seconds) for choice, team in teams.items()}
            found[f"contended, {face}"] = take_turns(together, rounds)
    return found


def take_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    for run in runs.values():
        run()  # connections are opened, scripts are loaded
    taken: dict[str, list[float]] = {choice: [] for choice in runs}
    order = list(runs.items())
    for number in range(rounds):
        first = number % len(order)
        turn = order[first:] + order[:first]
        for choice, run in turn if number // len(order) % 2 else reversed(turn):
            taken[choice].append(run())
    return taken


def report(found: Found, choices: dict[str, Choice]) -> list[Figure]:
    table = new_table("Microseconds of a cycle, and the ratio of the two (middle half of the rounds)")
    for head in ("", "", "µs", "beside", "µs", "ratio", ""):
        table.add_column(head, justify="right" if head in ("µs", "ratio") else "left", no_wrap=True)
    figures = []
    for scene, taken in found.items():
        for choice, at in choices.items():
            if not at.base:
                continue
            low, ratio, high = ratios(taken[choice], taken[at.base])
            spread = f"({low:.2f}-{high:.2f})"
            ours, base = (f"{median(taken[one]) * 1e6:.0f}" for one in (choice, at.base))
            table.add_row(scene, choice, ours, at.base, base, f"{ratio:.2f}", spread)
            if at.limited:
                name, measured = f"{choice}, {scene}", f"{ratio:.2f} {spread} of {at.base}"
                figures.append(Figure(name, measured, f"at most {_LIMIT}", ratio <= _LIMIT))
    console.print(table)
    return figures


def ratios(theirs: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratios of single rounds."""
    low, middle, high = quantiles((one / other for one, other in zip(theirs, base, strict=True)), n=4)
    return low, middle, high


def processor_time(servers: Sequence[Server]) -> float:
    """Seconds of processor time that these servers have used."""
    ticks = 0
    for server in servers:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


def throughput(seconds: float) -> dict[int, tuple[float, float, float]]:
    """By number of primaries: locks per second, and how many cores the clients and the servers used."""
    found = {}
    for primaries in (1, 2, 3):
        with ClusterFleet(primaries) as fleet, Team("threads", fleet.url, shared=False) as team:
            before = processor_time(fleet.servers)
            rate, clients = team.run(seconds)
            found[primaries] = rate, clients, (processor_time(fleet.servers) - before) / seconds
    return found


def report_throughput(found: dict[int, tuple[float, float, float]]) -> None:
    cores = os.cpu_count() or 1
    table = new_table(f"Cluster: four processes, each with a lock of its own ({cores} cores)")
    for head in ("", *(f"{primaries} primaries" if primaries > 1 else "1 primary" for primaries in found)):
        table.add_column(head, justify="right" if head else "left")
    table.add_row("locks per second", *(f"{rate:,.0f}" for rate, _, _ in found.values()))
    table.add_row("cores, clients", *(f"{clients:.2f}" for _, clients, _ in found.values()))
    table.add_row("cores, servers", *(f"{servers:.2f}" for _, _, servers in found.values()))
    console.print(table)
    console.print(limit_of(found, cores), "\n", soft_wrap=True)


def limit_of(found: dict[int, tuple[float, float, float]], cores: int) -> str:
    """What limited the number of locks per second: clients or servers."""
    used = max(clients + servers for _, clients, servers in found.values())
    busiest = max(servers / primaries for primaries, (_, _, servers) in found.items())
    measured = f"No server used more than {busiest:.2f} cores; clients and servers together used {used:.2f} of {cores}."
    if busiest >= _WHOLE_CORE:
        return "One primary used a whole core, so more primaries give more locks per second."
    if used < _WHOLE_CORE * cores:
        return f"{measured} The rest went to waiting and to other programs, so this run does not show the limit."
    return f"{measured} The limit is the processor time of the clients, which share the machine with the servers."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a contended round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        start = stack.enter_context
        sentinels = start(SentinelFleet())
        feeding = start(Server("--repl-diskless-sync-delay", "0"))
        for _ in sentinels.replicas:
            start(Server("--replicaof", "127.0.0.1", str(feeding.port)))
        choices = {
            "one server": Choice(start(Server()).url),
            "another server": Choice(start(Server()).url, "one server"),
            "Cluster": Choice(start(ClusterFleet(3)).url, "one server", limited=True),
            "one + 2 replicas": Choice(feeding.url),
            "Sentinel": Choice(sentinels.url, "one + 2 replicas", limited=True),
        }
        found = measure(choices, options.rounds, options.seconds)
    figures = report(found, choices)
    rates = throughput(10 * options.seconds)
    report_throughput(rates)
    return conclude(figures, details={"cycles": found, "throughput": rates}, json_file=options.json)


if __name__ == "__main__":
    sys.exit(main())
