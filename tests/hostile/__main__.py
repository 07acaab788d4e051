"""Run the harness, or the fuzz of replies, for one seed or for one seed after the other.

python -m tests.hostile --seed 7 --seconds 30            one run on one server
python -m tests.hostile --seed 7 --seconds 30 --total 300   seeds 7, 8, 9 ... for about 300 s
python -m tests.hostile --on etcd --seed 7 --seconds 60  one run on a fleet
python -m tests.hostile --fleets --seed 7 --total 900    all fleets in turn, and a table
python -m tests.hostile --fuzz --seed 7 --runs 5000      the fuzz of replies
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from tests.hostile import fuzz
from tests.hostile.faces import FACES
from tests.hostile.grounds import FLEETS, GROUNDS
from tests.hostile.harness import Harness
from tests.hostile.judges import judge
from tests.hostile.mistakes import MISTAKES
from tests.hostile.plan import QUIET, make_plan
from tests.hostile.table import Tally, write_table

FAULTS = sorted({name for ground in GROUNDS.values() for name in ground.faults})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help=f"of one run; the last {QUIET:g} have no faults")
    parser.add_argument("--total", type=float, default=0.0, help="go on with the next seeds for so many seconds")
    parser.add_argument("--on", choices=list(GROUNDS), default="single", help="on these servers")
    parser.add_argument("--fleets", action="store_true", help="on all fleets, one after the other")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--only", choices=FAULTS, action="append", default=[], help="only faults of this kind")
    parser.add_argument("--mistake", choices=[name for name in MISTAKES if name], default="", help="plant a mistake")
    parser.add_argument("--plan", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--fuzz", action="store_true", help="garble replies instead")
    parser.add_argument("--runs", type=int, default=200, help="of the fuzz")
    parser.add_argument("--first", type=int, default=0, help="number of the fuzz's first run")
    parser.add_argument("--face", choices=list(FACES), default="", help="fuzz this face only")
    options = parser.parse_args(arguments)
    if options.fuzz:
        return fuzz.main(options.seed, options.runs, options.first, [options.face] if options.face else list(FACES))
    until, seed = monotonic() + options.total, options.seed
    tallies: list[Tally] = []
    while True:
        for ground in FLEETS if options.fleets else (options.on,):
            if options.plan:
                print(*make_plan(seed, options.seconds, GROUNDS[ground].faults, options.only), sep="\n")
            else:
                tallies.append(run(ground, seed, options))
        seed += 1
        if monotonic() >= until:
            break
    if options.fleets and tallies:
        write_table(tallies, options.page)
    return int(any(tally.failed for tally in tallies))


def run(ground: str, seed: int, options: argparse.Namespace) -> Tally:
    """Run one seed and print its verdicts."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    harness = Harness(seed, options.seconds, folder, ground=ground, only=options.only, mistake=options.mistake)
    history = harness.run()
    verdicts = judge(history)
    tally = Tally.of(ground, seed, history, verdicts)
    print(f"{GROUNDS[ground].title}, seed {seed}: {tally}", flush=True)
    for verdict in verdicts:
        print(f"  {verdict}", flush=True)
    if tally.failed:
        again = ["--on", ground, "--seed", str(seed), "--seconds", f"{options.seconds:g}"]
        for name in options.only:
            again += ["--only", name]
        if options.mistake:
            again += ["--mistake", options.mistake]
        print(f"FAILED, history in {folder}\nagain: python -m tests.hostile {shlex.join(again)}", flush=True)
    else:
        shutil.rmtree(folder)
    return tally


if __name__ == "__main__":
    sys.exit(main())
