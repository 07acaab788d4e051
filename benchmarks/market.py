"""A market: how much faster finer locks are, by the number of items on offer.

    python -m benchmarks.market [--seconds 2] [--json FILE] [--svg FILE]

Buyers are threads of four processes. A purchase reads the stock of its items, takes two milliseconds to decide, and
writes the stock back. Without a lock, sales would be lost; each run checks at its end that none was. Ways to lock:

- *the whole market*: one lock for all items.
- *the item*: one lock for each item, so that only buyers of the same item wait for each other.
- *three items at once*: a basket of three, by one lock on all three names; all or nothing.
- *three, one by one*: the same basket, by three nested locks in sorted order. A buyer that waits for the third lock
  blocks others from the first and the second.
- *three, whole market*: the same basket, by one lock for all items.

Items are chosen at random. With few items, most buyers conflict and finer locks gain little; with many items, few do.

Then *a basket of two beside busy items*: two items, each locked by two processes that hold it for 5 ms again and again,
and a fifth process that wants both. A run without the fifth process shows what the basket costs the others. A run with
pauses between the holds shows what the basket gets if the items are half idle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis
from tests.servers import Server

import holdfast
from benchmarks.chart import Column, Group, Line, draw, in_ms, of_time
from benchmarks.report import Figure, conclude, console, new_table

PROCESSES: Final = 4
THREADS: Final = 8
ITEMS: Final = (4, 16, 64, 256)
BASKET: Final = 3
DECIDING: Final = 0.002
STOCK: Final = 1_000_000

Locking = Callable[[holdfast.Client, list[str]], AbstractContextManager[Any]]


def whole_market(client: holdfast.Client, items: list[str]) -> AbstractContextManager[Any]:
    return client.lock("market")


def all_at_once(client: holdfast.Client, items: list[str]) -> AbstractContextManager[Any]:
    return client.lock(*items)


def one_by_one(client: holdfast.Client, items: list[str]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    try:
        for item in sorted(items):
            stack.enter_context(client.lock(item))
    except BaseException:
        stack.close()
        raise
    return stack


class Way(NamedTuple):
    name: str
    basket: int
    locking: Locking
    is_ours: bool = False


WAYS: Final = (
    Way("the whole market", 1, whole_market),
    Way("the item", 1, all_at_once),
    Way("three, whole market", BASKET, whole_market),
    Way("three, one by one", BASKET, one_by_one),
    Way("three items at once", BASKET, all_at_once, is_ours=True),
)


class Tally(NamedTuple):
    way: str
    items: int
    rate: float  # purchases per second
    p99: float  # seconds waited for the lock
    lost: int  # sales that are missing in the stock


class Day(NamedTuple):
    """The arguments of a run, for each process."""

    url: str
    way: int
    items: int
    seconds: float


def trade(day: Day, start: Any, results: Any) -> None:
    """One process with its buyers."""
    url, way, items, seconds = day
    _, basket, locking, _ = WAYS[way]
    waits: list[float] = []
    with holdfast.connect(url) as client, redis.Redis.from_url(url) as shop:
        go = threading.Barrier(THREADS + 1)
        until = 0.0

        def buy(dice: random.Random) -> None:
            go.wait()
            while time.perf_counter() < until:
                chosen = [f"item:{number}" for number in dice.sample(range(items), basket)]
                stocks = [f"stock:{item}" for item in chosen]
                came = time.perf_counter()
                with locking(client, chosen):
                    waits.append(time.perf_counter() - came)
                    left = shop.mget(stocks)
                    time.sleep(DECIDING)
                    shop.mset({stock: int(there) - 1 for stock, there in zip(stocks, left, strict=True)})  # type: ignore[arg-type, call-overload]

        buyers = [threading.Thread(target=buy, args=(random.Random(),), daemon=True) for _ in range(THREADS)]
        for buyer in buyers:
            buyer.start()
        start.wait()
        until = time.perf_counter() + seconds
        go.wait()
        for buyer in buyers:
            buyer.join()
    results.put(waits)


def play(way: int, items: int, seconds: float, server: Server) -> Tally:
    with server.client() as admin:
        admin.flushall()
        admin.mset({f"stock:item:{number}": STOCK for number in range(items)})
        context = multiprocessing.get_context("spawn")
        start, results = context.Barrier(PROCESSES, timeout=60), context.Queue()
        arguments = Day(server.url, way, items, seconds), start, results
        processes = [context.Process(target=trade, args=arguments, daemon=True) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        waits = sorted(wait for _ in processes for wait in results.get(timeout=seconds + 120))
        for process in processes:
            process.join()
        left = sum(int(there) for there in admin.mget([f"stock:item:{number}" for number in range(items)]))  # type: ignore[arg-type]
    sold = len(waits) * WAYS[way].basket
    lost = sold - (items * STOCK - left)
    return Tally(WAYS[way].name, items, len(waits) / seconds, waits[len(waits) * 99 // 100], lost)


# ---- a basket of two beside busy items ------------------------------------------------------------------------------

LOCKERS: Final = 2  # processes for each of the two items
HOLDING: Final = 0.005
ROUNDS: Final = 3
PAIR: Final = ("tea", "cups")


class Beside(NamedTuple):
    """Grants of a lock on two names while other processes lock each name alone, and the grants of these others."""

    grants: float  # of the lock on both, per second
    longest: float  # the longest wait for that lock, in seconds
    singles: float  # grants of the others, per second


def total(rounds: list[Beside]) -> Beside:
    grants, longest, singles = zip(*rounds, strict=True)
    return Beside(sum(grants) / len(rounds), max(longest), sum(singles) / len(rounds))


class Shift(NamedTuple):
    """What one process does."""

    url: str
    names: tuple[str, ...]
    pause: float  # between two holds
    seconds: float


def hold_again_and_again(shift: Shift, start: Any, results: Any) -> None:
    url, names, pause, seconds = shift
    waits: list[float] = []
    with holdfast.connect(url) as client:
        lock = client.lock(*names)
        with lock:
            pass  # a warm-up, which makes the connections
        start.wait()
        until = time.perf_counter() + seconds
        while (came := time.perf_counter()) < until:
            # A wait that has not ended when the time is over also counts.
            lease = lock.acquire(timeout=max(0.001, until - came))
            waits.append(time.perf_counter() - came)
            if lease is None:
                break
            time.sleep(HOLDING)
            lock.release()
            time.sleep(pause)
        granted = len(waits) - (lease is None)
    results.put((names, granted, max(waits)))


def play_beside(server: Server, seconds: float, pause: float, *, with_basket: bool) -> Beside:
    with server.client() as admin:
        admin.flushall()
    context = multiprocessing.get_context("spawn")
    wanted = [(name,) for name in PAIR for _ in range(LOCKERS)] + ([PAIR] if with_basket else [])
    start, results = context.Barrier(len(wanted), timeout=60), context.Queue()
    processes = [
        context.Process(
            target=hold_again_and_again, args=(Shift(server.url, names, pause, seconds), start, results), daemon=True
        )
        for names in wanted
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=seconds + 120) for _ in processes]
    for process in processes:
        process.join()
    singles = sum(granted for names, granted, _ in found if len(names) == 1)
    grants, longest = next(((granted, longest) for names, granted, longest in found if names == PAIR), (0, 0.0))
    return Beside(grants / seconds, longest, singles / seconds)


# ---- results ---------------------------------------------------------------------------------------------------------

COLUMNS: Final = [
    Column(
        "purchases per second",
        "more is better, log scale",
        is_logarithmic=True,
        ticks=[(10.0**power, f"{10**power:,}") for power in range(6)],
    ),
    of_time("wait, 99th percentile"),
]


def picture(tallies: list[Tally]) -> str:
    groups = []
    for items in dict.fromkeys(tally.items for tally in tallies):
        of = {tally.way: tally for tally in tallies if tally.items == items}
        lines = [
            Line(
                way.name,
                [(of[way.name].rate, f"{of[way.name].rate:,.0f}"), (of[way.name].p99, in_ms(of[way.name].p99))],
                way.is_ours,
            )
            for way in WAYS
        ]
        times = of["three items at once"].rate / of["three, whole market"].rate
        groups.append(Group(f"{items} items", f"baskets of three: {times:.1f} times the whole market's", lines))
    subtitle = (
        f"{PROCESSES * THREADS} buyers in {PROCESSES} processes; a purchase takes {DECIDING * 1000:g} ms to decide"
    )
    return draw("A market, by what is locked", subtitle, COLUMNS, groups)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.market", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and number of items (default 2)")
    parser.add_argument("--beside", type=float, default=15.0, help="seconds of baskets beside busy items (default 15)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, default=Path("docs/market.svg"), help="the picture (docs/market.svg)")
    given = parser.parse_args()
    tallies: list[Tally] = []
    with Server() as server:
        for items in ITEMS:
            table = new_table(f"{items} items")
            for column in ("", "purchases/s", "wait p99", "lost sales"):
                table.add_column(column, justify="right" if column else "left")
            for number, way in enumerate(WAYS):
                tally = play(number, items, given.seconds, server)
                tallies.append(tally)
                table.add_row(way.name, f"{tally.rate:,.0f}", in_ms(tally.p99), str(tally.lost))
            console.print(table)
    given.svg.write_text(picture(tallies))
    with Server() as server:
        rounds: list[list[Beside]] = [[], [], []]  # in turn, because the machine's speed changes
        for _ in range(ROUNDS):
            for kind, (pause, with_basket) in enumerate(((0.0, True), (0.0, False), (3 * HOLDING, True))):
                rounds[kind].append(play_beside(server, given.beside / ROUNDS, pause, with_basket=with_basket))
    busy, alone, idle = map(total, rounds)
    table = new_table("a basket of two, beside two processes for each of its items")
    for column in ("", "baskets/s", "longest wait", "single items/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("busy items", f"{busy.grants:.1f}", in_ms(busy.longest), f"{busy.singles:.0f}")
    table.add_row("the same without baskets", "", "", f"{alone.singles:.0f}")
    table.add_row("half idle items", f"{idle.grants:.1f}", in_ms(idle.longest), f"{idle.singles:.0f}")
    console.print(table)
    kept = busy.singles / alone.singles
    by = {(tally.way, tally.items): tally for tally in tallies}
    most = ITEMS[-1]
    finer = by["the item", most].rate / by["the whole market", most].rate
    baskets = by["three items at once", most].rate / by["three, whole market", most].rate
    few = ITEMS[1]  # with so few items, baskets often have an item in common
    nested = by["three items at once", few].rate / by["three, one by one", few].rate
    lost = sum(tally.lost for tally in tallies)
    figures = [
        Figure("sales that were lost", f"{lost}", "none", lost == 0),
        Figure(f"a lock for each of {most} items", f"{finer:.1f} times one lock for all", "at least 3", finer >= 3),
        Figure(f"three of {most} items at once", f"{baskets:.1f} times one lock for all", "at least 2", baskets >= 2),
        Figure(f"three of {few} items at once", f"{nested:.1f} times nested locks", "at least 1", nested >= 1),
        Figure("baskets beside busy items", f"{busy.grants:.1f} per second", "at least 4", busy.grants >= 4),
        Figure("longest wait for one of them", f"{busy.longest:.2f} s", "below 1 s", busy.longest < 1),
        Figure("single items beside baskets", f"{kept:.2f} of those without", "at least 0.8", kept >= 0.8),
    ]
    beside = {"busy": busy._asdict(), "alone": alone._asdict(), "idle": idle._asdict()}
    details = {"tallies": [tally._asdict() for tally in tallies], "beside": beside}
    return conclude(figures, details=details, json_file=given.json)


if __name__ == "__main__":
    sys.exit(main())
