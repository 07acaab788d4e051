"""``holdfast doctor``: what it finds on servers that are set up badly, and that it finds nothing on a good one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.checks import replication
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, WARNING
from holdfast.cli.doctor.permissions import needed
from tests.cli.shell import eventually
from tests.cli.test_operate import call
from tests.servers import Server


@pytest.fixture
def admin(server: Server) -> Iterator[redis.Redis]:
    with server.client() as admin:
        yield admin


def findings(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and what was found, by check."""
    code, out, _ = call(capsys, "doctor", "--json", *args)
    by_check: dict[str, list[dict[str, Any]]] = {}
    report = json.loads(out)
    for finding in report["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    assert report["healthy"] == (code == 0)
    return code, by_check


def level_of(found: dict[str, list[dict[str, Any]]], check: str) -> str:
    levels: list[str] = [finding["level"] for finding in found[check]]
    return min(levels, key=[DANGER, WARNING, NOTE, OK].index)


def test_nothing_threatens_locks_on_a_good_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with holdfast.connect(server.url) as client, client.lock("job"):
        code, found = findings(capsys, server.url)
        assert code == 0
        checks = {"version", "eviction", "persistence", "replication", "clock", "round trip"}
        assert set(found) == checks | {"permissions", "pub/sub", "tracking", "keys"}
        assert "shortest lease" in found["round trip"][0]["message"]
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
    """A server that answers INFO and CONFIG GET as it is told."""

    def __init__(self, info: dict[str, str], settings: dict[str, str]) -> None:
        self._info = info
        self._settings = settings

    def info(self, section: str) -> dict[str, str]:
        return self._info

    def setting(self, name: str) -> str | None:
        return self._settings.get(name)


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


@pytest.fixture
def restricted(server: Server, admin: redis.Redis) -> Iterator[Any]:
    """A user with these rules; the URL of the server for it."""

    def make(*rules: str) -> str:
        admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
        return f"redis://app:secret@127.0.0.1:{server.port}/0"

    yield make
    admin.acl_deluser("app")


@pytest.mark.parametrize("operate", [False, True])
def test_the_least_privilege_user_is_enough(restricted: Any, capsys: pytest.CaptureFixture[str], operate: bool) -> None:
    url = restricted(*needed("shop:", cluster=False, operate=operate))
    code, found = findings(capsys, url, "--prefix", "shop:")
    assert code == 0
    missing = [finding["message"] for finding in found["permissions"] if finding["level"] != OK]
    assert (missing == []) == operate, "an operator may do all, a program all but operate"
    with holdfast.connect(url, namespace="shop:") as client:
        with client.lock("job"), client.semaphore("pool", 2), client.rwlock("rw").write:
            info = client.inspect("job")
            assert info is not None
            if operate:
                assert {info.name for info in client.locks()} == {"job", "pool", "rw"}
        assert client.get_or_compute("value", lambda: 1) == 1
        if operate:
            lease = client.lock("job").acquire()
            client.break_lock("job", fence=lease.fence, reason="it is stuck")
            assert [entry.reason for entry in client.history("job")] == ["it is stuck"]
            with pytest.raises(holdfast.LeaseLost):
                lease.release()


def test_what_is_forbidden_comes_with_the_line_that_allows_it(
    restricted: Any, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [rule for rule in needed("", cluster=False, operate=True) if rule not in ("+zadd", "+zcard", "+publish")]
    url = restricted(*rules, "-client|tracking", "+acl|whoami")
    code, found = findings(capsys, url)
    assert code == 1
    advice = {finding["advice"]: finding["level"] for finding in found["permissions"]}
    assert advice["ACL SETUSER app +zadd"] == DANGER
    assert advice["ACL SETUSER app +zcard"] == WARNING
    assert level_of(found, "pub/sub") == WARNING
    assert level_of(found, "tracking") == NOTE
    for finding in (finding for check in ("permissions", "pub/sub", "tracking") for finding in found[check]):
        if finding["advice"]:
            admin.execute_command(*finding["advice"].split())  # exactly this line
    assert findings(capsys, url)[0] == 0


@pytest.mark.parametrize("forbidden", ["+subscribe", "+publish", "+pubsub|numsub", "&*holdfast:bell:*"])
def test_pub_sub_that_is_forbidden_is_named(
    restricted: Any, capsys: pytest.CaptureFixture[str], forbidden: str
) -> None:
    rules = [rule for rule in needed("", cluster=False, operate=True) if rule != forbidden]
    code, found = findings(capsys, restricted("resetchannels", *rules))
    assert code == 1
    assert level_of(found, "pub/sub") == WARNING
    assert forbidden in found["pub/sub"][0]["advice"]


def test_scripts_that_are_forbidden_are_a_danger(restricted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, restricted("~*", "+info", "+time", "+ping"))
    assert code == 1
    assert level_of(found, "permissions") == DANGER
    assert "+evalsha +eval" in found["permissions"][0]["advice"]


def test_keys_that_are_forbidden_lead_to_the_prefix(restricted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = restricted(*needed("shop:", cluster=False, operate=True))
    code, found = findings(capsys, url)
    assert code == 1
    assert "--prefix" in found["permissions"][0]["advice"]


def test_the_acl_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--acl", "--prefix", "shop:")
    assert code == 0
    assert "~shop:*" in out
    assert "&shop:*holdfast:bell:*" in out
    lines = json.loads(call(capsys, "doctor", "--acl", "--json", "redis+cluster://h:7000")[1])
    assert "+ssubscribe" in lines["program"]
    assert "+scan" in lines["operator"]
    assert "+scan" not in lines["program"]
