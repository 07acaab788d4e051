"""A real cluster for tests: some primaries, with or without replicas, on loopback ports.

    with ClusterFleet(primaries=3, replicas=1) as fleet:
        client = holdfast.connect(fleet.url)
        fleet.move_slot(slot_of("x"), fleet.primaries[0])

Slots are spread evenly over the primaries at first. ``begin_move`` leaves a slot half-way, as resharding tools do for a
moment with every slot that they move.
"""

from __future__ import annotations

import time
from typing import Any, Final
from urllib.parse import quote

import redis
import redis.cluster

from holdfast.names import SLOTS, slot_of
from tests.fleets import eventually
from tests.servers import Server, find_binary, free_port

__all__ = ["ClusterFleet"]

_HOST: Final = "127.0.0.1"
_FAILOVER_S: Final = 6.0  # a server gives a failover up after 5 s, if it was not elected, and must be told again


class _Client(redis.cluster.RedisCluster):
    """Takes what tests ask of a single server: EXISTS of keys in different slots, and KEYS of all."""

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        run: Any = super().execute_command
        if args[0] == "EXISTS":
            return sum(run("EXISTS", key) for key in args[1:])
        if args[0] == "KEYS":
            primaries: Any = self.get_primaries
            return [key for node in primaries() for key in run(*args, target_nodes=node)]
        return run(*args, **kwargs)


class ClusterFleet:
    """The servers of one cluster. The first ``primaries`` of ``servers`` have the slots at first."""

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        *options: str,
        binary: str = "",
        node_timeout_ms: int = 1500,
        password: str = "",
        certificate: tuple[str, str] | None = None,
    ) -> None:
        """``certificate`` and its key: the nodes take TLS on ``tls_ports``, if the binary is built with it."""
        self._secured = ("--requirepass", password, "--masterauth", password) if password else ()
        self._password = password
        self.tls_ports: list[int] = []
        self._clients: list[redis.cluster.RedisCluster] = []
        self.servers: list[Server] = []
        try:
            for _ in range(primaries * (1 + replicas)):
                own = (
                    *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
                    *("--cluster-node-timeout", str(node_timeout_ms), "--cluster-replica-validity-factor", "0"),
                    *("--repl-diskless-sync-delay", "0"),
                    *(self._over_tls(*certificate) if certificate else ()),
                )
                self.servers.append(Server(*own, *self._secured, *options, binary=binary or find_binary()))
            self.admins = {server.port: server.client() for server in self.servers}
            self._form(primaries)
        except BaseException:
            self.stop()
            raise

    def _over_tls(self, certificate: str, key: str) -> tuple[str, ...]:
        """Options with which the next node takes TLS, and its bus too: else it would not say its TLS port there."""
        self.tls_ports.append(free_port())
        files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
        return "--tls-port", str(self.tls_ports[-1]), "--tls-cluster", "yes", "--tls-auth-clients", "no", *files

    def _form(self, primaries: int) -> None:
        first = self.servers[0]
        for number, server in enumerate(self.servers[:primaries]):
            start, end = SLOTS * number // primaries, SLOTS * (number + 1) // primaries - 1
            self.admin(server).execute_command("CLUSTER", "ADDSLOTSRANGE", start, end)
            self.admin(server).execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, server in enumerate(self.servers[1:], 1):
            bus = int(server._options[server._options.index("--cluster-port") + 1])
            port = self.tls_ports[number] if self.tls_ports else server.port
            self.admin(first).execute_command("CLUSTER", "MEET", _HOST, port, bus)
        eventually(lambda: all(self._known(server) == len(self.servers) for server in self.servers), "all nodes meet")
        for number, server in enumerate(self.servers[primaries:]):
            self.admin(server).execute_command("CLUSTER", "REPLICATE", self.id_of(self.servers[number % primaries]))
        self.settle()

    def settle(self) -> None:
        """Wait until all nodes that run agree, and replicas are in step."""
        running = [server for server in self.servers if server.is_running()]
        eventually(lambda: all(self._is_settled(server) for server in running), "the cluster is up")
        eventually(lambda: len({str(self.map_of(server)) for server in running}) == 1, "all nodes have the same map")

    def _is_settled(self, server: Server) -> bool:
        replication: Any = self.admin(server).info("replication")
        linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        return linked and self.info(server)["cluster_state"] == "ok"

    def _known(self, server: Server) -> int:
        return int(self.info(server)["cluster_known_nodes"])

    def info(self, server: Server) -> dict[str, str]:
        said: Any = self.admin(server).execute_command("CLUSTER INFO")
        return dict(said)

    def admin(self, server: Server) -> redis.Redis:
        """A client of one node, which follows no redirection."""
        return self.admins[server.port]

    def id_of(self, server: Server) -> str:
        said: Any = self.admin(server).execute_command("CLUSTER", "MYID")
        return str(said.decode())

    def map_of(self, server: Server) -> dict[int, int]:
        """First slot of each range -> port of its primary, as this node sees it."""
        ranges: Any = self.admin(server).execute_command("CLUSTER", "SLOTS")
        return {first: port for first, _, (_, port, *_), *_ in sorted(ranges)}

    @property
    def url(self) -> str:
        user = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis+cluster://{user}{','.join(f'{_HOST}:{server.port}' for server in self.servers)}"

    def client(self, **options: Any) -> redis.cluster.RedisCluster:
        """A new client of the cluster, closed with it."""
        client = _Client(host=_HOST, port=self.servers[0].port, password=self._password or None, **options)
        self._clients.append(client)
        return client

    def pause(self) -> None:
        """All nodes hang."""
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    @property
    def primaries(self) -> list[Server]:
        """Those that have slots, in the order of their slots."""
        ports: dict[int, None] = {}
        for server in self.servers:
            if server.is_running():
                ports = dict.fromkeys(port for _, port in sorted(self.map_of(server).items()))
                break
        return [next(server for server in self.servers if server.port == port) for port in ports]

    def owner(self, key: str) -> Server:
        """The primary that has this key's slot, as any node sees it."""
        slot = slot_of(key)
        server = next(server for server in self.servers if server.is_running())
        port = max((first, port) for first, port in self.map_of(server).items() if first <= slot)[1]
        return next(server for server in self.servers if server.port == port)

    def name_on(self, server: Server) -> str:
        """A name that this primary has."""
        return next(name for number in range(SLOTS) if self.owner(name := f"name:{number}") is server)

    def other(self, key: str) -> Server:
        """A primary that does not have this key's slot."""
        owner = self.owner(key)
        return next(server for server in self.primaries if server is not owner)

    def replica_of(self, primary: Server) -> Server:
        said: Any = self.admin(primary).info("replication")
        port = said["slave0"]["port"]
        return next(server for server in self.servers if server.port == port)

    # Resharding.

    def begin_move(self, slot: int, source: Server, target: Server) -> None:
        """The slot is on its way: keys that are not at the source are asked for at the target."""
        self.admin(target).execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        self.admin(source).execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))

    def move_keys(self, slot: int, source: Server, target: Server) -> int:
        admin, moved = self.admin(source), 0
        while keys := admin.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            auth = ("AUTH", self._password) if self._password else ()
            admin.execute_command("MIGRATE", _HOST, target.port, "", 0, 5000, *auth, "KEYS", *keys)
            moved += len(keys)
        return moved

    def end_move(self, slot: int, source: Server, target: Server) -> None:
        new = self.id_of(target)

        def has_moved() -> bool:
            """Whether they say so. If not, a heartbeat that the source had sent before took the slot back."""
            if all(self._owner_of(slot, server) is target for server in (source, target, self.servers[0])):
                return True
            for server in (target, source, *(one for one in self.primaries if one not in (source, target))):
                self.admin(server).execute_command("CLUSTER", "SETSLOT", slot, "NODE", new)
                if server is target:
                    self.admin(server).execute_command("CLUSTER", "BUMPEPOCH")
            return False

        eventually(has_moved, "the slot has moved")

    def move_slot(self, slot: int, target: Server) -> None:
        """Move a slot with its keys, as redis-cli does."""
        source = self._owner_of(slot)
        if source is target:
            return
        self.begin_move(slot, source, target)
        self.move_keys(slot, source, target)
        self.end_move(slot, source, target)

    def _owner_of(self, slot: int, seen_by: Server | None = None) -> Server:
        server = seen_by or self.servers[0]
        port = max((first, port) for first, port in self.map_of(server).items() if first <= slot)[1]
        return next(one for one in self.servers if one.port == port)

    # Failover.

    def fail_over(self, primary: Server) -> Server:
        """Let a replica take over from a primary that is in order; returns the replica."""
        replica = self.replica_of(primary)
        asked_at = 0.0

        def has_taken_over() -> bool:
            nonlocal asked_at
            if self.admin(replica).info("replication")["role"] == "master":
                return True
            if time.monotonic() > asked_at + _FAILOVER_S:
                asked_at = time.monotonic()
                self.admin(replica).execute_command("CLUSTER", "FAILOVER")
            return False

        eventually(has_taken_over, "the replica takes over")
        return replica

    def wait_for(self, replica: Server) -> None:
        """Wait until this server has become a primary."""
        eventually(lambda: self.admin(replica).info("replication")["role"] == "master", "the replica takes over")

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        for server in self.servers:
            server.stop()

    def __enter__(self) -> ClusterFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
