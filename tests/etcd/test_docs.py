"""What docs/etcd.md says: its URLs connect, with the members of a cluster in place of the example's."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.etcd.faulty_server import FaultyServer, is_whole_http
from tests.fleet_etcd import EtcdFleet
from tests.tls import TlsRelay

PAGE = (Path(__file__).parent.parent.parent / "docs" / "etcd.md").read_text()
URLS = re.findall(r"^etcds?://\S+", PAGE, re.MULTILINE)
PLAIN, GUARDED, ENCRYPTED = URLS


def with_ports(url: str, ports: list[int]) -> str:
    """The URL, with the members at these ports of localhost."""
    for number, port in enumerate(ports, 1):
        assert f"h{number}:2379" in url
        url = url.replace(f"h{number}:2379", f"localhost:{port}")
    return url


def must_lock(client: Any) -> int:
    with client.lock("x", ttl=10) as lease:
        assert lease.held
        fence: int = lease.fence
        return fence


def ports_of(fleet: EtcdFleet) -> list[int]:
    return [member.client_port for member in fleet.members]


def test_the_plain_url_connects(fleet: EtcdFleet, connect: Any) -> None:
    must_lock(connect(with_ports(PLAIN, ports_of(fleet))))


def test_the_url_with_a_user_and_a_floor_connects(connect: Any) -> None:
    with EtcdFleet() as fleet:
        fleet.ask("/v3/auth/user/add", {"name": "root", "password": "password"})
        fleet.ask("/v3/auth/role/add", {"name": "root"})
        fleet.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        fleet.ask("/v3/auth/enable", {})
        url = with_ports(GUARDED, ports_of(fleet))
        assert "user:password@" in url
        fence = must_lock(connect(url.replace("user:password@", "root:password@")))
        assert fence > int(GUARDED.rpartition("fence_floor=")[2])


def test_the_url_with_tls_connects(fleet: EtcdFleet, certificate: tuple[str, str], connect: Any) -> None:
    relays = [TlsRelay(port, *certificate) for port in ports_of(fleet)]
    url = with_ports(ENCRYPTED, [relay.port for relay in relays])
    assert "ssl_ca_certs=/etc/etcd/ca.pem" in url
    must_lock(connect(url.replace("/etc/etcd/ca.pem", certificate[0])))
    for relay in relays:
        relay.close()


KINDS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "lock": (1, lambda client: client.lock("x")),
    "several names": (1, lambda client: client.lock("x", "y")),
    "rlock": (1, lambda client: client.rlock("x")),
    "read": (1, lambda client: client.rwlock("x").read),
    "write": (1, lambda client: client.rwlock("x").write),
    "semaphore": (2, lambda client: client.semaphore("x", 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_requests_of_an_uncontended_acquire(fleet: EtcdFleet, kind: str) -> None:
    """The table says: one, of a semaphore two, and one more for the first acquire of a client."""
    requests, make = KINDS[kind]
    seen: list[bytes] = []

    def note(client: socket.socket, request: bytes) -> bool:
        if b"/v3/watch" not in request:  # of a holder, a moment later
            seen.append(request)
        return False

    with FaultyServer(ports_of(fleet)[0], is_whole_http) as relay:
        relay.fault = note
        with holdfast.connect(f"etcd://127.0.0.1:{relay.port}") as client:
            for further in (1, 0):
                seen.clear()
                with make(client):
                    assert len(seen) == requests + further
