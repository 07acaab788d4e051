"""``holdfast top``: the locks of a server, live.

One thread looks at the server again and again, and the main thread reads keys and draws. So a slow server never delays
a key. Keys are read one by one from the terminal, which is set back at the end.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.blocking import Client
from holdfast.cli import duration as duration_option
from holdfast.cli.operate.common import Output, operator_command
from holdfast.cli.operate.tables import LOCK_COLUMNS, SORTS, details, table
from holdfast.cli.place import note_on
from holdfast.errors import HoldfastError
from holdfast.holder import LockInfo
from holdfast.untrusted import printable

_HELP: Final = "q quit   s sort   / filter   up, down, enter: open one   esc: back"
_KEYS: Final = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "k": "up", "j": "down"}
_ONE_KEY: Final = re.compile(r"\x1b[\[O].|.", re.DOTALL)
_TICK: Final = 0.2


class Snapshots(threading.Thread):
    """Looks at the server again and again. ``found`` and ``error`` are those of the last look."""

    def __init__(self, client: Client, pattern: str, interval: float) -> None:
        super().__init__(name="holdfast-top", daemon=True)
        self._client = client
        self._pattern = pattern
        self._interval = interval
        self._over = threading.Event()
        self.found: list[LockInfo] = []
        self.error = ""
        self.note: str | None = None  # what to know about the place; None before the first look
        self.looks = 0

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self.found, self.error = list(self._client.locks(self._pattern)), ""
                self.note = note_on(self._client) if self.note is None else self.note
            except HoldfastError as error:
                self.error = str(error)
            self.looks += 1
            self._over.wait(self._interval)

    def end(self) -> None:
        self._over.set()


class Screen:
    """What is shown: how the locks are sorted and filtered, and which one is open."""

    def __init__(self) -> None:
        self.sort = "wait"
        self.filter = ""
        self.typing = False  # the filter
        self.place = 0
        self.opened: str | None = None
        self.over = False

    def press(self, key: str, shown: list[LockInfo]) -> None:
        if self.typing:
            self._type(key)
        elif key in ("q", "\x03", "\x04"):
            self.over = True
        elif key == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
        elif key == "/":
            self.typing, self.opened = True, None
        elif key == "\x1b":
            self.opened, self.filter = None, "" if self.opened is None else self.filter
        elif key in ("\r", "\n") and shown:
            self.opened = shown[min(self.place, len(shown) - 1)].key
        elif _KEYS.get(key) == "up":
            self.place = max(0, self.place - 1)
        elif _KEYS.get(key) == "down":
            self.place = max(0, min(self.place + 1, len(shown) - 1))

    def _type(self, key: str) -> None:
        if key in ("\r", "\n", "\x1b"):
            self.typing = False
            self.filter = "" if key == "\x1b" else self.filter
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key

    def select(self, found: list[LockInfo]) -> list[LockInfo]:
        return sorted((info for info in found if self.filter in info.key), key=SORTS[self.sort])

    def draw(self, snapshots: Snapshots, console: Console) -> RenderableType:
        shown = self.select(snapshots.found)
        self.place = max(0, min(self.place, len(shown) - 1))
        held = sum(info.holder_count for info in snapshots.found)
        waits = sum(info.waiter_count for info in snapshots.found)
        title = f"{len(shown)} of {len(snapshots.found)} locks, {held} holders, {waits} waiting; sorted by {self.sort}"
        head = [
            Text(
                title if snapshots.looks else "looking at the server ...",
                style="bold",
                overflow="ellipsis",
                no_wrap=True,
            )
        ]
        if self.filter or self.typing:
            head.append(Text(f"/{printable(self.filter)}" + ("_" if self.typing else ""), style="yellow"))
        if snapshots.note:
            head += [Text(line, style="yellow") for line in wrap(printable(snapshots.note), console.width)]
        if snapshots.error:
            head.append(Text(printable(snapshots.error), style="red", overflow="ellipsis", no_wrap=True))
        foot = Text(_HELP, style="dim", overflow="ellipsis", no_wrap=True)
        opened = next((info for info in snapshots.found if info.key == self.opened), None)
        if self.opened is not None:
            gone = Text(f"{printable(self.opened)} is free, and no process waits for it")
            return Group(*head, details(opened, console.width) if opened is not None else gone, foot)
        room = max(1, console.height - len(head) - 4)
        first = max(0, self.place - room + 1)
        rows = shown[first : first + room]
        shown_rows = table(rows, LOCK_COLUMNS, console.width, chosen=self.place - first, one_line=True)
        return Group(*head, shown_rows, foot)


@operator_command(short_help="Show the locks of a server, live.")
@click.argument("pattern", default="*")
@click.option("--interval", callback=duration_option(0.1), default="2", help="How often to look.  [default: 2]")
def top(client: Client, output: Output, *, pattern: str, interval: float) -> int:
    """Show the locks whose names match PATTERN, the longest wait first, and look again every two seconds.

    Keys: q quits, s sorts by wait, time held or name, / filters by a part of the name, the arrows and Enter open one
    lock, Esc goes back. With --json, one list per look and line.
    """
    if output.as_json:
        looks = 0
        while True:
            output.json([info.as_json() for info in client.locks(pattern)], indent=None)
            sys.stdout.flush()
            if not looks and (note := note_on(client)):
                output.say(note)
            looks += 1
            time.sleep(interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal; use holdfast ls, or --json")
    snapshots, screen, console = Snapshots(client, pattern, interval), Screen(), output.console()
    snapshots.start()
    try:
        with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
            while not screen.over:
                live.update(screen.draw(snapshots, console), refresh=True)
                for key in read_keys(_TICK):
                    screen.press(key, screen.select(snapshots.found))
    finally:
        snapshots.end()
    return 0


@contextmanager
def single_keys() -> Iterator[None]:
    """Let the terminal pass each key on at once, without showing it."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def read_keys(timeout: float) -> list[str]:
    """The keys that were pressed; none after that time. An arrow is one key of three characters."""
    if not select.select([sys.stdin], [], [], timeout)[0]:
        return []
    return _ONE_KEY.findall(os.read(sys.stdin.fileno(), 1024).decode(errors="replace"))
