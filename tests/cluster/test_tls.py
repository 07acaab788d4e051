"""TLS to all nodes of a cluster, with Debian's Redis, which is built with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.fleet_cluster import ClusterFleet
from tests.fleets import find_redis
from tests.support import eventually

PAGE = Path(__file__).parent.parent.parent / "docs" / "engines.md"


@pytest.fixture(scope="module")
def over_tls(certificate: tuple[str, str]) -> Iterator[ClusterFleet]:
    with ClusterFleet(3, binary=find_redis(), certificate=certificate) as fleet:
        yield fleet


def url_of(fleet: ClusterFleet, *options: str) -> str:
    return f"rediss+cluster://localhost:{fleet.tls_ports[0]}?{'&'.join(options)}"


def test_the_url_of_the_page_connects(connect: Any, over_tls: ClusterFleet, certificate: tuple[str, str]) -> None:
    (url,) = re.findall(r"^rediss\+cluster://\S+", PAGE.read_text(), re.MULTILINE)
    there = url.replace("/etc/redis/ca.pem", certificate[0])
    for number, port in enumerate(over_tls.tls_ports[:2]):
        there = there.replace(f"h{number + 1}:{7000 + number}", f"localhost:{port}")
    assert "h1" not in there
    assert "h2" not in there
    with connect(there).lock("x") as lease:
        assert lease.held


def test_all_nodes_are_reached_over_tls(connect: Any, over_tls: ClusterFleet, certificate: tuple[str, str]) -> None:
    client = connect(url_of(over_tls, f"ssl_ca_certs={certificate[0]}"))
    for name in ("a", "b", "c", "d"):  # on all nodes
        with client.lock(name) as lease:
            assert lease.held
    used = {int(node.rpartition(":")[2]) for node in client.client.statistics().nodes}
    assert used == set(over_tls.tls_ports)


def test_a_waiter_is_notified_over_tls(connect: Any, over_tls: ClusterFleet, certificate: tuple[str, str]) -> None:
    url = url_of(over_tls, f"ssl_ca_certs={certificate[0]}")
    first, second = connect(url), connect(url)
    lease = first.lock("waited for").acquire()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(second.lock("waited for", wait=60).acquire)
        eventually(lambda: any(node.subscribed for node in second.client.statistics().nodes.values()), 30)
        lease.release()
        waiting.result().release()


def test_an_untrusted_certificate_of_a_node_is_named(connect: Any, over_tls: ClusterFleet) -> None:
    with pytest.raises(holdfast.Unavailable, match=r"localhost:\d+ .*its TLS certificate is not trusted"):
        connect(url_of(over_tls)).lock("x", wait=0).acquire()


def test_a_node_with_a_certificate_for_another_host_is_refused(connect: Any, other_host: tuple[str, str]) -> None:
    with ClusterFleet(3, binary=find_redis(), certificate=other_host) as fleet:
        url = url_of(fleet, f"ssl_ca_certs={other_host[0]}")
        with pytest.raises(holdfast.Unavailable, match=r"localhost:\d+ .*its TLS certificate is not trusted"):
            connect(url).lock("x", wait=0).acquire()
        with connect(f"{url}&ssl_check_hostname=false").lock("x", wait=0) as lease:
            assert lease.held
