"""Three members of etcd, which reach each other through proxies.

What docs/etcd.md declares. Whatever happens to a minority of the members, nothing is granted twice; neither if none of
them can be reached, nor if etcd is out of space. If etcd revokes a lease, a second holder may start until the first is
told, within milliseconds if it has held for more than 0.1 s, else at its next renewal.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, ClassVar

import httpx

from tests.fleet_etcd import EtcdFleet, Member, coded
from tests.hostile.grounds.base import Ground, Noted, Route, during
from tests.hostile.plan import STALL, WORKER_FAULTS, WORKERS, Fault, FaultKind
from tests.hostile.proxy import Proxy, as_it_comes
from tests.support import eventually

__all__ = ["EtcdGround"]

MEMBERS = ("m0", "m1", "m2")
QUOTA = 3_000_000  # bytes; so few that it is soon used up
FILLING = 300_000  # bytes of one value
COMPACT_EVERY = 3.0  # seconds; else the history of the locks alone would use up the quota
REST = 2.0
# A leader is not to be replaced because the proxies, which are a program in Python, waited for a processor.
PATIENCE = ("--heartbeat-interval", "200", "--election-timeout", "2000")
OPTIONS = (*PATIENCE, "--quota-backend-bytes", str(QUOTA))


class EtcdGround(Ground):
    name = "etcd"
    title = "etcd, three members"
    engine = "etcd"
    faults: ClassVar[Mapping[str, FaultKind]] = {
        **WORKER_FAULTS,
        **STALL,
        "fork worker": FaultKind(("b0", "b1"), 0.09, 0.13, rest=2.0, weight=2),
        "stall peer links": FaultKind(MEMBERS, 1.0, 4.0, rest=REST, weight=4),
        "stall all peer links": FaultKind(shortest=0.5, longest=3.0, rest=REST),
        "pause leader": FaultKind(shortest=1.0, longest=5.0, rest=REST, weight=2),
        "pause member": FaultKind(MEMBERS, 0.5, 3.0, rest=REST),
        "kill member": FaultKind(MEMBERS, 0.0, 1.0, rest=3.0),
        "revoke lease": FaultKind(rest=0.1, weight=3),
        "fill": FaultKind(shortest=0.2, longest=1.0, rest=REST, weight=3),
    }

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(note)
        self._inner: dict[str, Proxy] = {}
        self._fleet = EtcdFleet(3, *OPTIONS, front=self._front)
        self._admin = self._fleet.client()
        self._compact_at = 0.0

    def _front(self, member: str, port: int) -> int:
        self._inner[member] = Proxy(port, frames=as_it_comes)
        return self._inner[member].port

    def route(self, place: str) -> Route:
        """Each place begins with another member."""
        proxies = [Proxy(member.client_port, frames=as_it_comes) for member in self._fleet.members]
        turn = WORKERS.index(place) % len(proxies)
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in (*proxies[turn:], *proxies[:turn]))
        return self.routes.setdefault(place, Route(f"etcd://{hosts}", proxies))

    def tokens(self) -> Iterator[tuple[str, bytes]]:
        self._revive()
        if monotonic() > self._compact_at:
            self._compact()
        for key, item in self._admin.range("").items():
            value = b64decode(item.get("value", ""))
            if ":hf1:intent:latch:" not in key and ":hf1:intent:" in key:
                yield key, json.loads(value)["token"].encode()
            elif ":hf1:slot:" in key:
                yield key, value

    def stop(self) -> None:
        self._fleet.stop()
        for proxy in self._inner.values():
            proxy.close()

    def _member(self, fault: Fault) -> Member:
        return self._fleet.members[MEMBERS.index(fault.target)]

    def _await_all(self) -> None:
        for member in self._fleet.members:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._fleet.await_ready(member)
            self._revive()
            self._fleet.await_ready(member)

    def _revive(self) -> None:
        """Start a member again that has ended by itself. etcd 3.5.1 panics if a client leaves during a read-only
        transaction (https://github.com/etcd-io/etcd/issues/14110)."""
        for member in self._fleet.members:
            if words := member.last_words():
                self.note("fault", name="member ended by itself", begun=monotonic(), target=member.name, words=words)
                self._fleet.restart(member)

    def _stall_peer_links(self, fault: Fault) -> None:
        """What this member says to the others, such as a request that it passes on to the leader, arrives late."""
        during(fault.seconds, [self._inner[fault.target]], Proxy.stall, Proxy.resume)
        self._await_all()

    def _stall_all_peer_links(self, fault: Fault) -> None:
        during(fault.seconds, self._inner.values(), Proxy.stall, Proxy.resume)
        self._await_all()

    def _pause_leader(self, fault: Fault) -> None:
        self._pause(self._fleet.leader(), fault.seconds)

    def _pause_member(self, fault: Fault) -> None:
        self._pause(self._member(fault), fault.seconds)

    def _pause(self, member: Member, seconds: float) -> None:
        member.pause()
        time.sleep(seconds)
        member.signal(signal.SIGCONT)
        self._await_all()

    def _kill_member(self, fault: Fault) -> None:
        member = self._member(fault)
        member.kill()
        time.sleep(fault.seconds)
        self._fleet.restart(member)
        self._await_all()

    def _revoke_lease(self, fault: Fault) -> Noted:
        """All keys of one etcd lease go, and with them holds and places in queues."""
        leases = sorted(int(lease["ID"]) for lease in self._fleet.ask("/v3/lease/leases", {}).get("leases", []))
        if not leases:
            return {}
        lease = leases[int(fault.at * 1000) % len(leases)]
        before = int(self._fleet.ask("/v3/lease/timetolive", {"ID": lease})["header"]["revision"])
        with contextlib.suppress(httpx.HTTPStatusError):  # it has just ended
            after = int(self._fleet.ask("/v3/lease/revoke", {"ID": lease})["header"]["revision"])
            return {"displaces": sorted({name for rev in range(before, after) for name in self._bound_to(lease, rev)})}
        return {}

    def _bound_to(self, lease: int, revision: int) -> list[str]:
        """The names of locks that had a key of this etcd lease at that revision."""
        items = self._admin.range("", revision=revision).items()
        return [key.partition(":hf1:")[0] for key, item in items if int(item.get("lease", 0)) == lease]

    def _fill(self, fault: Fault) -> None:
        """etcd has no space left, which it finds out while it executes a request; an operator makes room later."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._fill_up, range(4)))
        time.sleep(fault.seconds)
        eventually(self._make_room, timeout=60.0, what="etcd has space again")
        self._await_all()

    def _fill_up(self, number: int) -> None:
        for count in range(QUOTA // FILLING):
            body = {"key": coded(f"filling {number} {count}"), "value": coded("x" * FILLING)}
            try:
                self._fleet.ask("/v3/kv/put", body, self._fleet.members[number % 3])
            except httpx.HTTPError:  # it is full, or too busy with that
                return

    def _make_room(self) -> bool:
        self._revive()
        try:
            self._admin.delete("filling ")
            self._compact()
            for member in self._fleet.members:
                self._fleet.ask("/v3/maintenance/defragment", {}, member)
            for alarm in self._alarms():
                self._fleet.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
            self._fleet.ask("/v3/kv/put", {"key": coded("ready"), "value": ""})
            return not self._alarms()
        except httpx.HTTPError:
            return False

    def _compact(self) -> None:
        self._compact_at = monotonic() + COMPACT_EVERY
        revision = self._fleet.ask("/v3/kv/range", {"key": coded("ready")})["header"]["revision"]
        with contextlib.suppress(httpx.HTTPStatusError):  # it was compacted before
            self._fleet.ask("/v3/kv/compaction", {"revision": revision, "physical": True})

    def _alarms(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._fleet.ask("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", [])
        return found
