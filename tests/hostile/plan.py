"""What a seed decides: which faults strike, when, at what, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["FAULTS", "QUIET", "WORKERS", "Fault", "make_plan"]

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


# Name of a fault: whether it strikes a worker ("worker"), a key ("name") or the server (""); how long it lasts.
FAULTS: dict[str, tuple[str, float, float]] = {
    "kill worker": ("worker", 0.0, 0.0),
    "stop worker": ("worker", 0.2, 3.0),  # up to longer than most ttls
    "cut connections": ("worker", 0.0, 0.0),
    "refuse connections": ("worker", 0.1, 1.5),
    "black hole": ("worker", 0.1, 3.0),
    "garble replies": ("worker", 0.2, 1.5),
    "slow link": ("worker", 0.2, 1.0),
    "kill listeners": ("", 0.0, 0.0),
    "kill connections": ("", 0.0, 0.0),
    "delete key": ("name", 0.0, 0.0),
    "delete side keys": ("name", 0.0, 0.0),
    "pause clients": ("", 0.1, 1.0),
    "stop server": ("", 0.1, 2.5),
    "restart with data": ("", 0.0, 0.0),
    "restart without data": ("", 0.0, 0.0),
    "flush scripts": ("", 0.0, 0.0),
}


def make_plan(seed: int, seconds: float, names: Sequence[str], only: Sequence[str] = ()) -> list[Fault]:
    """The faults of a run of that length, of all kinds or only of those; the last ``QUIET`` seconds have none."""
    dice = Random(f"plan {seed}")
    plan: list[Fault] = []
    at = 0.5
    while True:
        name = dice.choice(list(only) or list(FAULTS))
        target, shortest, longest = FAULTS[name]
        choices = {"worker": WORKERS, "name": tuple(names), "": ("",)}[target]
        fault = Fault(round(at, 3), name, dice.choice(choices), round(dice.uniform(shortest, longest), 3))
        if fault.at + fault.seconds > seconds - QUIET:
            return plan
        plan.append(fault)
        # Some faults meet while an earlier one lasts.
        at += fault.seconds * dice.choice([0.3, 1.0]) + dice.choice(PAUSES)
