"""What ``acquire`` returns, to a type checker: None only where it may come back without a lease."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TYPED = ROOT / "tests" / "conformance" / "typed.py"


def test_a_type_checker_knows_whether_acquire_may_return_none() -> None:
    """Each ignored error must be one: --strict warns of an ignore that is not needed."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(TYPED)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TYPED.read_text().count("assert_type(") >= 30
