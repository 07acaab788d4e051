"""``python -m benchmarks.before``: see the package."""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic
from typing import IO, Final, NamedTuple

from tests.servers import Server

import benchmarks.before as package
from benchmarks.before.work import WORK, Job
from benchmarks.report import Figure, conclude, console, new_table, spread_of

ROOT: Final = Path(__file__).resolve().parent.parent.parent
NEW, OLD, CONTROL = "this tree", "before", "before, again"
HEAD_START_S: Final = 0.05  # for all processes to have read their job
LEAST: Final = 0.97


class Result(NamedTuple):
    """The result of all processes of a team together."""

    rate: float  # cycles per second
    cpu: float  # seconds of CPU per cycle


class Team:
    """The processes that run one tree."""

    def __init__(self, source: Path, url: str, namespace: str, stack: ExitStack) -> None:
        self.source = source
        self._url = url
        self._namespace = namespace
        self._stack = stack
        self._members: list[subprocess.Popen[str]] = []

    def run(self, name: str, seconds: float) -> Result:
        """Run that work for this many seconds."""
        wanted = WORK[name].processes
        while len(self._members) < wanted:
            self._members.append(self._start())
        begin = monotonic() + HEAD_START_S
        workers = self._members[:wanted]
        for member in workers:
            print(json.dumps(Job(name, begin, begin + seconds)), file=_pipe(member.stdin), flush=True)
        answers = [json.loads(_pipe(member.stdout).readline()) for member in workers]
        cycles = sum(done for done, _ in answers)
        return Result(cycles / seconds, sum(cpu for _, cpu in answers) / max(1, cycles))

    def _start(self) -> subprocess.Popen[str]:
        member = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "before" / "work.py"), self._url, self._namespace],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(self.source)},
            )
        )
        self._stack.callback(_pipe(member.stdin).close)  # the worker exits at the end of its input
        imported = Path(json.loads(_pipe(member.stdout).readline()))
        if self.source not in imported.parents:
            raise RuntimeError(f"a worker imported {imported}, not the tree in {self.source}")
        return member


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def unpack(revision: str, folder: Path) -> Path:
    """Unpack the sources of a revision into a folder; returns its ``src``."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def main() -> int:
    first_line, _, text = (package.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before",
        description=first_line,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", help="the earlier revision, as git knows it")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all three teams (default 15)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each work, team and round (default 0.5)")
    parser.add_argument("--only", choices=list(WORK), action="append", help="run only this work; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()

    table = new_table(f"cycles per second, this tree beside {asked.revision}; ratios within a round")
    for column in ("work", OLD, NEW, "new/old", "p10 to p90", "old/old", "CPU new/old", "old/old"):
        table.add_column(column, justify="left" if column == "work" else "right", no_wrap=True)
    figures: list[Figure] = []
    details: dict[str, dict[str, list[Result]]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-before-")))
        old = unpack(asked.revision, folder)
        sources = {NEW: ROOT / "src", OLD: old, CONTROL: old}
        teams = {
            name: Team(source, server.url, f"team{number}:", stack)
            for number, (name, source) in enumerate(sources.items())
        }
        with console.status("starting") as status:
            for name in asked.only or WORK:
                results: dict[str, list[Result]] = {team: [] for team in teams}
                for number in range(-1, asked.rounds):  # the first is a warm-up: connections, scripts, caches
                    status.update(f"{name}: round {number + 1} of {asked.rounds}")
                    for team in random.sample(list(teams), len(teams)):
                        result = teams[team].run(name, asked.seconds)
                        if number >= 0:
                            results[team].append(result)
                rounds = list(zip(results[NEW], results[OLD], results[CONTROL], strict=True))
                ours = spread_of([new.rate / old.rate for new, old, _ in rounds])
                noise = spread_of([again.rate / old.rate for _, old, again in rounds])
                cpu = spread_of([new.cpu / old.cpu for new, old, _ in rounds])
                cpu_noise = spread_of([again.cpu / old.cpu for _, old, again in rounds])
                least = min(LEAST, noise.p10)
                table.add_row(
                    name,
                    *(f"{median(result.rate for result in results[team]):,.0f}" for team in (OLD, NEW)),
                    f"{ours.median:.2f}",
                    *(f"{one.p10:.2f} to {one.p90:.2f}" for one in (ours, noise)),
                    f"{cpu.median:.2f}",
                    f"{cpu_noise.p10:.2f} to {cpu_noise.p90:.2f}",
                )
                figures.append(Figure(name, f"{ours.median:.2f}", f"at least {least:.2f}", ours.median >= least))
                details[name] = results
    console.print(table)
    return conclude(figures, details={"revision": asked.revision, "results": details}, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
