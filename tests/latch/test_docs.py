"""docs/latch.md does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "latch.md").read_text()


def test_the_code_on_the_page_runs(server: Server) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)).replace(
        "localhost:6379", f"127.0.0.1:{server.port}"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *lines, refused = done.stdout.splitlines()
    assert lines == ["2 left", "not yet", "True"]
    assert "count=4" in refused
    assert "began with count=3" in refused
