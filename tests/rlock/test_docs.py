"""docs/rlock.md and docs/hand-over.md do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server

DOCS = Path(__file__).parents[2] / "docs"
SAID = {
    "rlock.md": ["still held: True"],
    "hand-over.md": ["False", "order:42 True", "slot 0 True"],
}


def code_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", SAID)
def test_the_code_on_the_page_runs(page: str, server: Server) -> None:
    program = code_of(page).replace("localhost:6379", f"127.0.0.1:{server.port}")
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == SAID[page]


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
