"""Grants that count once replicas have them, on a cluster: each slot has replicas of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from tests.fleet_cluster import ClusterFleet
from tests.servers import Server


@pytest.fixture(scope="module")
def replicated() -> Iterator[ClusterFleet]:
    """Two primaries, with a replica each."""
    with ClusterFleet(2, 1) as fleet:
        yield fleet


@pytest.mark.parametrize("several", [False, True], ids=["one name", "names of two slots"])
def test_a_grant_is_on_the_replicas_of_its_slots_when_the_caller_has_it(
    connect: Any, replicated: ClusterFleet, several: bool
) -> None:
    names = [replicated.name_on(primary) for primary in replicated.primaries][: 1 + several]
    face = connect(replicated.url, replicas=1)
    with face.lock(*names) as lease:
        copies = [_on_replica(replicated, name) for name in names]
        assert copies == [lease.token.encode()] * len(names)


def test_so_is_a_hold_that_was_handed_over(replicated: ClusterFleet) -> None:
    names = [replicated.name_on(primary) for primary in replicated.primaries]
    with holdfast.connect(replicated.url, replicas=1) as client:
        adopted = client.adopt(client.lock(*names).acquire().hand_over())
        assert [_on_replica(replicated, name) for name in names] == [adopted.token.encode()] * len(names)
        adopted.release()


def test_too_few_replicas_of_one_slot_are_an_outage_and_leave_nothing(connect: Any, replicated: ClusterFleet) -> None:
    names = [replicated.name_on(primary) for primary in replicated.primaries]
    face = connect(replicated.url, replicas=2, timeout=1.0)
    with pytest.raises(holdfast.Unavailable, match="1 of 2 replicas confirmed the grant"):
        face.lock(*names, wait=0).acquire()
    with connect(replicated.url).lock(*names, wait=5.0):
        pass


def test_a_primary_without_replicas_ends_its_leases_and_no_others(connect: Any, replicated: ClusterFleet) -> None:
    names = [replicated.name_on(primary) for primary in replicated.primaries]
    face = connect(replicated.url, replicas=1)
    first, second = (face.lock(name, ttl=3.0).acquire() for name in names)
    both = face.lock(*(f"{{{name}}}:2" for name in names), ttl=3.0).acquire()
    time.sleep(5.0)
    assert both.held
    assert first.held
    assert second.held
    replica = _replica_of(replicated, names[0])
    replica.pause()
    try:
        assert first.lost.wait(20.0)
        assert both.lost.wait(20.0)
        time.sleep(3.0)
        assert second.held, "its renewals did not wait for the other primary"
    finally:
        replica.resume()
    second.release()
    for lost in (first, both):
        with pytest.raises(holdfast.LeaseLost, match="confirmed by 1 replica"):
            lost.release()


def _on_replica(fleet: ClusterFleet, name: str) -> Any:
    """The lock of that name, as the replica of its slot has it."""
    admin = fleet.admin(_replica_of(fleet, name))
    admin.execute_command("READONLY")
    return admin.get(name)


def _replica_of(fleet: ClusterFleet, name: str) -> Server:
    (replica,) = (
        server
        for server in fleet.servers
        if (said := fleet.admin(server).info("replication"))["role"] == "slave"
        and said["master_port"] == fleet.owner(name).port
    )
    return replica
