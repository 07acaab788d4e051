"""A failure counts unless the machine stood still, and the next test does not suffer from it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pulse import LONG, processes_below, time_waited
from tests.support import ROOT, eventually

TESTS = """
import ctypes, itertools, os, socket, subprocess, sys, time, warnings
from tests.pulse import Pulse

ROUNDS = {name: itertools.count(1) for name in ("once", "twice", "virtual", "starved")}

def pytest_configure(config):
    config.pluginmanager.register(Pulse(), "pulse")

def stand_still():
    ctypes.PyDLL(None).usleep(300_000)  # by which nobody else gets the interpreter

def use_the_network():
    with socket.create_server(("127.0.0.1", 0)):
        pass

class Lease:
    def __del__(self):
        if not hasattr(self, "released"):
            warnings.warn("dropped", ResourceWarning)

def test_fails_once_while_all_stand_still():
    lease = Lease()
    use_the_network()
    print("said the first time")
    stand_still()
    assert next(ROUNDS["once"]) == 2
    lease.released = True

def test_fails_twice_while_all_stand_still():
    use_the_network()
    stand_still()
    assert next(ROUNDS["twice"]) == 3

def test_fails_in_virtual_time_while_all_stand_still():
    stand_still()
    assert next(ROUNDS["virtual"]) == 2

def test_fails_with_a_steady_pulse():
    lease = Lease()
    assert lease is None

def test_after_it(): pass
"""


MANY = """

import pytest

@pytest.mark.parametrize("number", range(5))
def test_fails_at_first_while_all_stand_still(number):
    use_the_network()
    stand_still()
    assert next(ROUNDS.setdefault(number, itertools.count(1))) == 2
"""


STARVED = """

BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(1, flush=True)\\nwhile True: pass"

def test_fails_once_while_its_processes_wait_for_a_cpu():
    one_cpu = str(min(os.sched_getaffinity(0)))
    crowd = [subprocess.Popen([sys.executable, "-c", BUSY, one_cpu], stdout=subprocess.PIPE) for _ in range(5)]
    try:
        for process in crowd:
            process.stdout.readline()
        time.sleep(1.5)
        assert next(ROUNDS["starved"]) == 2
    finally:
        for process in crowd:
            process.kill()
            process.communicate()
"""


def run_pytest(
    directory: Path, options: list[str], *, more: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(TESTS + more)
    (directory / "test_some.py").write_text("from conftest import *\n")
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(directory)],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_outside_of_ci_nothing_runs_once_more(tmp_path: Path) -> None:
    assert "4 failed, 1 passed" in run_pytest(tmp_path, []).stdout


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_what_failed_while_the_machine_stood_still_runs_once_more_and_nothing_else(
    tmp_path: Path, options: list[str]
) -> None:
    done = run_pytest(tmp_path, options, CI="1")
    assert "3 failed, 2 passed, 2 rerun" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_some.py::test_fails_twice_while_all_stand_still" in done.stdout
    assert "FAILED test_some.py::test_fails_in_virtual_time_while_all_stand_still" in done.stdout
    assert "FAILED test_some.py::test_fails_with_a_steady_pulse" in done.stdout
    _, rerun = done.stdout.split("RERUN test_some.py::test_fails_once_while_all_stand_still - the machine stood still")
    assert '>       assert next(ROUNDS["once"]) == 2' in rerun, "the first failure is shown in full"
    assert "said the first time" in rerun
    assert done.returncode == 1


def test_a_machine_that_stands_still_all_the_time_is_a_failure(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, ["-k", "at_first"], more=MANY, CI="1")
    assert "2 failed, 3 passed, 5 deselected, 3 rerun" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not time_waited(os.getpid()), reason="this kernel does not tell how long a process waits")
def test_what_failed_while_a_process_of_its_own_was_kept_from_running_runs_once_more(tmp_path: Path) -> None:
    """The pulse of pytest itself may be steady: what it has started is crowded on one CPU."""
    done = run_pytest(tmp_path, ["-k", "wait_for_a_cpu"], more=STARVED, CI="1")
    assert "1 passed, 5 deselected, 1 rerun" in done.stdout, done.stdout + done.stderr
    assert 'assert next(ROUNDS["starved"]) == 2' in done.stdout, "the first failure is shown in full"


def test_a_process_that_sleeps_waits_for_no_cpu() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in processes_below(os.getpid())
        stat = Path(f"/proc/{process.pid}/stat")
        if stat.exists():
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", what="it sleeps")
        before = time_waited(process.pid)
        time.sleep(0.5)
        after = time_waited(process.pid)
        process.communicate(b"\n")
    assert before is None or after is None or after - before < LONG
    assert time_waited(process.pid) is None
    assert process.pid not in processes_below(os.getpid())


def test_a_scenario_in_the_simulated_world_depends_on_no_clock(request: pytest.FixtureRequest, play: Any) -> None:
    """So its failure counts, even in CI."""

    async def scenario(api: Any) -> None:
        async with api.client().lock("x"):
            await api.sleep(0.01)

    play(scenario)
    pulse: Any = request.config.pluginmanager.get_plugin("pulse")
    assert pulse._real == (request.node.callspec.params["play"] != "world")
