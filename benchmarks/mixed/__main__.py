"""``python -m benchmarks.mixed``: see the package."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from tests.servers import Server

import benchmarks.mixed as package
from benchmarks.contention.contenders import HOLDFAST, POTTERY, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.report import Figure, conclude, console, new_table

HOLD_S: Final = 0.005
PROCESSES: Final = 2  # of Holdfast, and as many of the peer
NAME: Final = "mixed"
COUNTER: Final = "mixed:inside"
FIRST_GRANT_S: Final = 40.0  # how long a peer may take for its first grant
ROOT: Final = Path(__file__).resolve().parent.parent.parent
BLOCKING, ASYNCIO, NODE = "blocking", "asyncio", "node"


class Peer(NamedTuple):
    library: str
    face: str
    prefix: str = ""  # what the library puts in front of the name to make the key
    median_s: float = inf  # what is promised of its waits
    longest_s: float = inf
    threw: float = 0.05  # the share of its calls that may fail

    @property
    def name(self) -> str:
        return f"{self.library}, asyncio" if self.face == ASYNCIO else self.library


PEERS: Final = [
    Peer(REDIS_PY, BLOCKING, "", 0.4, 2.0),
    Peer(REDIS_PY, ASYNCIO, "", 0.4, 2.0),
    Peer(POTTERY, BLOCKING, "redlock:", 0.4, 2.0),
    # Its waiters wait for a push that only python-redis-lock sends, so nothing is promised. See docs/recipes.md.
    Peer(PYTHON_REDIS_LOCK, BLOCKING, "lock:", threw=1.0),
    Peer("node-redlock", NODE),
    Peer("redis-semaphore", NODE, "mutex:", 0.4, 2.0),
]


@dataclass
class Calls:
    """The output of one process, as times on the monotonic clock."""

    asked: list[float] = field(default_factory=list)
    had: list[float] = field(default_factory=list)
    threw: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # when it asked, and was granted or failed (or inf)
    overlaps: int = 0


def read(lines: Sequence[str]) -> Calls:
    calls = Calls()
    for what, at, *more in (line.split() for line in lines):
        moment = float(at)
        if what == "ask":
            calls.asked.append(moment)
            calls.waits.append((moment, inf))
        elif what in ("had", "threw"):
            (calls.had if what == "had" else calls.threw).append(moment)
            calls.waits[-1] = calls.waits[-1][0], moment
            calls.overlaps += what == "had" and more[0] != "1"
    return calls


@dataclass
class Outcome:
    peer: Peer
    seconds: float
    alone: float  # grants per second of Holdfast without peers
    first_after: float  # seconds from the start of the peers to their first grant
    ours: int
    theirs: int
    waits: list[float]  # waits of the peers
    calls: int
    threw: int
    overlaps: int

    @property
    def kept(self) -> float:
        return self.ours / self.seconds / max(self.alone, 1e-9)

    @property
    def median_s(self) -> float:
        return median(self.waits) if self.waits else inf

    @property
    def longest_s(self) -> float:
        return max(self.waits, default=inf)

    @property
    def cells(self) -> list[str]:
        return [
            self.peer.name,
            f"{self.ours:,}",
            f"{self.theirs:,}",
            f"{self.theirs / max(self.ours + self.theirs, 1):.1%}",
            f"{self.first_after:.2f} s",
            f"{self.median_s:.3f} s",
            f"{self.longest_s:.2f} s",
            f"{self.threw} of {self.calls}",
            f"{self.kept:.0%}",
            f"{self.overlaps}",
        ]


COLUMNS: Final = (
    "two processes of",
    "Holdfast's grants",
    "theirs",
    "share",
    "first after",
    "wait p50",
    "longest",
    "threw",
    "ours, of a run alone",
    "overlaps",
)


class Field:
    def __init__(self, server: Server, node_modules: Path | None, seconds: float) -> None:
        self._server = server
        self._admin = server.client()
        self._node_modules = node_modules
        self._seconds = seconds

    def run(self, peer: Peer) -> Outcome:
        self._admin.flushall()
        key = peer.prefix + NAME
        with tempfile.TemporaryDirectory(prefix="hf-") as folder:
            alone, ours, theirs = (Path(folder) / part for part in ("alone", "ours", "theirs"))
            with self._processes(Peer(HOLDFAST, BLOCKING), key, alone):
                time.sleep(1.0)
                begin_alone = time.monotonic()
                time.sleep(self._seconds / 2)
                end_alone = time.monotonic()
            self._admin.flushall()
            with self._processes(Peer(HOLDFAST, BLOCKING), key, ours):
                time.sleep(1.0)
                with self._processes(peer, NAME, theirs):
                    begin = self._first_grant(theirs)
                    time.sleep(self._seconds)
                    end = time.monotonic()
            without, mine, other = (calls_in(path) for path in (alone, ours, theirs))
        rate = sum(count(one.had, begin_alone, end_alone) for one in without) / (end_alone - begin_alone)
        started = min((one.asked[0] for one in other if one.asked), default=begin)
        waits = [
            min(had, end) - max(asked, begin)
            for one in other
            for asked, had in one.waits
            if had > begin and asked < end
        ]
        threw = sum(count(one.threw, begin, end) for one in other)
        theirs_had = sum(count(one.had, begin, end) for one in other)
        return Outcome(
            peer,
            end - begin,
            rate,
            begin - started,
            sum(count(one.had, begin, end) for one in mine),
            theirs_had,
            waits,
            theirs_had + threw,
            threw,
            sum(one.overlaps for one in (*without, *mine, *other)),
        )

    @contextmanager
    def _processes(self, peer: Peer, name: str, folder: Path) -> Iterator[None]:
        folder.mkdir()
        arguments = [peer.library, peer.face, self._server.url, name, str(HOLD_S), COUNTER]
        environment = dict(os.environ)
        if peer.face == NODE:
            environment["NODE_PATH"] = str(self._node_modules)
            command = ["node", str(Path(__file__).with_name("worker.js")), *arguments]
        else:
            command = [sys.executable, "-m", "benchmarks.mixed.worker", *arguments]
        started = []
        try:
            for number in range(PROCESSES):
                with (folder / str(number)).open("w") as output:
                    started.append(subprocess.Popen(command, cwd=ROOT, stdout=output, env=environment))
            yield
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()

    @staticmethod
    def _first_grant(folder: Path) -> float:
        """When one of the processes was first granted the lock; if none is in FIRST_GRANT_S, the current time."""
        deadline = time.monotonic() + FIRST_GRANT_S
        while time.monotonic() < deadline:
            grants = [one.had[0] for one in calls_in(folder) if one.had]
            if grants:
                return min(grants)
            time.sleep(0.05)
        return time.monotonic()


def calls_in(folder: Path) -> list[Calls]:
    # The last line may be incomplete, because the process that wrote it was killed.
    return [read(path.read_text().rpartition("\n")[0].splitlines()) for path in sorted(folder.iterdir())]


def count(moments: Sequence[float], begin: float, end: float) -> int:
    return sum(begin <= moment < end for moment in moments)


def figures_of(outcome: Outcome) -> Iterator[Figure]:
    peer, name = outcome.peer, f"beside {outcome.peer.name}"
    if peer.median_s < inf:
        yield Figure(
            f"{name}: its waits",
            f"median {outcome.median_s:.3f} s, longest {outcome.longest_s:.2f} s",
            f"at most {peer.median_s:g} s and {peer.longest_s:g} s",
            outcome.median_s <= peer.median_s and outcome.longest_s <= peer.longest_s,
        )
    part = outcome.threw / max(outcome.calls, 1)
    if peer.threw < 1.0:
        yield Figure(f"{name}: its calls that failed", f"{part:.1%}", f"at most {peer.threw:.0%}", part <= peer.threw)
    yield Figure(f"{name}: Holdfast's grants, of a run alone", f"{outcome.kept:.0%}", "half", outcome.kept >= 0.5)
    yield Figure(f"{name}: two holders at once", f"{outcome.overlaps}", "never", not outcome.overlaps)


def main() -> int:
    first_line, _, text = (package.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed",
        description=first_line,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each library is measured (default 10)")
    parser.add_argument("--only", choices=[peer.name for peer in PEERS], action="append", help="may be repeated")
    parser.add_argument("--node-modules", type=Path, metavar="FOLDER", help="where redlock and redis-semaphore are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()
    node_modules = asked.node_modules.resolve() if asked.node_modules else None
    peers = [peer for peer in PEERS if not asked.only or peer.name in asked.only]
    if node_modules is None or not (node_modules / "redlock").is_dir():
        skipped = ", ".join(peer.name for peer in peers if peer.face == NODE)
        peers = [peer for peer in peers if peer.face != NODE]
        if skipped:
            console.print(f"skipped, because node and its packages are not installed: {skipped}")
    outcomes = []
    with Server() as server, console.status("starting") as status:
        field = Field(server, node_modules, asked.seconds)
        for peer in peers:
            status.update(f"beside {peer.name}")
            outcomes.append(field.run(peer))
    table = new_table("two busy Holdfast processes beside two processes of another library, one key, 5 ms holds")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*outcome.cells)
    console.print(table)
    figures = [figure for outcome in outcomes for figure in figures_of(outcome)]
    details = {outcome.peer.name: dict(zip(COLUMNS[1:], outcome.cells[1:], strict=True)) for outcome in outcomes}
    return conclude(figures, details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
