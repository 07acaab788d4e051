"""A failure counts unless the machine stood still, and the next test does not suffer from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

TESTS = """
import ctypes, itertools, socket, warnings
from tests.pulse import Pulse

ROUNDS = {name: itertools.count(1) for name in ("once", "twice", "virtual")}

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


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_what_failed_while_the_machine_stood_still_runs_once_more_and_nothing_else(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(TESTS)
    (tmp_path / "test_some.py").write_text("from conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "3 failed, 2 passed, 2 rerun" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_some.py::test_fails_twice_while_all_stand_still" in done.stdout
    assert "FAILED test_some.py::test_fails_in_virtual_time_while_all_stand_still" in done.stdout
    assert "FAILED test_some.py::test_fails_with_a_steady_pulse" in done.stdout
    _, rerun = done.stdout.split("RERUN test_some.py::test_fails_once_while_all_stand_still - the machine stood still")
    assert '>       assert next(ROUNDS["once"]) == 2' in rerun, "the first failure is shown in full"
    assert "said the first time" in rerun
    assert done.returncode == 1
