"""The picture ``docs/contention.svg``: the numbers of the tables as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.chart import AHEAD, Column, Group, Line, draw
from benchmarks.contention.contest import Contest, Standing
from benchmarks.contention.page import in_requests, milliseconds, per_second, times

__all__ = ["write_picture"]

POWERS: Final = [(power, f"{10.0**power:,g}") for power in range(-4, 5)]
COLUMNS: Final = [
    Column("acquisitions / s", "more is better", is_logarithmic=False),
    Column("changes of owner / s", "more is better", is_logarithmic=False),
    Column(
        "wait, 99th percentile",
        "less is better, ms on a log scale",
        is_logarithmic=True,
        ticks=[(10.0**power / 1000, text) for power, text in POWERS],
    ),
    Column(
        "requests / acquisition",
        "less is better, log scale",
        is_logarithmic=True,
        ticks=[(10.0**power, text) for power, text in POWERS],
    ),
]


def line_of(standing: Standing, *, is_ours: bool) -> Line:
    rate, changes, wait, requests = (
        standing.rate.median,
        standing.change_rate,
        standing.wait(0.99),
        standing.requests,
    )
    return Line(
        standing.contender.short_name,
        [
            (rate, per_second(rate)),
            None if changes is None else (changes, per_second(changes)),
            (wait, milliseconds(wait)),
            None if requests is None else (requests, in_requests(requests)),
        ],
        is_ours,
    )


def group_of(contest: Contest) -> Group:
    """One group of the chart. Its verdict is that of the tables: per measure, the median ratio to the best peer."""
    ratios = [(contest.times(contest.best_peer).median, "acquisitions")]
    changes = contest.times_changes(contest.best_changer)
    if changes is not None:
        ratios.append((changes.median, "changes of owner"))
    ahead = [f"{times(ratio)} the {what}" for ratio, what in ratios if ratio >= AHEAD]
    behind = [f"{times(ratio)} the {what}" for ratio, what in ratios if ratio < AHEAD]
    return Group(
        contest.scenario.title,
        ", ".join(ahead),
        [line_of(one, is_ours=one is contest.ours) for one in contest.ranking],
        ", ".join(behind),
        {number: ratio >= AHEAD for number, (ratio, _) in enumerate(ratios)},
    )


def write_picture(contests: Sequence[Contest], rounds: int, path: Path) -> None:
    subtitle = (
        f"All in one run on one server, medians of {rounds} rounds; (10 ms): polls that often instead of its default. "
        "Green where Holdfast is ahead of every peer."
    )
    path.write_text(draw("Holdfast under contention", subtitle, COLUMNS, [group_of(contest) for contest in contests]))
