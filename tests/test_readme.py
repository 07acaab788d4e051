"""The README's examples, run as they stand, one after the other in one program."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.servers import Server

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        yield directory
        with redis.Redis(unix_socket_path=f"{directory}/readme/holdfast.sock") as server:
            server.shutdown(nosave=True)
        while list(Path(directory, "readme").glob("holdfast.sock")):
            time.sleep(0.01)


def test_the_examples_run(directory: str, server: Server) -> None:
    """On servers of their own: only the directory of the one and the port of the other are changed."""
    program = "\n".join(BLOCKS).replace("local://", f"local://{directory}/readme").replace("6379,", f"{server.port},")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[0]) < int(lines[2]), "the later holder has the greater fence"
    assert 29 < float(lines[1]) < 30
    assert "nobody else is at it" in lines
    assert any("nothing listens there" in line for line in lines)
    assert "secret" not in done.stdout


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 7


def test_the_two_commands_at_the_top_are_targets() -> None:
    first = README[: README.index("```python")]
    targets = set(re.findall(r"^make (\w+)", first, re.MULTILINE))
    assert targets == {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(map(str, Path("docs").glob("*.md")))]
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
