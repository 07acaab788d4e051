"""What ``holdfast ls`` costs on a server with very many other keys, and ``holdfast who`` on a lock with a long queue.

    python -m benchmarks.listing [--keys 1000000] [--locks 1000] [--queue 200000]

While the locks are listed, another client sends PING all the time. Its longest wait shows how long a part of the scan
keeps the server busy. The longest wait without a scan is measured before, for comparison.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from typing import Any

import redis
from tests.inspection.test_redis import fill_queue
from tests.servers import Server

import holdfast


class Pings(threading.Thread):
    """Sends PING until it is ended, and records the longest wait for a reply, in seconds."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        with self._server.client() as client:
            while not self._over.wait(0.001):
                began = time.perf_counter()
                client.ping()
                self.longest = max(self.longest, time.perf_counter() - began)

    def end(self) -> None:
        self._over.set()
        self.join()


def calls(admin: redis.Redis, command: str) -> tuple[int, int]:
    """How often the server has run a command, and for how many us."""
    found: Any = admin.info("commandstats").get(f"cmdstat_{command}", {"calls": 0, "usec": 0})
    return found["calls"], found["usec"]


def list_locks(server: Server, admin: redis.Redis, client: holdfast.Client) -> None:
    pings = Pings(server)
    pings.start()
    time.sleep(1.0)
    idle, pings.longest = pings.longest, 0.0
    before = calls(admin, "scan")
    began = time.perf_counter()
    found = sum(1 for _ in client.locks())
    took = time.perf_counter() - began
    pings.end()
    scans, spent_us = (now - then for now, then in zip(calls(admin, "scan"), before, strict=True))
    print(f"client.locks(): {found:,} locks among {admin.dbsize():,} keys in {took:.2f} s")
    print(f"  {scans:,} SCANs of {spent_us / scans:.0f} us each; KEYS was called {calls(admin, 'keys')[0]} times")
    print(f"  the longest PING of another client: {pings.longest * 1000:.1f} ms (before: {idle * 1000:.1f} ms)")
    began = time.perf_counter()
    command = [sys.executable, "-m", "holdfast.cli", "ls", "--json", "--url", server.url]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"holdfast ls --json, with the start of Python: {time.perf_counter() - began:.2f} s")


def inspect_queue(admin: redis.Redis, client: holdfast.Client, length: int) -> None:
    with client.lock("k"):
        fill_queue(admin, length)
        client.inspect("k")
        before = calls(admin, "evalsha")
        began = time.perf_counter()
        info = client.inspect("k")
        took = time.perf_counter() - began
        steps, spent_us = (now - then for now, then in zip(calls(admin, "evalsha"), before, strict=True))
        assert info is not None
        print(f"client.inspect(): a queue of {info.waiter_count:,} in {took * 1000:.1f} ms; the first 100 are read")
        print(f"  {steps} step of {spent_us / max(1, steps):.0f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="that are no locks")
    parser.add_argument("--locks", type=int, default=1000)
    parser.add_argument("--queue", type=int, default=200_000, help="waiters for one lock")
    asked = parser.parse_args()
    with Server("--enable-debug-command", "yes") as server, server.client() as admin:
        admin.execute_command("DEBUG", "POPULATE", asked.keys, "other", 20)
        with holdfast.connect(server.url) as client:
            leases = [client.lock(f"lock:{number}", ttl=600).acquire() for number in range(asked.locks)]
            list_locks(server, admin, client)
            inspect_queue(admin, client, asked.queue)
            for lease in leases:
                lease.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
