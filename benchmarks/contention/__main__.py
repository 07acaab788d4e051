"""``python -m benchmarks.contention``: see the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.status import Status
from tests.servers import Server

import benchmarks.contention as package
from benchmarks import uncontended
from benchmarks.contention.contest import Contest, Times, run_contest
from benchmarks.contention.field import CORES, Field, Run
from benchmarks.contention.page import COLUMNS, Results, cells_of, write_page
from benchmarks.contention.picture import write_picture
from benchmarks.contention.relay import Relay
from benchmarks.contention.scenarios import (
    CONTESTS,
    crowd_figures,
    figures_of,
    overlap_figure,
    relay_figure,
    run_crowd,
    waiting_figure,
)
from benchmarks.report import Figure, conclude, console, new_table

CROWD, WAITERS, UNCONTENDED = "crowd", "waiters", "uncontended"
KEYS = [*[scenario.key for scenario in CONTESTS], CROWD, WAITERS, UNCONTENDED]
DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE, PICTURE = "contention.md", "contention.svg"
WAITING_PROCESSES = 64


def show(contest: Contest) -> None:
    table = new_table(contest.scenario.title)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for standing in contest.standings.values():
        table.add_row(*cells_of(contest, standing), style="bold" if standing is contest.ours else "")
    console.print(table)


def measure_uncontended(server: Server, rounds: int) -> list[Figure]:
    """The promises for an uncontended lock: features for contended locks must not make it slower."""
    with ExitStack() as stack:
        names = (uncontended.BARE, uncontended.HOLDFAST, uncontended.REDIS_PY)
        contenders = [one for one in uncontended.contenders(server, stack) if one.name in names]
        uncontended.place(server, "apart")
        try:
            took = uncontended.measure(contenders, rounds, 100)
        finally:
            if CORES:
                os.sched_setaffinity(0, CORES)
    return [figure._replace(name=f"uncontended: {figure.name}") for figure in uncontended.figures_of(took)]


def run_all(server: Server, relay: Relay, keys: list[str], times: Times, status: Status, *, is_quick: bool) -> Results:
    info: dict[str, Any] = server.client().info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    results = Results(f"{name} {info.get('valkey_version', info['redis_version'])}", times)
    field = Field(server, relay)
    ours: list[Run] = []
    relayed: list[Run] = []

    def progress(what: str) -> Callable[[str], None]:
        return lambda text: status.update(f"{what}: {text}")

    for scenario in CONTESTS:
        if scenario.key in keys:
            contest = run_contest(scenario, field, times, progress(scenario.key))
            show(contest)
            results.contests.append(contest)
            results.figures += figures_of(contest)
            ours += [*contest.ours.everything, contest.closely]
            relayed += [run for one in contest.standings.values() for run in one.runs if run.relayed]
    if CROWD in keys:
        results.crowd = run_crowd(field, times.rounds, times.window, progress(CROWD))
        results.figures += crowd_figures(results.crowd)
        ours += [*results.crowd.few, *results.crowd.many, *results.crowd.threads]
    if WAITERS in keys:
        status.update(f"{WAITING_PROCESSES} processes wait")
        waiting = field.watch_waiters(WAITING_PROCESSES, 3.0 if is_quick else 6.0)
        results.figures.append(waiting_figure(waiting))
    if relayed:
        results.round_trip = relay.round_trip()
        results.figures.append(relay_figure(relay.capacity(), relayed))
    if ours:
        results.figures.append(overlap_figure(ours))
    if UNCONTENDED in keys:
        status.stop()
        results.figures += measure_uncontended(server, 10 if is_quick else 40)
    return results


def details_of(results: Results) -> dict[str, Any]:
    return {
        "server": results.server,
        **{
            contest.scenario.key: {
                one.contender.name: {
                    "acquisitions_per_s": [run.rate for run in one.runs],
                    "changes_of_owner_per_s": [run.change_rate for run in one.runs],
                    "wait_p50_s": [run.wait(0.5) for run in one.runs],
                    "wait_p99_s": [run.wait(0.99) for run in one.runs],
                    "wait_max_s": one.longest,
                    "jain": [run.jain for run in one.runs],
                    "requests_per_acquisition": one.requests,
                    "requests": one.counted.requests if one.counted else None,
                    "overlaps": one.overlaps,
                    "errors": one.errors[:3],
                }
                for one in contest.standings.values()
            }
            for contest in results.contests
        },
    }


def main() -> int:
    first_line, _, text = (package.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contention",
        description=first_line,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="how many rounds are compared (default 5)")
    parser.add_argument("--window", type=float, default=1.2, help="seconds per contender and round (default 1.2)")
    parser.add_argument("--only", choices=KEYS, action="append", help="run only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not how fast")
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="write the page to this folder (a full run writes to docs/)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()
    if asked.quick:
        times = Times(rounds=1, window=0.4, trial=0.2, monitored=0.3)
    else:
        times = Times(rounds=asked.rounds, window=asked.window, trial=0.6, monitored=0.8)

    with Server() as server, Relay(server.port) as relay, console.status("starting") as status:
        results = run_all(server, relay, asked.only or KEYS, times, status, is_quick=asked.quick)
    docs: Path | None = asked.docs or (None if asked.only or asked.quick else DOCS)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        write_page(results, docs / PAGE, PICTURE)
        if results.contests:
            write_picture(results.contests, times.rounds, docs / PICTURE)
    return conclude(results.figures, details=details_of(results), json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
