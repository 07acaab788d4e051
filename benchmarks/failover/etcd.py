"""The leader of etcd is killed; every fifth time it hangs instead, and wakes up as an old leader."""

from __future__ import annotations

import signal
import time
from typing import Final

import httpx
from tests.fleet_etcd import EtcdFleet, coded

from benchmarks.failover.history import Fault
from benchmarks.failover.worker import Address

_WITHIN: Final = 60.0


class EtcdGround:
    title = "etcd, leaders killed"
    libraries = ("holdfast",)

    def __init__(self, fleet: EtcdFleet) -> None:
        self._fleet = fleet
        self.address = Address(fleet.url, ())

    def fault(self, number: int) -> Fault:
        leader = self._fleet.leader()
        others = [member for member in self._fleet.members if member is not leader]
        began = time.monotonic()
        if number % 5 == 4:
            leader.pause()
        else:
            leader.kill()
        while True:
            try:
                self._fleet.ask("/v3/kv/put", {"key": coded("probe"), "value": ""}, others[0])
                break
            except httpx.HTTPError:
                if time.monotonic() > began + _WITHIN:
                    raise
        ended = time.monotonic()
        leader.signal(signal.SIGCONT)
        if not leader.is_running():
            self._fleet.restart(leader)
        self._wait_for_all()
        return Fault(began, ended)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + _WITHIN
        for member in self._fleet.members:
            while True:
                try:
                    self._fleet.ask("/v3/kv/range", {"key": coded("probe")}, member)
                    break
                except httpx.HTTPError:
                    assert time.monotonic() < deadline, "a member does not come back"
                    time.sleep(0.02)
