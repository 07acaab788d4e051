"""``holdfast doctor`` on memcached: servers that are set up badly; and what ``stats`` of another server would say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pymemcache.exceptions import MemcacheServerError

from holdfast.cli.doctor import memcached as doctor
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING
from tests.cli.test_doctor import findings, level_of
from tests.cli.test_operate import call
from tests.server_memcached import MemcachedServer
from tests.servers import free_port


def only(found: dict[str, list[dict[str, Any]]], check: str) -> dict[str, Any]:
    (finding,) = found[check]
    return finding


def test_nothing_threatens_locks_on_a_good_server(
    memcached: MemcachedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    memcached.client().flushall()
    code, found = findings(capsys, memcached.url)
    assert code == 0
    checks = {"version", "eviction", "memory", "persistence", "connections", "clock", "round trip", "lock"}
    assert set(found) == checks
    assert only(found, "version")["message"].startswith("it is memcached 1.6.")
    eviction = "it has evicted nothing so far; when its memory is full, it evicts items, and locks among them"
    assert (only(found, "eviction")["level"], only(found, "eviction")["message"]) == (NOTE, eviction)
    assert "A restart, or flush_all, ends each lock" in only(found, "persistence")["message"]
    assert only(found, "lock")["message"] == "a lock can be taken, renewed and released"
    assert only(found, "clock")["message"] == "its clock and this machine's differ by less than 3 s"
    assert {finding["server"] for some in found.values() for finding in some} == {memcached.url}
    assert memcached.client().call("stats")[b"curr_items"] == 0, "nothing is left"
    code, out, err = call(capsys, "doctor", "--prefix", "app:", memcached.url)
    assert "✓ lock: a lock can be taken" in out
    assert "nothing there breaks locks" in err


def test_evictions_are_a_warning_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    with MemcachedServer("-m", "2") as server:
        for number in range(60):
            server.client().call("set", f"ballast{number}", b"x" * 500_000)
        code, found = findings(capsys, server.url)
        evicted = server.client().call("stats")[b"evictions"]
    assert code == 1
    assert evicted > 0
    message = only(found, "eviction")["message"]
    assert only(found, "eviction")["level"] == WARNING
    told = re.match(r"it has evicted ([\d,]+) items since its start ", message)
    assert told is not None
    assert 0 < int(told[1].replace(",", "")) <= evicted, "the doctor's own lock may evict more"
    assert message.endswith(" ago, and locks can be among them")


def test_a_server_that_evicts_nothing_is_good_until_it_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    with MemcachedServer("-m", "2", "-M") as server:
        found = findings(capsys, server.url)[1]
        message = "it evicts no item (-M): when its memory is full, it grants no lock"
        assert (only(found, "eviction")["level"], only(found, "eviction")["message"]) == (OK, message)
        for size in (100_000, 10_000, 1000, 100, 50, 1):
            for number in range(4000):
                try:
                    server.client().call("set", f"ballast{size}:{number}", b"x" * size, noreply=False)
                except MemcacheServerError:  # it is full for this size
                    break
        code, found = findings(capsys, server.url)
    assert code == 1
    assert level_of(found, "memory") == WARNING
    assert only(found, "memory")["message"].startswith("its memory is nearly full: items use ")
    assert only(found, "memory")["advice"] == "give it more (-m): a full one grants no lock"


def test_a_server_without_cas_is_a_danger(capsys: pytest.CaptureFixture[str]) -> None:
    with MemcachedServer("-C") as server:
        code, found = findings(capsys, server.url)
    assert code == 1
    message = "no lock can be renewed or released: its compare-and-swap is off (option -C)"
    assert (only(found, "lock")["level"], only(found, "lock")["message"]) == (DANGER, message)


def test_a_server_that_wants_a_password_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("user:secret\n")
    with MemcachedServer("-Y", str(users)) as server:
        code, out, err = call(capsys, "doctor", server.url)
    assert (code, out) == (69, "")
    assert "it wants a password. Holdfast can give none to memcached: start it without -Y" in err


def test_no_server_is_69(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "doctor", f"memcached://127.0.0.1:{free_port()}")
    assert (code, out) == (69, "")
    assert "nothing listens there" in err


@pytest.mark.parametrize(
    ("check", "stats", "level", "message"),
    [
        (doctor.version, {"version": "1.5.22"}, DANGER, "it is memcached 1.5.22"),
        (doctor.version, {"version": "1.6.0_beta1"}, OK, "it is memcached 1.6.0_beta1"),
        (doctor.version, {}, UNCHECKED, "not checked: stats does not say its version"),
        (doctor.eviction, {"evictions": "0"}, UNCHECKED, "not checked: stats does not say whether it evicts items"),
        (
            *(doctor.memory, {"bytes": "95", "limit_maxbytes": "100"}, WARNING),
            "its memory is nearly full: items use 95 of 100 bytes",
        ),
        (doctor.memory, {"bytes": "5"}, UNCHECKED, "not checked: stats does not say its memory"),
        (
            doctor.connections,
            {"curr_connections": "1000", "max_connections": "1024"},
            WARNING,
            "its connections are nearly used up: 1,000 of 1,024",
        ),
        (
            doctor.connections,
            {"curr_connections": "3", "max_connections": "1024", "rejected_connections": "7", "uptime": "7200"},
            WARNING,
            "it has refused 7 connections since its start 2 h ago; 3 of 1,024 are open",
        ),
        (doctor.connections, {}, UNCHECKED, "not checked: stats does not say how many connections it allows"),
    ],
)
def test_what_stats_say_is_judged(check: Any, stats: dict[str, str], level: str, message: str) -> None:
    (finding,) = check(stats)
    assert (finding.level, finding.message) == (level, message)


@pytest.mark.parametrize(
    ("time", "level", "message"),
    [
        ("1000", OK, "its clock and this machine's differ by less than 3 s"),
        ("1090", NOTE, "its clock is 90 s ahead of this machine's"),
        ("900", NOTE, "its clock is 98 s behind this machine's"),
        ("noon", UNCHECKED, "not checked: stats does not say its time"),
    ],
)
def test_a_clock_that_is_wrong_is_noted(time: str, level: str, message: str) -> None:
    (finding,) = doctor.clock({"time": time}, 1000.0, 1000.0)
    assert (finding.level, finding.message) == (level, message)
