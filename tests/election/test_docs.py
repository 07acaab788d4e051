"""docs/election.md and the example do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.servers import Server
from tests.support import run_page

ROOT = Path(__file__).parents[2]


def test_the_code_on_the_page_runs(server: Server) -> None:
    assert run_page("election.md", server.port) == [
        "leads: web True",
        "None",
        "mails",
        "reports",
        "backups",
        "leads once more: True",
    ]


def test_in_the_example_another_leads_after_the_leader_was_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.leader", "--ttl", "0.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    fences = [int(fence) for fence in re.findall(r"leads, fence (\d+)", done.stdout)]
    assert len(fences) == 4
    assert fences == sorted(set(fences))
    assert "was killed" in done.stdout
    assert len(set(re.findall(r"(\w+) leads", done.stdout))) == 3
    assert max(map(len, done.stdout.splitlines())) <= 80
