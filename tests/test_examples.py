"""Each program of examples/ does what it says, also where there is no terminal to draw on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import LEASE_LOGGED

ROOT = Path(__file__).parents[1]


Run = Callable[..., str]


@pytest.fixture
def run_example(embedded: str) -> Run:
    """Run one to its end: what it prints, which must fit a terminal without colours."""

    def run(name: str, *options: str) -> str:
        command, environment = (
            [sys.executable, "-m", f"examples.{name}", *options],
            {**os.environ, "HOLDFAST_URL": embedded},
        )
        return checked(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90))

    return run


def checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if not LEASE_LOGGED.match(line)] == []
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    return done.stdout


def test_lottery_gives_out_each_prize_once(run_example: Run) -> None:
    output = run_example("lottery", "--prizes", "40")
    assert "With Holdfast: exactly 40 draws of 40 prizes, each once." in output.splitlines()
    assert re.search(r"given out, of 40 prizes +\d+ +40\b", output)
    assert re.search(r"prizes given out twice or more +\d+ +0\b", output)
    assert "strictly rising" in output


def test_another_leads_after_the_leader_was_killed(run_example: Run) -> None:
    output = run_example("leader", "--ttl", "1")
    fences = [int(fence) for fence in re.findall(r"leads, fence (\d+)", output)]
    assert len(fences) == 4
    assert fences == sorted(set(fences))
    assert "was killed" in output
    assert len(set(re.findall(r"(\w+) leads", output))) == 3


def test_the_cache_asks_the_database_once_a_second(run_example: Run) -> None:
    output = run_example("cache_storm", "--seconds", "1.5")
    found = re.search(r"queries to the database +(\d+) +(\d+) +(\d+)", output)
    assert found is not None, output
    assert int(found[1]) > int(found[2])
