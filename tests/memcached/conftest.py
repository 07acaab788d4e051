"""A real memcached, and a server in front of it that fails as a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.etcd.faulty_server import FaultyServer
from tests.server_memcached import MemcachedServer


@pytest.fixture(scope="module")
def memcached() -> Iterator[MemcachedServer]:
    with MemcachedServer() as server:
        yield server


@pytest.fixture
def faulty(memcached: MemcachedServer) -> Iterator[FaultyServer]:
    memcached.client().flushall()
    with FaultyServer(memcached.port, lambda data: data.endswith(b"\r\n")) as faulty:
        yield faulty
