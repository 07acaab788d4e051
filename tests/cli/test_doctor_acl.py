"""``holdfast doctor`` and permissions: what it says if it may not look, and the ACL rules that it prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING
from holdfast.cli.doctor.permissions import DOCTOR, Use, needed, rules_of_operator
from tests.cli.shell import eventually
from tests.cli.test_doctor import findings, level_of
from tests.cli.test_operate import call
from tests.servers import Server

SINGLE = Use(cluster=False, confirms=False)


@pytest.fixture(autouse=True)
def _tolerate_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a replica may be 2 s behind, which is a warning of its own."""
    monkeypatch.setattr("holdfast.cli.doctor.checks.LARGEST_LAG", 60)


@pytest.fixture
def restricted(server: Server, admin: redis.Redis) -> Iterator[Any]:
    """A user with these rules; the URL of the server for it."""

    def make(*rules: str) -> str:
        admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
        return f"redis://app:secret@127.0.0.1:{server.port}/0"

    yield make
    admin.acl_deluser("app")


def follow(admin: redis.Redis, found: dict[str, list[dict[str, Any]]]) -> None:
    """Run each ACL line among the advice, exactly as it is printed."""
    for line in {finding["advice"] for some in found.values() for finding in some}:
        if line.startswith("ACL SETUSER"):
            admin.execute_command(*line.split())


@pytest.fixture
def operator(server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The operator that ``--acl`` prints, made by that line; the URL of the server for it."""
    line = json.loads(call(capsys, "doctor", "--acl", "--json", server.url)[1])["operator"]
    admin.execute_command(*line.split())
    yield f"redis://holdfast-ops:PASSWORD@127.0.0.1:{server.port}/0"
    admin.acl_deluser("holdfast-ops")


def test_the_operator_that_is_printed_can_make_each_check(operator: str, capsys: pytest.CaptureFixture[str]) -> None:
    with holdfast.connect(operator) as client, client.lock("job"):
        code, found = findings(capsys, operator)
    assert code == 0
    assert {finding["level"] for some in found.values() for finding in some} <= {OK, NOTE}


def test_the_operator_finds_the_problems_that_are_there(
    operator: str, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    with holdfast.connect(operator) as client:
        for name in ("list", "endless"):
            with client.lock(name):
                pass
    admin.rpush("list", "x")
    admin.set("endless", "x")
    admin.config_set("maxmemory", "1gb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        code, found = findings(capsys, operator)
    finally:
        admin.config_set("maxmemory", "0")
        admin.config_set("maxmemory-policy", "noeviction")
    assert code == 1
    assert [finding["level"] for finding in found["keys"]] == [WARNING, WARNING]
    assert level_of(found, "eviction") == DANGER


def test_what_could_not_be_checked_is_not_called_healthy(
    restricted: Any, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    url = restricted(*needed("", cluster=False, operate=True))
    with holdfast.connect(url) as client, client.lock("list"):
        pass
    admin.rpush("list", "x")
    code, found = findings(capsys, url)
    assert code == 77
    advice = {check: found[check][0]["advice"] for check in found if level_of(found, check) == UNCHECKED}
    info = dict.fromkeys(("version", "eviction", "persistence", "replication"), "ACL SETUSER app +info")
    assert advice == {**info, "keys": "ACL SETUSER app +type"}
    assert "keys not checked: user 'app' may not use TYPE" in found["keys"][0]["message"]
    code, out, err = call(capsys, "doctor", url)
    assert code == 77
    assert "? eviction: not checked: user 'app' may not use INFO" in out
    assert "no problem was found, but 5 checks could not be made" in err
    follow(admin, found)
    code, found = findings(capsys, url)
    assert code == 1
    assert level_of(found, "keys") == WARNING


def test_a_program_may_not_look_at_keys_and_leases(
    restricted: Any, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    url = restricted(*needed("", cluster=False, operate=False))
    code, found = findings(capsys, url)
    assert code == 77
    for check in ("keys", "round trip"):
        assert [finding["advice"] for finding in found[check]] == ["ACL SETUSER app +scan"]
        assert level_of(found, check) == UNCHECKED
    for _ in range(2):  # with SCAN it finds out that it lacks more
        follow(admin, found)
        code, found = findings(capsys, url)
    assert code == 0


def test_time_that_is_forbidden_is_named(restricted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rules = [rule for rule in rules_of_operator("", SINGLE) if rule != "+time"]
    code, found = findings(capsys, restricted(*rules))
    assert code == 1
    assert (level_of(found, "clock"), found["clock"][0]["advice"]) == (UNCHECKED, "ACL SETUSER app +time")


@pytest.mark.parametrize("operate", [False, True])
def test_the_least_privilege_user_is_enough(restricted: Any, capsys: pytest.CaptureFixture[str], operate: bool) -> None:
    url = restricted(*needed("shop:", cluster=False, operate=operate), *(f"+{command}" for command in DOCTOR))
    code, found = findings(capsys, url, "--prefix", "shop:")
    assert code == (0 if operate else 77), "a program may not list keys"
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


@pytest.mark.parametrize("whoami", [True, False], ids=["with ACL WHOAMI", "with the name in the URL"])
def test_what_is_forbidden_comes_with_the_line_that_allows_it(
    restricted: Any, admin: redis.Redis, capsys: pytest.CaptureFixture[str], whoami: bool
) -> None:
    forbidden = ("+evalsha", "+zadd", "+zcard", "+publish", "+info", *(() if whoami else ("+acl|whoami",)))
    rules = [rule for rule in rules_of_operator("", SINGLE) if rule not in forbidden]
    url = restricted(*rules, "-client|tracking")
    users = admin.acl_users()
    code, found = findings(capsys, url)
    assert code == 1
    advice = {finding["advice"]: finding["level"] for finding in found["permissions"]}
    assert advice["ACL SETUSER app +evalsha"] == DANGER
    assert advice["ACL SETUSER app +zadd"] == DANGER
    assert advice["ACL SETUSER app +zcard"] == WARNING
    assert level_of(found, "pub/sub") == WARNING
    assert level_of(found, "tracking") == NOTE
    follow(admin, found)
    assert admin.acl_users() == users, "no line makes a user"
    assert findings(capsys, url)[0] == 0


def test_without_a_user_in_the_url_the_default_user_is_named(
    server: Server, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.execute_command("ACL", "SETUSER", "default", "-acl|whoami", "-info")
    try:
        found = findings(capsys, server.url)[1]
        assert found["eviction"][0]["advice"] == "ACL SETUSER default +info"
    finally:
        admin.execute_command("ACL", "SETUSER", "default", "+@all")


@pytest.mark.parametrize("confirms", [False, True])
def test_grants_that_replicas_confirm_need_wait(
    server: Server, own_server: Server, restricted: Any, capsys: pytest.CaptureFixture[str], confirms: bool
) -> None:
    url = f"{restricted(*rules_of_operator('', SINGLE))}{'?replicas=1' if confirms else ''}"
    with own_server.client() as replica, server.client() as admin:
        admin.config_set("repl-diskless-sync-delay", "0")
        replica.replicaof("127.0.0.1", str(server.port))
        try:
            eventually(lambda: admin.info("replication").get("slave0", {}).get("state") == "online")
            code, found = findings(capsys, url)
            assert code == confirms
            assert "WAIT: ACL SETUSER app +wait;" in found["replication"][0]["advice"]
            if confirms:
                assert found["permissions"][0]["advice"] == "ACL SETUSER app +wait"
                assert level_of(found, "permissions") == DANGER
                follow(admin, found)
                with holdfast.connect(url) as client, client.lock("job"):
                    assert findings(capsys, url)[0] == 0
        finally:
            replica.replicaof("NO", "ONE")


@pytest.mark.parametrize("forbidden", ["+subscribe", "+publish", "+pubsub|numsub", "&*holdfast:bell:*"])
def test_pub_sub_that_is_forbidden_is_named(
    restricted: Any, capsys: pytest.CaptureFixture[str], forbidden: str
) -> None:
    rules = [rule for rule in rules_of_operator("", SINGLE) if rule != forbidden]
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


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, list[str]]:
    """The rules that ``--acl`` prints, by user."""
    code, out, _ = call(capsys, "doctor", "--acl", "--json", *args)
    assert code == 0
    return {user: line.split() for user, line in json.loads(out).items()}


def test_the_acl_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--acl", "--prefix", "shop:")
    assert code == 0
    assert "~shop:*" in out
    assert "&shop:*holdfast:bell:*" in out
    rules = printed(capsys, "redis://h")
    for rule in ("+scan", "+info", "+type", "+config|get", "+acl|whoami"):
        assert rule in rules["operator"]
        assert rule not in rules["program"]


@pytest.mark.parametrize(
    ("url", "sharded"),
    [
        ("redis+cluster://h:7000", True),
        ("REDISS+cluster://h:7000", True),
        ("redis://mycluster.abc", False),
        ("redis+sentinel://cluster:26379/cluster", False),
        ("local://", False),
    ],
)
def test_the_scheme_decides_on_the_channels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, sharded: bool
) -> None:
    assert ("+ssubscribe" in printed(capsys, url)["program"]) == sharded
    assert ("+subscribe" in printed(capsys, "--url", url)["program"]) != sharded
    monkeypatch.setenv("HOLDFAST_URL", url)
    assert ("+ssubscribe" in printed(capsys)["program"]) == sharded


def test_a_url_that_lets_replicas_confirm_needs_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert all("+wait" in rules for rules in printed(capsys, "redis://h?replicas=1").values())
    assert not any("+wait" in rules for rules in printed(capsys, "redis://h").values())


def test_a_url_of_sentinels_needs_role_and_a_user_on_the_sentinels(capsys: pytest.CaptureFixture[str]) -> None:
    rules = printed(capsys, "redis+sentinel://h/m")
    assert "+role" in rules["program"]
    assert "+role" in rules["operator"]
    assert rules["sentinel"][-2:] == ["+sentinel|get-master-addr-by-name", "+sentinel|masters"]
    assert rules["sentinel"][-1] in call(capsys, "doctor", "--acl", "redis+sentinel://h/m")[1]
    assert "sentinel" not in printed(capsys, "redis://h")


@pytest.mark.parametrize(
    ("url", "says"),
    [("memcached://h", "memcached has no users: each program that reaches its port"), ("nothing://h", "scheme")],
)
def test_what_has_no_users_is_a_wrong_use(capsys: pytest.CaptureFixture[str], url: str, says: str) -> None:
    code, out, err = call(capsys, "doctor", "--acl", url)
    assert (code, out) == (64, "")
    assert says in err


def test_on_etcd_the_role_and_the_user_are_commands_of_etcdctl(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--acl", "--prefix", "my app:", "etcd://h:2379")
    assert code == 0
    lines = [
        "etcdctl role add holdfast",
        "etcdctl role grant-permission holdfast --prefix=true readwrite 'my app:'",
        "etcdctl user add holdfast:PASSWORD",
        "etcdctl user grant-role holdfast holdfast",
    ]
    assert out.splitlines()[1:] == lines
    found = json.loads(call(capsys, "doctor", "--acl", "--json", "--prefix", "my app:", "etcd://h:2379")[1])
    assert found == {"program": "\n".join(lines), "operator": "\n".join(lines)}
