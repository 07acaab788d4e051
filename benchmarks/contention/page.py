"""The report: ``docs/contention.md``. Every number in it comes from the run that writes it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.contention.contenders import HOLDFAST
from benchmarks.contention.contest import Contest, Standing, Times
from benchmarks.contention.relay import DELAY_S
from benchmarks.contention.scenarios import CROWD_OF_TASKS, CROWD_OF_THREADS, Crowd
from benchmarks.report import Figure

__all__ = ["Results", "cells_of", "in_requests", "machine", "milliseconds", "per_second", "times", "write_page"]

COLUMNS = (
    "",
    "acquisitions/s",
    "Holdfast",
    "changes of owner/s",
    "Holdfast",
    "requests",
    "wait p50",
    "p99",
    "longest",
    "Jain",
    "overlaps",
)


@dataclass
class Results:
    """All that a run has found."""

    server: str
    times: Times
    contests: list[Contest] = field(default_factory=list)
    crowd: Crowd | None = None
    figures: list[Figure] = field(default_factory=list)
    round_trip: float | None = None  # through the relay


def milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def per_second(rate: float) -> str:
    return f"{rate:,.0f}"


def times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def in_requests(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def cells_of(contest: Contest, standing: Standing) -> list[str]:
    """One row of a table, as text, in the order of COLUMNS."""
    is_ours, changes = standing is contest.ours, contest.times_changes(standing)
    return [
        standing.contender.name,
        per_second(standing.rate.median),
        "" if is_ours else times(contest.times(standing).median),
        "" if standing.change_rate is None else per_second(standing.change_rate),
        "" if is_ours or changes is None else times(changes.median),
        "" if standing.requests is None else in_requests(standing.requests),
        milliseconds(standing.wait(0.5)),
        milliseconds(standing.wait(0.99)),
        milliseconds(standing.longest),
        f"{standing.jain:.2f}",
        f"{standing.overlaps}" + (f", {len(standing.errors)} errors" if standing.errors else ""),
    ]


def machine(server: str) -> str:
    """What it ran on, without saying whose it is."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    packages = ", ".join(f"{name} {version(name)}" for name in ("redis", "hiredis", "python-redis-lock", "pottery"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({model}), {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"{server}, {packages}"
    )


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tell_contest(contest: Contest) -> Iterator[str]:
    yield f"## {contest.scenario.title}"
    yield ""
    yield row(COLUMNS)
    yield row(["---", *["---:"] * (len(COLUMNS) - 1)])
    for standing in contest.ranking:
        cells = cells_of(contest, standing)
        if standing.contender.library == HOLDFAST:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        yield row(cells)
    yield ""
    turns = [(one.contender.name, one.counted.turns) for one in contest.standings.values() if one.counted]
    seen = [f"{name} {turn.out_of_turn:,} of {turn.grants:,}" for name, turn in turns if turn and turn.grants]
    if seen:
        yield f"Grants out of turn, that is before a caller that had asked earlier: {'; '.join(seen)}."
        yield ""


def tell_crowd(crowd: Crowd) -> Iterator[str]:
    few, many = (sorted(run.rate for run in runs)[len(runs) // 2] for runs in (crowd.few, crowd.many))
    threads = crowd.threads[0]
    yield "## A crowd"
    yield ""
    yield row(["Holdfast, one process, one lock", "acquisitions/s", "connections", "wait p50", "errors"])
    yield row(["---", *["---:"] * 4])
    for name, rate, run in (
        ("64 tasks", few, crowd.few[0]),
        (f"{CROWD_OF_TASKS:,} tasks", many, crowd.many[0]),
        (f"{CROWD_OF_THREADS:,} threads", threads.rate, threads),
    ):
        yield row([name, f"{rate:,.0f}", f"{run.connections}", milliseconds(run.wait(0.5)), f"{len(run.errors)}"])
    yield ""


def tell_how(results: Results) -> Iterator[str]:
    times = results.times
    far = ""
    if results.round_trip is not None:
        far = (
            f'- "{DELAY_S * 1000:g} ms away": all libraries talk to the server through one relay, which passes every\n'
            f"  chunk on {DELAY_S * 1000:g} ms after it came, in each direction. A PING through it takes "
            f"{milliseconds(results.round_trip)}.\n"
        )
    yield "## How it was measured"
    yield ""
    yield from f"""\
- One run, one server, TCP over loopback. All contenders run in each of {times.rounds} rounds, in an order that is
  shuffled each time, for {times.window:g} s each after a warm-up. Rates and waits are medians over the rounds,
  how many times its acquisitions Holdfast makes is the median of the ratios within a round, the longest wait is that of
  all rounds.
- Peers run at their defaults and tuned to poll fast: several settings run in a trial, and of redis-py the best of them
  goes on beside the defaults, of pottery the best of all. Whichever gets more done is the peer that counts.
- Each participant (a thread or task) makes a lock object anew for each acquisition, holds it just long enough to look
  whether another one is inside, and asks again at once. An acquisition by the participant that has just released
  counts: that is how locks that poll get most of theirs, and why they can be quick and unfair at the same time. A
  change of owner is an acquisition by another participant than the one before.
{far}- A wait is the time from asking to having. One that has not ended when the window shuts counts as long as it has
  lasted.
- Requests are what the clients sent, as MONITOR shows it, in a run of its own ({times.monitored:g} s), because MONITOR
  slows the server. Calls inside of scripts are not counted; everything else that a client sends is.
- Overlaps: whoever is inside writes its number into memory that all processes share, and looks whether it is still
  there when it leaves; a counter that is read and then written must end at the number of acquisitions. In one more
  run of Holdfast's, holders stay inside for a moment, and each must have a greater fence than the one before it.
- Order: the first request of an acquisition is the first in MONITOR's output that carries its token; the order of
  grants is written by the holders into the shared memory. The first few acquisitions of each process are left out.
- Jain's index is over the acquisitions of all threads or tasks: 1 if all had the same number, 1/n if one had all.
- An event loop and the server have a core each; threads and processes, and the server beside them, go where the kernel
  puts them. The same for everybody.""".splitlines()
    yield ""


def write_page(results: Results, path: Path, picture: str) -> None:
    lines = [
        "# Contention",
        "",
        "<!-- Written by `make bench-contention`. Do not edit: the next run writes it anew. -->",
        "",
        f"What a lock costs that many want at once. {machine(results.server)}.",
        "",
        f"![Acquisitions, changes of owner, waits and requests of Holdfast beside other libraries]({picture})",
        "",
        row(["", "measured", "promised", ""]),
        row(["---", "---", "---", "---"]),
        *[row([one.name, one.measured, one.promised, "PASS" if one.kept else "**FAIL**"]) for one in results.figures],
        "",
    ]
    for contest in results.contests:
        lines += tell_contest(contest)
    if results.crowd is not None:
        lines += tell_crowd(results.crowd)
    lines += tell_how(results)
    path.write_text("\n".join(lines).rstrip("\n") + "\n")
