"""A process that forks while a client of etcd has just started its threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.fleet_etcd import EtcdFleet

IMPORTS = textwrap.dedent("""
    import sys, threading, time, holdfast
    client = holdfast.connect(sys.argv[1])
    imported = []
    begin = threading.Thread.start
    def start(thread):
        imported.append(set(sys.modules))
        begin(thread)
    threading.Thread.start = start
    other = holdfast.connect(sys.argv[1])
    with client.lock("a"):
        other.lock("a", wait=0.5).acquire()  # the waiter has a key watched
        time.sleep(0.5)  # the holder, too
    print(*sorted(name for name in set(sys.modules) - imported[0]))
""")

FORKS = textwrap.dedent("""
    import os, sys, time, holdfast
    client, other = holdfast.connect(sys.argv[1]), holdfast.connect(sys.argv[1])
    lease = other.lock("b", ttl=20).acquire()
    with client.lock("a", ttl=20):
        time.sleep(float(sys.argv[2]))
        pid = os.fork()
        if not pid:
            code = 1
            try:
                waited = client.lock("b", wait=1.0).acquire()
                assert waited is None
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(os.waitpid(pid, 0)[1])
    lease.release()
""")


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_threads_of_a_client_import_nothing(fleet: EtcdFleet) -> None:
    """A fork in the middle of an import leaves the child with half a module."""
    done = run(IMPORTS, fleet.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.parametrize("after", ["0.10", "0.11", "0.12"])
def test_a_child_forked_soon_after_the_first_grant_waits_as_any_other(fleet: EtcdFleet, after: str) -> None:
    done = run(FORKS, fleet.url, after)
    assert done.stdout == "0\n", done.stderr
    assert "Traceback" not in done.stderr, done.stderr
