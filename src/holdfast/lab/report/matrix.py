"""The matrix, recipe by invariant, as a table in the terminal, in a layout that fits its width.

The layouts differ in width only. The narrowest one, for 80 columns, has abbreviated headings and a legend. With few
recipes the table is transposed, so that it has room for full texts. Every cell has a sign, so the table can be read
without colour.

The table is about a server that keeps its data. What a server that loses it does is told in the lines below, which end
with the verdict on Holdfast: the end is what is left on the screen.
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
from holdfast.lab.search.faults import KEEPS, LOSES
from holdfast.protocol.recipes import FENCED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from holdfast.lab.report.trace import Cell, Findings, Trace

STYLES: Final = {HOLDS: "green", BROKEN: "bold red", UNKNOWN: "dim"}
SO_FAR: Final = "~"  # after the number of states
SILENT: Final = "-"
EXCLUSION: Final = "MutualExclusion"
SAFETY: Final = "FencedSafety"
LONGEST_NAME: Final = 13  # letters; a narrow table folds longer names


class Signs(NamedTuple):
    holds: str
    broken: str


class Matrix:
    """A rich renderable."""

    def __init__(self, findings: Sequence[Findings]) -> None:
        cells = [cell for found in findings for cell in found.cells]
        self.cells = {(cell.recipe, cell.invariant): cell for cell in cells if cell.server == KEEPS}
        self.losing = {(cell.recipe, cell.invariant): cell for cell in cells if cell.server == LOSES}
        self.recipes = [found.recipe for found in findings]
        self.invariants = list(dict.fromkeys(invariant for _, invariant in self.cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        signs = Signs("✓", "✗") if options.encoding.startswith("utf") else Signs("+", "x")
        endless = options.update(width=10_000)
        layouts = list(self._layouts(signs))
        fitting = (each for each in layouts if Measurement.get(console, endless, each[0]).maximum <= options.max_width)
        table, legend = next(fitting, layouts[-1])
        if self.losing:
            yield Text("While the server keeps its data:\n", "bold")
        yield table
        if legend:
            yield ""
            yield from legend
        if self.losing:
            yield Text("\nIf the server loses its data, or its clock jumps:\n", "bold")
            yield self._if_the_server_loses_data(signs)
        if FENCED in self.recipes:
            yield ""
            yield self._promise(signs)

    @property
    def width(self) -> int:
        """The width of the widest layout."""
        columns = (
            max(len(invariant), *(len(_in_words(self.cells[recipe, invariant])) for recipe in self.recipes))
            for invariant in self.invariants
        )
        return max(map(len, ("recipe", *self.recipes))) + sum(width + 2 for width in columns)

    def _layouts(self, signs: Signs) -> Iterator[tuple[Table, list[RenderableType]]]:
        good, bad = (signs.holds, STYLES[HOLDS]), (f"{signs.broken} 7", STYLES[BROKEN])
        key = Text.assemble(
            *(good, "    holds     ", good, (SO_FAR, STYLES[HOLDS]), " so far: not every single fault was tried\n"),
            *(bad, "  broken, in 7 steps     ?  unknown     ", f"{SILENT}  does not apply"),
        )
        yield self._table(str, str, _in_words), []
        yield self._turned(), []
        yield self._table(str, _fold, lambda cell: _briefly(cell, signs), states=True), [key]
        terse = self._table(_fold_recipe, _abbreviate, lambda cell: _briefly(cell, signs), states=True)
        yield terse, [self._abbreviations(), "", key]

    def _table(
        self,
        name: Callable[[str], str],
        head: Callable[[str], str],
        say: Callable[[Cell], str],
        *,
        states: bool = False,
    ) -> Table:
        table = _empty_table("recipe", *(["states"] if states else []), *map(head, self.invariants))
        for recipe in self.recipes:
            cells = [self.cells[recipe, invariant] for invariant in self.invariants]
            told = (Text(say(cell), STYLES[cell.verdict]) for cell in cells)
            explored = [f"{count(cells[0].states):>5}"] if states else []
            table.add_row(Text(name(recipe), "bold"), *explored, *told)
        return table

    def _turned(self) -> Table:
        table = _empty_table("", *self.recipes)
        for invariant in self.invariants:
            cells = (self.cells[recipe, invariant] for recipe in self.recipes)
            table.add_row(Text(invariant, "bold"), *(Text(_in_words(cell), STYLES[cell.verdict]) for cell in cells))
        return table

    def _if_the_server_loses_data(self, signs: Signs) -> Table:
        """What that breaks for Holdfast, and for how many of the other locks."""
        others = [recipe for recipe in self.recipes if recipe != FENCED]
        subjects = [FENCED] if FENCED in self.recipes else others
        told = [
            invariant
            for invariant in self.invariants
            if invariant in (EXCLUSION, SAFETY)
            or any(self.losing[row, invariant].trace and not self.cells[row, invariant].trace for row in subjects)
        ]
        table = _empty_table("", *subjects[: FENCED in subjects], *([_those(others)] if others else []), wraps=True)
        for invariant in told:
            row = [self._with_loss(self.losing[FENCED, invariant], signs)] if FENCED in subjects else []
            if others:
                broken = sum(self.losing[recipe, invariant].trace is not None for recipe in others)
                text = f"{signs.broken} {broken} of {len(others)}" if len(others) > 1 else f"{signs.broken} broken"
                row.append(Text(text, STYLES[BROKEN]) if broken else Text("not broken"))
            table.add_row(Text(invariant, "bold"), *row)
        rest = [cell for (row, invariant), cell in self.losing.items() if row == FENCED and invariant not in told]
        if rest:
            good = sum(cell.verdict == HOLDS for cell in rest)
            so_far = " so far" if any(cell.so_far for cell in rest) else ""
            text = f"{signs.holds} {good} of {len(rest)} hold{so_far}" if good else "? unknown"
            table.add_row(Text("the others", "bold"), Text(text, STYLES[HOLDS if good else UNKNOWN]))
        return table

    def _with_loss(self, cell: Cell, signs: Signs) -> Text:
        """A cell of the fenced lock on a server that loses its data."""
        if cell.trace is not None:
            faults = " and ".join(dict.fromkeys(map(label, cell.trace.faults)))
            only = "only " if len(cell.trace.faults) > 1 and not cell.so_far else ""  # no single fault breaks it
            return Text(f"{signs.broken} broken {only}by {faults} ({_steps(cell.trace)})", STYLES[BROKEN])
        if cell.verdict != HOLDS:
            return Text(f"? {cell.verdict}", STYLES[UNKNOWN])
        text = "holds so far" if cell.so_far else "holds"
        why = ": late writes refused" if cell.invariant == SAFETY else ""
        return Text(f"{signs.holds} {text}{why}", STYLES[HOLDS])

    def _promise(self, signs: Signs) -> Text:
        """The verdict on Holdfast, in a sentence."""
        cells = [self.cells[FENCED, invariant] for invariant in self.invariants]
        good = [cell for cell in cells if cell.verdict == HOLDS]
        bad = any(cell.verdict == BROKEN for cell in cells)
        sign, style = (signs.broken, STYLES[BROKEN]) if bad else (signs.holds, STYLES[HOLDS]) if good else ("?", "dim")
        text = Text.assemble((f"{sign} {FENCED}: {len(good)} of {len(cells)} invariants hold", style))
        text.append(" while the server keeps its data")
        if good:
            faults = "one of the mildest faults" if any(cell.so_far for cell in good) else "one fault of any kind"
            text.append(f", in {good[0].states:,} states. Complete: two clients, without a fault and with {faults}.")
            text.append(" In part: more clients, more faults.")
        elif not bad:
            text.append(" so far: a larger --budget explores more.")
        return text

    def _abbreviations(self) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))
        half = (len(self.invariants) + 1) // 2
        for row in range(half):
            pair = self.invariants[row::half]
            grid.add_row(*(part for name in pair for part in (Text(_abbreviate(name), "bold"), f"{name}   ")))
        return grid


def _empty_table(*heads: str, wraps: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(Text(head), no_wrap=not wraps, vertical="top" if wraps else "bottom")
    return table


def _those(recipes: Sequence[str]) -> str:
    return recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"


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
        return f"broken ({_steps(cell.trace)})"
    if cell.verdict == HOLDS:
        return f"holds{' so far' if cell.so_far else ''} ({cell.states:,} states)"
    return "does not apply" if cell.silent else cell.verdict


def _steps(trace: Trace) -> str:
    return f"{trace.steps} step{'' if trace.steps == 1 else 's'}"


def _briefly(cell: Cell, signs: Signs) -> str:
    """A sign, and the number of steps."""
    if cell.trace is not None:
        return f"{signs.broken} {cell.trace.steps}"
    if cell.verdict == HOLDS:
        return f"{signs.holds}{SO_FAR if cell.so_far else ''}"
    return SILENT if cell.silent else "?"
