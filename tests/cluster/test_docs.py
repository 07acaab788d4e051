"""The URLs of docs/engines.md connect, with the hosts and the password of a fleet in place of the examples'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from tests.fleet_cluster import ClusterFleet

PAGE = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
URLS = sorted(set(re.findall(r"^redis\+cluster://\S+", PAGE, re.MULTILINE)))


def test_there_are_examples() -> None:
    assert len(URLS) == 2  # and one with TLS, in test_tls.py


@pytest.mark.parametrize("url", URLS)
def test_the_urls_connect(url: str) -> None:
    password = "secret" if "password" in url else ""
    with ClusterFleet(2, password=password) as fleet:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in fleet.servers)
        there = re.sub(r"h1:7000.*", hosts, url).replace("user:password", f":{password}")
        with holdfast.connect(there) as client:
            for name in ("a", "b", "c", "d"):  # on both nodes
                with client.lock(name, ttl=10) as lease:
                    assert lease.held
            nodes = client.statistics().nodes
            assert set(nodes) == set(hosts.split(","))
            assert all(node.connections for node in nodes.values())
