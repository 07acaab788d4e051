"""Plant mistakes one at a time, and see which test finds each.

python -m tests.mutants                          those that are kept, each first in the test that has found it
python -m tests.mutants --seed 3 --count 20      draw others
python -m tests.mutants --seed 3 --count 20 --keep   and keep them with what has found them
python -m tests.mutants --seed 3 --list          print what would be drawn, and run nothing
python -m tests.mutants --prune                  forget those whose lines are no longer in the code, and print them
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.kept import Kept, load, save
from tests.mutants.sites import ROOT, Mutant, area_of, draw, find_mutants, line_of, planted
from tests.mutants.trial import Verdict, begin, try_mutant

HEAD = "| # | where | mistake | before | after | found by | s |\n|---|---|---|---|---|---|---|"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="draw mistakes; without it, those that are kept")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the list, from 1")
    parser.add_argument("--list", action="store_true", help="print the mistakes, and run nothing")
    parser.add_argument("--keep", action="store_true", help="write them, and what found each, to kept.json")
    parser.add_argument("--prune", action="store_true", help="forget kept mistakes whose lines are no longer there")
    parser.add_argument("--jobs", type=int, default=2, help="trees on trial at the same time")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one mistake")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args(arguments)
    kept = load()
    if options.prune:
        save([one for one in kept if _applies(one.mutant)])
        return 0
    if options.seed is None:
        todo = kept
    else:
        before = {one.mutant: one for one in kept}
        drawn = draw(find_mutants(), options.seed, options.count)
        todo = [before.get(mutant, Kept(options.seed, mutant)) for mutant in drawn]
    numbered = [(number, one) for number, one in enumerate(todo, 1) if not options.only or number in options.only]
    if options.list:
        for number, one in numbered:
            _print(number, one.mutant)
        return 0
    verdicts = _try_all(numbered, options.jobs, options.limit)
    rows = [_row(number, one, verdicts.get(number)) for number, one in numbered]
    if options.out:
        options.out.write_text("\n".join([HEAD, *rows]) + "\n")
    if options.keep:
        _keep(kept, numbered, verdicts)
    missed = [number for number, one in numbered if not one.equivalent and not verdicts[number].found_by]
    same = sum(bool(one.equivalent) for _, one in numbered)
    print(f"\n{len(numbered)} planted: {len(numbered) - len(missed) - same} found, {same} change nothing", end="")
    print(f", {len(missed)} NOT FOUND: {missed}" if missed else "")
    return int(bool(missed))


def _try_all(numbered: list[tuple[int, Kept]], jobs: int, limit: float) -> dict[int, Verdict]:
    verdicts: dict[int, Verdict] = {}
    print(HEAD, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(jobs, initializer=begin, initargs=(Path(folder),)) as pool,
    ):
        todo = {pool.submit(try_mutant, one, limit): (number, one) for number, one in numbered if not one.equivalent}
        for done in as_completed(todo):
            number, one = todo[done]
            verdicts[number] = done.result()
            print(_row(number, one, verdicts[number]), flush=True)
            for test in verdicts[number].doubtful:
                print(f"  not counted, fails without it too or not always: {test}", flush=True)
    return verdicts


def _applies(mutant: Mutant) -> bool:
    path = ROOT / mutant.file
    try:
        planted(path.read_text() if path.exists() else "", mutant)
    except AssertionError as gone:
        print(f"forgotten: {gone}")
        return False
    return True


def _keep(kept: list[Kept], numbered: list[tuple[int, Kept]], verdicts: dict[int, Verdict]) -> None:
    now = {
        one.mutant: one._replace(found_by=verdicts[number].found_by, engine=verdicts[number].engine)
        for number, one in numbered
        if number in verdicts
    }
    known = [now.pop(one.mutant, one) for one in kept]
    save([*known, *now.values()])


def _where(mutant: Mutant) -> str:
    return f"{mutant.file.removeprefix('src/holdfast/')}:{line_of((ROOT / mutant.file).read_text(), mutant)}"


def _print(number: int, mutant: Mutant) -> None:
    print(f"{number}. {_where(mutant)} {mutant.function}: {mutant.operator}")
    print(*(f"  - {line}" for line in mutant.old.split("\n")), sep="\n")
    print(*(f"  + {line}" for line in mutant.new.split("\n")), sep="\n")


def _row(number: int, one: Kept, verdict: Verdict | None) -> str:
    mutant = one.mutant
    pairs = zip(mutant.old.split("\n"), [*mutant.new.split("\n"), ""], strict=False)
    before, after = next((old.strip(), new.strip()) for old, new in pairs if old != new)
    if verdict is None:
        outcome = f"changes nothing: {one.equivalent}"
    elif verdict.found_by:
        outcome = f"`{verdict.found_by}`" + (f" on {verdict.engine}" if verdict.engine != "standalone" else "")
    else:
        outcome = "**not found**" + (" (out of time)" if verdict.not_ended else "")
    cells = [
        *(str(number), f"{_where(mutant)}", f"{area_of(mutant.file)}: {mutant.operator}"),
        *(f"`{before}`", f"`{after}`", outcome, f"{verdict.seconds:.0f}" if verdict else ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
