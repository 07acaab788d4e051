"""The picture: ``docs/contention.svg``. Each peer at its better setting; all of them are in the tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.chart import Column, Group, Line, draw
from benchmarks.contention.contest import Contest, Standing
from benchmarks.contention.page import milliseconds

__all__ = ["write_picture"]

POWERS: Final = [(power, f"{10.0**power:,g}") for power in range(-4, 5)]
COLUMNS: Final = [
    Column("hand-overs per second", "more is better", is_logarithmic=False),
    Column(
        "wait, 99th percentile",
        "less is better, ms on a log scale",
        is_logarithmic=True,
        ticks=[(10.0**power / 1000, text) for power, text in POWERS],
    ),
    Column(
        "requests per hand-over",
        "less is better, log scale",
        is_logarithmic=True,
        ticks=[(10.0**power, text) for power, text in POWERS],
    ),
]


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def line_of(standing: Standing, *, is_ours: bool) -> Line:
    rate, wait, requests = standing.rate.median, standing.wait(0.99), standing.requests
    return Line(
        standing.contender.library,
        [
            (rate, f"{rate:,.0f}"),
            (wait, milliseconds(wait)),
            None if requests is None else (requests, f"{requests:.2g}" if requests < 100 else f"{requests:,.0f}"),
        ],
        is_ours,
    )


def group_of(contest: Contest) -> Group:
    # Of what is drawn, so that the words say what the bars show; the tables have the median of the ratios by round.
    ratio = contest.ours.rate.median / contest.best_peer.rate.median
    return Group(
        contest.scenario.title,
        f"{times(ratio)} times the hand-overs of the best peer",
        [line_of(contest.ours, is_ours=True), *[line_of(one, is_ours=False) for one in contest.peers]],
    )


def write_picture(contests: Sequence[Contest], rounds: int, path: Path) -> None:
    subtitle = f"Each library at its better setting, all in one run on one server, median of {rounds} rounds"
    path.write_text(draw("Holdfast under contention", subtitle, COLUMNS, [group_of(contest) for contest in contests]))
