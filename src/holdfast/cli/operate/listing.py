"""``holdfast ls`` and ``holdfast who``."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from holdfast.blocking import Client
from holdfast.cli.operate.common import Output, operator_command
from holdfast.cli.operate.endings import suggest_in_use, whole_key
from holdfast.cli.operate.tables import LOCK_COLUMNS, SORTS, details, table
from holdfast.cli.place import note_on
from holdfast.holder import LockInfo


@operator_command(short_help="List the locks that are held or waited for.")
@click.argument("pattern", default="*")
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="name", help="The longest wait or hold first, or by name."
)
def ls(client: Client, output: Output, *, pattern: str, sort: str) -> int:
    """List the locks whose names match PATTERN: who holds them, for how long, and how many waiters there are.

    In PATTERN, * stands for any text and ? for any character; quote it: holdfast ls 'order:*'. The keys of the server
    are looked through in small parts, so the server stays responsive; a large server takes a while.
    """
    found = sorted(all_locks(client, pattern), key=SORTS[sort])
    if note := note_on(client):
        output.say(note)
    if output.as_json:
        output.json([info.as_json() for info in found])
    elif found:
        console = output.console()
        console.print(table(found, LOCK_COLUMNS, console.width))
    if not found:
        contains = shlex.quote(f"*{pattern}*")
        hint = "" if any(char in pattern for char in "*?[") else f". For names that contain it: holdfast ls {contains}"
        output.say(f"no lock like {pattern!r} is held or waited for{hint}")
    elif not output.as_json and sys.stdout.isatty():
        output.say("to explain one: holdfast who NAME; to free one: holdfast break NAME --reason TEXT")
    return 0


def all_locks(client: Client, pattern: str) -> list[LockInfo]:
    locks = client.locks(pattern)
    with progress(lambda: f"looked at {locks.scanned:,} keys ..."):
        return list(locks)


@contextmanager
def progress(text: Callable[[], str]) -> Iterator[None]:
    """Show this text on stderr from time to time, if that is a terminal and the block takes long."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()

    def show() -> None:
        shown = 0
        while not over.wait(0.3):
            line = text()
            shown = max(shown, len(line))
            sys.stderr.write(f"\r{line}")
            sys.stderr.flush()
        if shown:
            sys.stderr.write("\r" + " " * shown + "\r")
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@operator_command(short_help="Show who holds a lock, and who waits for it.")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=100, help="How many waiters to read.  [default: 100]")
def who(client: Client, output: Output, *, name: str, limit: int) -> int:
    """Show who holds the lock NAME, since when, and its queue.

    A lease is renewed after each third of its ttl, an option of the holder's lock (30 s by default). If less than half
    of the ttl is left, the process has ended or is cut off, or does not renew its lease: the lock is free when the
    lease ends. If it is never less than half, the process is alive.
    """
    info = client.inspect(name, limit=limit)
    is_foreign = info is None and client.lock(name).locked() and (info := client.inspect(name, limit=limit)) is None
    if output.as_json:
        output.json(None if info is None else info.as_json())
    if info is None:
        why = "is no lock: another program has a key of this name there" if is_foreign else "is free"
        hint = f". For a pattern: holdfast ls {shlex.quote(name)}" if "*" in name else ""
        output.say(f"lock {whole_key(client, name)!r} {why}, and no process waits for it{hint}")
        suggest_in_use(client, output, name, "holdfast who {}")
        return 0
    if not output.as_json:
        console = output.console()
        console.print(details(info, console.width))
        if info.holders and sys.stdout.isatty():
            output.say(f"to free it: holdfast break {shlex.quote(name)} --reason TEXT")
    return 0
