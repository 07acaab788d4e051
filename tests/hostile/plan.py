"""What a seed decides: which faults strike, when, at what, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

__all__ = ["QUIET", "STALL", "WORKERS", "WORKER_FAULTS", "Fault", "FaultKind", "make_plan"]

QUIET = 7.5  # seconds without faults at the end: recovery is judged there
WORKERS = ("b0", "b1", "a0", "a1")  # places for worker processes: b is blocking, a is asyncio
PAUSES = (0.05, 0.05, 0.3, 0.3, 0.3, 0.3, 0.3, 1.0, 1.0, 8.0)  # the last is long enough to find a lost wake-up


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that strikes ``at`` seconds after the start."""

    at: float
    name: str
    target: str = ""
    seconds: float = 0.0


class FaultKind(NamedTuple):
    """What a fault strikes, one of these; how long it lasts; how long the servers need to get over it.

    Faults that the servers must get over come one after the other.
    """

    targets: tuple[str, ...] = ("",)
    shortest: float = 0.0
    longest: float = 0.0
    rest: float = 0.0
    weight: int = 1


# These strike a worker or its connections, on any servers.
WORKER_FAULTS = {
    "kill worker": FaultKind(WORKERS),
    "stop worker": FaultKind(WORKERS, 0.2, 3.0),  # up to longer than most ttls
    "cut connections": FaultKind(WORKERS),
    "refuse connections": FaultKind(WORKERS, 0.1, 1.5),
    "black hole": FaultKind(WORKERS, 0.1, 3.0),
    "slow link": FaultKind(WORKERS, 0.2, 1.0),
}
# This one too, if there are several servers. A late request is what a step must expect.
STALL = {"stall one link": FaultKind(WORKERS, 0.5, 4.0, weight=2)}


def make_plan(seed: int, seconds: float, kinds: Mapping[str, FaultKind], only: Sequence[str] = ()) -> list[Fault]:
    """The faults of a run of that length, of all kinds or only of those; the last ``QUIET`` seconds have none."""
    dice = Random(f"plan {seed}")
    names = [name for name in only or kinds for _ in range(kinds[name].weight)]
    plan: list[Fault] = []
    at = 0.5
    rested = 0.0
    while True:
        kind = kinds[name := dice.choice(names)]
        target, lasts = dice.choice(kind.targets), round(dice.uniform(kind.shortest, kind.longest), 3)
        at = max(at, rested) if kind.rest else at
        fault = Fault(round(at, 3), name, target, lasts)
        if fault.at + fault.seconds + kind.rest > seconds - QUIET:
            return plan
        plan.append(fault)
        rested = max(rested, fault.at + fault.seconds + kind.rest) if kind.rest else rested
        # Some faults meet while an earlier one lasts.
        at += fault.seconds * dice.choice([0.3, 1.0]) + dice.choice(PAUSES)
