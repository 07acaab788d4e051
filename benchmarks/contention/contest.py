"""One setting, all contenders, round after round.

First, all settings of a library run in a trial. For redis-py, the defaults and the best other setting go on into the
rounds; for the other libraries, the best setting does. After the rounds, each contender runs once under MONITOR, which
counts its requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from statistics import median
from typing import Final, NamedTuple

from benchmarks.contention.contenders import HOLDFAST, REDIS_PY, Contender
from benchmarks.contention.field import Field, Run, Setting
from benchmarks.report import Spread, spread_of

__all__ = ["Contest", "Scenario", "Standing", "Times", "run_contest"]

DWELL_S: Final = 0.0002

ShowProgress = Callable[[str], None]


class Scenario(NamedTuple):
    key: str
    title: str
    setting: Setting
    contenders: list[Contender]
    in_turn: bool = False  # whether the order of grants is compared with the order of requests


class Times(NamedTuple):
    """How long the runs take, in seconds, and how many rounds there are."""

    rounds: int
    window: float
    trial: float
    monitored: float


@dataclass
class Standing:
    """The runs of one contender."""

    contender: Contender
    runs: list[Run] = dataclass_field(default_factory=list)
    counted: Run | None = None

    @property
    def rate(self) -> Spread:
        return spread_of([run.rate for run in self.runs])

    @property
    def requests(self) -> float | None:
        return self.counted.requests_per_handover if self.counted else None

    @property
    def jain(self) -> float:
        return median(run.jain for run in self.runs)

    @property
    def change_rate(self) -> float | None:
        """Changes of owner per second; None where each participant has a lock of its own."""
        seen = [run.change_rate for run in self.runs if run.change_rate is not None]
        return median(seen) if seen else None

    @property
    def longest(self) -> float:
        return max(run.wait(1.0) for run in self.runs)

    @property
    def everything(self) -> list[Run]:
        return [*self.runs, *([self.counted] if self.counted else [])]

    @property
    def overlaps(self) -> int:
        return sum(run.overlaps for run in self.everything)

    @property
    def errors(self) -> list[str]:
        return [error for run in self.everything for error in run.errors]

    def wait(self, share: float) -> float:
        return median(run.wait(share) for run in self.runs)


@dataclass
class Contest:
    scenario: Scenario
    standings: dict[Contender, Standing]
    closely: Run  # a run of Holdfast in which holders keep the lock for a moment

    @property
    def ours(self) -> Standing:
        return self.standings[Contender(HOLDFAST)]

    @property
    def peers(self) -> list[Standing]:
        """One for each library: the setting with more acquisitions per second."""
        best: dict[str, Standing] = {}
        for contender, standing in self.standings.items():
            if contender.library == HOLDFAST:
                continue
            known = best.get(contender.library)
            if known is None or standing.rate.median > known.rate.median:
                best[contender.library] = standing
        return sorted(best.values(), key=lambda standing: -standing.rate.median)

    @property
    def ranking(self) -> list[Standing]:
        """All standings: Holdfast first, then by acquisitions per second."""
        return sorted(self.standings.values(), key=lambda one: (one is not self.ours, -one.rate.median))

    @property
    def best_peer(self) -> Standing:
        """The peer with the most acquisitions per second."""
        return self.peers[0]

    @property
    def best_changer(self) -> Standing:
        """The peer with the most changes of owner per second, at any setting."""
        others = [one for one in self.standings.values() if one.contender.library != HOLDFAST]
        return max(others, key=lambda one: one.change_rate or 0.0)

    def times(self, other: Standing) -> Spread:
        """Acquisitions of Holdfast divided by those of the other, within each round."""
        return spread_of([a.rate / max(b.rate, 1e-9) for a, b in zip(self.ours.runs, other.runs, strict=True)])

    def times_changes(self, other: Standing) -> Spread | None:
        """The same for changes of owner; None where each participant has a lock of its own."""
        pairs = zip(self.ours.runs, other.runs, strict=True)
        seen = [(a.change_rate, b.change_rate) for a, b in pairs]
        ratios = [ours / max(theirs, 1e-9) for ours, theirs in seen if ours is not None and theirs is not None]
        return spread_of(ratios) if ratios else None

    def wait_beside(self, others: list[Standing], share: float) -> Spread:
        """The wait with Holdfast divided by the shortest of the others, within each round."""
        theirs = [standing.runs for standing in others]
        return spread_of(
            [
                mine.wait(share) / min(run.wait(share) for run in runs)
                for mine, *runs in zip(self.ours.runs, *theirs, strict=True)
            ]
        )


def run_contest(scenario: Scenario, field: Field, times: Times, show: ShowProgress) -> Contest:
    chosen = choose(scenario, field, times, show)
    standings = {contender: Standing(contender) for contender in chosen}
    for number in range(times.rounds):
        for contender in random.sample(chosen, len(chosen)):
            show(f"round {number + 1} of {times.rounds}: {contender.name}")
            standings[contender].runs.append(field.run(contender, scenario.setting, times.window))
    for contender in chosen:
        show(f"requests of {contender.name}")
        standings[contender].counted = field.run(
            contender, scenario.setting, times.monitored, monitored=True, in_turn=scenario.in_turn
        )
    show("two holders at once?")
    dwell = 0.0 if scenario.setting.is_aio else DWELL_S
    return Contest(scenario, standings, field.run(Contender(HOLDFAST), scenario.setting, times.window, dwell=dwell))


def choose(scenario: Scenario, field: Field, times: Times, show: ShowProgress) -> list[Contender]:
    """The contenders that go on into the rounds."""
    by_library: dict[str, list[Contender]] = {}
    for contender in scenario.contenders:
        by_library.setdefault(contender.library, []).append(contender)
    chosen = []
    for library, settings in by_library.items():
        tried = [one for one in settings if not (library == REDIS_PY and one.is_default)]
        chosen += [one for one in settings if one not in tried]
        rates = {}
        for contender in tried if len(tried) > 1 else ():
            show(f"trial: {contender.name}")
            rates[contender] = field.run(contender, scenario.setting, times.trial).rate
        chosen.append(max(rates, key=rates.__getitem__, default=tried[0]))
    return chosen
