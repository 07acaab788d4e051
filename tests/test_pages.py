"""The Python on each page of docs/ runs as one program, and does what the page says."""

from __future__ import annotations

import inspect
import re
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import redis.lock

from holdfast.lua import SCRIPTS
from tests.servers import Server
from tests.support import LEASE_LOGGED, lock_keys

DOCS = Path(__file__).parent.parent / "docs"


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def code_of(page: str) -> str:
    """All the Python on a page, as one program."""
    return "\n".join(blocks_of(page, "python"))


def run(program: str, directory: Path, *options: str) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not LEASE_LOGGED.match(line)] == []
    return done.stdout.splitlines()


WITH_CODE = sorted(page.name for page in DOCS.glob("*.md") if code_of(page.name))

# What a page leaves open, which a program that ends with it closes.
CLOSING = {"guard.md": "\nconnection.close()\nclient.close()\nstore.close()\n"}
# All warnings are errors, but those that a page is about.
WARNS = {"recipes.md": "ignore::UserWarning"}

# What each page prints, line by line. A line that ends in "..." is the beginning of a longer one.
PRINTED = {
    "architecture.md": ["1 0 {} 0", "True"],
    "cache.md": ["3", "user:42:en", "LookupError no such user", "report of 42", "1 True"],
    "election.md": ["leads: web True", "None", "mails", "reports", "backups", "leads once more: True"],
    "engines.md": ["held on any engine: True", "held on both: True"],
    "guarantees.md": ["busy: another holder has it", "the fence rises: True"],
    "guard.md": [],
    "hand-over.md": ["False", "order:42 True", "slot 0 True"],
    "latch.md": ["2 left", "not yet", "True", "latch('index:built', count=4): it began with count=3..."],
    "lock.md": [
        "True order:42",
        "no other process does this now",
        "True",
        "lock 'x': cannot use redis://127.0.0.1:1/0: nothing listens there. Start a server there, ...",
    ],
    "lost-leases.md": [
        "False its ttl of 0.3 s ran out...",
        "LeaseLost for import",
        "step 1",
        "step 2",
        "the body was cancelled",
        "refused",
        "paid",
    ],
    "monitoring.md": ["True"],
    "moving.md": ["held, for 10 s at most", "None"],
    "multi.md": ["account:7, account:3 ['account:3', 'account:7']"],
    "recipes.md": ["9....", "None"],
    "rlock.md": ["still held: True"],
    "rwlock.md": ["any number of readers", "one writer", "reads what it has written, beside other readers"],
    "semaphore.md": ["slot 0"],
    "stuck.md": [
        "nightly:report lock report-builder True 0",
        "report-builder True",
        "it hangs",
        "['it hangs']",
    ],
    "testing.md": ["busy", "lost", "down"],
    "web-service.md": [],  # tests/web_service runs it
    "which-lock.md": [
        "report",
        "order 42 with a fence: True",
        "read",
        "write",
        "job in slot 0",
        "move money between ['account:3', 'account:7']",
        "tea costs 3",
        "sent",
        "leader: web",
        "all done: True",
        "worker holds it: True",
    ],
    "wire-format.md": ["True", "['wire:7', 'wire:7:hf1:fence:{wire:7}']"],
}


def test_the_modules_of_the_architecture_exist() -> None:
    source, page = DOCS.parent / "src" / "holdfast", (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:protocol|lua|drivers|engines|lab)/[\w/]+(?:\.\w+)?|\w+\.py)`", page))
    assert "protocol/mutex.py" in named
    assert [path for path in sorted(named) if not (source / path).exists()] == []


def test_the_steps_of_the_wire_format_are_all_there_are() -> None:
    table = (DOCS / "wire-format.md").read_text().partition("| step |")[2].partition("The name of a step")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == SCRIPTS.keys()


def test_each_page_with_code_is_run() -> None:
    assert set(WITH_CODE) == PRINTED.keys()


@pytest.mark.parametrize("page", PRINTED)
def test_the_code_prints_what_the_page_says(page: str, server: Server, tmp_path: Path) -> None:
    program = code_of(page).replace("localhost", "127.0.0.1").replace("6379", str(server.port)) + CLOSING.get(page, "")
    warnings = ["-W", "error", *(("-W", WARNS[page]) if page in WARNS else ())]
    lines, expected = run(program, tmp_path, *warnings), PRINTED[page]
    assert len(lines) == len(expected), lines
    for line, wanted in zip(lines, expected, strict=True):
        if wanted.endswith("..."):
            assert line.startswith(wanted.removesuffix("..."))
        else:
            assert line == wanted
    if page == "guard.md":
        check_what_was_guarded(server, tmp_path)
    if page == "recipes.md":
        with server.client() as admin:
            assert lock_keys(admin) == []


def check_what_was_guarded(server: Server, directory: Path) -> None:
    with server.client() as admin:
        assert admin.get("state:42") == b"returned"
        assert admin.hgetall("items:42") == {b"apples": b"3", b"pears": b"1"}
    assert (directory / "report.json").read_text() == '{"total": 3}\n'
    connection = sqlite3.connect(directory / "orders.db")
    assert connection.execute("SELECT id, state FROM orders").fetchall() == [(42, "sent")]
    connection.close()


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_runs_on_an_embedded_server(page: str, embedded: str, server: Server, tmp_path: Path) -> None:
    """As the comment beside each connect() says. A guard's store is a server of its own."""
    code = code_of(page)
    assert re.search(r'"redis://localhost:6379/0"\)?  # or "local://"', code)
    program = code.replace("redis://localhost:6379/0", embedded).replace("6379", str(server.port))
    run(program, tmp_path, "-W", WARNS.get(page, "default"))


def test_the_guarantees_begin_with_one_screen() -> None:
    lines = (DOCS / "guarantees.md").read_text().splitlines()
    table = [number for number, line in enumerate(lines[:30]) if line.startswith("|")]
    assert lines[table[0]] == "| guarantee | holds if | if not, and what to do |"
    assert table == list(range(table[0], table[-1] + 1))
    assert table[0] < 10 < table[-1] < 24


def test_every_option_of_redis_py_is_translated() -> None:
    section = (DOCS / "moving.md").read_text().partition("\n## redis-py\n")[2].partition("\n## ")[0]
    options = [name for name in inspect.signature(redis.lock.Lock).parameters if name not in ("redis", "name")]
    assert {"timeout", "blocking_timeout"} < set(options)
    assert [name for name in options if not re.search(rf"^\| `{name}\b", section, re.MULTILINE)] == []


def test_the_guard_by_hand_keeps_the_rule() -> None:
    create, update = blocks_of("guard.md", "sql")
    connection = sqlite3.connect(":memory:")
    connection.execute(create)
    connection.execute("INSERT INTO orders (id) VALUES (42)")
    for state, fence, holder, taken in (
        ("paid", 7, "a", 1),
        ("again", 7, "a", 1),
        ("other", 7, "b", 0),
        ("sent", 8, "b", 1),
        ("stale", 7, "a", 0),
    ):
        facts = {"id": 42, "state": state, "fence": fence, "holder": holder}
        assert connection.execute(update, facts).rowcount == taken
    assert connection.execute("SELECT state FROM orders").fetchone() == ("sent",)
    connection.close()


def test_the_fixture_for_tests_has_a_server_of_its_own(tmp_path: Path) -> None:
    fixture, _ = blocks_of("testing.md", "python")
    test = "def test_it(locks):\n    assert list(locks.locks()) == []\n    locks.lock('left').acquire()\n"
    (tmp_path / "test_program.py").write_text(f"{fixture}\n\n{test}\n\n{test.replace('test_it', 'test_again')}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_type_checker_takes_what_is_handed_over(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code_of("hand-over.md"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["semaphore", "rwlock"])
def test_the_picture_is_one(page: str) -> None:
    assert f"({page}.svg)" in (DOCS / f"{page}.md").read_text()
    root = ET.parse(DOCS / f"{page}.svg").getroot()
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (DOCS / f"{page}.svg").read_text()
