"""A short run of the harness on each fleet; that it finds a planted mistake there; and the table of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.grounds import FLEETS
from tests.hostile.judges import Verdict
from tests.hostile.table import BEGIN, END, Tally, write_table
from tests.hostile.test_harness import run
from tests.hostile.test_judges import ONE_AFTER_THE_OTHER, fault, history

# With this seed the first seconds have the fault that is named.
SHORT = {
    "sentinel": "fail over",
    "sentinel-confirmed": "kill primary",
    "cluster": "move slot",
    "etcd": "stall peer links",
}
SECONDS = 20

# In one process of a run: what it needs most is a processor.
pytestmark = pytest.mark.xdist_group("hostile")


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_fleet_keeps_what_its_page_promises_in_a_short_run(fleet: str) -> None:
    code, output = run(f"--on {fleet} --seed 1 --seconds {SECONDS} --only", SHORT[fleet])
    assert code == 0, output
    assert " 0 faults" not in output
    for check in ("exclusion", "fences", "bounded waits", "recovery", "orphans", "leaks", "exceptions"):
        assert f"{check}: valid" in output, output


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_planted_mistake_is_found_on_a_fleet(fleet: str) -> None:
    code, output = run(f"--on {fleet} --seed 1 --seconds 10 --mistake released-early")
    assert code == 1, output
    assert "exclusion: INVALID" in output


def test_the_table_adds_up_and_finds_its_place_in_the_page(tmp_path: Path) -> None:
    events = history(ONE_AFTER_THE_OTHER, fault("pause leader", 1, 2))
    wrong = Verdict("fences", False, ("one", "two"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table([Tally.of("etcd", seed, events, [wrong]) for seed in (7, 8)], page)
    text = page.read_text()
    assert "| etcd, three members | 7 to 8 | 4 | 2: pause leader 2 | 0 | 0 | 4 | 0 | 0 | 0 | 7.5e-01 |" in text
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
