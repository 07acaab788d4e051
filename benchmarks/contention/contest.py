"""One setting, all contenders, round after round.

First a trial of a peer's settings: those that poll fast. Of redis-py the defaults and the best other setting go on into
the rounds; of the rest the best one. Then the rounds; then each runs once more under MONITOR, for its requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from benchmarks.contention.contenders import HOLDFAST, REDIS_PY, Contender
from benchmarks.contention.field import Field, Run, Setting
from benchmarks.report import Spread, spread_of

__all__ = ["Contest", "Scenario", "Standing", "Times", "hold"]

DWELL_S: Final = 0.0002

Say = Callable[[str], None]


class Scenario(NamedTuple):
    key: str
    title: str
    setting: Setting
    contenders: list[Contender]
    in_turn: bool = False  # whether the order of grants is compared with that of the requests


class Times(NamedTuple):
    """How long, and how often."""

    rounds: int
    window: float
    trial: float
    monitored: float


@dataclass
class Standing:
    """What one contender has shown."""

    contender: Contender
    runs: list[Run] = field(default_factory=list)
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
    closely: Run  # Holdfast's, with holders who stay inside for a moment

    @property
    def ours(self) -> Standing:
        return self.standings[Contender(HOLDFAST)]

    @property
    def peers(self) -> list[Standing]:
        """One for each library: its defaults or its other setting, whichever got more done."""
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
        """All of them, ours first, then by acquisitions per second."""
        return sorted(self.standings.values(), key=lambda one: (one is not self.ours, -one.rate.median))

    @property
    def best_peer(self) -> Standing:
        """By acquisitions per second."""
        return self.peers[0]

    @property
    def best_changer(self) -> Standing:
        """The peer with the most changes of owner per second, at whatever setting."""
        others = [one for one in self.standings.values() if one.contender.library != HOLDFAST]
        return max(others, key=lambda one: one.change_rate or 0.0)

    def times(self, other: Standing) -> Spread:
        """How many times the acquisitions of the other Holdfast makes, compared within each round."""
        return spread_of([a.rate / max(b.rate, 1e-9) for a, b in zip(self.ours.runs, other.runs, strict=True)])

    def times_changes(self, other: Standing) -> Spread | None:
        """The same of changes of owner; None where each participant has a lock of its own."""
        pairs = zip(self.ours.runs, other.runs, strict=True)
        seen = [(a.change_rate, b.change_rate) for a, b in pairs]
        ratios = [ours / max(theirs, 1e-9) for ours, theirs in seen if ours is not None and theirs is not None]
        return spread_of(ratios) if ratios else None

    def wait_beside(self, those: list[Standing], share: float) -> Spread:
        """Holdfast's wait as a part of the shortest of theirs, compared within each round."""
        theirs = [standing.runs for standing in those]
        return spread_of(
            [
                mine.wait(share) / min(run.wait(share) for run in others)
                for mine, *others in zip(self.ours.runs, *theirs, strict=True)
            ]
        )


def hold(scenario: Scenario, on: Field, times: Times, say: Say) -> Contest:
    those = choose(scenario, on, times, say)
    standings = {contender: Standing(contender) for contender in those}
    for number in range(times.rounds):
        for contender in random.sample(those, len(those)):
            say(f"round {number + 1} of {times.rounds}: {contender.name}")
            standings[contender].runs.append(on.run(contender, scenario.setting, times.window))
    for contender in those:
        say(f"requests of {contender.name}")
        standings[contender].counted = on.run(
            contender, scenario.setting, times.monitored, monitored=True, in_turn=scenario.in_turn
        )
    say("two at once?")
    dwell = 0.0 if scenario.setting.is_aio else DWELL_S
    return Contest(scenario, standings, on.run(Contender(HOLDFAST), scenario.setting, times.window, dwell=dwell))


def choose(scenario: Scenario, on: Field, times: Times, say: Say) -> list[Contender]:
    """Who goes on into the rounds."""
    by_library: dict[str, list[Contender]] = {}
    for contender in scenario.contenders:
        by_library.setdefault(contender.library, []).append(contender)
    chosen = []
    for library, settings in by_library.items():
        tried = [one for one in settings if not (library == REDIS_PY and one.is_default)]
        chosen += [one for one in settings if one not in tried]
        rates = {}
        for contender in tried if len(tried) > 1 else ():
            say(f"trial: {contender.name}")
            rates[contender] = on.run(contender, scenario.setting, times.trial).rate
        chosen.append(max(rates, key=rates.__getitem__, default=tried[0]))
    return chosen
