"""TLS to the Sentinels and to the servers, with Debian's Redis, which is built with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from tests.fleets import SERVICE, SentinelServer, find_redis
from tests.servers import Server, free_port

PAGE = Path(__file__).parent.parent.parent / "docs" / "engines.md"


class Ports(NamedTuple):
    plain: int  # of the Sentinel
    tls: int
    certificate: str


@pytest.fixture(scope="module")
def ports(certificate: tuple[str, str]) -> Iterator[Ports]:
    with over_tls(certificate) as ports:
        yield ports


@pytest.fixture(scope="module")
def elsewhere(other_host: tuple[str, str]) -> Iterator[Ports]:
    """Their certificate is for another host."""
    with over_tls(other_host) as ports:
        yield ports


@contextmanager
def over_tls(certificate: tuple[str, str]) -> Iterator[Ports]:
    """A Sentinel that watches a primary over TLS, and so names its TLS port."""
    files = ("tls-cert-file", certificate[0], "tls-key-file", certificate[1], "tls-ca-cert-file", certificate[0])
    lines = [f"{option} {value}" for option, value in zip(files[::2], files[1::2], strict=True)]
    server_port, sentinel_port = free_port(), free_port()
    options = [word for line in [*lines, f"tls-port {server_port}", "tls-auth-clients no"] for word in line.split()]
    options = [f"--{word}" if number % 2 == 0 else word for number, word in enumerate(options)]
    own = [*lines, f"tls-port {sentinel_port}", "tls-auth-clients no", "tls-replication yes"]
    with (
        Server(*options, binary=find_redis()),
        SentinelServer(server_port, *own, quorum=1, binary=find_redis()) as sentinel,
    ):
        yield Ports(sentinel.port, sentinel_port, certificate[0])


def test_the_url_of_the_page_connects(connect: Any, ports: Ports) -> None:
    (url,) = re.findall(r"^rediss\+sentinel://\S+", PAGE.read_text(), re.MULTILINE)
    there = url.replace("h1:26379,h2:26379", f"localhost:{ports.tls}").replace("/etc/redis/ca.pem", ports.certificate)
    assert there.startswith("rediss+sentinel://localhost")
    with connect(there).lock("x") as lease:
        assert lease.held


def test_both_over_tls(connect: Any, ports: Ports) -> None:
    url = f"rediss+sentinel://localhost:{ports.tls}/{SERVICE}/0?ssl_ca_certs={ports.certificate}"
    with connect(url).lock("x") as lease:
        assert lease.held


def test_the_servers_alone(connect: Any, ports: Ports) -> None:
    options = f"ssl_ca_certs={ports.certificate}&sentinel_ssl=false"
    with connect(f"rediss+sentinel://localhost:{ports.plain}/{SERVICE}/0?{options}").lock("x") as lease:
        assert lease.held


def test_an_untrusted_certificate_of_a_sentinel_is_named(connect: Any, ports: Ports) -> None:
    with pytest.raises(holdfast.Unavailable, match=r"Sentinel localhost:\d+: its TLS certificate is not trusted"):
        connect(f"rediss+sentinel://localhost:{ports.tls}/{SERVICE}/0").lock("x").acquire()


def test_a_sentinel_with_a_certificate_for_another_host_is_refused(connect: Any, elsewhere: Ports) -> None:
    url = f"rediss+sentinel://localhost:{elsewhere.tls}/{SERVICE}/0?ssl_ca_certs={elsewhere.certificate}"
    with pytest.raises(holdfast.Unavailable, match=r"Sentinel localhost:\d+: its TLS certificate is not trusted"):
        connect(url).lock("x", wait=0).acquire()
    with connect(f"{url}&ssl_check_hostname=false").lock("x", wait=0) as lease:
        assert lease.held


def test_a_primary_with_a_certificate_for_another_host_is_refused(connect: Any, elsewhere: Ports) -> None:
    options = f"ssl_ca_certs={elsewhere.certificate}&sentinel_ssl=false"
    url = f"rediss+sentinel://localhost:{elsewhere.plain}/{SERVICE}/0?{options}"
    with pytest.raises(holdfast.Unavailable, match=r"primary 127\.0\.0\.1:\d+.*: its TLS certificate is not trusted"):
        connect(url).lock("x", wait=0).acquire()
