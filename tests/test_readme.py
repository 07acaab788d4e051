"""The README's examples run as one program; all pages are linked, and all links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

import holdfast
from tests.support import LEASE_LOGGED

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_examples_run(embedded: str) -> None:
    """On an embedded server of their own: only its directory is changed."""
    program = "\n".join(BLOCKS).replace("local://", embedded)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not LEASE_LOGGED.match(line)] == []
    fence, remaining = done.stdout.splitlines()
    assert int(fence) > 0
    assert 25 < float(remaining) < 30


@pytest.mark.parametrize("page", [README, CHINESE], ids=["English", "Chinese"])
def test_it_is_short_and_in_order(page: str) -> None:
    assert len(page.splitlines()) <= 120
    order = [
        *("\nmake demo ", "\nmake test ", "pip install", "client.lock(", "redis-py", "409", "503", "`SET NX`"),
        *("client.rlock(name)", "(docs/which-lock.md)", "(docs/moving.md)", "(docs/testing.md)", "(docs/engines.md)"),
        *("(docs/stuck.md)", "(docs/architecture.md)", "`holdfast lab`", "docs/lab-getset.svg", "docs/contention.svg"),
    ]
    places = [page.rfind(mark) if "docs/" in mark else page.find(mark) for mark in order]
    assert places == sorted(places)
    assert -1 not in places


@pytest.mark.parametrize("page", [README, CHINESE], ids=["English", "Chinese"])
def test_it_uses_few_words_of_our_own_and_explains_them(page: str) -> None:
    assert re.findall("cohort|tombstone|statistics|recipe|adopt", page) == []
    explained = next(line for line in page.splitlines() if "*lease*" in line)
    for word in ("lease", "fence"):
        assert page.index(word) == page.index(explained) + explained.index(word)


def test_what_comes_from_redis_py_means_the_same(url: str, admin: redis.Redis) -> None:
    """Each line is taken from the page, and excludes the other while it is held."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    old, new = re.findall(r"^[-+]with (.*?):  ", diff, re.MULTILINE)
    with holdfast.connect(admin) as client:
        scope = {"r": admin, "client": client}
        lock, lease = eval(old, scope), eval(new, scope).acquire()
        assert lease.remaining() < 10 >= admin.ttl("order:42")
        assert not lock.acquire(blocking=False)
        lease.release()
        assert lock.acquire()
        assert eval(new, scope).acquire(blocking=False) is None
        assert 9 <= admin.ttl("order:42") <= 10
        lock.release()


def test_what_is_raised_in_place_of_the_errors_of_redis_py(url: str, admin: redis.Redis) -> None:
    with holdfast.connect(url) as client:
        with admin.lock("x", timeout=30):
            with pytest.raises(holdfast.AcquireTimeout), client.lock("x", wait=0):
                pass
        with client.lock("x"), pytest.raises(LockError), admin.lock("x", blocking=False):
            pass
        with pytest.raises(LockNotOwnedError), admin.lock("x", timeout=30):
            admin.delete("x")
        with pytest.raises(holdfast.LeaseLost), client.lock("x", ttl=1, max_hold=1) as lease:
            assert lease.lost.wait(30)
        lock, theirs = client.lock("x"), admin.lock("x", timeout=30)
        for one, error in ((lock, holdfast.NotHeld), (theirs, LockError)):
            one.acquire()
            one.release()
            with pytest.raises(error):
                one.release()


def test_the_first_example_is_short() -> None:
    assert 5 <= len(BLOCKS[0].splitlines()) <= 10
    assert README[: README.index("```python")].count("\n") < 25, "it is on the first screen"


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_the_classes_are_where_annotations_are_told_to_find_them(face: str) -> None:
    page = (ROOT / "docs" / "lock.md").read_text()
    (named,) = set(re.findall(rf"`holdfast\.{face}\.(\w+)`", page))
    module = import_module(f"holdfast.{face}")
    assert {named, "Semaphore", "RLock", "RWLock", "Latch", "Election", "Lease"} <= set(module.__all__)


def test_the_index_has_everything_that_a_client_can_do() -> None:
    for name in dir(holdfast.Client):
        if not name.startswith("_"):
            assert re.search(rf"client\.{name}\b", INDEX), name


@pytest.mark.parametrize("page", ["docs/README.md", "docs/guarantees.md"])
def test_every_primitive_is_linked(page: str) -> None:
    """The page of each is where its method's row in the index leads."""
    primitives = set(re.findall(r"^\| `.*\]\((\w+\.md)\) \|$", INDEX, re.MULTILINE))
    assert {"rlock.md", "semaphore.md", "cache.md", "guard.md", "latch.md"} <= primitives
    linked = {Path(link).name for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())}
    assert primitives <= linked


def test_the_index_omits_no_page() -> None:
    index = INDEX.partition("## All calls")[0]
    linked = {str((ROOT / "docs" / link).resolve().relative_to(ROOT)) for link in re.findall(r"\]\(([^)#]+)\)", index)}
    assert linked == set(PAGES) - {"docs/README.md"}
    assert "(docs/README.md)" in README


def test_the_two_commands_at_the_top_are_targets() -> None:
    first = README[: README.index("```python")]
    targets = re.findall(r"^make (\w+)", first, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert first.index("`python -m examples.lottery`") < first.index("make demo"), "for those who have the package"
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
