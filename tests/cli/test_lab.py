"""``holdfast lab``, as a shell would call it: the search is the real one, with a budget of moments."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.lab.report.trace import Trace
from holdfast.lab.surveys.recipes import FAULTS, INVARIANTS, MEANING, PRIMITIVES, ROWS
from tests.cli.shell import CLI, PATIENCE_S, environment
from tests.servers import Server, free_port

Run = Callable[..., tuple[int, str, str]]
CRASHED = ("show", "setnx", "NoOrphan", "--fault", "crash", "--clients", "2")
SERVERS = ("keeps", "loses")
QUICK = ("--recipe", "setnx", "--fault", "crash", "--clients", "2", "--budget", "2s")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call it in this process: exit code, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("HOLDFAST_URL", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["lab", *args])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, as --save writes it."""
    path = tmp_path_factory.mktemp("lab") / "trace.json"
    with pytest.raises(SystemExit) as end:
        main(["lab", *CRASHED, "--save", str(path)])
    assert not end.value.code
    return path


# The matrix ---------------------------------------------------------------------------------------------------------


def test_the_matrix_has_every_verdict_in_words(run: Run) -> None:
    code, out, err = run(*QUICK)
    assert (code, err.count("\n")) == (0, 1)
    heads, _, row, *_ = out.splitlines()
    assert heads.split() == ["recipe", *INVARIANTS]
    assert row.split()[0] == "setnx"
    assert re.search(r"broken \(\d+ steps?\)", row)
    assert re.search(r"seed 0$", out, re.MULTILINE)
    assert "holdfast lab show setnx " in out


def test_the_matrix_fits_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*QUICK)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_json_is_exactly_what_was_agreed(run: Run) -> None:
    code, out, err = run(*QUICK, "--seed", "5", "--json")
    assert (code, err.count("\n")) == (0, 1)
    data = json.loads(out)
    assert list(data) == ["seed", "states", "cells"]
    assert data["seed"] == 5
    assert data["states"] > 0
    assert [cell["invariant"] for cell in data["cells"]] == list(INVARIANTS)
    for cell in data["cells"]:
        assert list(cell) == ["recipe", "invariant", "verdict", "states", "steps", "faults", "server"]
        assert cell["recipe"] == "setnx"
        assert cell["verdict"] in ("holds", "broken", "unknown")
        assert (cell["steps"] is not None) == (cell["verdict"] == "broken")
        assert set(cell["faults"]) <= {"crash"}
        assert cell["server"] == "keeps", "a crash of a client takes no data"
    orphan = next(cell for cell in data["cells"] if cell["invariant"] == "NoOrphan")
    assert orphan["verdict"] == "broken"
    assert orphan["faults"] == ["crash"]


def test_several_recipes_stand_in_the_order_they_were_named(run: Run) -> None:
    args = ("--recipe", "set_nx", "--recipe", "setnx", "--fault", "none", "--clients", "2", "--budget", "1s", "--json")
    _, out, _ = run(*args)
    cells = json.loads(out)["cells"]
    assert list(dict.fromkeys(cell["recipe"] for cell in cells)) == ["set_nx", "setnx"]
    assert not any(cell["faults"] for cell in cells)


def test_cells_of_both_servers_say_which_one_they_are_about(run: Run) -> None:
    args = ("--recipe", "set_nx", "--fault", "crash", "--fault", "restart", "--clients", "2", "--budget", "5s")
    cells = json.loads(run(*args, "--json")[1])["cells"]
    assert [(cell["invariant"], cell["server"]) for cell in cells] == [
        (invariant, server) for server in ("keeps", "loses") for invariant in INVARIANTS
    ]
    kept, lost = (next(c for c in cells if c["invariant"] == "MutualExclusion" and c["server"] == s) for s in SERVERS)
    assert (kept["verdict"], lost["verdict"], lost["faults"]) == ("holds", "broken", ["restart"])
    _, out, _ = run(*args)
    assert "While the server keeps its data:" in out
    assert "If the server loses its data, or its clock jumps:" in out
    _, out, _ = run(*args, "--spare-server", "--json")
    assert {cell["server"] for cell in json.loads(out)["cells"]} == {"keeps"}


def test_a_bar_is_shown_to_people_and_stdout_stays_clean() -> None:
    """On a terminal for stderr alone, so that what the bar draws can be told from the result."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*CLI, "lab", "--recipe", "getset", "--budget", "1s", "--json"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment(TERM="xterm"),
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end was closed
                break
            if not chunk:
                break
            shown += chunk
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert json.loads(out)["cells"]
    assert b"recipes" in shown


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["matrix", "json"])
def test_where_nobody_looks_each_recipe_is_a_line_on_stderr_and_stdout_stays_clean(options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*CLI, "lab", *QUICK, "--recipe", "set_nx", *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["set_nx", "setnx"]
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"\w+: [\d,]+ states, \d+ broken; {number} of 2 recipes", line)
        assert line not in done.stdout
    if options:
        assert {cell["recipe"] for cell in json.loads(done.stdout)["cells"]} == {"set_nx", "setnx"}


def test_the_primitives_are_searched_by_name(run: Run) -> None:
    code, out, err = run("primitives", "Latch", "--budget", "500ms", "--seed", "7")
    assert (code, err) == (0, "")
    heading, verdict, _, legend, bounds = out.splitlines()
    assert re.fullmatch(r"latch, 3 clients: [\d,]+ states; .*2 faults in part", heading)
    assert re.match("  (holds|unknown): ShutUntilZero", verdict), "a busy machine may not come to the end of anything"
    assert all(f"{word}: " in legend for word in ("complete", "not complete", "in part"))
    assert bounds.endswith("budget 0.5 s, seed 7")


# Wrong usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--recipe", "setxn"], ROWS),
        (["--fault", "earthquake"], [*FAULTS, "none"]),
        (["show", "setnx", "Exclusion"], INVARIANTS),
        (["show", "setnx:x", "Fifo"], ROWS),
        (["show", "setnx"], ["INVARIANT"]),
        (["--clients", "1"], ["2<=x<=4"]),
        (["--clients", "5"], ["2<=x<=4"]),
        (["--budget", "soon"], ["not a duration"]),
        (["--seed", "x"], ["not a valid integer"]),
        (["--seed", "3", "show", "setnx", "Fifo"], ["holdfast lab show --seed"]),
        (["dance"], ["No such command"]),
        (["primitives", "lotch"], list(PRIMITIVES)),
        (["report"], ["--html"]),
        (["report", "--html", "/nowhere/at/all.html"], ["cannot be written"]),
        (["show", "setnx", "Fifo", "--save", "/"], ["cannot be written"]),
        (["replay", "/nowhere/at/all.json"], ["No such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_64_and_says_what_there_is(run: Run, args: list[str], said: list[str]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (64, "")
    assert all(part in err for part in said)


def test_help_of_everything(run: Run) -> None:
    for args in ([], ["show"], ["replay"], ["report"], ["primitives"]):
        code, out, _ = run(*args, "--help")
        assert code == 0
        assert out.startswith(f"Usage: holdfast {' '.join(['lab', *args])} ")


WITHOUT_LUPA = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lupa":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from holdfast.cli import main
main()
"""


@pytest.mark.parametrize("args", [[], ["show", "setnx", "Fifo"], ["report", "--html", "x.html"], ["replay", "-"]])
def test_without_lua_it_says_what_to_install(args: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_LUPA, "lab"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment(), "timeout": PATIENCE_S}
    done = subprocess.run([*command, *args], stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 69
    assert done.stdout == ""
    assert "run: pip install 'holdfast[lab]', or in a clone: pip install -e '.[lab]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert subprocess.run([*command, "--help"], **options).returncode == 0


# Drawings -----------------------------------------------------------------------------------------------------------


def test_show_draws_the_trace_and_explains_it(run: Run) -> None:
    code, out, err = run(*CRASHED)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"setnx, NoOrphan: broken in \d+ steps? \(crash\)", lines[0])
    assert max(map(len, lines[:-1])) <= 80
    assert "[crash]" in out
    assert "✗ " in out
    assert MEANING["NoOrphan"] in " ".join(out.split())
    assert "seed 0" in lines[-1]


def test_show_says_that_it_holds_and_in_how_many_states(run: Run, tmp_path: Path) -> None:
    args = ("show", "set_nx", "mutualexclusion", "--fault", "none", "--clients", "2")
    code, out, _ = run(*args)
    assert code == 0
    assert re.search(r"set_nx, MutualExclusion: holds in the [\d,]+ states", out)
    code, out, _ = run(*args, "--save", str(tmp_path / "none.json"))
    assert code == 1, "what was to be saved does not exist"
    assert not list(tmp_path.iterdir())


def test_show_draws_at_once_what_a_server_that_loses_its_data_breaks(run: Run) -> None:
    """With a budget of hours: the search ends when the run is found."""
    code, out, _ = run("show", "holdfast", "MutualExclusion", "--budget", "9h")
    assert code == 0
    first, *_ = out.splitlines()
    assert re.fullmatch(r"holdfast, MutualExclusion: broken in \d+ steps \(\w+: the server loses data\)", first)
    told = " ".join(out.split())
    assert re.search(
        r"While the server keeps its data, and its clock does not jump, MutualExclusion is not broken in [\d,]+ states "
        r"so far\. holdfast lab show holdfast MutualExclusion --spare-server searches that to the end\.",
        told,
    )


def test_show_of_a_promise_says_that_it_holds_whatever_the_server_does(run: Run) -> None:
    args = ("show", "set_nx", "NoOrphan", "--fault", "crash", "--fault", "restart", "--clients", "2", "--budget", "5s")
    code, out, _ = run(*args)
    assert code == 0
    assert re.search(r"^set_nx, NoOrphan: holds in the [\d,]+ states that were explored\.$", out, re.MULTILINE)
    assert "If the server loses its data, or its clock jumps: holds in the" in out
    _, out, _ = run(*args, "--spare-server")
    assert "loses" not in out
    assert "of a server that keeps its data" in out


def test_show_saves_the_trace_and_the_image(run: Run, saved: Path, tmp_path: Path) -> None:
    trace = Trace.from_json(saved.read_text())
    assert (trace.recipe, trace.invariant, trace.faults) == ("setnx", "NoOrphan", ("crash",))
    assert trace.moments[-1].violation
    image = tmp_path / "image.svg"
    assert run(*CRASHED, "--svg", str(image))[0] == 0
    assert image.read_text().startswith("<svg ")


def test_the_trace_is_saved_though_nobody_reads_the_drawing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        subprocess.run(
            [*CLI, "lab", *CRASHED, "--save", str(path)],
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=environment(),
            timeout=PATIENCE_S,
        )
    finally:
        os.close(theirs)
    assert Trace.from_json(path.read_text()).moments


def test_report_writes_one_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = run("report", "--html", str(page), *QUICK)
    assert (code, err.count("\n")) == (0, 1)
    assert re.search(r"page\.html: \d+ pitfalls in [\d,]+ states; .*seed 0", out)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert 'id="setnx-NoOrphan"' in text


# On a real server ---------------------------------------------------------------------------------------------------


def test_replay_of_another_claim_is_not_confirmed(run: Run, saved: Path, server: Server, tmp_path: Path) -> None:
    """The same schedule does not break mutual exclusion, whatever the file says."""
    data = json.loads(saved.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "invariant": "MutualExclusion"}))
    code, out, _ = run("replay", str(other), "--url", server.url)
    assert code == 1
    assert out.splitlines()[-1].startswith("not confirmed: ")


def test_replay_prints_no_control_character_of_a_trace(run: Run, saved: Path, server: Server, tmp_path: Path) -> None:
    data = json.loads(saved.read_text())
    for moment in data["moments"]:
        moment["does"] = "\x1b]0;owned\x07\nconfirmed: all is well"
        moment["command"] = moment["command"] and "\x1b[31mFLUSHALL"
    crafted = tmp_path / "crafted.json"
    crafted.write_text(json.dumps(data))
    code, out, err = run("replay", str(crafted), "--url", server.url)
    assert code == 1
    assert "\\x1b]0;owned\\x07\\nconfirmed" in out
    assert "and not \\x1b[31mFLUSHALL" in out
    assert all(char.isprintable() or char == "\n" for char in out + err)


def test_replay_performs_the_trace_and_confirms_it(saved: Path, server: Server) -> None:
    """From stdin, on the server that the environment names."""
    done = subprocess.run(
        [*CLI, "lab", "replay", "-"],
        input=saved.read_text(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(HOLDFAST_URL=server.url),
    )
    assert done.returncode == 0, done.stderr
    *moments, last = done.stdout.splitlines()
    assert moments
    assert last.startswith("confirmed: ")


def test_what_no_real_server_can_be_made_to_do(run: Run, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "jump.json"
    assert run("show", "set_nx", "MutualExclusion", "--fault", "clock_jump", "--save", str(path))[0] == 0
    code, out, err = run("replay", str(path), "--url", server.url)
    assert (code, out) == (69, "")
    assert "clock" in err


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"moments": [], "choices": []}', "no json"])
def test_what_is_no_trace_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    code, _, err = run("replay", str(file), "--url", "redis://127.0.0.1:1")
    assert code == 64
    assert "is not a trace" in err


def test_replay_without_a_server(run: Run, saved: Path) -> None:
    code, _, err = run("replay", str(saved), "--url", f"redis://127.0.0.1:{free_port()}")
    assert code == 69
    assert "Traceback" not in err
    assert run("replay", str(saved), "--url", "gopher://x")[0] == 64
