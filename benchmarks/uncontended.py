"""The cost of an uncontended acquire and release, compared with other libraries and with a bare socket.

    python -m benchmarks.uncontended [--rounds 60] [--cycles 100] [--json FILE]

Fairness of the comparison. All contenders use TCP over loopback to one real server, and make a new lock object with a
random token in every cycle, like a program that locks one order after the other. Other libraries are used as their own
documentation advises, with hiredis, which is their fast path.

Noise. The speed of a machine can change by a factor of three within seconds. So if two contenders run one after the
other, their absolute numbers say little. Here all contenders run in each of many short rounds, in an order that is
shuffled each time. The result is the median over the rounds of the ratio within a round.

Cores. A kernel that sees one client talk to one server often runs both on one core for some seconds; a round trip then
takes six times as long. In production, a client and its lock server rarely share a core. So where the system allows it,
the server gets a core of its own (``--server-core apart``, the default), the same for all contenders. The two figures
on one shared core are printed too; there a round trip costs next to nothing, so they show the computing time of each
client. ``--server-core free`` lets the kernel decide.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import hiredis
import pottery
import redis
import redis.asyncio
import redis_lock  # type: ignore[import-untyped]
from rich.progress import track
from tests.servers import Server

import holdfast
import holdfast.aio
from benchmarks.report import Figure, Spread, conclude, console, new_table, spread_of

BARE, HOLDFAST, REDIS_PY, AIO, REDIS_PY_AIO = (
    "bare socket",
    "Holdfast",
    "redis-py Lock",
    "Holdfast, asyncio",
    "redis-py Lock, asyncio",
)
SHORT = {BARE: "bare", REDIS_PY_AIO: "redis-py's"}
LEAST_TIMES_REDIS_PY = 1.25
MOST_TIMES_BARE = 1.35
TTL = 30

SLOW = 0.001
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []

Turns = Callable[[int], float]  # runs this many cycles, and returns the seconds that they took


class Contender(NamedTuple):
    name: str
    turns: Turns
    beside: str  # the contender with which its time is compared


def timed(cycle: Callable[[], object]) -> Turns:
    def turns(cycles: int) -> float:
        started = perf_counter()
        for _ in range(cycles):
            cycle()
        return perf_counter() - started

    return turns


def holdfast_turns(server: Server, stack: ExitStack) -> Turns:
    client = stack.enter_context(holdfast.connect(server.url))

    def cycle() -> None:
        lock = client.lock("bench:holdfast", ttl=TTL)
        if not lock.acquire():
            raise RuntimeError("another holder has the lock")
        lock.release()

    return timed(cycle)


def redis_py_turns(server: Server) -> Turns:
    client = server.client()

    def cycle() -> None:
        lock = client.lock("bench:redis-py", timeout=TTL)
        if not lock.acquire():
            raise RuntimeError("another holder has the lock")
        lock.release()

    return timed(cycle)


def python_redis_lock_turns(server: Server) -> Turns:
    client = server.client()

    def cycle() -> None:
        lock = redis_lock.Lock(client, "bench:python-redis-lock", expire=TTL)
        if not lock.acquire():
            raise RuntimeError("another holder has the lock")
        lock.release()

    return timed(cycle)


def pottery_turns(server: Server) -> Turns:
    client = server.client()

    def cycle() -> None:
        lock = pottery.Redlock(key="bench:pottery", masters={client}, auto_release_time=TTL)
        if not lock.acquire():
            raise RuntimeError("another holder has the lock")
        lock.release()

    return timed(cycle)


def bare_socket_turns(server: Server, stack: ExitStack) -> Turns:
    """A lower bound for a library: two requests and two replies, packed and parsed in C."""
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = hiredis.Reader()
    compare_and_delete = "if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('DEL',KEYS[1]) end return 0"

    def ask(*words: Any) -> Any:
        sock.sendall(hiredis.pack_command(words))
        reader.feed(sock.recv(65536))
        return reader.gets()

    sha = ask("SCRIPT", "LOAD", compare_and_delete)

    def cycle() -> None:
        token = secrets.token_urlsafe(16)
        if ask("SET", "bench:bare", token, "NX", "PX", TTL * 1000) != b"OK":
            raise RuntimeError("another holder has the lock")
        if ask("EVALSHA", sha, 1, "bench:bare", token) != 1:
            raise RuntimeError("the lock was lost")

    return timed(cycle)


def aio_turns(loop: asyncio.Runner, new_lock: Callable[[], Any]) -> Turns:
    async def run(cycles: int) -> float:
        started = perf_counter()
        for _ in range(cycles):
            lock = new_lock()
            if not await lock.acquire():
                raise RuntimeError("another holder has the lock")
            await lock.release()
        return perf_counter() - started

    return lambda cycles: loop.run(run(cycles))


def contenders(server: Server, stack: ExitStack) -> list[Contender]:
    loop = stack.enter_context(asyncio.Runner())
    ours = holdfast.aio.connect(server.url)
    stack.callback(lambda: loop.run(ours.aclose()))
    theirs = redis.asyncio.Redis.from_url(server.url)
    stack.callback(lambda: loop.run(theirs.aclose()))
    return [
        Contender(BARE, bare_socket_turns(server, stack), BARE),
        Contender(HOLDFAST, holdfast_turns(server, stack), BARE),
        Contender(REDIS_PY, redis_py_turns(server), BARE),
        Contender("python-redis-lock", python_redis_lock_turns(server), BARE),
        Contender("pottery Redlock", pottery_turns(server), BARE),
        Contender(AIO, aio_turns(loop, lambda: ours.lock("bench:aio", ttl=TTL)), REDIS_PY_AIO),
        Contender(REDIS_PY_AIO, aio_turns(loop, lambda: theirs.lock("bench:redis-py-aio", timeout=TTL)), REDIS_PY_AIO),
    ]


def place(server: Server, where: str) -> str:
    """Put client and server on a core each, or on the same one; returns where the server runs."""
    if where == "free" or len(CORES) < 2:
        return "where the kernel puts it"
    first, *others = CORES
    os.sched_setaffinity(server.pid, {first})
    os.sched_setaffinity(0, {first} if where == "shared" else others)
    return "on the client's core" if where == "shared" else "on a core of its own"


def measure(opened: list[Contender], rounds: int, cycles: int) -> dict[str, list[float]]:
    """Seconds per cycle of each contender, round by round."""
    took: dict[str, list[float]] = {contender.name: [] for contender in opened}
    turns = {contender.name: cycles for contender in opened}
    for name, run, _ in opened:
        run(10)  # a warm-up: connections, scripts and caches
        if run(10) / 10 > SLOW:
            turns[name] = max(1, cycles // 10)  # fewer cycles are enough for a slow contender
    for _ in track(range(rounds), "measuring", console=console, transient=True, disable=not console.is_terminal):
        for name, run, _ in random.sample(opened, len(opened)):
            took[name].append(run(turns[name]) / turns[name])
    return took


def ratio(took: dict[str, list[float]], one: str, other: str) -> Spread:
    """The time of ``one`` divided by the time of ``other``, within each round."""
    return spread_of([a / b for a, b in zip(took[one], took[other], strict=True)])


def show(opened: list[Contender], took: dict[str, list[float]], title: str) -> None:
    table = new_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("cycles/s", justify="right")
    table.add_column("p10 .. p90", justify="right", no_wrap=True)
    table.add_column("us", justify="right")
    table.add_column("time, compared", no_wrap=True)
    for name, _, beside in opened:
        per_second = spread_of([1 / seconds for seconds in took[name]])
        table.add_row(
            name,
            f"{per_second.median:,.0f}",
            f"{per_second.p10:,.0f} .. {per_second.p90:,.0f}",
            f"{spread_of(took[name]).median * 1e6:.0f}",
            "" if name == beside else f"{ratio(took, name, beside).median:.2f} x {SHORT[beside]}",
            style="bold" if name.startswith(HOLDFAST) else "",
            end_section=name == "pottery Redlock",
        )
    console.print(table)


def figures_of(took: dict[str, list[float]]) -> list[Figure]:
    quicker, slower = ratio(took, REDIS_PY, HOLDFAST), ratio(took, HOLDFAST, BARE)
    return [
        Figure(
            "Holdfast's cycles per second",
            f"{quicker.median:.2f} times redis-py's Lock, p10..p90 {quicker.p10:.2f}..{quicker.p90:.2f}",
            f"at least {LEAST_TIMES_REDIS_PY}",
            quicker.median >= LEAST_TIMES_REDIS_PY,
        ),
        Figure(
            "Holdfast's time per cycle",
            f"{slower.median:.2f} times the bare socket's, p10..p90 {slower.p10:.2f}..{slower.p90:.2f}",
            f"at most {MOST_TIMES_BARE}",
            slower.median <= MOST_TIMES_BARE,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uncontended", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="number of rounds (default 60)")
    parser.add_argument("--cycles", type=int, default=100, help="acquire + release per contender and round (100)")
    parser.add_argument("--server-core", choices=("apart", "shared", "free"), default="apart", help="see above")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    asked = parser.parse_args()

    with ExitStack() as stack:
        server = stack.enter_context(Server())
        opened = contenders(server, stack)
        where = place(server, asked.server_core)
        took = measure(opened, asked.rounds, asked.cycles)
        show(opened, took, f"Uncontended acquire + release, server {where}")
        beside = {}
        if asked.server_core == "apart" and place(server, "shared") != where:
            beside = measure(opened[:3], asked.rounds, asked.cycles)
            show(opened[:3], beside, "The same on the client's core (no figure is promised)")
    return conclude(
        figures_of(took),
        details={"server": where, "seconds_per_cycle": took, "seconds_per_cycle_on_a_shared_core": beside},
        json_file=asked.json,
    )


if __name__ == "__main__":
    sys.exit(main())
