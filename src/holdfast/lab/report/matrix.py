"""The matrix, recipe by invariant, as a table in the terminal, in a layout that fits its width.

The layouts differ in width only. The narrowest one, for 80 columns, has abbreviated headings and a legend. With few
recipes the table is transposed, so that it has room for full texts. Every cell has a sign, so the table can be read
without colour. The faults that broke the fenced lock are listed below the table, because a server that loses writes is
not a mistake of the lock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.report.lanes import count, label
from holdfast.lab.search.faults import FAULTS
from holdfast.protocol.recipes import FENCED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from holdfast.lab.report.trace import Cell, Findings

STYLES: Final = {HOLDS: "green", BROKEN: "bold red", UNKNOWN: "dim"}
SO_FAR: Final = "~"  # after the number of states
SILENT: Final = "-"
LONGEST_NAME: Final = 13  # letters; a narrow table folds longer names


class Signs(NamedTuple):
    holds: str
    broken: str


class Matrix:
    """A rich renderable."""

    def __init__(self, findings: Sequence[Findings]) -> None:
        self.cells = {(cell.recipe, cell.invariant): cell for found in findings for cell in found.cells}
        self.recipes = [found.recipe for found in findings]
        self.invariants = list(dict.fromkeys(invariant for _, invariant in self.cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        signs = Signs("✓", "✗") if options.encoding.startswith("utf") else Signs("+", "x")
        endless = options.update(width=10_000)
        layouts = list(self._layouts(signs))
        fitting = (each for each in layouts if Measurement.get(console, endless, each[0]).maximum <= options.max_width)
        table, legend = next(fitting, layouts[-1])
        yield table
        if legend:
            yield ""
            yield from legend
        causes = list(self._causes())
        if causes:
            yield ""
            yield from causes

    @property
    def width(self) -> int:
        """The width of the widest layout."""
        columns = (
            max(len(invariant), *(len(_in_words(self.cells[recipe, invariant])) for recipe in self.recipes))
            for invariant in self.invariants
        )
        return max(map(len, ("recipe", *self.recipes))) + sum(width + 2 for width in columns)

    def _layouts(self, signs: Signs) -> Iterator[tuple[Table, list[RenderableType]]]:
        key = Text.assemble(
            *((signs.holds, STYLES[HOLDS]), " 12k  holds, in 12 thousand states     "),
            *((signs.broken, STYLES[BROKEN]), " 7  broken, in 7 steps\n"),
            f"{SO_FAR}  so far: not every single fault was tried     ?  unknown     {SILENT}  does not apply",
        )
        yield self._table(str, str, _in_words), []
        yield self._turned(), []
        yield self._table(str, _fold, lambda cell: _briefly(cell, signs, units=True)), []
        yield self._table(_fold_recipe, _fold, lambda cell: _briefly(cell, signs, units=False)), [key]
        terse = self._table(_fold_recipe, _abbreviate, lambda cell: _briefly(cell, signs, units=False), gap=0)
        yield terse, [self._abbreviations(), "", key]

    def _table(
        self, name: Callable[[str], str], head: Callable[[str], str], say: Callable[[Cell], str], gap: int = 1
    ) -> Table:
        table = _empty_table("recipe", *map(head, self.invariants), gap=gap)
        for recipe in self.recipes:
            cells = (self.cells[recipe, invariant] for invariant in self.invariants)
            table.add_row(Text(name(recipe), "bold"), *(Text(say(cell), STYLES[cell.verdict]) for cell in cells))
        return table

    def _turned(self) -> Table:
        table = _empty_table("", *self.recipes, gap=1)
        for invariant in self.invariants:
            cells = (self.cells[recipe, invariant] for recipe in self.recipes)
            table.add_row(Text(invariant, "bold"), *(Text(_in_words(cell), STYLES[cell.verdict]) for cell in cells))
        return table

    def _causes(self) -> Iterator[Text]:
        """The faults that broke the fenced lock, a line for each cell."""
        for (recipe, invariant), cell in self.cells.items():
            if recipe == FENCED and cell.trace is not None:
                faults = dict.fromkeys(cell.trace.faults)
                took = " and ".join(f"{label(fault)} ({FAULTS[fault]})" for fault in faults) or "no fault"
                yield Text.assemble((f"{recipe}, {invariant}: ", "bold"), f"broken by {took}")

    def _abbreviations(self) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))
        half = (len(self.invariants) + 1) // 2
        for row in range(half):
            pair = self.invariants[row::half]
            grid.add_row(*(part for name in pair for part in (Text(_abbreviate(name), "bold"), f"{name}   ")))
        return grid


def _empty_table(*heads: str, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=True, vertical="bottom")
    return table


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Z][a-z0-9]*|[a-z0-9_]+", name)


def _fold(name: str) -> str:
    return "\n".join(_words(name))


def _fold_recipe(name: str) -> str:
    return name.replace(":", "\n :") if len(name) > LONGEST_NAME else name


def _abbreviate(name: str) -> str:
    """``OwnerOnlyRelease`` is OOR, and ``Fifo`` is Fifo."""
    words = _words(name)
    return "".join(word[0] for word in words) if len(words) > 1 else name[:5]


def _in_words(cell: Cell) -> str:
    if cell.trace is not None:
        return f"broken ({cell.trace.steps} step{'' if cell.trace.steps == 1 else 's'})"
    if cell.verdict == HOLDS:
        return f"holds{' so far' if cell.so_far else ''} ({cell.states:,} states)"
    return "does not apply" if cell.silent else cell.verdict


def _briefly(cell: Cell, signs: Signs, *, units: bool) -> str:
    """A sign and a number, with the unit of the number or without."""
    if cell.trace is not None:
        return f"{signs.broken} {cell.trace.steps}{' steps' if units else ''}"
    if cell.verdict == HOLDS:
        states = f" {count(cell.states)} states" if units else f"{count(cell.states):>4}"
        return f"{signs.holds}{states}{SO_FAR if cell.so_far else ''}"
    return SILENT if cell.silent else "? unknown" if units else "?"
