"""How locks look in a terminal: durations, holders, and tables that fit its width.

In a narrow terminal a table leaves out its optional columns, the last one first; then long texts are folded. Nothing
that identifies a lock is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.holder import Broken, Holder, LockInfo, Waiter
from holdfast.untrusted import printable

_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "m"))
_SHOWN_WAITERS: Final = 20
_NARROW: Final = 72  # columns; in fewer, a row of the history does not fit


def duration(seconds: float | None) -> str:
    """At most two units: 3h12m, 45s, 0.3s; empty if it is not known."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s"
    left = int(seconds)
    for number, (size, unit) in enumerate(_UNITS):
        if left >= size:
            smaller, name = (*_UNITS, (1, "s"))[number + 1]
            rest = left % size // smaller
            return f"{left // size}{unit}{rest}{name}" if rest else f"{left // size}{unit}"
    return f"{left}s"


def clock_time(seconds: float) -> str:
    """A time by this machine's time zone."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def named(who: Holder | Waiter) -> str:
    """A holder or waiter in one line: ``nightly @ web1:4711``."""
    if not who.host:
        return "a client of another library" if isinstance(who, Holder) else "a process"
    place = who.host if who.pid is None else f"{who.host}:{who.pid}"
    return f"{who.label} @ {place}" if who.label else place


def held_by(info: LockInfo) -> str:
    if info.left is not None:
        return f"{info.left} left to count down"
    if not info.holders:
        return "free, and being passed on"
    first = info.holders[0]
    text = ("kept for " if first.mode == "reserved" else "") + named(first)
    return f"{text} and {info.holder_count - 1} more" if info.holder_count > 1 else text


def held_for(info: LockInfo) -> float | None:
    """How long its first holder has had it, in seconds, by the server's clock."""
    starts = [holder.since for holder in info.holders if holder.since is not None]
    return max(0.0, info.at - min(starts)) if starts else None


def longest_wait(info: LockInfo) -> float:
    return max((waiter.waiting or 0.0 for waiter in info.waiters), default=0.0)


def waiting(info: LockInfo) -> str:
    """How many waiters there are, and how long the first of them has waited."""
    if not info.waiter_count:
        return ""
    longest = longest_wait(info)
    return f"{info.waiter_count} for {duration(longest)}" if longest else str(info.waiter_count)


class Column(NamedTuple):
    title: str
    text: Callable[[Any], str]
    right: bool = False
    style: str = ""
    folds: bool = False  # long text continues on the next line
    optional: bool = False  # left out where the table would not fit


_GAP: Final = 3  # between two columns


def table(
    rows: Sequence[Any], columns: Sequence[Column], width: int, *, chosen: int | None = None, one_line: bool = False
) -> Table:
    """The rows, without optional columns that do not fit. ``chosen``: which row is highlighted. ``one_line``: each row
    is one line, in which long texts are cut off."""
    cells = [[column.text(row) for column in columns] for row in rows]
    most = max(12, width // 3)  # characters of a text that can be folded
    widths = [
        min(most if column.folds else width, max([len(column.title), *(cell_len(row[place]) for row in cells)]))
        for place, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    for place in reversed(range(len(columns))):
        if columns[place].optional and sum(widths[each] + _GAP for each in kept) - _GAP > width:
            kept.remove(place)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for place in kept:
        column = columns[place]
        shown.add_column(
            column.title,
            justify="right" if column.right else "left",
            style=column.style,
            overflow="ellipsis" if one_line else "fold",
            no_wrap=one_line or not column.folds,
            max_width=widths[place] if one_line else None,
            header_style="bold",
        )
    for number, row in enumerate(cells):
        shown.add_row(*(Text(row[place]) for place in kept), style="reverse" if number == chosen else "")
    return shown


LOCK_COLUMNS: Final = (
    Column("NAME", lambda info: printable(info.key), folds=True, style="bold"),
    Column("HELD BY", held_by, folds=True),
    Column("WAITING", waiting, right=True, style="yellow"),
    Column("HELD FOR", lambda info: duration(held_for(info)), right=True, style="cyan", optional=True),
    Column("KIND", lambda info: info.kind, optional=True),
    Column(
        "LEASE",
        lambda info: duration(info.holders[0].remaining) if info.holders else "",
        right=True,
        optional=True,
    ),
    Column(
        "FENCE",
        lambda info: str(info.holders[0].fence or "") if info.holders else "",
        right=True,
        style="dim",
        optional=True,
    ),
)

SORTS: Final[dict[str, Callable[[LockInfo], tuple[Any, ...]]]] = {
    "wait": lambda info: (-longest_wait(info), -info.waiter_count, info.name),
    "held": lambda info: (-(held_for(info) or 0.0), info.name),
    "name": lambda info: (info.name, info.kind),
}


def history_table(entries: Sequence[Broken], console: Console) -> RenderableType:
    """One entry in each row, or in a narrow terminal in some lines."""
    if console.width < _NARROW:
        return Group(*(line for entry in entries for line in _entry_lines(entry)))
    columns = [
        Column("WHEN", lambda entry: clock_time(entry.at) if entry.at else ""),
        Column("REASON", lambda entry: entry.reason, folds=True),
        Column("HOLDER", lambda entry: named(entry.holder), folds=True),
        Column("BROKEN BY", lambda entry: named(entry.by), folds=True),
        Column("FENCE", lambda entry: str(entry.holder.fence or ""), right=True, style="dim", optional=True),
    ]
    return table(entries, columns, console.width)


def _entry_lines(entry: Broken) -> list[Text]:
    facts = {"reason": entry.reason, "holder": named(entry.holder), "by": named(entry.by)}
    return [Text(clock_time(entry.at) if entry.at else "-"), *(_fact(title, text) for title, text in facts.items())]


def details(info: LockInfo, width: int) -> RenderableType:
    """One lock: who holds it, since when, and who waits."""
    parts: list[RenderableType] = [Text.assemble((printable(info.key), "bold"), f"  ({info.kind})")]
    if info.left is not None:
        parts.append(_fact("count", f"{info.left} left until it opens"))
    elif not info.holders:
        parts.append(_fact("held by", "no client: it is being passed on to the first waiter"))
    elif len(info.holders) == 1:
        parts += _holder_facts(info.holders[0], info.at)
    else:
        parts += [_fact("held by", f"{info.holder_count} holders"), table(info.holders, _holder_columns(info), width)]
    parts.append(_fact("waiting", _waiter_count(info), "bold" if info.waiters else ""))
    if info.waiters and info.kind != "cache":
        rows = list(enumerate(info.waiters[:_SHOWN_WAITERS], 1))
        parts.append(table(rows, _waiter_columns(info), width))
        if info.waiter_count > len(rows):
            parts.append(Text(f"    and {info.waiter_count - len(rows)} more", style="dim"))
    return Group(*parts)


def _fact(title: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {title:9}", "dim"), (text, style))


def _holder_facts(holder: Holder, now: float) -> list[RenderableType]:
    what = {"read": ", to read", "write": ", to write"}.get(holder.mode, "")
    slot = "" if holder.slot is None else f", permit {holder.slot}"
    facts = [_fact("kept for" if holder.mode == "reserved" else "held by", f"{named(holder)}{what}{slot}", "bold cyan")]
    if holder.since is not None:
        facts.append(_fact("for", f"{duration(now - holder.since)}, since {clock_time(holder.since)}"))
    lease = (
        "it has no end" if holder.remaining is None else f"ends in {duration(holder.remaining)} unless it is renewed"
    )
    facts.append(_fact("lease", lease))
    facts.append(
        _fact("fence", str(holder.fence)) if holder.fence is not None else _fact("id", f"{holder.id} (no fence)")
    )
    return [*facts]


def _holder_columns(info: LockInfo) -> list[Column]:
    return [
        Column("HOLDER", named, folds=True, style="cyan"),
        Column("FENCE", lambda holder: str(holder.fence or holder.id), right=True),
        Column("FOR", lambda holder: duration(holder.since and info.at - holder.since), right=True),
        Column("LEASE", lambda holder: duration(holder.remaining), right=True),
        Column("", lambda holder: holder.mode if holder.slot is None else f"permit {holder.slot}"),
    ]


def _waiter_columns(info: LockInfo) -> list[Column]:
    columns = [
        Column("", lambda row: str(row[0]), right=True, style="dim"),
        Column("WAITER", lambda row: named(row[1]), folds=True),
        Column("FOR", lambda row: duration(row[1].waiting), right=True, style="yellow"),
    ]
    if any(waiter.mode for waiter in info.waiters):
        columns.append(Column("WANTS", lambda row: f"to {row[1].mode}" if row[1].mode else ""))
    if any(waiter.local for waiter in info.waiters):
        columns.append(Column("BEHIND IT", lambda row: f"{row[1].local} in its process" if row[1].local else ""))
    return columns


def _waiter_count(info: LockInfo) -> str:
    if not info.waiter_count:
        return "no waiter"
    local = sum(waiter.local for waiter in info.waiters)
    waiters, them = ("1 waiter", "it") if info.waiter_count == 1 else (f"{info.waiter_count} waiters", "them")
    callers = "1 more caller" if local == 1 else f"{local} more callers"
    return f"{waiters}, with {callers} behind {them}" if local else waiters
