"""The README's examples, run as they stand, one after the other in one program."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import code_of

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


def test_every_page_with_code_is_run_by_a_test() -> None:
    """Each page has a test of its own beside what it is about, as only there it is known what its code should say."""
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    running = [text for text in tests if "```python" in text or "run_page(" in text]
    for page in (ROOT / "docs").glob("*.md"):
        if "```python" in page.read_text():
            names = f'"{page.name}"', f'"{page.stem}"'
            assert any(name in text for text in running for name in names), page.name


def test_the_code_of_the_pages_runs_without_a_server_at_hand(directory: str, server: Server) -> None:
    """What each should say is the matter of its own test. The store of a guard is a server of one's own."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        code = code_of(page.name)
        if "redis://localhost" not in code:
            continue
        assert '"redis://localhost:6379/0")  # or "local://"' in code
        program = code.replace("redis://localhost:6379/0", f"local://{directory}/readme")
        program = program.replace("6379", str(server.port))
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=directory
        )
        assert done.returncode == 0, f"{page.name}: {done.stderr}"


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_the_classes_are_where_annotations_are_told_to_find_them(face: str) -> None:
    (named,) = set(re.findall(rf"`holdfast\.{face}\.(\w+)`", README))
    module = import_module(f"holdfast.{face}")
    assert {named, "Lock", "RLock", "RWLock", "Latch", "Election", "Lease"} <= set(module.__all__)


def test_everything_that_a_client_can_do_is_here() -> None:
    for name in dir(holdfast.Client):
        if not name.startswith("_") and name not in ("close", "invalidate"):  # of those their pages tell
            assert re.search(rf"client\.{name}\b|with client\.{name}", README), name


@pytest.mark.parametrize("page", ["README.md", "docs/guarantees.md"])
def test_every_primitive_is_linked(page: str) -> None:
    """The page of each is where its method's row in the README leads."""
    primitives = {Path(link).name for link in re.findall(r"^\|.*\]\((docs/\S+\.md)\) \|$", README, re.MULTILINE)}
    assert {"rlock.md", "semaphore.md", "cache.md", "guard.md", "latch.md"} <= primitives
    linked = {Path(link).name for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())}
    assert primitives <= linked


def test_every_page_is_linked() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+\.md)", README))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


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
