"""Latches and elections: how soon waiters are woken, and what waiting costs.

    python -m benchmarks.latch_election [--rounds 10] [--json FILE]

Two scenes on one server; each contender runs once in every round, in random order:

- *latch*: 200 threads of four clients wait. The time is from the call that opens the latch until the last thread
  continues. The comparison is a latch written by hand: a counter in Redis that every waiter reads every 10 ms. (We know
  of no library with a latch on Redis.) Requests are those that the server counted in the second before that call.
- *election*: two candidates take turns. The time is from the call of ``resign`` until the other candidate leads. The
  comparison is redis-py's Lock, released and waited for, at its defaults (it polls every 100 ms) and with a poll every
  10 ms.
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
    command: str  # the command whose calls the server counts
    is_ours: bool


# ---- latch -----------------------------------------------------------------------------------------------------------


class OpenedLatch(NamedTuple):
    waits: list[Callable[[], object]]
    opens: Callable[[], object]


@contextmanager
def by_latch(url: str, name: str, option: None) -> Iterator[OpenedLatch]:
    with ExitStack() as stack:
        clients = [stack.enter_context(holdfast.connect(url)) for _ in range(CLIENTS)]
        yield OpenedLatch([client.latch(name, 1).wait for client in clients], clients[0].latch(name, 1).count_down)


@contextmanager
def by_hand(url: str, name: str, pause: float) -> Iterator[OpenedLatch]:
    def wait(client: redis.Redis) -> None:
        while int(client.get(name)) > 0:
            time.sleep(pause)

    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(url, max_connections=1000)) for _ in range(CLIENTS)]
        clients[0].set(name, 1)
        yield OpenedLatch([lambda client=client: wait(client) for client in clients], lambda: clients[0].decr(name))


def count_calls(stats: redis.Redis, command: str) -> int:
    return int(stats.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def open_latch(server: Server, way: Way, name: str) -> tuple[float, float]:
    """Seconds until the last waiter continues, and the requests in the second before the latch was opened."""
    ends: list[float] = []

    def wait(waits: Callable[[], object]) -> None:
        waits()
        ends.append(time.perf_counter())

    with server.client() as stats, way.opens(server.url, name, way.option) as latch:
        threads = [threading.Thread(target=wait, args=(latch.waits[number % CLIENTS],)) for number in range(WAITERS)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = count_calls(stats, way.command)
        time.sleep(1.0)
        requests = count_calls(stats, way.command) - before
        began = time.perf_counter()
        latch.opens()
        for thread in threads:
            thread.join()
    return max(ends) - began, requests


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
    """Seconds from each resignation until the other candidate leads."""
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
            time.sleep(random.uniform(0.1, 0.25))  # otherwise a polling candidate is always at the same point
            began = time.perf_counter()
            leader.resign()
            rival.join()
            took.append(led_at[0] - began)
            leader, other = other, leader
        leader.resign()
    return took


# ---- both scenes -----------------------------------------------------------------------------------------------------

LATCHES: Final = [
    Way("Holdfast's latch", by_latch, None, "evalsha", True),
    Way("a counter, polled every 10 ms", by_hand, 0.01, "get", False),
]
ELECTIONS: Final = [
    Way("Holdfast's election", by_election, None, "", True),
    Way("redis-py's Lock", by_lock, 0.1, "", False),
    Way("redis-py's Lock, 10 ms polls", by_lock, 0.01, "", False),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latch_election", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
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
        Figure("latch: requests per second of a waiting client", f"{asks:.2g}", "at most 2.5", asks <= 2.5),
        Figure(
            "latch: until the last of 200 continues",
            f"{ours / peers:.2f} of the time by hand",
            "less than 1",
            ours < peers,
        ),
        Figure(
            "election: from a resignation to the next leader",
            f"{leads / followers:.2f} of redis-py's better time",
            "at most 0.5",
            leads <= 0.5 * followers,
        ),
    ]
    details = {"seconds": took, "requests": requests, "waiters": WAITERS, "clients": CLIENTS}
    return conclude(figures, details=details, json_file=asked.json)


if __name__ == "__main__":
    sys.exit(main())
