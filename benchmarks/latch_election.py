"""Latches and elections: how soon those who wait are woken, and what waiting costs.

    python -m benchmarks.latch_election [--rounds 10] [--json FILE]

Two scenes on one server, in every round each way once, in an order of chance:

- *latch*: 200 threads of four clients wait. The time is from the call that opens the latch until the last of them goes
  on. Beside it the same by hand: a counter in Redis at which everybody who waits looks every 10 ms. (No library that we
  know of has a latch on Redis.) Requests are what the server has counted in the second before.
- *election*: two candidates take turns. The time is from the call by which one steps down until the other leads. Beside
  it redis-py's Lock, released and waited for, at its defaults (it looks every 100 ms) and looking every 10 ms.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis
from tests.servers import Server

import holdfast
from benchmarks.report import Figure, conclude, console, new_table, spread_of

WAITERS: Final = 200
CLIENTS: Final = 4
TURNS: Final = 6  # in a round
TTL: Final = 30.0


class Way(NamedTuple):
    name: str
    opens: Callable[..., Any]
    option: Any
    command: str  # what the server counts as one of its requests
    is_ours: bool


# ---- latch -----------------------------------------------------------------------------------------------------------


class Gate(NamedTuple):
    waits: list[Callable[[], object]]
    opens: Callable[[], object]


@contextmanager
def by_latch(url: str, name: str, option: None) -> Iterator[Gate]:
    with ExitStack() as stack:
        clients = [stack.enter_context(holdfast.connect(url)) for _ in range(CLIENTS)]
        yield Gate([client.latch(name, 1).wait for client in clients], clients[0].latch(name, 1).count_down)


@contextmanager
def by_hand(url: str, name: str, pause: float) -> Iterator[Gate]:
    def wait(client: redis.Redis) -> None:
        while int(client.get(name)) > 0:
            time.sleep(pause)

    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(url, max_connections=1000)) for _ in range(CLIENTS)]
        clients[0].set(name, 1)
        yield Gate([lambda client=client: wait(client) for client in clients], lambda: clients[0].decr(name))


def count_calls(stats: redis.Redis, command: str) -> int:
    return int(stats.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def open_latch(server: Server, way: Way, name: str) -> tuple[float, float]:
    """Seconds until the last waiter goes on, and requests a second before that."""
    gone_on: list[float] = []

    def wait(waits: Callable[[], object]) -> None:
        waits()
        gone_on.append(time.perf_counter())

    with server.client() as stats, way.opens(server.url, name, way.option) as gate:
        threads = [threading.Thread(target=wait, args=(gate.waits[number % CLIENTS],)) for number in range(WAITERS)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = count_calls(stats, way.command)
        time.sleep(1.0)
        requests = count_calls(stats, way.command) - before
        began = time.perf_counter()
        gate.opens()
        for thread in threads:
            thread.join()
    return max(gone_on) - began, requests


# ---- election --------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    lead: Callable[[], object]
    resign: Callable[[], object]


@contextmanager
def by_election(url: str, name: str, option: None) -> Iterator[list[Candidate]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(holdfast.connect(url)) for _ in range(2)]
        elections = [client.election(name, ttl=TTL) for client in clients]
        yield [Candidate(election.lead().acquire, election.resign) for election in elections]


@contextmanager
def by_lock(url: str, name: str, sleep: float) -> Iterator[list[Candidate]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(url)) for _ in range(2)]
        locks = [client.lock(name, timeout=TTL, sleep=sleep, thread_local=False) for client in clients]
        yield [Candidate(lock.acquire, lock.release) for lock in locks]


def take_turns(server: Server, way: Way, name: str) -> list[float]:
    """Seconds from resigning to leading, turn by turn."""
    took = []
    with way.opens(server.url, name, way.option) as candidates:
        leader, other = candidates
        leader.lead()
        for _ in range(TURNS):
            led_at: list[float] = []
            rival = threading.Thread(
                target=lambda other=other, led_at=led_at: (other.lead(), led_at.append(time.perf_counter()))
            )
            rival.start()
            time.sleep(random.uniform(0.1, 0.25))  # or whoever polls would always be met at the same point
            began = time.perf_counter()
            leader.resign()
            rival.join()
            took.append(led_at[0] - began)
            leader, other = other, leader
        leader.resign()
    return took


# ---- the whole -------------------------------------------------------------------------------------------------------

LATCHES: Final = [
    Way("Holdfast's latch", by_latch, None, "evalsha", True),
    Way("a counter, looked at every 10 ms", by_hand, 0.01, "get", False),
]
ELECTIONS: Final = [
    Way("Holdfast's election", by_election, None, "", True),
    Way("redis-py's Lock", by_lock, 0.1, "", False),
    Way("redis-py's Lock, every 10 ms", by_lock, 0.01, "", False),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latch_election", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often everything is measured (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there as well")
    asked = parser.parse_args()

    took: dict[str, list[float]] = {way.name: [] for way in LATCHES + ELECTIONS}
    requests: dict[str, list[float]] = {way.name: [] for way in LATCHES}
    with Server() as server:
        for number in range(asked.rounds):
            for way in random.sample(LATCHES, len(LATCHES)):
                seconds, some = open_latch(server, way, f"latch:{way.is_ours}:{number}")
                took[way.name].append(seconds)
                requests[way.name].append(some)
            for way in random.sample(ELECTIONS, len(ELECTIONS)):
                took[way.name] += take_turns(server, way, f"election:{way.option}")

    table = new_table(f"{WAITERS} threads of {CLIENTS} clients wait; two candidates take turns ({asked.rounds} rounds)")
    for column in ("", "median", "p10", "p90", "requests/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, seconds in took.items():
        spread = spread_of(seconds)
        shown = [f"{value * 1000:,.2f} ms" for value in (spread.median, spread.p10, spread.p90)]
        table.add_row(name, *shown, f"{spread_of(requests[name]).median:,.0f}" if name in requests else "")
    console.print(table)

    middle = {name: spread_of(seconds).median for name, seconds in took.items()}
    ours, peers = middle[LATCHES[0].name], min(middle[way.name] for way in LATCHES[1:])
    leads, followers = middle[ELECTIONS[0].name], min(middle[way.name] for way in ELECTIONS[1:])
    asks = spread_of(requests[LATCHES[0].name]).median / CLIENTS
    figures = [
        Figure("latch: requests a second of a client that waits", f"{asks:.2g}", "at most 2.5", asks <= 2.5),
        Figure("latch: until the last of 200 goes on", f"{ours / peers:.2f} of the time by hand", "less", ours < peers),
        Figure(
            "election: from resigning to the next leading",
            f"{leads / followers:.2f} of redis-py's better time",
            "at most 0.5",
            leads <= 0.5 * followers,
        ),
    ]
    details = {"seconds": took, "requests": requests, "waiters": WAITERS, "clients": CLIENTS}
    return conclude(figures, details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
