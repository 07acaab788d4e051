"""One server, which is killed, paused and restarted, and whose keys are deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import redis

from tests.hostile.garble import BROKEN, Garbler
from tests.hostile.grounds.base import Ground, Noted, Route, during
from tests.hostile.grounds.keys import pool_keys, tokens_in
from tests.hostile.plan import WORKER_FAULTS, WORKERS, Fault, FaultKind
from tests.hostile.proxy import Proxy
from tests.hostile.worker import NAMES
from tests.servers import Server

__all__ = ["SingleGround"]


class SingleGround(Ground):
    name = "single"
    title = "one server"
    engine = "redis"
    faults: ClassVar[Mapping[str, FaultKind]] = {
        **{name: kind for name, kind in WORKER_FAULTS.items() if name != "slow link"},
        "garble replies": FaultKind(WORKERS, 0.2, 1.5),
        "slow link": WORKER_FAULTS["slow link"],
        "kill listeners": FaultKind(),
        "kill connections": FaultKind(),
        "delete key": FaultKind(NAMES),
        "delete side keys": FaultKind(NAMES),
        "pause clients": FaultKind(shortest=0.1, longest=1.0),
        "stop server": FaultKind(shortest=0.1, longest=2.5),
        "restart with data": FaultKind(),
        "restart without data": FaultKind(),
        "flush scripts": FaultKind(),
    }

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(note)
        self._server = Server()
        self._admin: Any = self._server.client(socket_timeout=5.0)
        self._watching: Any = self._server.client(socket_timeout=1.0)

    def strike(self, fault: Fault) -> Noted:
        try:
            return super().strike(fault)
        except redis.RedisError as error:  # the server is just down for another fault
            return {"failed": str(error), **({"displaces": ["*"]} if fault.name == "delete key" else {})}

    def route(self, place: str) -> Route:
        proxy = Proxy(self._server.port)
        return self.routes.setdefault(place, Route(proxy.url, [proxy]))

    def tokens(self) -> Iterator[tuple[str, bytes]]:
        return tokens_in(self._watching)

    def stop(self) -> None:
        self._server.stop()

    def _garble_replies(self, fault: Fault) -> None:
        garbler = Garbler(f"{fault.target} {fault.at}", rate=0.2, kinds=BROKEN)
        during(fault.seconds, self.routes[fault.target].proxies, lambda proxy: setattr(proxy, "garbler", garbler))

    def _kill_listeners(self, fault: Fault) -> None:
        self._admin.client_kill_filter(_type="pubsub")

    def _kill_connections(self, fault: Fault) -> None:
        self._admin.client_kill_filter(_type="normal", skipme=True)
        self._admin.client_kill_filter(_type="pubsub", skipme=True)

    def _delete_key(self, fault: Fault) -> Noted:
        name = fault.target
        deleted = self._admin.delete(name, *pool_keys(self._admin, name))
        return {"displaces": [name], "certain": bool(deleted)}

    def _delete_side_keys(self, fault: Fault) -> Noted:
        """One key of a name that is not its main key: of a pool that displaces its holders, of a lock it never does."""
        name = fault.target
        keys = sorted(self._admin.keys(f"{name}:hf1:*"))
        pool = pool_keys(self._admin, name)
        if not keys:
            return {}
        key = keys[int(fault.at * 1000) % len(keys)]
        self._admin.delete(key)
        return {"key": key.decode(), "displaces": [name] if key in pool else [], "certain": key in pool}

    def _pause_clients(self, fault: Fault) -> None:
        self._admin.execute_command("CLIENT", "PAUSE", int(fault.seconds * 1000), "ALL")
        time.sleep(fault.seconds)

    def _stop_server(self, fault: Fault) -> None:
        with self.busy:
            self._server.pause()
            time.sleep(fault.seconds)
            self._server.resume()

    def _restart_with_data(self, fault: Fault) -> Noted:
        with self.busy:
            self._server.restart(empty=False)
        # What was acknowledged between the save and the kill is lost.
        return {"displaces": ["*"]}

    def _restart_without_data(self, fault: Fault) -> Noted:
        with self.busy:
            self._server.restart()
        return {"displaces": ["*"], "certain": True}

    def _flush_scripts(self, fault: Fault) -> None:
        self._admin.script_flush()
