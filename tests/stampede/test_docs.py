"""docs/cache.md and the example do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.servers import Server
from tests.support import run_page

ROOT = Path(__file__).parents[2]


def test_the_code_on_the_page_runs(server: Server) -> None:
    said = ["3", "user:42:en", "LookupError no such user", "report of 42", "1 True"]
    assert run_page("cache.md", server.port) == said


def test_the_example_asks_the_database_once_a_second() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.cache_storm", "--seconds", "1.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = re.search(r"queries to the database +(\d+) +(\d+) +(\d+)", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > int(found[2])
    assert max(map(len, done.stdout.splitlines())) <= 80
