"""The glossary of CONTRIBUTING.md is that of the code: its terms are used, and retired identifiers are gone."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
TABLE = CONTRIBUTING.partition("## Glossary")[2]
RETIRED = re.findall(r"\w+", TABLE.partition("```text")[2].partition("```")[0])
TERMS = [row.split("|") for row in TABLE.splitlines() if row.startswith("| ")][1:]


def identifiers() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        found.update((path.stem, path.name))
        with path.open("rb") as file:
            found.update(token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME)
    found.update(path.name for path in (ROOT / "src").rglob("*") if path.is_dir() or path.suffix == ".lua")
    return found


def test_each_term_is_in_the_code() -> None:
    used = identifiers()
    named = [name for row in TERMS for name in re.findall(r"`([^`]+)`", row[3])]
    assert len(TERMS) > 25
    assert [name for name in named if name not in used] == []


def test_no_term_is_explained_twice() -> None:
    terms = [row[1].strip() for row in TERMS]
    assert len(set(terms)) == len(terms)


def test_words_that_only_this_code_uses_have_a_row() -> None:
    assert {"claim", "cohort", "crowd", "keeper", "recipe", "tombstone"} <= {row[1].strip() for row in TERMS}


def test_no_retired_identifier_is_left() -> None:
    assert len(set(RETIRED)) == len(RETIRED) > 70
    assert sorted(set(RETIRED) & identifiers()) == []
