"""A primary with replicas behind Sentinels.

The servers and the Sentinels reach each other through proxies, and each worker has proxies of its own, so a primary can
be cut off from the rest of the fleet and from some workers.

What docs/engines.md declares. A failover can lose what was granted or renewed in the last moments; the first holder is
told at its next renewal. A client asks a Sentinel again every second, and until then may follow the one that it knows.
An old primary that is cut off, with clients that reach it and no Sentinel, grants locks to them until it is demoted.
With ``replicas=1`` no replica confirms what a primary that is cut off grants or renews, so that is not declared. The
replica that takes over may still be the one that had not received a grant.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, ClassVar

import redis

from tests.fleets import SERVICE, SentinelFleet, eventually
from tests.hostile.grounds.base import Ground, Noted, Route, address_rewriter
from tests.hostile.grounds.keys import tokens_in
from tests.hostile.plan import STALL, WORKER_FAULTS, WORKERS, Fault, FaultKind
from tests.hostile.proxy import Proxy, as_it_comes
from tests.servers import Server

__all__ = ["ConfirmedGround", "SentinelGround"]

RECHECK = 1.5  # a client asks a Sentinel every second, waits 0.25 s for the answer, and then drops its connections
PATIENCE_MS = 2000
FAILOVER_TIMEOUT_MS = 3000
ASK_AGAIN = 8.0


class SentinelGround(Ground):
    name = "sentinel"
    title = "Sentinel, two replicas"
    engine = "sentinel"
    options = ""
    follows_cut_off = True  # whether an old primary that is cut off may have holders of its own
    faults: ClassVar[Mapping[str, FaultKind]] = {
        **WORKER_FAULTS,
        **STALL,
        "fail over": FaultKind(shortest=0.5, longest=4.0, rest=6.0),
        "kill primary": FaultKind(shortest=0.5, longest=2.0, rest=9.0),
        "pause primary": FaultKind(shortest=0.5, longest=4.0, rest=9.0),
        "hung replica": FaultKind(shortest=6.0, longest=9.0, rest=6.0, weight=2),
        "resumed primary": FaultKind(shortest=1.0, longest=4.0, rest=9.0),
        "cut off primary": FaultKind(WORKERS, 2.0, 6.0, rest=12.0, weight=2),
    }

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(note)
        self._inner: dict[int, Proxy] = {}  # by the port of the server: how the fleet reaches it
        self._fleet = SentinelFleet(front=self._front, patience_ms=PATIENCE_MS)
        self._to_server: dict[str, dict[int, Proxy]] = {}  # by place and port
        self._sentinels = [redis.Redis(port=sentinel.port, socket_timeout=1.0) for sentinel in self._fleet.sentinels]
        self._primary = self._fleet.primary
        self._settled_at = monotonic()
        self._admins: dict[int, Any] = {
            server.port: server.client(socket_timeout=1.0) for server in self._fleet.servers
        }

    def _front(self, port: int) -> int:
        self._inner[port] = Proxy(port, frames=as_it_comes)
        return self._inner[port].port

    def route(self, place: str) -> Route:
        """Each place has the Sentinels in another order."""
        servers = {server.port: Proxy(server.port) for server in self._fleet.servers}
        ports = {self._fleet.port_of(server): servers[server.port].port for server in self._fleet.servers}
        rewrite = address_rewriter(ports)
        sentinels = [Proxy(sentinel.port, rewrite=rewrite) for sentinel in self._fleet.sentinels]
        turn = WORKERS.index(place)
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in (sentinels * 2)[turn % 3 :][:3])
        url = f"redis+sentinel://{hosts}/{SERVICE}/0{self.options}"
        self._to_server[place] = servers
        return self.routes.setdefault(place, Route(url, [*sentinels, *servers.values()]))

    def tokens(self) -> Iterator[tuple[str, bytes]]:
        self._look_for_failovers()
        return tokens_in(self._admins[self._primary.port])

    def stop(self) -> None:
        self._fleet.stop()
        for sentinel in self._sentinels:
            sentinel.close()
        for proxy in self._inner.values():
            proxy.close()

    def _look_for_failovers(self) -> None:
        """On a busy machine the Sentinels may find a primary silent that only had to wait for a processor."""
        if {self._named_by(number) for number in range(len(self._sentinels))} <= {self._primary, None}:
            self._settled_at = monotonic()
            return
        begun, old = self._settled_at - PATIENCE_MS / 1000, self._primary
        noted = self._get_over(old, 0.0)
        self.note("fault", **{"name": "failover by itself", "begun": begun, "target": "", **noted})

    def _named_by(self, number: int) -> Server | None:
        """The server to which this Sentinel sends its clients; None if it does not answer."""
        with contextlib.suppress(redis.RedisError):
            said: Any = self._sentinels[number].execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return next(one for one in self._fleet.servers if self._fleet.port_of(one) == int(said[1]))
        return None

    def _get_over(self, old: Server, seconds: float) -> Noted:
        """Wait until all Sentinels name another primary, for these seconds, and until all servers are in order."""
        self._await_switch(old)
        switched = monotonic()
        time.sleep(seconds)
        return {**self._settle(), **self._lost_grants(until=switched + RECHECK)}

    def _await_switch(self, old: Server, *, by_all: bool = True) -> None:
        agreed = all if by_all else any
        eventually(
            lambda: agreed(self._named_by(number) not in (None, old) for number in range(len(self._sentinels))),
            "the Sentinels name another primary",
        )

    def _settle(self) -> Noted:
        self._fleet.heal()
        self._primary = self._fleet.primary
        self._settled_at = monotonic()
        return {}

    def _lost_grants(self, until: float) -> Noted:
        return {"displaces": ["*"], "until": until}

    def strike(self, fault: Fault) -> Noted:
        with self.busy:  # what the Sentinels have done by themselves meanwhile is no part of this fault
            self._look_for_failovers()
            return super().strike(fault)

    def _fail_over(self, fault: Fault) -> Noted:
        """By order: the old primary is in order, and answers until it is demoted."""
        old = self._primary
        self._order_failover(fault, old)
        return self._get_over(old, fault.seconds)

    def _order_failover(self, fault: Fault, old: Server) -> None:
        """A Sentinel gives a failover up if it cannot choose a replica, and must be told again."""
        leader = self._fleet.sentinels[int(fault.at * 1000) % len(self._sentinels)]
        asked_at = 0.0

        def has_begun() -> bool:
            nonlocal asked_at
            if any(self._named_by(number) not in (None, old) for number in range(len(self._sentinels))):
                return True
            if monotonic() > asked_at + ASK_AGAIN:
                self._fleet.begin_failover(leader)
                asked_at = monotonic()
            return False

        eventually(has_begun, "a failover begins")

    def _kill_primary(self, fault: Fault) -> Noted:
        old = self._primary
        old.kill()
        return self._get_over(old, fault.seconds)

    def _pause_primary(self, fault: Fault) -> Noted:
        """It hangs, is replaced, and goes on as if nothing had happened."""
        old = self._primary
        old.pause()
        self._await_switch(old)
        old.resume()
        return self._get_over(old, fault.seconds)

    def _hung_replica(self, fault: Fault) -> Noted:
        """A failover lasts for as long as one replica does not follow; the old primary is in order all the time."""
        old, hung = self._primary, self._last_replica()
        # Else the Sentinels would soon go on without the replica, as they do by default after 30 s.
        self._fleet.set_option("down-after-milliseconds", 60_000)
        self._fleet.set_option("failover-timeout", 60_000)
        hung.pause()
        try:
            self._order_failover(fault, old)
            self._await_switch(old)
            switched = monotonic()
            time.sleep(fault.seconds)
        finally:
            hung.resume()
            self._fleet.set_option("down-after-milliseconds", PATIENCE_MS)
            self._fleet.set_option("failover-timeout", FAILOVER_TIMEOUT_MS)
        return {**self._settle(), **self._lost_grants(until=switched + RECHECK)}

    def _resumed_primary(self, fault: Fault) -> Noted:
        """The old primary comes back while the failover still waits for a replica that hangs."""
        old, hung = self._primary, self._last_replica()
        old.pause()
        try:
            self._await_switch(old, by_all=False)
            hung.pause()
        finally:
            old.resume()
        self._await_switch(old)
        switched = monotonic()
        time.sleep(fault.seconds)
        hung.resume()
        return {**self._settle(), **self._lost_grants(until=switched + RECHECK)}

    def _last_replica(self) -> Server:
        """The replica that does not take over."""
        return [server for server in self._fleet.servers if server is not self._primary][-1]

    def _cut_off_primary(self, fault: Fault) -> Noted:
        """Two places are on the side of the primary, the others and all Sentinels and replicas on the other side."""
        begun, old = monotonic(), self._primary
        turn = WORKERS.index(fault.target)
        inside = [WORKERS[turn], WORKERS[(turn + 1) % len(WORKERS)]]
        cut = [self._inner[old.port]]
        for place, route in self.routes.items():
            to_primary = self._to_server[place][old.port]
            cut += [proxy for proxy in route.proxies if (proxy is not to_primary) == (place in inside)]
        for proxy in cut:
            proxy.stall()
        try:
            self._await_switch(old)
            switched = monotonic()
            time.sleep(fault.seconds)
        finally:
            for proxy in cut:
                proxy.resume()
        self._settle()
        if self.follows_cut_off:  # the old primary granted locks until it was demoted, to its own side
            noted = {"name": "cut off primary: inside", "begun": begun, "target": "", "places": inside}
            self.note("fault", **{**noted, **self._lost_grants(until=monotonic())})
        return self._lost_grants(until=switched + RECHECK)


class ConfirmedGround(SentinelGround):
    """A grant counts once a replica has it."""

    name = "sentinel-confirmed"
    title = "Sentinel, two replicas, `replicas=1`"
    options = "?replicas=1"
    follows_cut_off = False
