"""One cluster of etcd for the tests here, empty for each of them, and with all its members up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet_etcd import EtcdFleet


@pytest.fixture(scope="session")
def _session_fleet() -> Iterator[EtcdFleet]:
    with EtcdFleet() as fleet:
        yield fleet


@pytest.fixture
def fleet(_session_fleet: EtcdFleet) -> Iterator[EtcdFleet]:
    _session_fleet.client().flushall()
    yield _session_fleet
    _session_fleet.resume()
    for member in _session_fleet.members:
        if not member.is_running():
            _session_fleet.restart(member)
    _session_fleet.await_ready()
