"""The URLs of docs/memcached.md connect, with the port of a real server in place of the example's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.server_memcached import MemcachedServer

PAGE = (Path(__file__).parent.parent.parent / "docs" / "memcached.md").read_text()
URLS = re.findall(r"^memcached://\S+", PAGE, re.MULTILINE)


def test_the_urls_connect(connect: Any) -> None:
    assert URLS == ["memcached://localhost:11211", "memcached://localhost:11211?namespace=shop%3A&timeout=2"]
    with MemcachedServer() as server:
        for url, key in zip(URLS, ("x", "shop:x"), strict=True):
            with connect(url.replace("11211", str(server.port))).lock("x", ttl=10) as lease:
                assert lease.held
                assert server.client().exists(key)
            assert not server.client().exists(key)
