"""One primary of a cluster is down or hangs: calls on the others go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from tests.fleet_cluster import ClusterFleet
from tests.servers import Server
from tests.support import took

FAULTS: dict[str, Callable[[Server], None]] = {"killed": Server.kill, "stopped": Server.pause}


@pytest.fixture
def fleet() -> Iterator[ClusterFleet]:
    """Three primaries without replicas, whose slots are served although others are not."""
    with ClusterFleet(3, 0, "--cluster-require-full-coverage", "no") as fleet:
        yield fleet


def take(client: holdfast.Client, *names: str, **options: Any) -> None:
    with client.lock(*names, **options):
        pass


def outcome(call: Callable[[], Any]) -> type:
    try:
        return type(call())
    except holdfast.HoldfastError as error:
        return type(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lock_on_several_names_blames_only_the_node_that_failed(
    fleet: ClusterFleet, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy, victim = fleet.primaries[:2]
    on_healthy, on_victim = fleet.name_on(healthy), fleet.name_on(victim)
    held_name = next(name for name in (f"held:{n}" for n in range(1000)) if fleet.owner(name) is healthy)
    with holdfast.connect(fleet.url, outage_wait=1.0) as client:
        for name in (on_healthy, on_victim):
            take(client, name)
        held = client.lock(held_name, ttl=60)
        held.acquire()
        FAULTS[fault](victim)
        with caplog.at_level(logging.WARNING, "holdfast"):
            both = client.lock(on_healthy, on_victim, wait=8)
            found = []
            waiter = threading.Thread(target=lambda: found.append(outcome(client.lock(held_name, wait=4).acquire)))
            waiter.start()
            with took(less_than=7.5):  # it ends when contact has been lost for outage_wait
                outcome(both.acquire)
            for _ in range(3):
                assert outcome(both.acquire) is holdfast.Unavailable
                take(client, on_healthy, wait=2)
            waiter.join()
            assert found == [type(None)], "the lock on the healthy node is busy"
            said = [record.getMessage() for record in caplog.records if "contact" in record.getMessage()]
            assert said
            assert not [line for line in said if str(healthy.port) in line.split(" of ")[0]], said
            assert not [line for line in said if line.startswith("contact with")], said
        held.release()
        if fault == "stopped":
            victim.resume()
            take(client, on_victim, wait=10, outage_wait=None)
            take(client, on_healthy, on_victim, wait=8)
