"""The engines on which the conformance suite runs: ``pytest --engine sentinel``, or all by ``make test-engines``.

Each entry starts real servers and offers what tests/servers.py does: ``url``, ``client()``, ``pause()``, ``resume()``.
The second part of an entry is the engine's name in holdfast.engines.capabilities: a test that needs a feature says so
(``pytest.mark.needs("rwlock")``), and is skipped on an engine that declares not to have it, and for no other reason.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import redis

import holdfast
from tests.contention.support import OldServer
from tests.fleet_cluster import ClusterFleet
from tests.fleet_etcd import EtcdFleet
from tests.fleets import SentinelFleet, find_redis
from tests.server_memcached import MemcachedServer
from tests.servers import Server, pause_process

__all__ = ["CHOICES", "DEFAULT", "EmbeddedServer"]

DEFAULT: Final = "standalone"
_NO_FAILOVER_MS: Final = 600_000  # a server that is paused for a test is not to be replaced


class EmbeddedServer:
    """The server behind local://, in a directory of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hf-")
        self._socket = f"{self._folder.name}/e/holdfast.sock"
        self.url = f"local://{self._folder.name}/e"
        self._clients: list[redis.Redis] = []
        with holdfast.connect(self.url) as client, client.lock("starts the server"):
            self._pid: int = self.client().info("server")["process_id"]

    def client(self, **options: Any) -> redis.Redis:
        client = redis.Redis(unix_socket_path=self._socket, **options)
        self._clients.append(client)
        return client

    def pause(self) -> None:
        pause_process(self._pid)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()
        with self.client() as admin:
            admin.shutdown(nosave=True)
        for client in self._clients:
            client.close()
        while Path(self._socket).exists():
            time.sleep(0.01)
        self._folder.cleanup()


class Choice(NamedTuple):
    start: Callable[[], Any]
    engine: str  # in ENGINES


CHOICES: Final = {
    DEFAULT: Choice(Server, "redis"),
    "resp2": Choice(OldServer, "redis"),
    "redis7": Choice(lambda: Server(binary=find_redis()), "redis"),
    "local": Choice(EmbeddedServer, "local"),
    "sentinel": Choice(lambda: SentinelFleet(patience_ms=_NO_FAILOVER_MS), "sentinel"),
    "sentinel-redis7": Choice(
        lambda: SentinelFleet(
            binary=find_redis(),
            patience_ms=_NO_FAILOVER_MS,
            password="one/pass",
            sentinel_password="another",
            database=3,
        ),
        "sentinel",
    ),
    "cluster": Choice(lambda: ClusterFleet(node_timeout_ms=_NO_FAILOVER_MS), "cluster"),
    "cluster-redis7": Choice(
        lambda: ClusterFleet(node_timeout_ms=_NO_FAILOVER_MS, binary=find_redis(), password="a secret"), "cluster"
    ),
    "etcd": Choice(EtcdFleet, "etcd"),
    "memcached": Choice(MemcachedServer, "memcached"),
    "etcd-minority-dead": Choice(lambda: EtcdFleet(dead=1), "etcd"),
}
