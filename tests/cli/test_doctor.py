"""``holdfast doctor``: what it finds on servers that are set up badly, and that it finds nothing on a good one.

Where a server cannot be set up that way, a proxy changes what it answers, or a check gets recorded answers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.checks import eviction, persistence, replication, version
from holdfast.cli.doctor.findings import DANGER, LEVELS, NOTE, OK, UNCHECKED, WARNING, Refused
from holdfast.cli.doctor.leases import Look, longest_ttl
from holdfast.guard import RedisGuard
from tests.cli.shell import eventually
from tests.cli.test_operate import call
from tests.proxy import Proxy, delay, instead
from tests.servers import Server


def findings(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and what was found, by check."""
    code, out, _ = call(capsys, "doctor", "--json", *args)
    by_check: dict[str, list[dict[str, Any]]] = {}
    report = json.loads(out)
    for finding in report["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    levels = {finding["level"] for finding in report["findings"]}
    problems, unchecked = bool(levels & {DANGER, WARNING}), UNCHECKED in levels
    assert report["healthy"] == (not problems and not unchecked)
    assert bool(report["unchecked"]) == unchecked
    assert code == (1 if problems else 77 if unchecked else 0)
    return code, by_check


def level_of(found: dict[str, list[dict[str, Any]]], check: str) -> str:
    levels: list[str] = [finding["level"] for finding in found[check]]
    return min(levels, key=LEVELS.index)


def test_nothing_threatens_locks_on_a_good_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with holdfast.connect(server.url) as client, client.lock("job"):
        code, found = findings(capsys, server.url)
        assert code == 0
        checks = {"version", "eviction", "persistence", "replication", "clock", "round trip"}
        assert set(found) == checks | {"permissions", "pub/sub", "tracking", "keys"}
        assert "1 names" in found["keys"][0]["message"]
        code, out, err = call(capsys, "doctor", server.url)
        assert code == 0
        assert "✓ eviction" in out
        assert "nothing there breaks locks" in err


def test_a_server_that_evicts_keys_is_a_danger(
    server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.config_set("maxmemory", "1gb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        code, found = findings(capsys, server.url)
        assert code == 1
        assert level_of(found, "eviction") == DANGER
        assert "noeviction" in found["eviction"][0]["advice"]
        admin.config_set("maxmemory-policy", "noeviction")
        assert level_of(findings(capsys, server.url)[1], "eviction") == OK
    finally:
        admin.config_set("maxmemory", "0")
        admin.config_set("maxmemory-policy", "noeviction")


def test_what_survives_a_crash_is_said(server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    assert "after a restart it knows no holds" in findings(capsys, server.url)[1]["persistence"][0]["message"]
    admin.config_set("appendonly", "yes")
    try:
        assert "the last second" in findings(capsys, server.url)[1]["persistence"][0]["message"]
        admin.config_set("appendfsync", "always")
        assert level_of(findings(capsys, server.url)[1], "persistence") == OK
    finally:
        admin.config_set("appendonly", "no")
        admin.config_set("appendfsync", "everysec")


def test_a_replica_is_a_danger_and_a_primary_says_how_many_it_has(
    server: Server, own_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with own_server.client() as replica, server.client() as admin:
        replica.replicaof("127.0.0.1", str(server.port))
        try:
            code, found = findings(capsys, own_server.url)
            assert code == 1
            assert level_of(found, "replication") == DANGER
            eventually(lambda: admin.info("replication")["connected_slaves"] == 1)
            messages = [finding["message"] for finding in findings(capsys, server.url)[1]["replication"]]
            assert any("1 replicas" in message for message in messages)
        finally:
            replica.replicaof("NO", "ONE")


class Answers:
    """Recorded answers of a server to INFO and CONFIG GET. Without ``settings``, CONFIG is forbidden, as is WAIT."""

    user = "app"
    is_watched = False

    def __init__(self, info: dict[str, str], settings: dict[str, str] | None = None) -> None:
        self._info = info
        self._settings = settings

    def info(self, section: str) -> dict[str, str]:
        return self._info

    def setting(self, name: str) -> str:
        if self._settings is None:
            raise Refused("NOPERM User app has no permissions to run the 'config|get' command", "CONFIG", "GET", name)
        return self._settings.get(name, "0")

    def may(self, *words: str | int) -> bool:
        return self._settings is not None


def test_a_replica_that_lags_is_a_warning() -> None:
    behind = "ip=127.0.0.1,port=1,state=online,offset=5,lag=9"
    server: Any = Answers({"role": "master", "connected_slaves": "1", "slave0": behind}, {})
    levels = {finding.level: finding.message for finding in replication(server)}
    assert "9 s behind" in levels[WARNING]
    online: Any = Answers(
        {"role": "master", "connected_slaves": "1", "slave0": behind.replace("lag=9", "lag=0")},
        {"min-replicas-to-write": "1"},
    )
    assert [finding.level for finding in replication(online)] == [OK]


def test_keys_that_no_lock_has_written_are_named(
    server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    with holdfast.connect(server.url) as client:
        for name in ("list", "endless", "good"):
            with client.lock(name):
                pass
    admin.rpush("list", "x")
    admin.set("endless", "a token of a client that crashed between SETNX and EXPIRE")
    admin.hset("good:hf1:queue:{good}", "x", "y")
    code, found = findings(capsys, server.url)
    assert code == 1
    foreign, endless = (finding["message"] for finding in found["keys"])
    assert "list is a list" in foreign
    assert "good:hf1:queue:{good} is a hash" in foreign
    assert "endless" in endless
    assert "good" not in endless


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"redis_version": "6.0.16", "redis_mode": "standalone"}, DANGER),
        ({"redis_version": "6.2.14", "redis_mode": "standalone"}, OK),
        ({"redis_version": "6.2.14", "redis_mode": "cluster"}, WARNING),
        ({"redis_version": "7.0.15", "redis_mode": "cluster"}, OK),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.1", "redis_mode": "cluster"}, OK),
        ({"server_name": "another"}, UNCHECKED),
    ],
)
def test_each_version_is_judged(info: dict[str, str], level: str) -> None:
    server: Any = Answers(info)
    assert [finding.level for finding in version(server)] == [level]


def test_data_that_a_guard_protects_are_no_keys_of_locks(
    server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have no ttl, and may be of any type. To break such a "lock" would delete them."""
    guarded = RedisGuard(admin)
    with holdfast.connect(server.url) as client, client.lock("job") as lease:
        guarded.set("state:42", "paid", lease)
        guarded.execute("HSET", "items:42", "tea", "6", lease=lease)
    code, found = findings(capsys, server.url)
    assert code == 0
    assert level_of(found, "keys") == OK


def test_what_is_no_redis_at_all_is_no_answer(proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    proxy.on("*", instead(b"ERROR\r\n"), times=500)  # as memcached says to a command that it does not know
    code, out, err = call(capsys, "doctor", proxy.url)
    assert (code, out) == (69, "")
    assert "it sent something that is no reply of Redis. Check host and port" in err


def test_two_servers_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "doctor", "redis://h1", "--url", "redis://h2")
    assert code == 64
    assert err.endswith("Error: two servers were named: give the URL once\n")


def test_a_server_that_is_too_old_is_a_danger(proxy: Proxy, capsys: pytest.CaptureFixture[str]) -> None:
    text = b"# Server\r\nredis_version:6.0.16\r\nredis_mode:standalone\r\n"
    proxy.on("info", instead(b"$%d\r\n%s\r\n" % (len(text), text)))  # the first section that is asked for
    code, found = findings(capsys, proxy.url)
    assert code == 1
    assert level_of(found, "version") == DANGER
    assert "6.0.16" in found["version"][0]["message"]


@pytest.mark.parametrize(("ahead", "side"), [(90, "ahead of"), (-90, "behind")])
def test_a_clock_that_is_wrong_is_a_warning(
    proxy: Proxy, capsys: pytest.CaptureFixture[str], ahead: int, side: str
) -> None:
    proxy.on("time", instead(b"*2\r\n$10\r\n%010d\r\n$6\r\n000000\r\n" % (time.time() + ahead)), times=5)
    code, found = findings(capsys, proxy.url)
    assert code == 1
    assert level_of(found, "clock") == WARNING
    assert f"s {side} this machine's" in found["clock"][0]["message"]


def test_memory_that_is_nearly_full_is_a_warning(
    server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.set("large", b"x" * 20_000_000)
    used: Any = admin.info("memory")["used_memory"]
    admin.config_set("maxmemory", str(round(used / 0.95)))
    try:
        code, found = findings(capsys, server.url)
        assert code == 1
        assert level_of(found, "memory") == WARNING
        assert level_of(found, "eviction") == OK
        admin.config_set("maxmemory", str(2 * used))
        assert "memory" not in findings(capsys, server.url)[1]
    finally:
        admin.config_set("maxmemory", "0")


def test_a_save_that_failed_is_a_danger(own_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with own_server.client() as admin:
        folder: Any = admin.config_get("dir")["dir"]
        shutil.rmtree(folder)  # where it wants to save
        admin.execute_command("BGSAVE")
        eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
        code, found = findings(capsys, own_server.url)
        assert code == 1
        assert level_of(found, "persistence") == DANGER
        assert "rdb_last_bgsave_status" in found["persistence"][0]["message"]


def test_settings_that_are_forbidden_count_as_the_worse_value() -> None:
    appends: Any = Answers({"aof_enabled": "1"})
    (kept,) = persistence(appends)
    assert (kept.level, kept.advice) == (NOTE, "ACL SETUSER app +config|get")
    replica = "ip=127.0.0.1,port=1,state=online,offset=5,lag=0"
    primary: Any = Answers({"role": "master", "connected_slaves": "1", "slave0": replica})
    (lossy,) = replication(primary)
    assert lossy.level == NOTE
    assert "min-replicas-to-write unknown" in lossy.message


def test_an_answer_that_says_nothing_is_not_taken_as_good() -> None:
    silent: Any = Answers({})
    for check in (version, eviction, persistence, replication):
        assert [finding.level for finding in check(silent)] == [UNCHECKED]
    hides_policy: Any = Answers({"maxmemory": "1000", "used_memory": "10"})
    assert [finding.level for finding in eviction(hides_policy)] == [UNCHECKED]


def test_a_lease_that_was_not_renewed_says_nothing_of_its_ttl() -> None:
    first = Look(left=0.5, at=100.0, name="job", holder="a")
    assert longest_ttl(first, first._replace(left=0.1, at=100.4)) is None
    assert longest_ttl(first, first._replace(left=0.899, at=100.2)) == pytest.approx(1.099)


def test_a_round_trip_that_is_slow_for_a_ttl_is_a_warning(
    server: Server, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.on("time", delay(0.5), times=5)
    with holdfast.connect(server.url) as client, client.lock("job", ttl=3):
        code, found = findings(capsys, proxy.url)
    assert code == 1
    assert level_of(found, "round trip") == WARNING
    assert "the ttl of 'job'" in found["round trip"][0]["message"]


def test_a_lease_that_is_about_to_end_is_no_alarm(
    server: Server, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.on("time", delay(0.2), times=5)
    with holdfast.connect(server.url) as client:
        lease = client.lock("job", ttl=1.8, renew=False).acquire()
        assert level_of(findings(capsys, proxy.url)[1], "round trip") == OK
        with contextlib.suppress(holdfast.LeaseLost):
            lease.release()
