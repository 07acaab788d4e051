"""What the tests of the command line share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast

PATIENCE_S = 20.0
CLI = [sys.executable, "-m", "holdfast.cli"]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    source = str(Path(holdfast.__file__).parents[1])
    return {**kept, "PYTHONPATH": source, "PYTHONWARNINGS": "error", **more}


def eventually(condition: Callable[[], Any], what: str = "it", within: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + within
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def events_of(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines()]


def first_line(process: subprocess.Popen[str]) -> str:
    line: str = process.stdout.readline()
    if not line:
        pytest.fail(f"it said nothing and ended with {process.wait(PATIENCE_S)}: {process.stderr.read()}")
    return line


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err
