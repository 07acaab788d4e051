"""Operator commands on another place than it seems: one node of a cluster, a Sentinel, the embedded server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.cli.doctor.findings import OK, WARNING
from holdfast.protocol.effects import Command
from tests.cli.shell import eventually
from tests.cli.test_doctor import findings
from tests.cli.test_operate import call
from tests.fleet_cluster import ClusterFleet
from tests.fleets import SERVICE, SentinelFleet, SentinelServer
from tests.servers import Server, find_binary

HERE, ELSEWHERE = "b", "foo"  # in slots 3300 and 12182: on the first and on the second node


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterFleet]:
    with ClusterFleet(primaries=2, node_timeout_ms=10_000) as fleet:
        yield fleet


@pytest.fixture
def node(cluster: ClusterFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the first node, which the commands are given. A lock is held on each node."""
    cluster.client().flushall(target_nodes="all")
    where = f"127.0.0.1:{cluster.servers[0].port}"
    monkeypatch.setenv("HOLDFAST_URL", f"redis://{where}")
    with holdfast.connect(cluster.url) as client, client.lock(HERE), client.lock(ELSEWHERE):
        yield where


def note(node: str) -> str:
    return (
        f"holdfast: redis://{node}/0 is one node of a cluster, and locks on its other nodes are not seen: "
        f"use redis+cluster://{node}\n"
    )


def test_ls_on_one_node_says_that_it_lists_a_part(node: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "ls", "--json")
    assert (code, [info["name"] for info in json.loads(out)], err) == (0, [HERE], note(node))
    assert call(capsys, "ls")[2] == note(node)
    code, out, err = call(capsys, "ls", "--json", "--url", f"redis+cluster://{node}")
    assert (code, [info["name"] for info in json.loads(out)], err) == (0, [HERE, ELSEWHERE], "")


@pytest.mark.parametrize(
    "args", [["who"], ["break", "--reason", "why", "--yes"], ["history"], ["watch", "--for", "0s"]], ids=lambda a: a[0]
)
def test_a_key_of_another_node_offers_the_url_of_the_cluster(
    node: str, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    code, out, err = call(capsys, args[0], ELSEWHERE, *args[1:])
    assert code == 69
    use = f"it is a node of a cluster. Use redis+cluster://{node} in the URL, or connect(RedisCluster(...))"
    assert use in " ".join(f"{out} {err}".split()), "watch folds its lines"


def test_a_name_that_is_free_on_one_node_may_be_meant_for_another(
    node: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "who", "c", "--json")  # its slot is 7365, on this node
    assert (code, out) == (0, "null\n")
    assert err.endswith(note(node))


def test_doctor_warns_of_one_node(node: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(capsys, f"redis://{node}")
    (one,) = found["address"]
    assert (code, one["level"]) == (1, WARNING)
    assert (
        one["message"] == "it is one node of a cluster: it refuses locks of the other nodes, which are not checked here"
    )
    assert one["advice"] == f"use redis+cluster://{node}, here and in programs"
    assert "address" not in findings(capsys, f"redis+cluster://{node}")[1]


@pytest.fixture(scope="module")
def sentinel() -> Iterator[SentinelServer]:
    with Server() as watched, SentinelServer(watched.port, quorum=1, binary=find_binary()) as sentinel:
        yield sentinel


@pytest.mark.parametrize(
    "args",
    [
        *(["ls"], ["ls", "--json"], ["who", "x"], ["break", "x", "--reason", "why", "--yes"], ["history", "x"]),
        *(["watch", "x", "--for", "0s"], ["top", "--json"], ["doctor"], ["run", "--wait", "0", "x", "--", "true"]),
    ],
    ids=" ".join,
)
def test_each_command_names_a_sentinel(
    sentinel: SentinelServer, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    where = f"127.0.0.1:{sentinel.port}"
    code, out, err = call(capsys, args[0], "--url", f"redis://{where}", *args[1:])
    assert code == 69
    use = f"it is a Sentinel, which keeps no locks. Use redis+sentinel://{where}/{SERVICE} in the URL"
    assert use in " ".join(f"{out} {err}".split()), "watch folds its lines"


def test_doctor_warns_if_no_replica_can_take_over(capsys: pytest.CaptureFixture[str]) -> None:
    with SentinelFleet(replicas=1, patience_ms=30_000) as fleet:
        primary, (replica,) = fleet.primary, fleet.replicas
        assert WARNING not in {one["level"] for one in findings(capsys, fleet.url)[1]["replication"]}
        replica.kill()
        with primary.client() as admin:
            eventually(lambda: admin.info("replication")["connected_slaves"] == 0, "the primary notices it")
        code, found = findings(capsys, fleet.url)
        (one,) = found["replication"]
        assert (code, one["level"]) == (1, WARNING)
        assert one["message"] == (
            "no replica is connected to it: if it fails, nothing can take over, and locks wait until it is back"
        )
        assert one["advice"] == "start a replica, or see in the log of the replica why it does not follow"
        alone = findings(capsys, primary.url)[1]["replication"]
        assert [one["level"] for one in alone] == [OK], "no Sentinel was asked for"


def test_the_embedded_server_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"local://{tmp_path}/locks"
    with holdfast.connect(url) as client, client.lock("x"):
        ((_, engine),) = client._driver.servers(5.0).items()
        said = engine.call(Command(("INFO", "server")), 5.0).decode()
        info = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
        server = f"the embedded server in {tmp_path}/locks (pid {info['process_id']}, {info['executable']})"
        code, out, err = call(capsys, "ls", "--json", "--url", url)
        assert (code, len(json.loads(out)), err) == (0, 1, f"holdfast: these locks are on {server}\n")
        code, found = findings(capsys, url)
        (one,) = found["address"]
        assert (code, one["level"], one["message"]) == (0, OK, f"{url} is {server}")


@pytest.mark.parametrize("args", [[], ["ls"], ["run"], ["doctor"]])
def test_help_explains_the_directory_of_an_embedded_server(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert "local:///DIR" in call(capsys, *args, "--help")[1]


def test_an_unknown_error_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Server("--rename-command", "SCAN", "") as server:
        code, _, err = call(capsys, "ls", "--url", server.url)
    assert (code, err.endswith("it answered ERR unknown command 'SCAN'. See its log\n")) == (69, True)
