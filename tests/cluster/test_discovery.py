"""How a new client finds the nodes: by the map that an earlier client of the process has read, if that still holds."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.names import slot_of
from tests.fleet_cluster import ClusterFleet


def maps_read(fleet: ClusterFleet) -> int:
    """How often the nodes were asked for the slot map."""
    asked = 0
    for server in fleet.servers:
        statistics: Any = fleet.admin(server).info("commandstats")
        asked += statistics.get("cmdstat_cluster|slots", {}).get("calls", 0)
    return asked


def test_only_the_first_client_of_a_process_reads_the_map(connect: Any, fleet: ClusterFleet) -> None:
    with connect(fleet.url).lock("a"):
        before = maps_read(fleet)
    for name in ("a", "b", "c", "d"):  # on all nodes
        with connect(fleet.url).lock(name) as lease:
            assert lease.held
    assert maps_read(fleet) == before


def test_a_new_client_follows_a_slot_that_has_moved_since(connect: Any, fleet: ClusterFleet) -> None:
    with connect(fleet.url).lock("moved"):
        pass
    fleet.move_slot(slot_of("moved"), fleet.other("moved"))
    with connect(fleet.url).lock("moved", wait=0) as lease:
        assert lease.held


def test_a_new_client_does_without_a_node_that_has_died_since(connect: Any) -> None:
    with ClusterFleet(3, 1) as pairs:
        with connect(pairs.url).lock("a"):
            pass
        primary = pairs.owner("a")
        replica = pairs.replica_of(primary)
        primary.kill()
        pairs.wait_for(replica)
        with connect(pairs.url).lock("a", wait=10) as lease:
            assert lease.held


def test_a_new_client_says_that_all_nodes_are_gone(connect: Any) -> None:
    with ClusterFleet(2) as fleet:
        with connect(fleet.url).lock("a"):
            pass
        for server in fleet.servers:
            server.kill()
        # A client that was answered once would wait without end for the nodes to come back.
        with pytest.raises(holdfast.Unavailable, match="nothing listens there"):
            connect(fleet.url).lock("a").acquire()
