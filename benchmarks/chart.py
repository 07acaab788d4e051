"""A chart of groups of contenders side by side, as one SVG without external files.

Every group is a small table: a line for each contender, a column for each measure. A linear measure is drawn as a bar
from zero. A logarithmic scale has no zero, so such a measure is drawn as a point on a grid. Holdfast is green only
where it is better than all others by more than the noise. The chart has its own background, and follows the reader's
light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["AHEAD", "Column", "Group", "Line", "draw", "in_ms", "of_time"]

WIDTH: Final = 1060
MARGIN: Final = 32
AHEAD: Final = 1.05  # Holdfast counts as ahead if it is better than all others by this factor
NAMES: Final = 172  # width of the names of contenders
GAP: Final = 28  # between columns
LABEL: Final = 62  # width of the number after a bar or point
HEAD: Final = 132
LINE: Final = 24
GROUP_HEAD: Final = 34
GROUP_GAP: Final = 24
FOOT: Final = 46

STYLE: Final = """
  .ground { fill: #ffffff; stroke: #d9dee5 }
  .text { fill: #1d2733 } .soft { fill: #5c6b7c } .ours { fill: #0b7a75 }
  .bar { fill: #b4bfcb } .bar-ours { fill: #0f9d94 } .bar-behind { fill: #6f7f90 }
  .rule { stroke: #e3e7ec } .grid { stroke: #edf0f3 } .stem { stroke: #c9d1da; stroke-width: 2 }
  .stem-ours { stroke: #0f9d94; stroke-width: 2 } .stem-behind { stroke: #6f7f90; stroke-width: 2 }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; font-size: 13px;
    font-variant-numeric: tabular-nums }
  .title { font-size: 23px; font-weight: 650 } .group { font-size: 14.5px; font-weight: 600 }
  .small { font-size: 11.5px } .strong { font-weight: 650 } .end { text-anchor: end } .middle { text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #12181f; stroke: #2b3642 }
    .text { fill: #e8edf2 } .soft { fill: #93a1b0 } .ours { fill: #3fd0c4 }
    .bar { fill: #52606f } .bar-ours { fill: #26b3a8 } .bar-behind { fill: #8fa0b1 }
    .rule { stroke: #2a343f } .grid { stroke: #212a33 } .stem { stroke: #43505d }
    .stem-ours { stroke: #26b3a8 } .stem-behind { stroke: #8fa0b1 }
  }
"""


class Column(NamedTuple):
    title: str
    note: str
    is_logarithmic: bool
    ticks: Sequence[tuple[float, str]] = ()  # the grid of a logarithmic column

    def is_best(self, value: float, others: Sequence[float]) -> bool:
        if self.note.startswith("more"):
            return value >= AHEAD * max(others, default=0.0)
        return value * AHEAD <= min(others, default=value * AHEAD)


def of_time(title: str) -> Column:
    """A column of times in seconds, on a scale that starts at a tenth of a millisecond."""
    ticks = [(10.0**power / 1000, f"{10.0**power:,g}") for power in range(-1, 6)]
    return Column(title, "less is better, ms on a log scale", is_logarithmic=True, ticks=ticks)


def in_ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


class Line(NamedTuple):
    """One contender: a value and a text for each column, or None where there is nothing to show."""

    name: str
    values: Sequence[tuple[float, str] | None]
    is_ours: bool


class Group(NamedTuple):
    title: str
    verdict: str
    lines: Sequence[Line]
    behind: str = ""  # the part of the verdict where Holdfast is not ahead
    ahead: Mapping[int, bool] = MappingProxyType({})  # by column number; overrides what the values say

    def is_ahead(self, number: int, column: Column) -> bool:
        """Whether Holdfast is the best in that column."""
        if number in self.ahead:
            return self.ahead[number]
        ours = [found[0] for line in self.lines if line.is_ours and (found := line.values[number])]
        others = [found[0] for line in self.lines if not line.is_ours and (found := line.values[number])]
        return bool(ours) and column.is_best(ours[0], others)


class Span(NamedTuple):
    """The position of a column, and the mapping from its values to x coordinates."""

    left: float
    width: float  # of the bar or point, without the number
    lowest: float
    highest: float
    is_logarithmic: bool

    def place(self, value: float) -> float:
        if not self.is_logarithmic:
            return self.left + self.width * value / self.highest
        value = min(max(value, self.lowest), self.highest)
        return self.left + self.width * math.log(value / self.lowest) / math.log(self.highest / self.lowest)


def text_at(x: float, y: float, text: str, classes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(text)}</text>'


def spans_of(columns: Sequence[Column], groups: Sequence[Group]) -> list[list[Span]]:
    """By group and column. A logarithmic column has one scale for all groups, a linear one has a scale per group."""
    room = (WIDTH - 2 * MARGIN - NAMES - GAP * len(columns)) / len(columns)
    spans = []
    for group in groups:
        in_group = []
        for number, column in enumerate(columns):
            shown = groups if column.is_logarithmic else [group]
            values = [
                found[0] for one in shown for line in one.lines if (found := line.values[number]) and found[0] > 0
            ]
            lowest, highest = min(values, default=1.0), max(values, default=1.0)
            if column.is_logarithmic:
                lowest, highest = around(lowest, highest, [tick for tick, _ in column.ticks])
            left = MARGIN + NAMES + GAP / 2 + number * (room + GAP)
            in_group.append(Span(left, room - LABEL, lowest, highest, column.is_logarithmic))
        spans.append(in_group)
    return spans


def around(lowest: float, highest: float, ticks: Sequence[float]) -> tuple[float, float]:
    """From the nearest tick below all values to the greatest value, and at least to the next tick."""
    low = max((tick for tick in ticks if tick <= lowest), default=lowest)
    return low, max(highest, min((tick for tick in ticks if tick > low), default=low * 10))


def draw_head(title: str, subtitle: str, columns: Sequence[Column], spans: Sequence[Span]) -> Iterator[str]:
    yield text_at(MARGIN, 48, title, "text title")
    yield text_at(MARGIN, 71, subtitle, "soft")
    for column, span in zip(columns, spans, strict=True):
        yield text_at(span.left, 104, column.title, "text strong")
        yield text_at(span.left, 120, column.note, "soft small")


def draw_line(line: Line, y: float, ahead: Sequence[bool], spans: Sequence[Span]) -> Iterator[str]:
    yield text_at(MARGIN, y + 4.5, line.name, "text strong" if line.is_ours else "text")
    for found, is_ahead, span in zip(line.values, ahead, spans, strict=True):
        text, ours = "text", ""
        if line.is_ours:
            text, ours = ("ours strong", "-ours") if is_ahead else ("text strong", "-behind")
        if found is None:
            yield text_at(span.left, y + 4.5, "–", "soft")
            continue
        value, label = found
        x = span.place(value)
        if span.is_logarithmic:
            yield f'<line x1="{span.left:.1f}" y1="{y}" x2="{x:.1f}" y2="{y}" class="stem{ours}"/>'
            yield f'<circle cx="{x:.1f}" cy="{y}" r="5" class="bar{ours}"/>'
            x += 4
        else:
            width = max(x - span.left, 1.5)
            yield f'<rect x="{span.left:.1f}" y="{y - 7}" width="{width:.1f}" height="14" rx="2.5" class="bar{ours}"/>'
        yield text_at(x + 7, y + 4.5, label, text)


def draw_group(group: Group, top: float, columns: Sequence[Column], spans: Sequence[Span]) -> Iterator[str]:
    bottom = top + GROUP_HEAD + LINE * len(group.lines)
    yield f'<line x1="{MARGIN}" y1="{top}" x2="{WIDTH - MARGIN}" y2="{top}" class="rule"/>'
    yield text_at(MARGIN, top + 22, group.title, "text group")
    spans_of_text = [(group.verdict, "ours"), (", " * bool(group.verdict and group.behind) + group.behind, "soft")]
    verdict = "".join(f'<tspan class="{classes}">{escape(text)}</tspan>' for text, classes in spans_of_text if text)
    yield f'<text x="{WIDTH - MARGIN:.1f}" y="{top + 22:.1f}" class="group end">{verdict}</text>'
    for column, span in zip(columns, spans, strict=True):
        for tick, _ in column.ticks:
            if span.lowest <= tick <= span.highest:
                x = span.place(tick)
                yield f'<line x1="{x:.1f}" y1="{top + GROUP_HEAD}" x2="{x:.1f}" y2="{bottom}" class="grid"/>'
    ahead = [group.is_ahead(number, column) for number, column in enumerate(columns)]
    for number, line in enumerate(group.lines):
        yield from draw_line(line, top + GROUP_HEAD + LINE * number + LINE / 2, ahead, spans)


def draw_ticks(y: float, columns: Sequence[Column], spans: Sequence[Span]) -> Iterator[str]:
    for column, span in zip(columns, spans, strict=True):
        for tick, label in column.ticks:
            if label and span.lowest <= tick <= span.highest:
                yield text_at(span.place(tick), y, label, "soft small middle")


def draw(title: str, subtitle: str, columns: Sequence[Column], groups: Sequence[Group]) -> str:
    spans = spans_of(columns, groups)
    heights = [GROUP_HEAD + LINE * len(group.lines) + GROUP_GAP for group in groups]
    height = HEAD + sum(heights) + FOOT - GROUP_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="what about">',
        f'<title id="what">{escape(title)}</title>',
        f'<desc id="about">{escape(described(columns, groups))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" class="ground"/>',
        *draw_head(title, subtitle, columns, spans[0]),
    ]
    top = float(HEAD)
    for group, in_group, taken in zip(groups, spans, heights, strict=True):
        parts += draw_group(group, top, columns, in_group)
        top += taken
    parts += draw_ticks(top - GROUP_GAP + 18, columns, spans[0])
    return "\n".join([*parts, "</svg>", ""])


def described(columns: Sequence[Column], groups: Sequence[Group]) -> str:
    """The chart as text, for screen readers."""
    sentences = []
    for group in groups:
        lines = [
            f"{line.name} "
            + ", ".join(
                f"{found[1]} {column.title}" for found, column in zip(line.values, columns, strict=True) if found
            )
            for line in group.lines
        ]
        sentences.append(f"{group.title}: {'; '.join(lines)}.")
    return " ".join(sentences)
