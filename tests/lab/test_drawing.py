"""Drawings in the terminal: what stands in which lane, at the widths that terminals have."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN
from holdfast.lab.report.drawing import Drawing
from holdfast.lab.report.lanes import clients_of, clock, count, left, numbers_of, sentence, shorten
from holdfast.lab.report.matrix import Matrix
from holdfast.lab.report.trace import Cell, Findings, Moment, Trace
from holdfast.lab.search.faults import LOSES
from tests.lab.stories import FINDINGS, HOSTILE, MEANING, ORPHAN, PAUSE, STORIES


def drawn(thing: object, width: int = 80, *, colour: bool = False, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(thing)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


def the(words: str, lines: list[str]) -> int:
    """The one line with these words."""
    (index,) = (index for index, line in enumerate(lines) if words in line)
    return index


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.recipe)
def test_a_drawing_fits_and_tells_everything(story: Trace, width: int) -> None:
    lines = drawn(Drawing(story), width)
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    for moment in story.moments:
        for word in " ".join((moment.does, moment.violation, moment.command, moment.reply)).split():
            assert word in told


def test_four_clients_fit_on_eighty_columns() -> None:
    names = ("A", "B", "C", "D")
    moments = tuple(Moment(n, name, "asks " * 30, "", "GET k", "1", "v" * 90) for n, name in enumerate(names))
    assert max(map(len, drawn(Drawing(Trace("x", "y", 4, (), (), moments))))) <= 80


def test_lanes_show_who_holds_who_is_paused_and_who_is_dead() -> None:
    lines = drawn(Drawing(PAUSE))
    assert lines[the("A takes the lock", lines)].startswith("    0 s  ●───┼───▶ a.1")
    assert lines[the("A takes the lock", lines) + 1].startswith("         █   │   ┃ ttl 3 s")
    assert lines[the("[pause]", lines)].startswith("   2 ms  ‖   │   ┃")
    assert lines[the("[pause]", lines) + 1].startswith("         ▒   │   ┃")
    assert "free" in lines[the("The server lets the key", lines)]
    assert lines[the("A and B hold", lines)].startswith("         █   █   ┃")
    lines = drawn(Drawing(ORPHAN))
    assert lines[the("[crash]", lines)].startswith("   2 ms  ✖   │   ┃")
    assert lines[the("B asks", lines)].startswith("   3 ms      ●───▶ 1"), "who is dead has no lane"


def test_a_violation_is_red_and_a_fault_yellow_and_both_are_words() -> None:
    lines = drawn(Drawing(PAUSE), colour=True)
    assert "\x1b[1;31m" in lines[the("A and B hold", lines)]
    assert "\x1b[1;33m" in lines[the("[pause]", lines)]
    plain = drawn(Drawing(PAUSE))
    assert "✗ A and B hold the lock at the same time." in plain[the("A and B hold", plain)]


def test_a_terminal_without_the_letters_gets_plain_ones() -> None:
    lines = drawn(Drawing(PAUSE), encoding="ascii")
    assert lines[the("A takes the lock", lines)].startswith("    0 s  o---+---> a.1")
    assert "x 6" in "".join(drawn(Matrix(FINDINGS), encoding="ascii"))


def test_markup_in_a_trace_is_text() -> None:
    moment = Moment(0, "A", "says [bold]loudly[/bold]", command="SET k [red]", value="[link]")
    text = "\n".join(drawn(Drawing(Trace("x", "y", 1, (), (), (moment,)))))
    assert all(part in text for part in ("[bold]loudly[/bold]", "SET k [red]", "[link]"))


def test_only_those_who_take_part_have_a_lane() -> None:
    assert clients_of(PAUSE) == ["A", "B"]
    assert clients_of(HOSTILE) == ["A", "B", "C"]


def test_that_time_passes_is_no_step() -> None:
    assert numbers_of(ORPHAN) == ["1", "2", "3", ""]
    assert all(max(map(int, filter(None, numbers_of(story)))) == story.steps for story in STORIES)


@pytest.mark.parametrize(
    ("us", "said"),
    [(0, "0 s"), (7, "7 µs"), (1500, "1.5 ms"), (2_998_000, "2.998 s"), (90_000_000, "90 s"), (-2_000_000, "-2 s")],
)
def test_times_are_short_numbers(us: int, said: str) -> None:
    assert clock(us) == said
    assert left(us) == f"ttl {said}"
    assert left(None) == "no ttl"


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0"), (999, "999"), (1234, "1.2k"), (9_960, "10k"), (98_765, "99k"), (999_999, "1.0M"), (12_345_678, "12M")],
)
def test_counts_have_four_letters_at_most(number: int, said: str) -> None:
    assert count(number) == said
    assert len(said) <= 4


def test_a_long_value_keeps_both_ends() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"


def test_a_sentence_names_its_actor_once() -> None:
    assert sentence(Moment(0, "A", "asks")) == ("A", " asks")
    assert sentence(Moment(0, "A", "A asks")) == ("", "A asks")
    assert sentence(Moment(0, "server", "restarts")) == ("The server", " restarts")
    assert sentence(Moment(0, "server", "the server restarts")) == ("", "the server restarts")
    assert sentence(Moment(0, "time", "a second goes by")) == ("", "a second goes by")


# The matrix ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200, 400])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_matrix_fits_and_every_cell_has_its_verdict(width: int, rows: int) -> None:
    lines = drawn(Matrix((FINDINGS * 3)[:rows]), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "…" not in "".join(lines)
    text = "\n".join(lines)
    assert "broken (3 steps)" in text or "✗ 3" in text
    assert "holds (1,234 states)" in text or re.search(r" 1\.2k .*✓ ", text)


def test_a_wide_matrix_says_it_in_words() -> None:
    matrix = Matrix(FINDINGS)
    lines = drawn(matrix, matrix.width)
    assert lines[0].split() == ["recipe", *MEANING]
    row = lines[the("set_nx ", lines)]
    assert re.split(r"\s\s+", row.strip()) == [
        *("set_nx", "broken (6 steps)", *["holds (1,234 states)"] * 4),
        *("unknown", *["holds (1,234 states)"] * 3, "holds (1,234,567 states)"),
    ]


def fenced(*broken: Cell, so_far: bool = False) -> list[Findings]:
    """Holdfast beside a recipe: all holds, except these cells of a server that loses its data."""
    rows = []
    for row in ("holdfast", "set_nx"):
        kept = [Cell(row, name, HOLDS, 1234, so_far=so_far) for name in MEANING]
        lost = [Cell(row, name, HOLDS, 2345, so_far=True, server=LOSES) for name in MEANING]
        mine = {cell.invariant: replace(cell, recipe=row) for cell in broken}
        lost = [mine.get(cell.invariant, cell) for cell in lost]
        rows.append(Findings(row, 3579, 4000, False, (*kept, *lost)))
    return rows


def lost(invariant: str, *faults: str) -> Cell:
    return Cell("holdfast", invariant, BROKEN, 2345, replace(PAUSE, faults=faults), server=LOSES)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_a_server_that_loses_its_data_breaks_stands_apart(width: int) -> None:
    lines = drawn(Matrix(fenced(lost("MutualExclusion", "restart"), lost("NoOrphan", "delay", "failover"))), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "…" not in "".join(lines)
    apart = the("If the server loses its data, or its clock jumps:", lines)
    assert the("While the server keeps its data:", lines) == 0
    assert "broken" not in "".join(lines[:apart])
    steps = PAUSE.steps
    told = [" ".join(line.split()) for line in lines[apart:]]
    assert f"MutualExclusion ✗ broken by restart ({steps} steps) ✗ broken" in told
    assert f"NoOrphan ✗ broken only by delay and failover ({steps} steps) ✗ broken" in told
    assert "FencedSafety ✓ holds so far: late writes refused not broken" in told
    assert f"the others ✓ {len(MEANING) - 3} of {len(MEANING) - 3} hold so far" in told


@pytest.mark.parametrize(
    ("so_far", "complete"), [(False, "with one fault of any kind."), (True, "with one of the mildest faults.")]
)
def test_the_matrix_ends_with_the_verdict_on_holdfast_and_its_bounds(so_far: bool, complete: str) -> None:
    lines = drawn(Matrix(fenced(lost("MutualExclusion", "restart"), so_far=so_far)), 80)
    end = " ".join(" ".join(lines[len(lines) - lines[::-1].index("") :]).split())
    assert end == (
        f"✓ holdfast: {len(MEANING)} of {len(MEANING)} invariants hold while the server keeps its data, "
        f"in 1,234 states. Complete: two clients, without a fault and {complete} In part: more clients, more faults."
    )


def test_what_is_unknown_of_holdfast_is_no_promise() -> None:
    found = Findings("holdfast", 9, 9, False, tuple(Cell("holdfast", name, UNKNOWN, 9) for name in MEANING))
    end = " ".join(" ".join(drawn(Matrix([found]), 80)[-2:]).split())
    said = f"? holdfast: 0 of {len(MEANING)} invariants hold while the server keeps its data so far: a larger --budget"
    assert said in end


def test_few_recipes_are_turned_to_have_room_for_words() -> None:
    lines = drawn(Matrix(FINDINGS[:1]), 80)
    assert lines[0].split() == ["setnx"]
    assert lines[the("NoOrphan", lines)].split() == ["NoOrphan", "broken", "(3", "steps)"]


def test_a_narrow_matrix_explains_its_abbreviations() -> None:
    lines = drawn(Matrix(FINDINGS * 2), 80)
    heads = lines[0].split()[2:]
    assert all(
        any(re.search(rf"\b{head} +{name}\b", line) for line in lines)
        for head, name in zip(heads, MEANING, strict=True)
    )
