"""The demo does what it says, also where there is no terminal to draw on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_lottery_gives_out_each_prize_once():
    done = subprocess.run(
        [sys.executable, "-m", "examples.lottery", "--prizes", "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "With Holdfast: exactly 40 draws of 40 prizes, each once." in done.stdout.splitlines()
    assert re.search(r"given out, of 40 prizes +\d+ +40\b", done.stdout)
    assert re.search(r"prizes given out twice or more +\d+ +0\b", done.stdout)
    assert "strictly rising" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
