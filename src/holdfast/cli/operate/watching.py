"""``holdfast watch``: what happens to one lock, as it happens.

The lock is inspected again and again, and two looks are compared. So a hold that begins and ends between two looks is
not seen. A break is seen in the history.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from holdfast.blocking import Client
from holdfast.cli import UNAVAILABLE
from holdfast.cli import duration as duration_option
from holdfast.cli.operate.common import Output, operator_command
from holdfast.cli.operate.endings import suggest_in_use
from holdfast.cli.operate.tables import clock_time, duration, named
from holdfast.errors import Unavailable
from holdfast.holder import Broken, Holder, LockInfo, Waiter

Event = tuple[str, dict[str, Any], str]  # its kind, its facts, and a sentence

_STYLES = {"held": "green", "expired": "red", "waiting": "yellow", "broken": "bold red", "unavailable": "red"}


@operator_command(short_help="Show what happens to a lock, as it happens.")
@click.argument("name")
@click.option("--interval", callback=duration_option(0.01), default="0.5", help="How often to look.  [default: 0.5]")
@click.option("--for", "lasts", callback=duration_option(), metavar="DURATION", help="End after this time.")
def watch(client: Client, output: Output, *, name: str, interval: float, lasts: float | None) -> int:
    """Show what happens to the lock NAME: which client gets it, waits for it, leaves it or loses it. Ctrl-C ends it.

    With --json, one object per line.
    """
    until = None if lasts is None else time.monotonic() + lasts
    console = output.console()
    before: LockInfo | None = None
    known: set[tuple[float, int | None]] | None = None  # breaks, by their times and fences
    outage, looked_at = False, time.monotonic()
    while True:
        events: list[Event] = []
        first = known is None
        try:
            info, entries = client.inspect(name), client.history(name)
            breaks = [entry for entry in entries if known is not None and (entry.at, entry.fence) not in known]
            events += changes(before, info, time.monotonic() - looked_at, breaks)
            if first and info is None:
                events.append(("free", {}, "it is free"))
            before, known, outage = info, {(entry.at, entry.fence) for entry in entries}, False
            looked_at = time.monotonic()
        except Unavailable as error:
            if not outage:  # it is said once, not at each look
                events = [("unavailable", {"message": str(error)}, str(error))]
            outage = True
        for kind, facts, sentence in events:
            if output.as_json:
                output.json({"time": time.time(), "event": kind, "name": name, **facts}, indent=None)
            else:
                line = Text.assemble((clock_time(time.time())[11:], "dim"), "  ", (f"{kind:8}", _STYLES.get(kind, "")))
                console.print(line.append(f"  {sentence}"))
        if first and not outage and before is None:
            suggest_in_use(client, output, name, "holdfast watch {}")
        if until is not None and time.monotonic() >= until:
            return UNAVAILABLE if outage else 0
        time.sleep(interval if until is None else max(0.0, min(interval, until - time.monotonic())))


def changes(
    before: LockInfo | None, now: LockInfo | None, elapsed: float = 0.0, breaks: Sequence[Broken] = ()
) -> Iterator[Event]:
    """What happened between two looks, ``elapsed`` seconds apart. ``breaks``: those of that time, the latest first."""
    old = {} if before is None else {(holder.id, holder.fence): holder for holder in before.holders}
    new = {} if now is None else {(holder.id, holder.fence): holder for holder in now.holders}
    waited = Counter(() if before is None else map(_identity, before.waiters))  # a process may have several places
    waits = Counter(() if now is None else map(_identity, now.waiters))
    broken = {entry.holder.fence for entry in breaks if entry.holder.fence is not None}
    yield from map(_broken, reversed(breaks))
    for key, holder in old.items():
        if key not in new and holder.fence not in broken:
            expired = holder.remaining is not None and holder.remaining <= elapsed
            yield "expired" if expired else "released", {"holder": asdict(holder)}, f"{named(holder)} has it no longer"
    for key, holder in new.items():
        if key not in old:
            yield "held", {"holder": asdict(holder)}, f"by {named(holder)}{_fence(holder)}"
    for waiter in () if now is None else now.waiters:
        waited[_identity(waiter)] -= 1
        if waited[_identity(waiter)] < 0:
            yield "waiting", {"waiter": asdict(waiter)}, f"{named(waiter)}, for {duration(waiter.waiting) or 'a while'}"
    holds = {(holder.host, holder.pid, holder.label) for holder in new.values()}
    for waiter in () if before is None else before.waiters:
        waits[_identity(waiter)] -= 1
        if waits[_identity(waiter)] < 0 and (waiter.host, waiter.pid, waiter.label) not in holds:
            yield "left", {"waiter": asdict(waiter)}, f"{named(waiter)} waits no longer"


def _identity(waiter: Waiter) -> tuple[str, int | None, str, str]:
    return waiter.host, waiter.pid, waiter.label, waiter.mode


def _fence(holder: Holder) -> str:
    return "" if holder.fence is None else f", fence {holder.fence}"


def _broken(entry: Broken) -> Event:
    facts = {"holder": asdict(entry.holder), "by": asdict(entry.by), "reason": entry.reason}
    return "broken", facts, f"taken from {named(entry.holder)} by {named(entry.by)}: {entry.reason}"
