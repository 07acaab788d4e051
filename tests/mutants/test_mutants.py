"""How mistakes are drawn, and whether those that are kept still apply. ``python -m tests.mutants`` plants them."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.kept import Kept, load
from tests.mutants.selection import runs_for
from tests.mutants.sites import OPERATORS, ROOT, Mutant, area_of, draw, find_mutants, line_of, planted
from tests.mutants.sites import lua_mutants as of_lua
from tests.mutants.sites import python_mutants as of_python

PYTHON = """
def release(items, key, token):
    found = yield from ask(key)
    if found is None:
        return GONE
    yield from end_watch(token)
    items.forget(token)
    mine = [item for item in found if item.token == token]
    done = yield from perform(Txn((Created(key, 1), Modified(key, 2)), (Delete(key),)))
    while not done and mine:
        done = found or 1
    return DONE if done else GONE
"""
LUA = """
if owner == ARGV[1] and (left or right) then
  redis.call('DEL', KEYS[1])
elseif not owner then
  local gone = redis.call('GET', KEYS[1])
end
if left_ms < 5 then
  return 0
end
"""


def changes(mutants: list[Mutant]) -> set[tuple[str, str]]:
    """Of each: its operator, and the line that it puts there."""
    found = set()
    for mutant in mutants:
        old, new = mutant.old.split("\n"), mutant.new.split("\n")
        found |= {(mutant.operator.split()[0], line.strip()) for line in new if line not in old}
    return found


def test_mistakes_of_python() -> None:
    assert changes(of_python("src/x.py", PYTHON)) == {
        ("drop", "if False:"),
        ("invert", "if not (found is None):"),
        ("skip", "yield from ()"),
        ("skip", "pass"),
        ("drop", "mine = [item for item in found if True]"),
        ("drop", "done = yield from perform(Txn((Modified(key, 2),), (Delete(key),)))"),
        ("drop", "done = yield from perform(Txn((Created(key, 1),), (Delete(key),)))"),
        ("drop", "while mine:"),
        ("drop", "while not done:"),
        ("invert", "while not (not done and mine):"),
        ("invert", "return DONE if not (done) else GONE"),
    }


def test_mistakes_of_lua() -> None:
    assert changes(of_lua("src/x.lua", LUA)) == {
        ("drop", "if (left or right) then"),
        ("drop", "if owner == ARGV[1] then"),
        ("invert", "if not (owner == ARGV[1] and (left or right)) then"),
        ("skip", "do end"),
        ("invert", "elseif owner then"),
        ("invert", "if not (left_ms < 5) then"),
        ("drop", "if false then"),
    }


def test_a_mistake_is_planted_in_its_function_alone() -> None:
    twice = PYTHON + PYTHON.replace("def release", "def abandon")
    for mutant in of_python("src/x.py", twice):
        after = planted(twice, mutant)
        head, found, tail = after.partition("def abandon")
        assert found
        assert (head in twice) == (mutant.function == "abandon")
        assert (tail in twice) == (mutant.function == "release")
        assert after.split("\n")[line_of(twice, mutant) - 1] != twice.split("\n")[line_of(twice, mutant) - 1]


def test_a_mistake_that_no_longer_applies_is_noticed() -> None:
    mutant = of_python("src/x.py", PYTHON)[0]
    with pytest.raises(AssertionError, match="not there"):
        planted(PYTHON.replace("found", "seen"), mutant)
    with pytest.raises(AssertionError, match="no function"):
        planted(PYTHON.replace("def release", "def free"), mutant)


def test_a_seed_draws_the_same_mistakes_evenly() -> None:
    mutants = find_mutants()
    drawn = draw(mutants, 7, 20)
    assert drawn == draw(list(mutants), 7, 20)
    assert len(set(drawn)) == 20
    assert drawn != draw(mutants, 8, 20)
    cells = Counter((area_of(mutant.file), mutant.operator) for mutant in drawn)
    assert len(cells) == 3 * len(OPERATORS)
    assert set(cells.values()) == {2, 3}
    for mutant in drawn:
        source = planted((ROOT / mutant.file).read_text(), mutant)
        if mutant.file.endswith(".py"):
            ast.parse(source)
        runs = [path for run in runs_for(mutant) for path in run.paths]
        assert [path for path in runs if not (ROOT / path).exists()] == []
        assert runs


@pytest.mark.parametrize(
    "kept", load(), ids=lambda kept: f"{kept.mutant.file.rpartition('/')[2]}-{kept.mutant.function}"
)
def test_what_is_kept_applies_and_is_accounted_for(kept: Kept) -> None:
    planted((ROOT / kept.mutant.file).read_text(), kept.mutant)
    assert bool(kept.found_by) != bool(kept.equivalent)
    if kept.found_by:
        path, _, rest = kept.found_by.partition("::")
        assert f"def {rest.partition('[')[0]}(" in (ROOT / path).read_text()
