"""A URL of one server that leads to a Sentinel, or to one node of a cluster: the error says so, and offers a URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.fleet_cluster import ClusterFleet
from tests.fleets import SERVICE, SentinelServer
from tests.servers import Server, find_binary

NEVER_NAMED = "sentinel auth-pass mymaster hunter2"


@pytest.fixture(scope="module")
def sentinel() -> Iterator[SentinelServer]:
    with Server() as watched, SentinelServer(watched.port, NEVER_NAMED, quorum=1, binary=find_binary()) as sentinel:
        yield sentinel


@pytest.fixture(scope="module")
def node() -> Iterator[Server]:
    """The node of a cluster that has the first half of the slots."""
    with ClusterFleet(primaries=2, node_timeout_ms=10_000) as fleet:
        yield fleet.servers[0]


def refused(connect: Any, url: str, name: str = "x") -> str:
    with pytest.raises(holdfast.Unavailable) as caught:
        connect(url).lock(name, wait=0).acquire()
    return str(caught.value)


def test_a_sentinel_says_what_it_is_and_names_its_service(connect: Any, sentinel: SentinelServer) -> None:
    where = f"127.0.0.1:{sentinel.port}"
    assert refused(connect, f"redis://{where}") == (
        f"lock 'x': cannot use redis://{where}/0: it is a Sentinel, which keeps no locks. "
        f"Use redis+sentinel://{where}/{SERVICE} in the URL"
    )
    assert f"Use redis+sentinel://{where}/{SERVICE} in the URL" in refused(connect, f"redis+cluster://{where}")


def test_the_offered_url_works(connect: Any, sentinel: SentinelServer) -> None:
    offered = refused(connect, f"redis://127.0.0.1:{sentinel.port}").partition("Use ")[2].partition(" ")[0]
    with connect(offered).lock("x", wait=10):
        pass


def test_a_sentinel_with_several_services_lists_them(connect: Any) -> None:
    more = "sentinel monitor orders 127.0.0.1 1 1"
    with Server() as watched, SentinelServer(watched.port, more, quorum=1, binary=find_binary()) as sentinel:
        said = refused(connect, f"redis://127.0.0.1:{sentinel.port}")
        assert f"Use redis+sentinel://127.0.0.1:{sentinel.port}/SERVICE in the URL; its services are " in said
        assert sorted(said.rpartition("are ")[2].split(", ")) == [SERVICE, "orders"]


def test_a_sentinel_that_does_not_tell_its_services(connect: Any) -> None:
    hidden = "user default on nopass +@all -sentinel|masters ~* &*"
    with Server() as watched, SentinelServer(watched.port, hidden, quorum=1, binary=find_binary()) as sentinel:
        said = refused(connect, f"redis://127.0.0.1:{sentinel.port}")
        assert said.endswith(f"Use redis+sentinel://127.0.0.1:{sentinel.port}/SERVICE in the URL")


def test_a_url_with_a_database_or_a_password_offers_that_of_a_sentinel(connect: Any, sentinel: SentinelServer) -> None:
    """Such a connection fails before the server can be asked what it is."""
    offered = f"If it is a Sentinel, use redis+sentinel://127.0.0.1:{sentinel.port}/SERVICE"
    assert f"it has no SELECT. {offered}/3 in the URL; else leave out the database" in refused(
        connect, f"redis://127.0.0.1:{sentinel.port}/3"
    )
    said = refused(connect, f"redis://:hunter2@127.0.0.1:{sentinel.port}")
    assert f"it takes no password. {offered} in the URL; else leave out the password" in said
    assert "hunter2" not in said


def test_a_server_without_scripts_is_no_sentinel(connect: Any) -> None:
    with Server("--rename-command", "EVALSHA", "", "--rename-command", "EVAL", "") as server:
        assert "scripts are disabled there" in refused(connect, server.url)


def test_a_node_of_a_cluster_offers_the_url_of_the_cluster(connect: Any, node: Server) -> None:
    where = f"127.0.0.1:{node.port}"
    use = f"it is a node of a cluster. Use redis+cluster://{where} in the URL, or connect(RedisCluster(...))"
    elsewhere = "foo"  # its slot is 12182, in the second half
    assert refused(connect, f"redis://{where}", elsewhere) == f"lock 'foo': cannot use redis://{where}/0: {use}"
    with connect(f"redis+cluster://{where}").lock(elsewhere, wait=10):
        pass


def test_an_unknown_error_is_shown_without_the_arguments_of_the_command() -> None:
    with Server("--rename-command", "SCAN", "") as server, holdfast.connect(server.url) as client:
        with pytest.raises(holdfast.Unavailable) as caught:
            list(client.locks("hunter2*"))
        assert "hunter2" in str(caught.value.__cause__), "the server quotes the arguments"
        assert str(caught.value).endswith("it answered ERR unknown command 'SCAN'. See its log")
