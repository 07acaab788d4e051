"""The URLs of docs/engines.md connect, with the hosts and passwords of a fleet in place of the examples'."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest

import holdfast
from tests.fleets import SentinelFleet

PAGE = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
URLS = sorted(set(re.findall(r"^redis\+sentinel://\S+", PAGE, re.MULTILINE)))


def test_there_are_examples() -> None:
    assert len(URLS) == 2  # and one with TLS, in test_tls.py


@pytest.mark.parametrize(
    ("_fleet", "url"), [("redis7" if "password" in url else "valkey", url) for url in URLS], indirect=["_fleet"]
)
@pytest.mark.parametrize("replicas", [None, 1])
def test_the_urls_connect(fleet: SentinelFleet, url: str, replicas: int | None) -> None:
    there = re.sub(r"h1:26379[^/]*", ",".join(f"{host}:{port}" for host, port in fleet.hosts), url)
    there = there.replace("user:password", f":{quote(fleet.password, safe='')}")
    there = there.replace("=other", f"={quote(fleet.sentinel_password, safe='')}")
    with holdfast.connect(there, replicas=replicas) as client, client.lock("x", ttl=10) as lease:
        assert lease.held
