"""Mistakes that were drawn once and are kept, with the test that finds each: kept.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.sites import Mutant

__all__ = ["Kept", "load", "save"]

_PLACE: Final = Path(__file__).with_name("kept.json")


class Kept(NamedTuple):
    seed: int
    mutant: Mutant
    found_by: str = ""
    engine: str = ""
    equivalent: str = ""  # why no test can find it: it changes nothing


def load() -> list[Kept]:
    if not _PLACE.exists():
        return []
    rows = json.loads(_PLACE.read_text())
    return [
        Kept(
            row["seed"],
            Mutant(row["file"], row["function"], row["operator"], "\n".join(row["old"]), "\n".join(row["new"])),
            row.get("found_by", ""),
            row.get("engine", ""),
            row.get("equivalent", ""),
        )
        for row in rows
    ]


def save(kept: list[Kept]) -> None:
    rows = []
    for one in kept:
        mutant = one.mutant
        row = {"seed": one.seed, "file": mutant.file, "function": mutant.function, "operator": mutant.operator}
        lines = {"old": mutant.old.split("\n"), "new": mutant.new.split("\n")}
        outcome = {"found_by": one.found_by, "engine": one.engine, "equivalent": one.equivalent}
        rows.append({**row, **lines, **{name: value for name, value in outcome.items() if value}})
    _PLACE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
