"""A lottery: four processes draw 200 prizes, first with no lock, then with Holdfast.

    python -m examples.lottery [--prizes 200]

The prizes are rows of a database. A draw reads the first prize without a winner, takes a moment (as a payment or a slow
network would), and writes the winner. Such code is common, and with two processes it is wrong: both find the same prize
before either has written. ``draw_with_lock`` shows how to do it right. You need not set up a server: an embedded one is
started, unless ``HOLDFAST_URL`` names one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import holdfast

SERVER = os.environ.get("HOLDFAST_URL", "local://")
PROCESSES = 4
DRAWING = (0.004, 0.008)  # seconds, from .. to; needs the lock
MAILING = (0.015, 0.030)  # seconds to notify the winner; needs no lock


# ---- the job ---------------------------------------------------------------------------------------------------------


def draw(prizes: sqlite3.Connection, who: int, fence: int = 0) -> bool:
    """Draw one prize; False if none is left. Correct only if no other process draws at the same time."""
    [number] = prizes.execute("SELECT min(number) FROM prizes WHERE winner IS NULL").fetchone()
    if number is None:
        return False
    time.sleep(random.uniform(*DRAWING))
    winner = f"ticket {random.randrange(1_000_000):06}"
    prizes.execute("UPDATE prizes SET winner = ? WHERE number = ?", (winner, number))
    prizes.execute(
        "INSERT INTO draws (prize, winner, process, fence) VALUES (?, ?, ?, ?)", (number, winner, who, fence)
    )
    return True


def draw_with_lock(client: holdfast.Client, prizes: sqlite3.Connection, who: int) -> bool:
    """The same under a lock. If this process dies in here, the lock is free again after 5 seconds."""
    with client.lock("lottery", ttl=5) as lease:
        return draw(prizes, who, lease.fence)


def work(file: Path, who: int, locked: bool, start: Barrier, stop: Event) -> None:
    """One of the processes: draw until no prize is left."""
    with closing(connect(file)) as prizes, holdfast.connect(SERVER) as client:
        with suppress(BrokenBarrierError):  # Ctrl-C before the start
            start.wait()
        while not stop.is_set():
            if not (draw_with_lock(client, prizes, who) if locked else draw(prizes, who)):
                return
            time.sleep(random.uniform(*MAILING))


def connect(file: Path) -> sqlite3.Connection:
    """A connection in autocommit mode: no transaction protects ``draw``."""
    prizes = sqlite3.connect(file, isolation_level=None, timeout=30)
    prizes.execute("PRAGMA journal_mode = WAL")
    prizes.execute("PRAGMA synchronous = OFF")
    return prizes


# ---- two runs --------------------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """The counts of a run."""

    prizes: int
    draws: list[int]  # by process
    given: int  # prizes that have a winner
    twice: int  # prizes that have more than one
    rising: bool  # every draw had a greater fence than the draw before it
    seconds: float

    @property
    def exact(self) -> bool:
        return sum(self.draws) == self.given == self.prizes and self.twice == 0 and self.rising


def count(log: sqlite3.Connection, prizes: int, seconds: float) -> Tally:
    draws = [0] * PROCESSES
    winners = [0] * (prizes + 1)
    fences = []
    for prize, process, fence in log.execute("SELECT prize, process, fence FROM draws ORDER BY id"):
        draws[process] += 1
        winners[prize] += 1
        fences.append(fence)
    rising = all(before < after for before, after in pairwise(fences))
    return Tally(prizes, draws, sum(n > 0 for n in winners), sum(n > 1 for n in winners), rising, seconds)


def run(prizes: int, *, locked: bool) -> Iterator[Tally]:
    """Let the processes draw; yields the counts from time to time, and finally the last ones."""
    with tempfile.TemporaryDirectory(prefix="lottery-") as folder:
        file = Path(folder) / "prizes.db"
        with closing(connect(file)) as log:
            log.execute("CREATE TABLE prizes (number INTEGER PRIMARY KEY, winner TEXT)")
            log.execute("CREATE TABLE draws (id INTEGER PRIMARY KEY, prize INT, winner TEXT, process INT, fence INT)")
            log.executemany("INSERT INTO prizes (number) VALUES (?)", [(n,) for n in range(1, prizes + 1)])
            with processes(file, locked) as (workers, start):
                yield count(log, prizes, 0.0)
                start.wait()
                began = time.perf_counter()
                while any(worker.is_alive() for worker in workers):
                    yield count(log, prizes, time.perf_counter() - began)
                    time.sleep(0.03)
                took = time.perf_counter() - began
            yield count(log, prizes, took)


@contextmanager
def processes(file: Path, locked: bool) -> Iterator[tuple[list[SpawnProcess], Barrier]]:
    """The processes, waiting to start together. When the block ends, all of them have ended."""
    spawn = multiprocessing.get_context("spawn")
    start, stop = spawn.Barrier(PROCESSES + 1, timeout=60), spawn.Event()
    workers = [spawn.Process(target=work, args=(file, who, locked, start, stop)) for who in range(PROCESSES)]
    try:
        # Ctrl-C reaches every process of a terminal. The workers inherit the blocked signal, so only this process
        # handles it, and asks them to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for worker in workers:
            worker.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield workers, start
    finally:
        stop.set()
        start.abort()
        for worker in workers:
            worker.join(timeout=1)
            if worker.is_alive():
                worker.kill()
                worker.join()


# ---- output ----------------------------------------------------------------------------------------------------------


def picture(tally: Tally) -> Table:
    """A bar for each process, one for the prizes, and one for the prizes that were given out twice."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=18)
    grid.add_column(ratio=1)
    grid.add_column(width=11, justify="right")
    for process, drawn in enumerate(tally.draws, 1):
        grid.add_row(f" process {process}", bar(drawn, tally.prizes, "cyan"), f"{drawn} drawn")
    grid.add_row(" prizes given out", bar(tally.given, tally.prizes, "green"), f"{tally.given} of {tally.prizes}")
    alarm = "bold red" if tally.twice else "dim"
    grid.add_row(Text(" given out twice", alarm), bar(tally.twice, tally.prizes, "red"), Text(f"{tally.twice}", alarm))
    return grid


def bar(done: int, total: int, colour: str) -> ProgressBar:
    return ProgressBar(total, done, complete_style=colour, finished_style=colour)


def show(console: Console, title: str, prizes: int, *, locked: bool) -> Tally:
    console.print(f"[bold]{title}[/]: {PROCESSES} processes draw {prizes} prizes")
    with Live(console=console, auto_refresh=False) as live:
        for tally in run(prizes, locked=locked):
            live.update(picture(tally), refresh=console.is_terminal)
    console.print()
    return tally


def summarise(console: Console, bare: Tally, held: Tally) -> None:
    def mark(value: int, *, right: int) -> Text:
        return Text(str(value), "bold green" if value == right else "bold red")

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 1))
    table.add_column("")
    table.add_column("without a lock", justify="right")
    table.add_column("with Holdfast", justify="right")
    drawn = [mark(sum(tally.draws), right=tally.prizes) for tally in (bare, held)]
    twice = [mark(tally.twice, right=0) for tally in (bare, held)]
    table.add_row(f"given out, of {bare.prizes} prizes", *drawn)
    table.add_row("prizes given out twice or more", *twice)
    table.add_row(
        "fences, in the order of the draws", "none", "strictly rising" if held.rising else "[red]NOT RISING[/]"
    )
    table.add_row("time", f"{bare.seconds:.1f} s", f"{held.seconds:.1f} s")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.lottery", description=__doc__.partition("\n")[0])
    parser.add_argument("--prizes", type=int, default=200, help="number of prizes (default 200)")
    prizes: int = parser.parse_args().prizes
    if prizes < 1:
        parser.error("--prizes must be at least 1")
    console = Console(highlight=False)

    bare = show(console, "Without a lock", prizes, locked=False)
    held = show(console, "With Holdfast", prizes, locked=True)
    summarise(console, bare, held)

    if not bare.twice:
        console.print("This time no prize was given out twice without a lock. Try again, or with more --prizes.")
    if not held.exact:
        console.print(f"[bold red]With Holdfast: {sum(held.draws)} draws of {prizes} prizes. That is a bug.[/]")
        return 1
    console.print(f"[bold green]With Holdfast: exactly {prizes} draws of {prizes} prizes, each once.[/]")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
