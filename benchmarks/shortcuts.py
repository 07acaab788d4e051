"""What a shortcut in the code brings: the CPU time of a cycle with it and without it.

    python -m benchmarks.shortcuts [--rounds 60] [--cycles 640] [--json FILE]

A shortcut makes code faster, but longer or less clear. It stays only if it saves at least 2 % of the CPU time of the
work that it was made for. Here each shortcut is switched off and on in turn, in one process, in many short rounds. The
result is the median over the rounds of the ratio within a round. CPU time is that of this process, which the server and
other work on the machine affect little.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import process_time
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from tests.servers import Server

import holdfast.aio
from benchmarks.report import Figure, Spread, conclude, console, new_table, spread_of
from holdfast.aio import Client
from holdfast.engines.redis import protocol
from holdfast.protocol.lock import BaseLock

LEAST: Final = 1.02
ALONE, MANY = "one task", "64 tasks, one lock"
TASKS: Final = {ALONE: 1, MANY: 64}


class Shortcut(NamedTuple):
    name: str
    work: str
    switch_off: Callable[[Client], AbstractContextManager[Any]]


def without_options_cache(client: Client) -> AbstractContextManager[Any]:
    return patch.object(client, "_options_of", client._options_of.__wrapped__)


def without_pass_at_once(client: Client) -> AbstractContextManager[Any]:
    return patch.object(BaseLock, "_leave", BaseLock._leave_in_order)


def without_packed_openings(client: Client) -> AbstractContextManager[Any]:
    return patch.object(protocol, "_opening", protocol._opening.__wrapped__)


SHORTCUTS: Final = [
    Shortcut("options cache", ALONE, without_options_cache),
    Shortcut("with: no protocol for a local pass", MANY, without_pass_at_once),
    Shortcut("the start of a request is packed once", ALONE, without_packed_openings),
]


async def spend(client: Client, tasks: int, cycles: int) -> float:
    """The CPU time of this many cycles."""

    async def run() -> None:
        for _ in range(cycles // tasks):
            async with client.lock("shortcuts"):
                pass

    used = process_time()
    await asyncio.gather(*(run() for _ in range(tasks)))
    return process_time() - used


async def measure(client: Client, shortcut: Shortcut, rounds: int, cycles: int) -> list[float]:
    """Time without the shortcut, as a multiple of the time with it, in each round."""
    ratios = []
    for number in range(-1, rounds):  # the first is a warm-up
        times = {}
        for is_on in random.sample((True, False), 2):
            with ExitStack() as stack:
                if not is_on:
                    stack.enter_context(shortcut.switch_off(client))
                times[is_on] = await spend(client, TASKS[shortcut.work], cycles)
        if number >= 0:
            ratios.append(times[False] / times[True])
    return ratios


async def measure_all(server: Server, rounds: int, cycles: int) -> dict[str, list[float]]:
    async with holdfast.aio.connect(server.url) as client:
        return {shortcut.name: await measure(client, shortcut, rounds, cycles) for shortcut in SHORTCUTS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shortcuts", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds with and without (default 60)")
    parser.add_argument("--cycles", type=int, default=640, help="cycles of each (default 640)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()
    with Server() as server:
        ratios = asyncio.run(measure_all(server, asked.rounds, asked.cycles))
    table = new_table("CPU time of a cycle without a shortcut, as a multiple of that with it; asyncio")
    for column in ("shortcut", "work", "without/with", "p10 to p90"):
        table.add_column(column, justify="left" if column in ("shortcut", "work") else "right")
    figures = []
    for shortcut in SHORTCUTS:
        spread: Spread = spread_of(ratios[shortcut.name])
        table.add_row(
            shortcut.name, shortcut.work, f"{spread.median:.3f}", f"{spread.p10:.2f} to {spread.p90:.2f}"
        )  # fmt: skip
        figures.append(Figure(shortcut.name, f"{spread.median:.3f}", f"at least {LEAST:.2f}", spread.median >= LEAST))
    console.print(table)
    return conclude(figures, details={"ratios": ratios}, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
