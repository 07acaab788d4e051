"""What events cost: an uncontended acquire and release, without a listener and with each kind of listener.

    python -m benchmarks.events [--rounds 60] [--cycles 100]

Each listener has its own client on one server. All clients run in each of many short rounds, in shuffled order. In each
round, the time is divided by that of the client without a listener; the result is the median over the rounds.
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import ExitStack
from typing import Any

from prometheus_client import CollectorRegistry
from tests.servers import Server

import holdfast
from benchmarks.report import console, new_table, spread_of
from benchmarks.uncontended import Contender, measure, place, ratio, timed
from holdfast.metrics import Prometheus
from holdfast.otel import Spans

SILENT = "no listener"


def ignore(_: object) -> None:
    """A hook that does nothing."""


def contender(name: str, server: Server, stack: ExitStack, on_event: Any) -> Contender:
    client = stack.enter_context(holdfast.connect(server.url, on_event=on_event))

    def cycle() -> None:
        lock = client.lock(f"bench:{name}")
        if not lock.acquire():
            raise RuntimeError("another holder has the lock")
        lock.release()

    return Contender(name, timed(cycle), SILENT)


def with_debug_log(silent: Contender) -> Contender:
    """The same cycles while the debug log is on, and its output is dropped."""
    log = logging.getLogger("holdfast")

    def turns(cycles: int) -> float:
        log.setLevel(logging.DEBUG)
        try:
            return silent.turns(cycles)
        finally:
            log.setLevel(logging.NOTSET)

    return Contender("debug log", turns, SILENT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cycles", type=int, default=100)
    options = parser.parse_args()
    log = logging.getLogger("holdfast")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    with Server() as server, ExitStack() as stack:
        where = place(server, "apart")
        opened = [
            contender(SILENT, server, stack, None),
            contender("empty hook", server, stack, ignore),
            contender("Prometheus", server, stack, Prometheus(CollectorRegistry())),
            contender("spans, without an SDK", server, stack, Spans()),
        ]
        opened.append(with_debug_log(contender("with a log", server, stack, None)))
        took = measure(opened, options.rounds, options.cycles)
    table = new_table(f"an uncontended cycle with events, the server {where}")
    table.add_column("", no_wrap=True)
    table.add_column("us", justify="right")
    table.add_column("times no listener", justify="right")
    for name, *_ in opened:
        us = spread_of([seconds * 1e6 for seconds in took[name]])
        table.add_row(name, f"{us.median:.0f}", f"{ratio(took, name, SILENT).median:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
