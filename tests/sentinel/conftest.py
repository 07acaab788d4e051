"""Fleets that a module's tests share. Each test finds all servers up, and may leave them in any roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleets import SentinelFleet, find_redis


@pytest.fixture(scope="module", params=["valkey", "redis7"])
def _fleet(request: pytest.FixtureRequest) -> Iterator[SentinelFleet]:
    """The second one wants passwords, and its locks are in another database."""
    options: dict[str, Any] = {}
    if request.param == "redis7":
        options = {"binary": find_redis(), "password": "s3kr1t/one", "sentinel_password": "s3kr1t@two", "database": 3}
    with SentinelFleet(**options) as fleet:
        yield fleet


@pytest.fixture
def fleet(_fleet: SentinelFleet) -> Iterator[SentinelFleet]:
    _fleet.heal()
    with _fleet.client() as admin:
        admin.flushall()
    yield _fleet
    _fleet.resume()
