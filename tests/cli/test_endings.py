"""``who``, ``break`` and ``history`` of a name without its namespace: they suggest the whole key."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis
from rich.console import Console

import holdfast
from holdfast.cli.operate.common import Output
from holdfast.cli.operate.endings import suggest_broken, suggest_in_use
from holdfast.cli.operate.tables import LOCK_COLUMNS, details, table
from holdfast.holder import LockInfo
from holdfast.protocol.inspection.endings import find_endings
from tests.cli.shell import first_line
from tests.cli.test_operate import call
from tests.servers import Server


@pytest.fixture
def shop(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[holdfast.Client]:
    """A client whose names are in a namespace."""
    monkeypatch.setenv("HOLDFAST_URL", server.url)
    with holdfast.connect(server.url, namespace="shop:") as client:
        yield client


def test_who_suggests_the_whole_key(shop: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.lock("nightly", label="report"):
        code, out, err = call(capsys, "who", "nightly", "--json")
        assert (code, out) == (0, "null\n")
        free, but = err.splitlines()
        assert free == "holdfast: lock 'nightly' is free, and no process waits for it"
        assert re.fullmatch(r"holdfast: but 'shop:nightly' is held by report @ \S+:\d+: holdfast who shop:nightly", but)
    assert call(capsys, "who", "nightly")[2] == f"{free}\n", "a lock that was released is in no list"


def test_watch_suggests_the_whole_key_at_its_first_look(
    shop: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with shop.lock("nightly", label="report"):
        code, out, err = call(capsys, "watch", "nightly", "--interval", "0.1", "--for", "0.5")
    assert code == 0
    assert "it is free" in out
    (but,) = err.splitlines()
    assert but.startswith("holdfast: but 'shop:nightly' is held by report @ ")
    assert but.endswith(": holdfast watch shop:nightly")


def test_break_suggests_what_is_held(shop: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.lock("a job"):
        code, out, err = call(capsys, "break", "a job", "--reason", "why", "--yes")
        assert (code, out) == (1, "")
        nothing, but = err.splitlines()
        assert nothing == "holdfast: lock 'a job' is not held: there is nothing to break"
        assert but.startswith("holdfast: but 'shop:a job' is held by ")
        assert but.endswith(": holdfast break 'shop:a job' --reason TEXT")


def test_history_suggests_what_was_broken(shop: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    lease = shop.lock("nightly").acquire()
    shop.break_lock("nightly", fence=lease.fence, reason="why")
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    code, out, err = call(capsys, "history", "nightly", "--json")
    assert (code, out) == (0, "[]\n")
    assert err == (
        "holdfast: lock 'nightly' was not broken in the last 30 days\n"
        "holdfast: but 'shop:nightly' was broken: holdfast history shop:nightly\n"
    )
    assert "why" in call(capsys, "history", "shop:nightly")[1]


def test_many_are_counted_and_the_likeliest_come_first(
    shop: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with shop.lock("x"), shop.lock("tax"), shop.lock("a:x"), shop.lock("a:b:x"), shop.lock("box"):
        lines = call(capsys, "who", "x")[2].splitlines()[1:]
    assert [line.rpartition(" ")[2] for line in lines[:3]] == ["shop:x", "shop:a:x", "shop:a:b:x"]
    assert lines[3] == "holdfast: and 2 more: holdfast ls '*x'"


def test_a_name_is_no_pattern(shop: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.lock("report[1]*"), shop.lock("report1x"):
        lines = call(capsys, "who", "report[1]*")[2].splitlines()[1:]
    assert [line.rpartition(": ")[2] for line in lines] == ["holdfast who 'shop:report[1]*'"]


def test_a_command_with_a_namespace_takes_the_name_without_it(
    shop: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output(as_json=False)
    with shop.lock("nightly", label="job"):
        with holdfast.connect(os.environ["HOLDFAST_URL"], namespace="bank:") as bank, bank.lock("nightly", label="job"):
            suggest_in_use(shop, output, "shop:nightly", "holdfast who {}")
            (but,) = capsys.readouterr().err.splitlines()
            assert but.startswith("holdfast: but 'shop:nightly' is held by job @ ")
            assert but.endswith(": holdfast who nightly")
            suggest_in_use(shop, output, "ightly", "holdfast who {}")
            other, mine = sorted(capsys.readouterr().err.splitlines())
            assert mine.endswith(": holdfast who nightly")
            assert other.endswith(": to reach it, leave namespace='shop:' out of the URL")
        suggest_broken(shop, output, "nightly", "holdfast history {}")
        assert capsys.readouterr().err == ""


def test_the_search_is_limited_and_says_so(
    shop: holdfast.Client, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as admin:
        fill(admin, 5000)
    monkeypatch.setattr(
        "holdfast.cli.operate.endings.find_endings", functools.partial(find_endings, most_keys=2000, longest=60.0)
    )
    _, out, err = call(capsys, "who", "nightly", "--json")
    assert out == "null\n"
    assert err.splitlines()[1] == (
        "holdfast: the search for keys that end in 'nightly' stopped after 2,000 keys: "
        "holdfast ls '*nightly' looks through all"
    )
    found = shop._driver.run(find_endings("nightly", longest=0.0))
    assert (found.scanned, found.complete) == (0, False)
    assert shop._driver.run(find_endings("nightly", longest=60.0)).complete


def fill(admin: redis.Redis, count: int) -> None:
    admin.mset({f"filler:{number}": "x" for number in range(count)})


def test_tables_name_the_whole_key(shop: holdfast.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with shop.lock("nightly"):
        (info,) = shop.locks()
    assert (info.name, info.key) == ("nightly", "shop:nightly")
    console = Console(width=100)
    for shown in (details(info, 100), table([info], LOCK_COLUMNS, 100)):
        console.print(shown)
        assert "shop:nightly" in capsys.readouterr().out


def test_a_lock_without_a_namespace_has_its_name_as_key() -> None:
    assert json.loads(json.dumps(LockInfo("x", "lock").as_json()))["key"] == "x"


HOLD = """
import holdfast, signal, sys
lock = holdfast.connect(sys.argv[1], namespace="shop:").lock("nightly", label="report", ttl=60)
lock.acquire()
print("held", flush=True)
signal.raise_signal(signal.SIGSTOP)
"""


def test_an_operator_frees_a_lock_by_the_key_of_a_message(
    shop: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process in a namespace is stopped while it holds a lock; the error of another one has the key to copy."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, os.environ["HOLDFAST_URL"]], stdout=subprocess.PIPE, text=True
    ) as stopped:
        try:
            first_line(stopped)
            with pytest.raises(holdfast.AcquireTimeout) as caught, shop.lock("nightly", wait=1.0):
                pass
            (key,) = re.findall(r"lock '([^']+)'", str(caught.value))
            assert "report @" in call(capsys, "who", key)[1]
            code, _, err = call(capsys, "break", key, "--reason", "it is stopped", "--yes")
            assert code == 0
            assert "lock 'shop:nightly' was taken from report @" in err
            with shop.lock("nightly", wait=10.0):
                pass
        finally:
            stopped.kill()
