"""The table of a run on all fleets, as docs/hostile.md has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.hostile.grounds import GROUNDS
from tests.hostile.history import Event
from tests.hostile.judges import Verdict, facts_of, overlaps_in

__all__ = ["Tally", "write_table"]

BEGIN = "<!-- fleets: written by make hostile-fleets -->"
END = "<!-- fleets end -->"


@dataclass(slots=True)
class Tally:
    """What was seen on one ground, in one run or in several."""

    ground: str
    seeds: list[int] = field(default_factory=list)
    grants: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    declared: int = 0
    found: Counter[str] = field(default_factory=Counter)  # by judge: what must not happen

    @classmethod
    def of(cls, ground: str, seed: int, history: Sequence[Event], verdicts: Iterable[Verdict]) -> Tally:
        facts = facts_of(history)
        return cls(
            ground,
            [seed],
            grants=sum(hold.granted for hold in facts.holds),
            faults=Counter(fault.data["name"] for fault in facts.faults if "places" not in fault.data),
            declared=len(overlaps_in(history, facts).declared),
            found=Counter({verdict.check: len(verdict.reasons) for verdict in verdicts if verdict.reasons}),
        )

    def __iadd__(self, other: Tally) -> Tally:
        self.seeds += other.seeds
        self.grants += other.grants
        self.faults += other.faults
        self.declared += other.declared
        self.found += other.found
        return self

    def __str__(self) -> str:
        return f"{self.faults.total()} faults, {self.grants} grants, {self.declared} declared overlaps"

    @property
    def failed(self) -> bool:
        return bool(self.found)

    def row(self) -> str:
        rest = self.found.copy()
        beyond, fences, late = (rest.pop(check, 0) for check in ("exclusion", "fences", "bounded waits"))
        leaks = rest.pop("leaks", 0) + rest.pop("orphans", 0)
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        seeds = f"{self.seeds[0]} to {self.seeds[-1]}" if len(self.seeds) > 1 else str(self.seeds[0])
        bound = f"{3 / self.grants:.1e}" if self.grants else ""
        cells = (
            GROUNDS[self.ground].title,
            seeds,
            f"{self.grants:,}",
            f"{self.faults.total()}: {kinds}",
            self.declared,
        )
        return "| " + " | ".join(map(str, (*cells, beyond, fences, late, leaks, rest.total(), bound))) + " |"


def write_table(tallies: Iterable[Tally], page: Path | None) -> None:
    """Print it, and put it in its place in the page, if there is one."""
    totals: dict[str, Tally] = {}
    for tally in tallies:
        totals.setdefault(tally.ground, Tally(tally.ground))
        totals[tally.ground] += tally
    grants = sum(tally.grants for tally in totals.values())
    faults = sum(tally.faults.total() for tally in totals.values())
    heads = ("fleet", "seeds", "grants checked", "faults", "overlaps declared", "beyond", "fences fallen", "late calls")
    lines = [
        "| " + " | ".join((*heads, "leaks", "other findings", "95 % bound, 3/n")) + " |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
        *(tally.row() for tally in totals.values()),
        "",
        f"{grants:,} grants checked and {faults} faults in all.",
    ]
    print("\n".join(lines), flush=True)
    if page is not None:
        before, rest = page.read_text().split(BEGIN)
        page.write_text("\n".join((before + BEGIN, *lines, END)) + rest.split(END)[1])
