"""``holdfast doctor`` where there are several servers: each has its own ACL, and each is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.findings import DANGER, OK, UNCHECKED, WARNING
from holdfast.cli.doctor.permissions import Use, rules_of_operator
from tests.cli.shell import eventually
from tests.cli.test_doctor import findings
from tests.fleet_cluster import ClusterFleet
from tests.fleets import SentinelFleet
from tests.servers import Server


@pytest.fixture(autouse=True)
def _tolerate_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a replica may be 2 s behind, which is a warning of its own."""
    monkeypatch.setattr("holdfast.cli.doctor.checks.LARGEST_LAG", 60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterFleet]:
    # No failover is wanted here, also not after a moment without CPU.
    with ClusterFleet(primaries=3, replicas=1, node_timeout_ms=10_000) as fleet:
        eventually(lambda: all(map(names_replicas, map(fleet.admin, fleet.primaries))), "each node knows all replicas")
        yield fleet


def names_replicas(admin: redis.Redis) -> bool:
    ranges: Any = admin.execute_command("CLUSTER", "SLOTS")
    return all(len(nodes) == 2 for _, _, *nodes in ranges)


@pytest.fixture
def clustered(cluster: ClusterFleet) -> Callable[..., str]:
    """A user with these rules on these nodes; on the others, with all that an operator needs."""
    rules = rules_of_operator("", Use(cluster=True, confirms=False))

    def make(nodes: list[Server], *more: str) -> str:
        for node in cluster.servers:
            own = more if node in nodes else ()
            cluster.admin(node).execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules, *own)
        return cluster.url.replace("://", "://app:secret@")

    return make


def test_each_primary_of_a_cluster_is_asked_for_permissions(
    cluster: ClusterFleet, clustered: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = findings(capsys, clustered([]))
    assert code == 0
    assert [(one["level"], one["server"]) for one in found["permissions"]] == [(OK, "")]
    some = cluster.primaries[1:]
    code, found = findings(capsys, clustered(some, "-eval", "-evalsha", "-zadd"))
    assert code == 1
    assert {one["server"] for one in found["permissions"] if one["level"] == DANGER} == {
        f"127.0.0.1:{node.port}" for node in some
    }
    for one in found["permissions"]:
        if one["level"] == DANGER:
            node = next(node for node in some if one["server"].endswith(str(node.port)))
            cluster.admin(node).execute_command(*one["advice"].split())
    found = findings(capsys, clustered(some, "-zadd", "-ssubscribe"))[1]
    assert len([one for one in found["permissions"] if one["advice"] == "ACL SETUSER app +zadd"]) == 2
    assert len([one for one in found["pub/sub"] if one["level"] == WARNING]) == 2


def test_what_is_forbidden_on_each_server_is_said_once(
    cluster: ClusterFleet, clustered: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = findings(capsys, clustered(cluster.servers, "-zadd", "-type"))
    assert code == 1
    (one,) = found["permissions"]
    assert (one["level"], one["advice"]) == (DANGER, "ACL SETUSER app +zadd")
    assert one["message"].startswith("on each of 6 servers: ")


def test_each_primary_of_a_cluster_is_asked_for_its_keys(
    cluster: ClusterFleet, clustered: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    node = cluster.primaries[0]
    url = clustered([node], "-scan")
    admin = cluster.client()
    admin.flushall()
    with holdfast.connect(cluster.url) as client:
        for name in (cluster.name_on(primary) for primary in cluster.primaries):
            with client.lock(name):
                pass
            admin.rpush(name, "x")
    code, found = findings(capsys, url)
    admin.flushall()
    assert code == 1
    unchecked = [one for one in found["keys"] if one["level"] == UNCHECKED]
    assert [(one["server"], one["advice"]) for one in unchecked] == [
        (f"127.0.0.1:{node.port}", "ACL SETUSER app +scan")
    ]
    (foreign,) = (one["message"] for one in found["keys"] if one["level"] == WARNING)
    assert foreign.count("is a list") == 2, "the other nodes are looked at"


@pytest.mark.parametrize("rules", [("-zadd",), ("-eval",), ("off",), ("nopass", "resetpass")])
def test_a_replica_that_could_take_over_is_asked_too(
    cluster: ClusterFleet, clustered: Callable[..., str], capsys: pytest.CaptureFixture[str], rules: tuple[str, ...]
) -> None:
    replica = cluster.replica_of(cluster.primaries[0])
    code, found = findings(capsys, clustered([replica], *rules))
    assert code == 1
    (one,) = (one for one in found["permissions"] if one["level"] != OK)
    assert (one["level"], one["server"]) == (WARNING, f"127.0.0.1:{replica.port}")
    assert one["message"].startswith("after a failover to this replica: ")


def test_a_replica_behind_sentinels_is_asked_too(capsys: pytest.CaptureFixture[str]) -> None:
    with SentinelFleet(replicas=1, patience_ms=30_000) as fleet:
        rules = rules_of_operator("", Use(cluster=False, confirms=False))
        for server in fleet.servers:
            with server.client() as admin:
                admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
        url = fleet.url.replace("://", "://app:secret@")
        assert findings(capsys, url)[0] == 0
        (replica,) = fleet.replicas
        with replica.client() as admin:
            admin.execute_command("ACL", "SETUSER", "app", "-zadd")
        found = findings(capsys, url)[1]
        (one,) = (one for one in found["permissions"] if one["level"] != OK)
        assert (one["level"], one["advice"]) == (WARNING, "ACL SETUSER app +zadd")
        replica.pause()
        code, found = findings(capsys, url)
        replica.resume()
        (one,) = (one for one in found["permissions"] if one["level"] != OK)
        assert (code, one["level"]) == (77, UNCHECKED)
