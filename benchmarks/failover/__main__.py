"""python -m benchmarks.failover: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.failover.faults import TAG, ground
from benchmarks.failover.history import Summary, summarise
from benchmarks.failover.worker import TTL, Team
from benchmarks.report import Figure, conclude, console, new_table

KINDS = ("sentinel", "cluster", "reshard", "etcd")


def run(kind: str, faults: int, workers: int, pause: float) -> tuple[str, dict[str, Summary]]:
    """Run both libraries on the same servers while the faults happen; returns the results."""
    with ground(kind) as servers:
        teams = {library: Team(library, servers.address, f"{TAG}:{library}", workers) for library in servers.libraries}
        for team in teams.values():
            team.wait_until_ready()
        time.sleep(1)  # let them contend before the first fault
        seen = []
        for number in range(faults):
            seen.append(servers.fault(number))
            time.sleep(pause)
        time.sleep(2 * TTL)
        return servers.title, {library: summarise(team.finish(), seen) for library, team in teams.items()}


def print_table(title: str, faults: int, seconds: float, summaries: dict[str, Summary]) -> None:
    table = new_table(f"{title}: {faults}, in {seconds:.0f} s")
    for head in ("", *summaries):
        table.add_column(head, justify="left" if not head else "right")
    rows: tuple[tuple[str, str], ...] = (
        ("grants", "{0.grants:,}"),
        ("attempts that raised", "{0.errors}"),
        ("mutual-exclusion violations", "{0.violations}"),
        ("holders told of a loss", "{0.lost}"),
        ("fenced writes refused", "{0.refused}"),
        ("fence regressions", "{0.regressions}"),
        ("work goes on after, p50", "{0.until_work_p50:.2f} s"),
        ("work goes on after, max", "{0.until_work_max:.2f} s"),
        ("longest wait beyond the fault", "{0.longest_wait_beyond:.2f} s"),
    )
    for name, form in rows:
        table.add_row(name, *(form.format(summary) for summary in summaries.values()))
    console.print(table)


def figures_of(title: str, ours: Summary) -> list[Figure]:
    beyond = ours.longest_wait_beyond
    return [
        Figure(f"{title}, fence regressions", str(ours.regressions), "0", not ours.regressions),
        Figure(
            f"{title}, longest wait beyond the fault", f"{beyond:.2f} s", f"at most the ttl, {TTL:g} s", beyond <= TTL
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover")
    parser.add_argument("--failovers", type=int, default=50)
    parser.add_argument("--reshardings", type=int, default=20)
    parser.add_argument("--leaders", type=int, default=20, help="leaders of etcd that are killed")
    parser.add_argument("--workers", type=int, default=8, help="processes of each library")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for kind in (options.only,) if options.only else KINDS:
        faults = {"reshard": options.reshardings, "etcd": options.leaders}.get(kind, options.failovers)
        began = time.monotonic()
        title, summaries = run(kind, faults, options.workers, options.pause)
        print_table(title, faults, time.monotonic() - began, summaries)
        ours = summaries["holdfast"]
        figures += figures_of(title, ours)
        if kind == "etcd":  # replication is not asynchronous there: nothing may be granted twice
            figures.append(Figure(f"{title}, violations", str(ours.violations), "0", not ours.violations))
        details[kind] = {library: summary._asdict() for library, summary in summaries.items()}
    return conclude(figures, details=details, json_file=options.json)


if __name__ == "__main__":
    sys.exit(main())
