"""Each test that a page names is there: the paths exist, and ``-k`` selects at least one test below them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
COMMANDS = sorted(
    {command for page in PAGES for command in re.findall(r"`[^`]*\bpytest (tests[^`]*)`", page.read_text())}
)
NAMED = sorted(
    {
        named
        for place in [*PAGES, *(ROOT / "src").rglob("*.py"), ROOT / "Makefile", ROOT / ".ci" / "run"]
        for named in re.findall(r"\btests/[\w/]+(?:\.py)?", place.read_text())
    }
)
FACES = ("blocking", "asyncio")  # ids of a fixture that all tests share


@functools.cache
def names_in(path: Path) -> tuple[list[str], list[str]]:
    """The tests of a file, and the ids that it gives to parameters."""
    tree = ast.parse(path.read_text())
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    keywords = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "ids"]
    ids = [node.value for value in keywords for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return [name for name in tests if name.startswith("test_")], [name for name in ids if isinstance(name, str)]


def is_part(known: str, word: str, /, **_: object) -> bool:
    return word.lower() in known


def selected(expression: str, paths: list[str]) -> bool:
    """As pytest matches it: a part of the name of a test, of its file, of a folder or of a parameter."""
    compiled = Expression.compile(expression)
    for where in paths:
        place = ROOT / where
        for path in place.rglob("test_*.py") if place.is_dir() else [place]:
            tests, ids = names_in(path)
            for name in tests:
                known = " ".join([*path.relative_to(ROOT).parts[1:], name, *ids, *FACES]).lower()
                if compiled.evaluate(functools.partial(is_part, known)):
                    return True
    return False


def test_what_is_named_exists() -> None:
    assert [named for named in NAMED if not (ROOT / named).exists()] == []


def test_each_command_selects_a_test() -> None:
    assert len(COMMANDS) > 100
    nothing = []
    for command in COMMANDS:
        paths, _, expression = command.partition(" -k ")
        if not selected(expression.strip('"') or "test", paths.split()):
            nothing.append(command)
    assert nothing == []


def test_a_name_that_is_not_there_selects_nothing() -> None:
    assert selected("selects_nothing", ["tests"])
    assert not selected("selects" + "_what_is_nowhere", ["tests"])
