"""docs/rlock.md and docs/hand-over.md do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server
from tests.support import code_of, run_page

DOCS = Path(__file__).parents[2] / "docs"
SAID = {
    "rlock.md": ["still held: True"],
    "hand-over.md": ["False", "order:42 True", "slot 0 True"],
}


@pytest.mark.parametrize("page", SAID)
def test_the_code_on_the_page_runs(page: str, server: Server) -> None:
    assert run_page(page, server.port) == SAID[page]


def test_a_type_checker_takes_what_is_handed_over(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code_of("hand-over.md"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
