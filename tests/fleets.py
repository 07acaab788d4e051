"""A primary, its replicas, and the Sentinels that watch them, as real processes on loopback ports.

    with SentinelFleet() as fleet:
        client = holdfast.connect(fleet.url)
        fleet.fail_over()

A fault is a method, as in tests/servers.py. The roles change with each failover, so ``primary`` is whichever server the
Sentinels name at the moment. ``patience_ms`` is how long a silent primary is tolerated before it is replaced. With
``front`` the servers and the Sentinels reach each other through it: it gets the port of a server, and returns another
one that leads there. Then the first of the replicas in ``servers`` is the one that takes over.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import redis
from redis.sentinel import Sentinel

from tests.servers import Server, find_binary, free_port

__all__ = ["SERVICE", "SentinelFleet", "SentinelServer", "find_redis"]

SERVICE: Final = "mymaster"
_READY_WITHIN_S: Final = 60.0
_QUORUM: Final = 2


def find_redis() -> str:
    """Redis itself, beside the Valkey that the other tests use. ``make test-engines`` installs it."""
    if found := shutil.which("redis-server"):
        return found
    raise FileNotFoundError("no redis-server on PATH: apt-get install redis-server, or run make test-engines")


def eventually(condition: Callable[[], bool], what: str, within: float = _READY_WITHIN_S) -> None:
    deadline = time.monotonic() + within
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class SentinelServer(Server):
    """One Sentinel. It keeps what it learns in its configuration file, so a restart loses none of it."""

    def __init__(self, watched_port: int, *settings: str, quorum: int = _QUORUM, binary: str) -> None:
        self._watched = f"{watched_port} {quorum}"
        self._settings = settings
        super().__init__(binary=binary)

    @property
    def password(self) -> str | None:
        return next((line.split()[1] for line in self._settings if line.startswith("requirepass ")), None)

    def _command(self) -> list[str]:
        file = Path(self._folder) / "sentinel.conf"
        if not file.exists():
            file.write_text(
                "\n".join(
                    (
                        f"port {self.port}",
                        "bind 127.0.0.1",
                        f'dir "{self._folder}"',
                        f"sentinel monitor {SERVICE} 127.0.0.1 {self._watched}",
                        *self._settings,
                        "",
                    )
                )
            )
        return [self._binary, str(file), "--sentinel"]


class SentinelFleet:
    """A primary, two replicas and three Sentinels."""

    def __init__(
        self,
        *,
        binary: str = "",
        patience_ms: int = 1000,
        password: str = "",
        sentinel_password: str = "",
        replicas: int = 2,
        database: int = 0,
        failover_timeout_ms: int = 3000,
        in_order: bool = False,
        front: Callable[[int], int] | None = None,
    ) -> None:
        """``in_order``: the first replica takes over if it can."""
        self._front = front
        self._announced: dict[Server, int] = {}
        self._binary = binary or find_binary()
        self.password, self.sentinel_password = password, sentinel_password
        self.database = database
        self._clients: list[redis.Redis] = []
        self.servers: list[Server] = []
        self.sentinels: list[SentinelServer] = []
        try:
            self._start(replicas, patience_ms, failover_timeout_ms, in_order)
        except BaseException:
            self.stop()
            raise

    def _start(self, replicas: int, patience_ms: int, failover_timeout_ms: int, in_order: bool) -> None:
        first = self._start_server()
        for number in range(replicas):
            priority = ("--replica-priority", str(10 + number)) if in_order else ()
            self._start_server("--replicaof", "127.0.0.1", str(self.port_of(first)), *priority)
        eventually(lambda: self._replicas_of(first) == replicas, "the replicas follow the primary")
        settings = [
            f"sentinel down-after-milliseconds {SERVICE} {patience_ms}",
            f"sentinel failover-timeout {SERVICE} {failover_timeout_ms}",
            f"sentinel parallel-syncs {SERVICE} 2",
        ]
        if self.password:
            settings.append(f"sentinel auth-pass {SERVICE} {self.password}")
        if self.sentinel_password:
            settings += [f"requirepass {self.sentinel_password}", f"sentinel sentinel-pass {self.sentinel_password}"]
        for _ in range(3):
            self.sentinels.append(SentinelServer(self.port_of(first), *settings, binary=self._binary))
        eventually(self.is_ready, "the Sentinels know all servers and each other")

    def _start_server(self, *options: str) -> Server:
        secured = ("--requirepass", self.password, "--masterauth", self.password) if self.password else ()
        quick = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        port = free_port() if self._front else None
        if self._front and port:
            announced = self._front(port)
            rank = str(10 * (len(self.servers) + 1))
            options = (*options, "--replica-announce-port", str(announced), "--replica-priority", rank)
        server = Server(*secured, *quick, *options, port=port, binary=self._binary)
        self._announced[server] = announced if self._front else server.port
        self.servers.append(server)
        return server

    def port_of(self, server: Server) -> int:
        """Under which port the Sentinels know this server."""
        return self._announced[server]

    @property
    def hosts(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        return self.url_from(0)

    def url_from(self, first: int) -> str:
        """A URL that lists the Sentinels in the same circle, beginning with that one."""
        user = f":{quote(self.password, safe='')}@" if self.password else ""
        hosts = ",".join(f"{host}:{port}" for host, port in (*self.hosts[first:], *self.hosts[:first]))
        options = f"?sentinel_password={quote(self.sentinel_password, safe='')}" if self.sentinel_password else ""
        return f"redis+sentinel://{user}{hosts}/{SERVICE}/{self.database}{options}"

    def manager(self, flavour: Any = Sentinel, **options: Any) -> Any:
        """redis-py's Sentinel object, or that of redis.asyncio."""
        return flavour(
            self.hosts,
            sentinel_kwargs={"password": self.sentinel_password or None, "socket_timeout": 1.0},
            password=self.password or None,
            db=self.database,
            **options,
        )

    def client(self, **options: Any) -> redis.Redis:
        """A new client of the primary, closed with the fleet."""
        client: redis.Redis = self.manager().master_for(SERVICE, **options)
        self._clients.append(client)
        return client

    @property
    def epoch(self) -> int:
        """Rises with each failover."""
        return max(int(self._state(sentinel)["config-epoch"]) for sentinel in self.sentinels)

    @property
    def primary(self) -> Server:
        """The server that most Sentinels name."""
        ports = [int(self._state(sentinel)["port"]) for sentinel in self.sentinels]
        port = max(ports, key=ports.count)
        return next(server for server in self.servers if self.port_of(server) == port)

    @property
    def replicas(self) -> list[Server]:
        primary = self.primary
        return [server for server in self.servers if server is not primary]

    def fail_over(self) -> None:
        """Let a replica take over from a primary that is in order, which then becomes a replica."""
        old = self.primary
        self.begin_failover(self.sentinels[0])
        self.wait_for_failover(old)

    def begin_failover(self, sentinel: SentinelServer) -> None:
        """Let this Sentinel lead a failover of a primary that is in order."""
        with contextlib.closing(self._admin(sentinel)) as admin:
            eventually(lambda: bool(admin.execute_command("SENTINEL", "FAILOVER", SERVICE)), "a failover begins")

    def set_option(self, option: str, value: int) -> None:
        """Set an option of the service on all Sentinels."""
        for sentinel in self.sentinels:
            with contextlib.closing(self._admin(sentinel)) as admin:
                admin.execute_command("SENTINEL", "SET", SERVICE, option, value)

    def wait_for_failover(self, old: Server) -> None:
        """Wait until the Sentinels agree that another server is the primary."""
        eventually(
            lambda: all(int(self._state(sentinel)["port"]) != self.port_of(old) for sentinel in self.sentinels),
            "another server takes over",
        )

    def is_ready(self) -> bool:
        """Whether the Sentinels know all servers and each other, so that a failover can happen."""
        states = [self._state(sentinel) for sentinel in self.sentinels]
        return len({state["port"] for state in states}) == 1 and all(
            state["num-slaves"] >= len(self.servers) - 1
            and state["num-other-sentinels"] == len(self.sentinels) - 1
            and state["flags"] == "master"
            for state in states
        )

    def heal(self) -> None:
        """All servers run again, as a primary and replicas that are up to date."""
        for server in self.servers:
            if not server.is_running():
                server.restart(empty=True)
            server.resume()
        eventually(self.is_ready, "the Sentinels know all servers again")
        primary = self.primary
        for server in self.replicas:
            with contextlib.closing(self._admin(server)) as admin:
                admin.execute_command("REPLICAOF", "127.0.0.1", self.port_of(primary))
        eventually(lambda: self._replicas_of(primary) == len(self.servers) - 1, "the replicas follow the primary")

    def pause(self) -> None:
        """The primary hangs."""
        self._paused = self.primary
        self._paused.pause()

    def resume(self) -> None:
        for server in self.servers:
            if server.is_running():
                server.resume()

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        for process in (*self.sentinels, *self.servers):
            process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _state(self, sentinel: SentinelServer) -> dict[str, Any]:
        with contextlib.closing(self._admin(sentinel)) as admin:
            state: Any = admin.sentinel_master(SERVICE)
            return dict(state)

    def _replicas_of(self, server: Server) -> int:
        """How many replicas have all that this server has."""
        with contextlib.closing(self._admin(server)) as admin:
            info = admin.info("replication")
        followers = [info[name] for name in info if name.startswith("slave") and isinstance(info[name], dict)]
        return sum(follower["state"] == "online" for follower in followers)

    def _admin(self, server: Server) -> redis.Redis:
        return redis.Redis(port=server.port, password=server.password, socket_timeout=2.0)
