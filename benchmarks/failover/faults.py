"""The faults of a run: each is injected into real servers, and ends when these accept writes again."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import redis
import redis.exceptions
from tests.fleet_cluster import ClusterFleet
from tests.fleet_etcd import EtcdFleet
from tests.fleets import SERVICE, SentinelFleet

from benchmarks.failover.etcd import EtcdGround
from benchmarks.failover.history import Fault
from benchmarks.failover.worker import LIBRARIES, Address
from holdfast.names import slot_of

TAG: Final = "{failover}"  # all names of a run share a slot, so that one fault affects all of them
_PROBE: Final = f"{TAG}:probe"
_WITHIN: Final = 60.0
_STAGE: Final = 0.25  # seconds; a moving slot pauses for this long at two stages


class Ground(ABC):
    """Servers, and the one fault that a run repeats on them."""

    title = ""
    libraries = tuple(LIBRARIES)
    address: Address

    @abstractmethod
    def strike(self, number: int) -> None:
        """Begin the fault. The servers overcome it by themselves, or it is over when this returns."""

    @abstractmethod
    def mend(self) -> None:
        """Bring the servers back to full strength for the next fault."""

    def fault(self, number: int) -> Fault:
        began = time.monotonic()
        self.strike(number)
        self._wait_for_writes()
        ended = time.monotonic()
        self.mend()
        return Fault(began, ended)

    def _wait_for_writes(self) -> None:
        """Wait until the servers accept a write, as a client of redis-py sees them."""
        deadline = time.monotonic() + _WITHIN
        client = None
        while True:
            try:
                client = client or self.address.redis_client()
                client.set(_PROBE, 1, px=1000)
                break
            except (redis.exceptions.RedisError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        client.close()


class SentinelGround(Ground):
    """The primary is killed; every fifth time it hangs instead, and wakes up as an old primary."""

    title = "Sentinel, failovers"

    def __init__(self, fleet: SentinelFleet) -> None:
        self._fleet = fleet
        self.address = Address(fleet.url, tuple(fleet.hosts), SERVICE)

    def strike(self, number: int) -> None:
        primary = self._fleet.primary
        primary.pause() if number % 5 == 4 else primary.kill()
        self._fleet.wait_for_failover(primary)

    def mend(self) -> None:
        self._fleet.heal()


class ClusterGround(Ground):
    """The primary of the lock's slot is killed, and its replica takes over."""

    title = "Cluster, failovers"

    def __init__(self, fleet: ClusterFleet) -> None:
        self._fleet = fleet
        self.address = Address(fleet.url, tuple(("127.0.0.1", server.port) for server in fleet.servers))

    def strike(self, number: int) -> None:
        primary = self._fleet.owner(TAG)
        replica = self._fleet.replica_of(primary)
        self._killed = primary
        primary.kill()
        self._fleet.wait_for(replica)

    def mend(self) -> None:
        self._killed.restart(empty=True)
        self._fleet.settle()


class ReshardingGround(ClusterGround):
    """The slot of the lock moves to another primary, key by key, while clients use it."""

    title = "Cluster, reshardings"

    def strike(self, number: int) -> None:
        fleet, slot = self._fleet, slot_of(TAG)
        source, target = fleet.owner(TAG), fleet.other(TAG)
        fleet.begin_move(slot, source, target)
        time.sleep(_STAGE)  # keys that do not exist are created at the target, others stay at the source
        fleet.move_keys(slot, source, target)
        time.sleep(_STAGE)
        fleet.move_keys(slot, source, target)
        fleet.end_move(slot, source, target)

    def mend(self) -> None:
        self._fleet.settle()


@contextlib.contextmanager
def ground(kind: str) -> Iterator[Any]:
    if kind == "etcd":
        with EtcdFleet(safe=True) as etcd:
            yield EtcdGround(etcd)
    elif kind == "sentinel":
        with SentinelFleet() as sentinels:
            yield SentinelGround(sentinels)
    elif kind == "cluster":
        with ClusterFleet(3, 1) as cluster:
            yield ClusterGround(cluster)
    else:
        with ClusterFleet(3) as cluster:
            yield ReshardingGround(cluster)
