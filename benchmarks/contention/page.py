"""The report ``docs/contention.md``. Every number in it comes from the run that writes it."""

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
    """All results of a run."""

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
    """A description of the machine, without its name."""
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


def contest_section(contest: Contest) -> Iterator[str]:
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
        yield f"Grants out of turn (while a caller that had asked earlier was still waiting): {'; '.join(seen)}."
        yield ""


def crowd_section(crowd: Crowd) -> Iterator[str]:
    few, many = (sorted(run.rate for run in runs)[len(runs) // 2] for runs in (crowd.few, crowd.many))
    threads = crowd.threads[0]
    yield "## Very many waiters"
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


def method_section(results: Results) -> Iterator[str]:
    times = results.times
    far = ""
    if results.round_trip is not None:
        far = (
            f'- "{DELAY_S * 1000:g} ms away": all libraries talk to the server through one relay, which forwards\n'
            f"  every chunk {DELAY_S * 1000:g} ms after its arrival, in each direction. A PING through it takes "
            f"{milliseconds(results.round_trip)}.\n"
        )
    yield "## How it was measured"
    yield ""
    yield from f"""\
- One run, one server, TCP over loopback. All contenders run in each of {times.rounds} rounds, in an order that is
  shuffled each time, for {times.window:g} s each after a warm-up. Rates and waits are medians over the rounds.
  The columns "Holdfast" are the median of the ratios within a round. The longest wait is the longest of all rounds.
- Other libraries run at their defaults and with faster polling: several settings run in a trial. For redis-py, the best
  of them runs in the rounds beside the defaults; for pottery, the best of all settings runs. The setting with more
  acquisitions represents the library.
- Each participant (a thread or task) makes a new lock object for each acquisition, holds it just long enough to check
  that no other participant is inside, and asks again at once. An acquisition by the participant that has just released
  counts. Locks that poll get most of their acquisitions in this way, so they can be fast and unfair at the same time. A
  change of owner is an acquisition by a participant other than the last one.
{far}- A wait is the time from the request to the grant. A wait that has not ended when the window closes counts with
  its length so far.
- Requests are what the clients sent, as MONITOR shows it. They are counted in a separate run
  ({times.monitored:g} s), because MONITOR slows the server. Calls inside scripts are not counted; everything else
  that a client sends is.
- Overlaps: each holder writes its number into memory that all processes share, and checks before it leaves that the
  number is still there. A counter that is read and then written must end at the number of acquisitions. In one more
  run of Holdfast, holders stay inside for a moment, and each must have a greater fence than the one before it.
- Order: the first request of an acquisition is the first in MONITOR's output that carries its token. Holders write the
  order of grants into the shared memory. The first few acquisitions of each process are left out.
- Jain's index is over the acquisitions of all threads or tasks: 1 if all have the same number, 1/n if one has all.
- An event loop and the server have a core each. Threads and processes, and the server beside them, run where the kernel
  puts them. This is the same for all libraries.""".splitlines()
    yield ""


def write_page(results: Results, path: Path, picture: str) -> None:
    lines = [
        "# Contention",
        "",
        "<!-- Written by `make bench-contention`. Do not edit: the next run overwrites it. -->",
        "",
        f"The cost of a contended lock, for Holdfast and for other libraries. {machine(results.server)}.",
        "",
        f"![Acquisitions, changes of owner, waits and requests of Holdfast beside other libraries]({picture})",
        "",
        row(["", "measured", "promised", ""]),
        row(["---", "---", "---", "---"]),
        *[row([one.name, one.measured, one.promised, "PASS" if one.kept else "**FAIL**"]) for one in results.figures],
        "",
    ]
    for contest in results.contests:
        lines += contest_section(contest)
    if results.crowd is not None:
        lines += crowd_section(results.crowd)
    lines += method_section(results)
    path.write_text("\n".join(lines).rstrip("\n") + "\n")
