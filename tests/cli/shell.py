"""What the tests of the command line share."""

from __future__ import annotations

import json
import os
import re
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
Start = Callable[..., subprocess.Popen[str]]
Call = Callable[..., tuple[int, str, str]]


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


def lines_of(stderr: str) -> list[str]:
    """Its lines, without those that say that it waits: on a busy machine a free lock may take that long, too."""
    return [line for line in stderr.splitlines() if not re.match(r'holdfast: waiting for|\{"event": "waiting"', line)]


def events_of(stderr: str) -> list[dict[str, Any]]:
    """All events but ``waiting``."""
    return [json.loads(line) for line in lines_of(stderr)]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = process.stderr.read() if process.stderr is not None else ""
        pytest.fail(f"it said nothing and ended with {process.wait(PATIENCE_S)}: {said}")
    return line


def error_line(process: subprocess.Popen[str]) -> str:
    """The next line of the process's stderr."""
    assert process.stderr is not None
    return process.stderr.readline()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err
