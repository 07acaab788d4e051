"""Run the harness, or the fuzz of replies, for one seed or for one seed after the other.

python -m tests.hostile --seed 7 --seconds 30            one run
python -m tests.hostile --seed 7 --seconds 30 --total 300   seeds 7, 8, 9 ... for about 300 s
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
from tests.hostile.harness import Harness
from tests.hostile.judges import judge
from tests.hostile.plan import FAULTS, QUIET, make_plan
from tests.hostile.worker import MISTAKES, NAMES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help=f"of one run; the last {QUIET:g} have no faults")
    parser.add_argument("--total", type=float, default=0.0, help="go on with the next seeds for so many seconds")
    parser.add_argument("--only", choices=list(FAULTS), action="append", default=[], help="only faults of this kind")
    parser.add_argument("--mistake", choices=[name for name in MISTAKES if name], default="", help="plant a mistake")
    parser.add_argument("--plan", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--fuzz", action="store_true", help="garble replies instead")
    parser.add_argument("--runs", type=int, default=200, help="of the fuzz")
    parser.add_argument("--first", type=int, default=0, help="number of the fuzz's first run")
    parser.add_argument("--face", choices=list(FACES), default="", help="fuzz this face only")
    options = parser.parse_args(arguments)
    if options.fuzz:
        return fuzz.main(options.seed, options.runs, options.first, [options.face] if options.face else list(FACES))
    until, seed, failed = monotonic() + options.total, options.seed, False
    while True:
        if options.plan:
            print(*make_plan(seed, options.seconds, NAMES, options.only), sep="\n")
        else:
            failed |= run(seed, options)
        seed += 1
        if monotonic() >= until:
            return int(failed)


def run(seed: int, options: argparse.Namespace) -> bool:
    """Run one seed and print its verdicts; whether one of them is invalid."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    history = Harness(seed, options.seconds, folder, only=options.only, mistake=options.mistake).run()
    verdicts = judge(history)
    holds = sum(event.what == "held" for event in history)
    faults = sum(event.what == "fault" for event in history)
    print(f"seed {seed}: {faults} faults, {holds} holds, {len(history)} events", flush=True)
    for verdict in verdicts:
        print(f"  {verdict}", flush=True)
    failed = any(verdict.valid is False for verdict in verdicts)
    if failed:
        again = ["--seed", str(seed), "--seconds", f"{options.seconds:g}"]
        for name in options.only:
            again += ["--only", name]
        if options.mistake:
            again += ["--mistake", options.mistake]
        print(f"FAILED, history in {folder}\nagain: python -m tests.hostile {shlex.join(again)}", flush=True)
    else:
        shutil.rmtree(folder)
    return failed


if __name__ == "__main__":
    sys.exit(main())
