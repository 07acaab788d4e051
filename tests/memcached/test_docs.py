"""The URL of docs/memcached.md connects, with the port of a real server in place of the example's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.server_memcached import MemcachedServer

PAGE = (Path(__file__).parent.parent.parent / "docs" / "memcached.md").read_text()
URLS = re.findall(r"^memcached://\S+", PAGE, re.MULTILINE)


def test_the_url_connects(connect: Any) -> None:
    assert URLS == ["memcached://localhost:11211"]
    with MemcachedServer() as server:
        with connect(URLS[0].replace("11211", str(server.port))).lock("x", ttl=10) as lease:
            assert lease.held
        assert not server.client().exists("x")
