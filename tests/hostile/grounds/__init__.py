"""Grounds: the servers of a run, how a worker reaches them, the faults that they can have, and what these displace."""

from __future__ import annotations

from tests.hostile.grounds.base import Ground, Noted, Route
from tests.hostile.grounds.cluster import ClusterGround
from tests.hostile.grounds.etcd import EtcdGround
from tests.hostile.grounds.sentinel import ConfirmedGround, SentinelGround
from tests.hostile.grounds.single import SingleGround

__all__ = ["FLEETS", "GROUNDS", "Ground", "Noted", "Route"]

GROUNDS: dict[str, type[Ground]] = {
    ground.name: ground for ground in (SingleGround, SentinelGround, ConfirmedGround, ClusterGround, EtcdGround)
}
FLEETS = tuple(name for name in GROUNDS if name != SingleGround.name)
