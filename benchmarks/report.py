"""The output of a benchmark: tables, then PASS or FAIL for each promised figure, and an exit code."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Figure", "Spread", "conclude", "console", "new_table", "spread_of"]

# Without a terminal, rich guesses a width that is too small, and cuts tables off.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)


class Spread(NamedTuple):
    """The distribution of measurements. There is no mean: one stall of the machine would move it."""

    p10: float
    median: float
    p90: float


def spread_of(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    tenths = quantiles(values, n=10, method="inclusive")
    return Spread(tenths[0], median(values), tenths[-1])


class Figure(NamedTuple):
    """One promise, and what was measured."""

    name: str
    measured: str
    promised: str
    kept: bool


def new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def conclude(figures: Sequence[Figure], *, details: dict[str, Any], json_file: Path | None) -> int:
    """Print the verdicts, write the JSON file if one is given, and return the exit code."""
    for figure in figures:
        verdict = Text("PASS ", "bold green") if figure.kept else Text("FAIL ", "bold red")
        # No wrapping: a verdict is one line, for people and for grep.
        console.print(
            verdict.append(f"{figure.name}: {figure.measured} (promised: {figure.promised})", ""), soft_wrap=True
        )
    if json_file is not None:
        written = {
            "python": platform.python_version(),
            "machine": f"{sys.platform} {platform.machine()}",
            **details,
            "figures": [figure._asdict() for figure in figures],
        }
        json_file.write_text(json.dumps(written, indent=2) + "\n")
    return 0 if all(figure.kept for figure in figures) else 1
