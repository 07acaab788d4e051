"""An election: three processes, of which one leads at a time. The first leader is killed, the next ones resign.

    python -m examples.leader [--ttl 2]

``campaign`` is the code of a candidate; the rest starts the processes and watches them. A watcher need not be a
candidate: ``leader()`` returns the current leader to any client. You need not set up a server: an embedded one is
started, unless ``HOLDFAST_URL`` names one.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Barrier

import holdfast
from holdfast.blocking import Election, Leader

SERVER = os.environ.get("HOLDFAST_URL", "local://")
CANDIDATES = ("anna", "bela", "carl")
TERMS = 4
PATIENCE = 30.0


# ---- the job ---------------------------------------------------------------------------------------------------------


def campaign(office: str, name: str, ttl: float, start: Barrier) -> None:
    """Lead again and again, each time for a limited time, so that other candidates get a turn."""
    election = holdfast.connect(SERVER).election(office, ttl=ttl, label=name)
    start.wait(PATIENCE)
    for lease in election.terms():
        ends_at = time.monotonic() + ttl
        while lease.held:
            # Do here the work that only the leader may do. The resource that it writes to should check lease.fence:
            # otherwise a leader that was suspended in the middle could write after its successor.
            lease.lost.wait(0.05)
            if time.monotonic() > ends_at:
                with contextlib.suppress(holdfast.LeaseLost):  # it may have ended just now
                    election.resign()


# ---- watching --------------------------------------------------------------------------------------------------------


def await_leader(election: Election, last_fence: int) -> Leader:
    """Wait for a leader with a greater fence."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        leader = election.leader()
        if leader is not None and leader.fence is not None and leader.fence > last_fence:
            return leader
        time.sleep(0.005)
    raise SystemExit("There is no leader. That is a bug.")


def watch(office: str, ttl: float) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(CANDIDATES) + 1)
    processes = {
        name: context.Process(target=campaign, args=(office, name, ttl, start), daemon=True) for name in CANDIDATES
    }
    with holdfast.connect(SERVER) as client:
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
                    print(f"{time.monotonic() - began:6.2f} s  {leader.label} was killed; its ttl must end", flush=True)
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.leader", description=__doc__.partition("\n")[0])
    parser.add_argument("--ttl", type=float, default=2.0, help="ttl of a leader's lease, in seconds (default 2)")
    asked = parser.parse_args()
    watch(f"examples:leader:{os.getpid()}", asked.ttl)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
