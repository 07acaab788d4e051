"""A cluster of three primaries, each with a replica, whose slots move and whose primaries fail.

What docs/engines.md declares. A slot that moves loses nothing. A failover can lose what was granted or renewed in the
last moments, and an old primary grants locks until it has heard of its replica; the first holder is told at its next
renewal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, ClassVar

from holdfast.names import slot_of
from tests.fleet_cluster import ClusterFleet
from tests.hostile.grounds.base import Ground, Noted, Route, address_rewriter
from tests.hostile.grounds.keys import tokens_in
from tests.hostile.plan import STALL, WORKER_FAULTS, WORKERS, Fault, FaultKind
from tests.hostile.proxy import Proxy
from tests.hostile.worker import BURST_NAMES, NAMES
from tests.servers import Server

__all__ = ["ClusterGround"]

NODE_TIMEOUT_MS = 2000
LOCKS = (*NAMES, *BURST_NAMES)


class ClusterGround(Ground):
    name = "cluster"
    title = "Cluster, three primaries and their replicas"
    engine = "cluster"
    faults: ClassVar[Mapping[str, FaultKind]] = {
        **WORKER_FAULTS,
        **STALL,
        "move slot": FaultKind(LOCKS, 0.1, 1.0, rest=1.0, weight=3),
        "fail over": FaultKind(LOCKS, rest=3.0, weight=2),
        "kill primary": FaultKind(LOCKS, 0.0, 1.0, rest=8.0, weight=2),
        "pause primary": FaultKind(LOCKS, 0.0, 1.0, rest=7.0, weight=2),
    }

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(note)
        self._fleet = ClusterFleet(3, 1, "--cluster-announce-ip", "127.0.0.1", node_timeout_ms=NODE_TIMEOUT_MS)
        self._roles: dict[int, str] = {}
        self._settled_at = monotonic()
        self._remember()

    def route(self, place: str) -> Route:
        """Each place begins with another node."""
        proxies = {server.port: Proxy(server.port) for server in self._fleet.servers}
        rewrite = address_rewriter({port: proxy.port for port, proxy in proxies.items()})
        for proxy in proxies.values():
            proxy.rewrite = rewrite
        turn = WORKERS.index(place)
        known = [*proxies.values()]
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in (*known[turn:], *known[:turn]))
        return self.routes.setdefault(place, Route(f"redis+cluster://{hosts}", known))

    def tokens(self) -> Iterator[tuple[str, bytes]]:
        self._look_for_failovers()
        for port in self._primaries:
            yield from tokens_in(self._fleet.admins[port])

    def stop(self) -> None:
        self._fleet.stop()

    @property
    def _primaries(self) -> list[int]:
        return [port for port, role in self._roles.items() if role == "master"]

    def _role_of(self, port: int) -> str:
        replication: Any = self._fleet.admins[port].info("replication")
        return str(replication["role"])

    def _remember(self) -> None:
        self._fleet.settle()
        self._roles = {server.port: self._role_of(server.port) for server in self._fleet.servers}
        self._settled_at = monotonic()

    def _look_for_failovers(self) -> None:
        """On a busy machine a replica may take over from a primary that only had to wait for a processor."""
        if {port: self._role_of(port) for port in self._roles} == self._roles:
            self._settled_at = monotonic()
            return
        begun = self._settled_at - NODE_TIMEOUT_MS / 1000
        self._remember()
        self.note("fault", name="failover by itself", begun=begun, target="", displaces=["*"])

    def strike(self, fault: Fault) -> Noted:
        with self.busy:  # what the nodes have done by themselves meanwhile is no part of this fault
            self._look_for_failovers()
            return super().strike(fault)

    def _move_slot(self, fault: Fault) -> None:
        """As resharding tools do it, but slowly: keys that do not exist are created at the target meanwhile."""
        fleet, slot = self._fleet, slot_of(fault.target)
        source, target = fleet.owner(fault.target), fleet.other(fault.target)
        fleet.begin_move(slot, source, target)
        time.sleep(fault.seconds)
        fleet.move_keys(slot, source, target)
        time.sleep(fault.seconds / 2)
        fleet.move_keys(slot, source, target)
        fleet.end_move(slot, source, target)
        self._remember()

    def _fail_over(self, fault: Fault) -> Noted:
        """By order: the primary waits for its replica, and hands over to it."""
        self._fleet.fail_over(self._fleet.owner(fault.target))
        return self._lost_grants()

    def _kill_primary(self, fault: Fault) -> Noted:
        old, new = self._pair(fault)
        old.kill()
        self._fleet.wait_for(new)
        time.sleep(fault.seconds)
        old.restart(empty=True)
        return self._lost_grants()

    def _pause_primary(self, fault: Fault) -> Noted:
        """It hangs, is replaced, and goes on as if nothing had happened."""
        old, new = self._pair(fault)
        old.pause()
        self._fleet.wait_for(new)
        time.sleep(fault.seconds)
        old.resume()
        return self._lost_grants()

    def _pair(self, fault: Fault) -> tuple[Server, Server]:
        primary = self._fleet.owner(fault.target)
        return primary, self._fleet.replica_of(primary)

    def _lost_grants(self) -> Noted:
        self._remember()
        return {"displaces": ["*"]}
