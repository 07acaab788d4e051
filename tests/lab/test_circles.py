"""In which order the searches of the matrix go, and that it does not decide which trace is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from holdfast.lab.invariants.locks import INVARIANTS
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.faults import DAILY, DEFAULT_FAULTS, EXCLUDED, FAULTS, KEEPS, LOSES, UNRELIABLE_SERVER
from holdfast.lab.subjects.rows import ROWS, config_of
from holdfast.lab.surveys.agenda import EXPLORE, FINISH, FIRST, LOOK, Agenda, Unit
from holdfast.lab.surveys.circles import LOOKS, Circle, RowSearch, circles
from holdfast.lab.surveys.common import quietly
from holdfast.lab.surveys.recipes import find

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
DEEPEST = ("setnx_expire", "setnx_repair", "getset", "watch", "holdfast")  # where finding all pitfalls takes longest
ENDLESS = 1_000.0
BOUNDS = {"clients": 3, "kinds": DEFAULT_FAULTS, "most_faults": 2, "spares_holders": False}


def matrix_on_the_page() -> dict[str, list[str]]:
    """The cells of every row, as they are printed there."""
    table = PAGE.split("## The matrix")[1].split("ME  Mutual")[0]
    lines = [line for line in table.splitlines() if re.search("[✓✗]", line)]
    return dict(zip(ROWS, (re.findall(r"✗ \d+|✓~?|[-?](?=\s|$)", line) for line in lines), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("row", DEEPEST)
def test_looks_find_every_pit_that_the_page_shows(row: str) -> None:
    cells = dict(zip(INVARIANTS, matrix_on_the_page()[row], strict=True))
    search = RowSearch(row, BOUNDS)
    with quietly():
        for transitions in LOOKS:
            search.look(transitions, ENDLESS)
    assert search.broken.keys() == {name for name, cell in cells.items() if cell.startswith("✗")}


@pytest.mark.long
def test_what_holdfast_promises_holds_in_every_run_of_two_clients_with_one_fault() -> None:
    search = RowSearch("holdfast", BOUNDS)
    with quietly():
        search.finish(ENDLESS)
    explored = search.explored
    assert explored.is_enough
    assert explored.has_every_single_fault
    assert not explored.broken
    assert explored.known == {*INVARIANTS}


@pytest.mark.long
@pytest.mark.parametrize("row", ["holdfast", "set_nx", "memcached_add", "getset"])
def test_a_server_that_loses_its_data_breaks_mutual_exclusion_of_every_lock(row: str) -> None:
    search = RowSearch(row, BOUNDS, server=LOSES)
    with quietly():
        for transitions in LOOKS:
            search.look(transitions, ENDLESS)
    broken = search.explored.broken
    assert {*broken["MutualExclusion"].faults} & UNRELIABLE_SERVER
    assert ("FencedSafety" in broken) == (row != "holdfast"), "a late write has a lower fence, if there are fences"
    assert all(EXCLUDED & {*trace.faults} for trace in broken.values()), "other runs do not count"


def test_with_one_fault_the_required_ones_only_are_tried_last() -> None:
    explorer = Explorer(config_of("set_nx", clients=2, kinds=("crash", "restart"), required=frozenset({"restart"})))
    with quietly():
        assert explorer.search(1)
        single = explorer.states
        assert explorer.search(2)
    assert explorer.states > single
    assert {choice[1] for broken in explorer.broken.values() for choice in broken.choices if choice[0] == "fault"} == {
        "restart"
    }, "what a crash breaks does not count without a restart, and with one takes more faults than the restart alone"


@pytest.mark.long
def test_a_trace_of_a_worse_fault_gives_way_to_one_of_a_milder_fault_that_is_found_later() -> None:
    search = RowSearch("getset:del", {**BOUNDS, "clients": 2})

    def faults() -> set[str]:
        choices = search.broken["OwnerOnlyRelease"].choices
        return {choice[1] for choice in choices if choice[0] == "fault"}

    with quietly():
        search.look(800, ENDLESS)
        assert not faults() & DAILY
        search.look(3_000, ENDLESS)
        assert faults() <= DAILY


@pytest.mark.long
def test_what_is_shown_is_the_mildest_whatever_was_found_first() -> None:
    trace = find("getset:del", "OwnerOnlyRelease", clients=2)[0].trace
    assert trace is not None
    assert set(trace.faults) <= DAILY
    direct = Explorer(config_of("getset:del", clients=2), stop_at=["OwnerOnlyRelease"])
    direct.search(1, tuple(kind for kind in FAULTS if kind in DAILY))
    assert trace.choices == direct.broken["OwnerOnlyRelease"].choices


@pytest.mark.long
def test_a_search_that_is_left_again_and_again_finds_what_it_finds_at_once() -> None:
    config = config_of("multi", clients=2)
    at_once, by_and_by = Explorer(config), Explorer(config)
    with quietly():
        assert at_once.search(0, ())
        assert at_once.search(1)
        search, other = by_and_by.begin(1), by_and_by.begin(0, ())
        for transitions in range(100, 100_000, 100):
            by_and_by.go_on(other, transitions=transitions // 10)  # another one in between leaves it as it is
            if by_and_by.go_on(search, transitions=transitions):
                break
            assert transitions <= search.transitions < transitions + 1_000
    assert search.is_done
    assert other.is_done
    assert by_and_by.transitions == search.transitions + other.transitions == at_once.transitions
    assert by_and_by.hashes == at_once.hashes
    assert {name: found.choices for name, found in by_and_by.broken.items()} == {
        name: found.choices for name, found in at_once.broken.items()
    }


def test_every_single_fault_is_searched_once_for_each_number_of_clients_the_mild_ones_first() -> None:
    for clients in (2, 3):
        single = [one for one in circles(3, 2, tuple(FAULTS)) if one.clients == clients and one.most_faults == 1]
        assert sorted(kind for one in single for kind in one.kinds) == sorted(FAULTS)
        assert set(single[0].kinds) == DAILY
        assert set(single[-1].kinds) == UNRELIABLE_SERVER
        assert [one.server for one in single] == [KEEPS, KEEPS, LOSES]
    assert [one.kinds for one in circles(2, 2, ("skew",))] == [(), ("skew",), ("skew",)]
    assert circles(2, 0, ()) == [Circle(2, 0, ())]


def test_every_two_faults_are_searched_with_one_of_the_two_servers() -> None:
    several = [one for one in circles(2, 2, DEFAULT_FAULTS) if one.most_faults == 2]
    for pair in combinations_with_replacement(DEFAULT_FAULTS, 2):
        servers = {one.server for one in several if {*pair} <= {*one.kinds}}
        assert (LOSES if EXCLUDED & {*pair} else KEEPS) in servers
    assert not any(EXCLUDED & {*one.kinds} for one in several if one.server == KEEPS)


def test_late_replies_are_searched_for_two_clients_beside_what_a_verdict_takes() -> None:
    late = [one for one in circles(3, 2, tuple(FAULTS), overtaking=True) if one.overtaking]
    assert {one.clients for one in late} == {2}
    assert not any(one.is_needed for one in late)
    assert late[0] == Circle(2, 0, (), overtaking=True)
    assert sorted(kind for one in late for kind in one.kinds) == sorted(FAULTS)


def units(*rows: str) -> list[Unit]:
    return [Unit(row, server) for row in rows for server in (KEEPS, LOSES)]


def planned(agenda: Agenda) -> list[tuple[str, str, str]]:
    tasks = iter(agenda.next, None)
    return [(task.unit.row, task.unit.server, task.what) for task in tasks]


def test_holdfast_comes_first_and_a_server_that_loses_its_data_after_the_promises_of_all_rows() -> None:
    tasks = planned(Agenda(units("set_nx", "holdfast"), 1, ENDLESS))
    assert tasks[0] == ("holdfast", KEEPS, FIRST)
    promised = [tasks.index((row, KEEPS, FINISH)) for row in ("holdfast", "set_nx")]
    lost = [tasks.index((row, LOSES, FINISH)) for row in ("holdfast", "set_nx")]
    assert promised == sorted(promised)
    assert max(promised) < min(lost)


def test_all_rows_are_looked_at_before_any_other_is_explored() -> None:
    tasks = planned(Agenda(units("a", "b"), 1, ENDLESS))
    whats = [what for _, _, what in tasks]
    assert whats.count(LOOK) == 4 * len(LOOKS)
    assert whats[:8] == [LOOK] * 8
    assert whats[-4:] == [EXPLORE] * 4
    assert FIRST not in whats


def test_a_unit_has_one_thing_done_to_it_at_a_time() -> None:
    agenda = Agenda(units("a"), 2, ENDLESS)
    first, second = units("a")
    assert [task.unit for task in (agenda.next(), agenda.next([first])) if task] == [first, second]
    assert agenda.next([first, second]) is None


def test_looks_end_in_time_and_every_unit_is_explored_in_what_is_left() -> None:
    tasks = planned(Agenda(units("a", "b"), 1, 0.0))
    assert {what for _, _, what in tasks} == {FINISH, EXPLORE}
    assert [what for _, _, what in tasks].count(EXPLORE) == 4


ALONE = """
from holdfast.lab.surveys.recipes import survey
survey(
    ["setnx", "set_nx", "multi"], budget=60.0, jobs=2, spares_server=True,
    progress=lambda at: print(at.row, flush=True),
)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks /proc who its children are")
def test_processes_of_a_search_end_with_the_one_that_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        rows = {""}
        while "multi" not in rows:  # so that all three are there
            rows.add(parent.stdout.readline().strip())
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 3
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    for child in children:
        ends_at = time.monotonic() + 20
        while is_running(int(child)):
            if time.monotonic() > ends_at:
                os.kill(int(child), signal.SIGKILL)
                pytest.fail("it goes on although nobody waits for what it finds")
            time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
