"""Locks that many want: a call that does not get one must say "busy", never "the server is down".

    python -m benchmarks.busy [--runs 20] [--json FILE]

A healthy server, one warm client, and more callers than its locks can serve within their waits, so that many waits end
at every moment of a hand-over. Each scene is played with tasks and with threads. If this process itself was late by
more than 40 ms at any moment of a run (measured by a task or thread that sleeps for 5 ms at a time), the run does not
count and is repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from tests.servers import Server

import holdfast
import holdfast.aio
from benchmarks.report import Figure, conclude, console, new_table

LATE: Final = 0.04
PULSE: Final = 0.005
REPEATS: Final = 5  # runs that do not count, for each that should


class Scene(NamedTuple):
    callers: int
    keys: int
    wait: float
    hold: float
    calls: int  # of each caller

    def __str__(self) -> str:
        keys = "1 key" if self.keys == 1 else f"{self.keys} keys"
        return f"{self.callers} on {keys}, wait={self.wait:g}, holds of {self.hold:g} s"


SCENES: Final = (Scene(30, 1, 0.5, 0.05, 20), Scene(200, 5, 2.0, 0.1, 5), Scene(100, 5, 1.0, 0.1, 5))


class Run(NamedTuple):
    outcomes: Counter[str]
    latest: float  # by how much this process was late at most


async def with_tasks(scene: Scene, url: str) -> Run:
    outcomes: Counter[str] = Counter()
    latest = 0.0
    async with holdfast.aio.connect(url) as client:
        for key in range(scene.keys):
            async with client.lock(f"busy:{key}"):
                pass

        async def pulse() -> None:
            nonlocal latest
            while True:
                due = time.monotonic() + PULSE
                await asyncio.sleep(PULSE)
                latest = max(latest, time.monotonic() - due)

        async def call(number: int) -> None:
            for _ in range(scene.calls):
                try:
                    async with client.lock(f"busy:{number % scene.keys}", wait=scene.wait):
                        await asyncio.sleep(scene.hold)
                    outcomes["granted"] += 1
                except holdfast.HoldfastError as error:
                    outcomes[type(error).__name__] += 1

        beating = asyncio.create_task(pulse())
        async with asyncio.TaskGroup() as group:
            for number in range(scene.callers):
                group.create_task(call(number))
        beating.cancel()
    return Run(outcomes, latest)


def with_threads(scene: Scene, url: str) -> Run:
    outcomes: list[str] = []
    late = [0.0]
    over = threading.Event()
    with holdfast.connect(url) as client:
        for key in range(scene.keys):
            with client.lock(f"busy:{key}"):
                pass

        def pulse() -> None:
            while not over.is_set():
                due = time.monotonic() + PULSE
                time.sleep(PULSE)
                late.append(time.monotonic() - due)

        def call(number: int) -> None:
            for _ in range(scene.calls):
                try:
                    with client.lock(f"busy:{number % scene.keys}", wait=scene.wait):
                        time.sleep(scene.hold)
                    outcomes.append("granted")
                except holdfast.HoldfastError as error:
                    outcomes.append(type(error).__name__)

        beating = threading.Thread(target=pulse)
        beating.start()
        callers = [threading.Thread(target=call, args=(number,)) for number in range(scene.callers)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        over.set()
        beating.join()
    return Run(Counter(outcomes), max(late))


def play(scene: Scene, face: str, runs: int) -> tuple[Counter[str], int, int]:
    """The outcomes of the runs that count, how many there were, and how many had to be repeated."""
    outcomes: Counter[str] = Counter()
    counted = repeated = 0
    with Server() as server:
        while counted < runs and repeated < REPEATS * runs:
            run = asyncio.run(with_tasks(scene, server.url)) if face == "tasks" else with_threads(scene, server.url)
            if run.latest > LATE:
                repeated += 1
            else:
                counted += 1
                outcomes += run.outcomes
    return outcomes, counted, repeated


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="of each scene and face (default 20)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = new_table("Calls on locks that many want, on a healthy server")
    for column in ("callers", "scene", "runs", "repeated", "calls", "granted", "busy", "Unavailable", "other"):
        table.add_column(column)
    figures: list[Figure] = []
    seen: dict[str, object] = {}
    for scene in SCENES:
        for face in ("tasks", "threads"):
            outcomes, counted, repeated = play(scene, face, arguments.runs)
            named = {name: outcomes.pop(name, 0) for name in ("granted", "AcquireTimeout", "Unavailable")}
            other = outcomes.total()
            calls = sum(named.values()) + other
            table.add_row(face, str(scene), *map(str, (counted, repeated, calls, *named.values(), other)))
            seen[f"{face}: {scene}"] = {"runs": counted, "repeated": repeated, **named, "other": dict(outcomes)}
            wrong = named["Unavailable"] + other
            kept = wrong == 0 and counted == arguments.runs
            measured = f"{wrong} of {calls} in {counted} runs"
            figures.append(Figure(f"{face}, {scene}: calls that fail", measured, f"0 in {arguments.runs} runs", kept))
    console.print(table)
    return conclude(figures, details={"scenes": seen}, json_file=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
