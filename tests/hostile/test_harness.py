"""The harness on real servers, with fixed seeds; and that it finds a mistake that was planted."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.hostile.grounds import GROUNDS, Ground
from tests.hostile.judges import JUDGES
from tests.hostile.place import Place
from tests.hostile.plan import QUIET, WORKERS, make_plan
from tests.support import ROOT

FAULTS = GROUNDS["single"].faults

SEEDS = (26, 58)
SECONDS = 14
SHORT_SEED = 2856
SHORT_SECONDS = 10
COMMANDS = {
    **{str(seed): f"--seed {seed} --seconds {SECONDS}" for seed in SEEDS},
    "mistake": "--on single --seed 1 --seconds 2 --mistake set-without-nx",
}


def run(command: str, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", *command.split(), *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    return done.returncode, done.stdout


# In one process of a run, which then performs the commands once.
pytestmark = pytest.mark.xdist_group("hostile")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str]]:
    """All runs at once, for they mostly wait."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(COMMANDS, pool.map(run, COMMANDS.values()), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_promised_holds_whatever_fails(outcomes: dict[str, tuple[int, str]], seed: int) -> None:
    expect_valid(*outcomes[str(seed)])


def test_what_is_promised_holds_in_a_short_run() -> None:
    """Clients of both faces cannot connect, and side keys of a lock and of a semaphore are deleted."""
    expect_valid(*run(f"--seed {SHORT_SEED} --seconds {SHORT_SECONDS}"))


def expect_valid(code: int, output: str) -> None:
    assert code == 0, output
    # Whether a holder was displaced is up to chance. All the rest must have been judged.
    assert output.count(": valid") >= len(JUDGES) - 1, output


def test_the_fixed_seeds_plan_every_fault() -> None:
    plans = [make_plan(seed, SECONDS, FAULTS) for seed in SEEDS] + [make_plan(SHORT_SEED, SHORT_SECONDS, FAULTS)]
    assert {fault.name for plan in plans for fault in plan} == set(FAULTS)
    assert {"refuse connections", "delete side keys"} <= {fault.name for fault in plans[-1]}


@pytest.mark.long
def test_a_planted_mistake_is_found_and_its_command_printed(outcomes: dict[str, tuple[int, str]]) -> None:
    code, output = outcomes["mistake"]
    assert code == 1, output
    assert "exclusion: INVALID" in output
    assert f"again: python -m tests.hostile {COMMANDS['mistake']}" in output


def test_a_seed_decides_the_plan() -> None:
    assert make_plan(5, 60.0, FAULTS) == make_plan(5, 60.0, FAULTS) != make_plan(6, 60.0, FAULTS)


@pytest.mark.parametrize("ground", GROUNDS.values(), ids=list(GROUNDS))
def test_the_last_seconds_of_a_plan_are_quiet_and_every_fault_is_planned_by_some_seed(ground: type[Ground]) -> None:
    plans = [make_plan(seed, 60.0, ground.faults) for seed in range(50)]
    assert {fault.name for plan in plans for fault in plan} == set(ground.faults)
    targets = {target for kind in ground.faults.values() for target in kind.targets}
    assert {fault.target for plan in plans for fault in plan} == targets >= {*WORKERS}
    assert all(fault.at + fault.seconds <= 60.0 - QUIET for plan in plans for fault in plan)


@pytest.mark.parametrize("ground", GROUNDS.values(), ids=list(GROUNDS))
def test_every_fault_can_be_done(ground: type[Ground]) -> None:
    for name in ground.faults:
        method = name.replace(" ", "_")
        assert hasattr(Place, method) or hasattr(ground, f"_{method}"), name
