"""The README's examples run as one program; all pages are linked, and all links lead somewhere."""

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
from tests.support import LEASE_LOGGED

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        yield directory
        with redis.Redis(unix_socket_path=f"{directory}/readme/holdfast.sock") as server:
            server.shutdown(nosave=True)
        while list(Path(directory, "readme").glob("holdfast.sock")):
            time.sleep(0.01)


def test_the_examples_run(directory: str) -> None:
    """On an embedded server of their own: only its directory is changed."""
    program = "\n".join(BLOCKS).replace("local://", f"local://{directory}/readme")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not LEASE_LOGGED.match(line)] == []
    fence, remaining, later_fence = done.stdout.splitlines()
    assert int(fence) < int(later_fence), "the later holder has the greater fence"
    assert 25 < float(remaining) < 30, "the first request starts the server, which takes time"


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 3


def test_the_first_example_is_short() -> None:
    assert 5 <= len(BLOCKS[0].splitlines()) <= 10
    assert README[: README.index("```python")].count("\n") < 25, "it is on the first screen"


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_the_classes_are_where_annotations_are_told_to_find_them(face: str) -> None:
    page = (ROOT / "docs" / "lock.md").read_text()
    (named,) = set(re.findall(rf"`holdfast\.{face}\.(\w+)`", page))
    module = import_module(f"holdfast.{face}")
    assert {named, "Semaphore", "RLock", "RWLock", "Latch", "Election", "Lease"} <= set(module.__all__)


def test_everything_that_a_client_can_do_is_here() -> None:
    for name in dir(holdfast.Client):
        if not name.startswith("_") and name not in ("invalidate",):  # its page has it
            assert re.search(rf"client\.{name}\b", README), name


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
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_make_test_needs_no_server_that_make_does_not_install() -> None:
    """On a new machine only test-engines and test-floors install Redis itself and memcached."""
    (elsewhere,) = re.findall(r"^SERVERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    in_make_test = [name for name in tests if not name.startswith(tuple(elsewhere.split()))]
    needing = r"\b(find_redis|MemcachedServer|server_memcached)\b"
    assert [
        name
        for name in in_make_test
        if name != "tests/test_readme.py" and re.search(needing, (ROOT / name).read_text())
    ] == []


def anchors_of(page: Path) -> set[str]:
    """The fragments by which the headings of a page can be linked, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        target, _, fragment = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if fragment:
            assert fragment in anchors_of(path), f"{page}: {link}"
