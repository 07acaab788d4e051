"""An election: three processes, one of which leads at a time. The first leader is killed, the next ones resign.

    python -m examples.leader [--ttl 2]

What a candidate does is in ``campaign``; the rest starts the processes and looks on. Whoever looks on is no candidate:
``leader()`` tells everybody who leads. No server is to be set up for it: ``local://`` brings its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Barrier

import holdfast
from holdfast.blocking import Election, Leader

CANDIDATES = ("anna", "bela", "carl")
TERMS = 4
PATIENCE = 30.0


# ---- the job ---------------------------------------------------------------------------------------------------------


def campaign(office: str, name: str, ttl: float, start: Barrier) -> None:
    """Lead, again and again; but each time for a while only, so that others get their turn."""
    election = holdfast.connect("local://").election(office, ttl=ttl, label=name)
    start.wait(PATIENCE)
    for lease in election.terms():
        ends_at = time.monotonic() + ttl
        while lease.held:
            # Here is what only one may do. What it writes to should check lease.fence, or a leader that was stopped
            # in the middle of it would write beside the next.
            lease.lost.wait(0.05)
            if time.monotonic() > ends_at:
                election.resign()


# ---- looking on ------------------------------------------------------------------------------------------------------


def await_leader(election: Election, last_fence: int) -> Leader:
    """Who leads after the one with that fence."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        leader = election.leader()
        if leader is not None and leader.fence is not None and leader.fence > last_fence:
            return leader
        time.sleep(0.005)
    raise SystemExit("Nobody leads. That is a bug.")


def look_on(office: str, ttl: float) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(CANDIDATES) + 1)
    processes = {
        name: context.Process(target=campaign, args=(office, name, ttl, start), daemon=True) for name in CANDIDATES
    }
    with holdfast.connect("local://") as client:
        election = client.election(office)
        try:
            for process in processes.values():
                process.start()
            start.wait(PATIENCE)
            began, fence = time.monotonic(), 0
            for term in range(TERMS):
                leader = await_leader(election, fence)
                fence = leader.fence or 0
                print(f"{time.monotonic() - began:6.2f} s  {leader.label} leads, fence {fence}", flush=True)
                if term == 0:
                    time.sleep(ttl / 2)
                    processes[leader.label].kill()
                    print(f"{time.monotonic() - began:6.2f} s  {leader.label} was killed: wait for its ttl", flush=True)
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.leader", description=__doc__.partition("\n")[0])
    parser.add_argument("--ttl", type=float, default=2.0, help="of a leader's lease, in seconds (default 2)")
    asked = parser.parse_args()
    look_on(f"examples:leader:{os.getpid()}", asked.ttl)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
