"""Turns what ``connect`` was given into a way to open connections to that server.

Connections are objects of redis-py, made with the settings of the user's client (TLS, credentials, database). They do
not come from the client's pool. So Holdfast never drains that pool, the client's retries never send a step twice, and
its decoding does not matter. Connections start with RESP2, whatever the user's client uses.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 (else the first host look-up imports it, and a fork at that moment hangs the child)
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.engines import greenlets, handshake
from holdfast.engines.capabilities import ENGINES, require
from holdfast.engines.local.server import ensure
from holdfast.engines.others import resolve_other
from holdfast.engines.redis.sentinel import Node, Sentinels
from holdfast.engines.redis.settings import check_settings, cleaned, keep_alive, read_url
from holdfast.errors import InvalidConfig, LocalOnlyWarning, Unavailable
from holdfast.lua import SCRIPTS, SHARDED, Script
from holdfast.options import OF_ENGINE, refuse_unknown
from holdfast.protocol.primary import RECHECK_AFTER, Endpoint
from holdfast.url import Location, locate

_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_MOST_READS: Final = 256  # of 64 KiB at most, for one handshake

_told = False

Remap: TypeAlias = Callable[[tuple[str, int]], tuple[str, int]]


class Target(NamedTuple):
    """How to open a connection: a class of redis-py, its settings, and what must run first.

    ``prepare(timeout)`` returns further settings: where the server is now. Under asyncio it is a coroutine function.
    """

    address: str
    connection_class: type[Any]
    settings: dict[str, Any]
    prepare: Callable[[float], Any] | None = None
    starts_server: bool = False  # prepare may take as long as a server needs to start
    tls: bool = False
    sentinels: Sentinels | None = None
    engine: str = "redis"  # in ENGINES
    options: Mapping[str, Any] = {}
    passes: bool = True  # it reserves fences, so a lease can be passed on within a process
    fenced: bool = True  # it gives out fences
    keys_expire: bool = True  # a key that is not renewed expires
    scripts: Mapping[str, Script] = SCRIPTS
    seeds: tuple[tuple[str, int], ...] = ()  # some nodes, if it is a cluster
    remap: Remap | None = None  # maps the address that a node reports to the address to connect to

    def __repr__(self) -> str:
        return f"<Target {self.address}>"  # the settings contain a password, and tracebacks may show locals

    def node(self, host: str, port: int) -> Target:
        """How to open a connection to this node of a cluster."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._replace(
            address=f"{place} of {self.address}",
            settings={**self.settings, "host": host, "port": port},
            scripts=SHARDED,
            seeds=(),
        )

    @property
    def where(self) -> str:
        """The address for error messages, with the primary that was found last."""
        if self.sentinels is None or self.sentinels.primary.endpoint is None:
            return self.address
        host, port = self.sentinels.primary.endpoint
        return f"{self.address} (primary {host}:{port})"

    def recheck(self) -> None:
        """Before a step: ask about a failover, if the Sentinels have not been asked for a second."""
        if self.sentinels is not None and self.sentinels.is_recheck_due():
            self.sentinels.recheck()

    def on_move(self, drop_others: Callable[[], None]) -> None:
        """Call ``drop_others`` whenever another server has become the primary."""
        if self.sentinels is not None:
            self.sentinels.primary.on_move.append(drop_others)

    def refuse_old_primary(self, connection: Any, asked_at: float = float("inf")) -> None:
        """Raise ConnectionResetError if another server is the primary now: replies of the old one must be ignored.

        ``asked_at``: when the request was sent. If the reply is late, a Sentinel is asked first.
        """
        if self.sentinels is not None:
            if self.sentinels.has_to_ask(asked_at):
                self.sentinels.recheck()
            if not self.sentinels.is_primary(connection):
                raise ConnectionResetError("another server has become the primary")

    @property
    def late_after(self) -> float:
        """Seconds after which a reply is late: see ``protocol.primary``. Without Sentinels, none is."""
        return float("inf") if self.sentinels is None else RECHECK_AFTER

    def primary(self) -> Endpoint | None:
        """The primary that was found last, behind Sentinels."""
        return None if self.sentinels is None else self.sentinels.primary.endpoint

    def has_moved(self, primary: Endpoint | None, asked_at: float) -> bool:
        """Whether another server has become the primary since a request was sent to that one."""
        if self.sentinels is not None and self.sentinels.has_to_ask(asked_at):
            self.sentinels.recheck()
        return primary not in (None, self.primary())

    def prepared(self, timeout: float) -> tuple[dict[str, Any], float]:
        """The settings that ``prepare`` returns, and the time that is left to connect."""
        if self.prepare is None:
            return {}, timeout
        until = time.monotonic() + timeout
        extra = self.prepare(timeout / 2)
        return extra, timeout if self.starts_server else max(timeout / 2, until - time.monotonic())

    def connect(self, connection: Any) -> None:
        """Let redis-py connect and perform the handshake."""
        handshake.connect(connection)
        if self.sentinels is not None:
            try:
                self.sentinels.check(connection)
            except BaseException:
                connection.disconnect()
                raise

    def connection(self, timeout: float, extra: dict[str, Any]) -> Any:
        for option in _FILES:
            path = self.settings.get(option)
            if path and not os.path.exists(path):
                raise Unavailable(
                    {self.address: f"{option} names a file that does not exist: {path}"}, "Check the path"
                )
        connection = self.connection_class(
            **{**self.settings, **extra, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        )
        connection.set_parser(_limited(connection._parser.__class__))
        return connection


@lru_cache
def _limited(parser_class: Any) -> Any:
    """A parser class of redis-py with a limit on the length of the handshake's replies."""
    from redis.exceptions import InvalidResponse

    class Limited(parser_class):  # type: ignore[misc]
        reads = 0

        def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:  # a coroutine under asyncio
            self.reads += 1
            if self.reads > _MOST_READS:
                raise InvalidResponse("a reply of the handshake is too long")
            return super().read_from_socket(*args, **kwargs)

    Limited.__module__ = parser_class.__module__  # its reference cycles are attributed to redis-py
    return Limited


# An option with this value counts as not given: the URL decides, or the engine.
_NOT_GIVEN: Final = {"outage_wait": OF_ENGINE, "replicas": None, "fence_floor": None}


def resolve(target: object, options: Mapping[str, Any] = _NOT_GIVEN, *, aio: bool) -> Any:
    """The server that ``connect(target, **options)`` names, as a Target of its engine.

    The ``options`` of the Target are those given here, which override those of the URL.
    """
    greenlets.refuse_eventlet()
    refuse_unknown(options)
    if target is None:
        target = os.environ.get("HOLDFAST_URL") or _fall_back_to_local()
    found: Any
    of_url: Mapping[str, Any] = {}
    if isinstance(target, str):
        location = locate(target)
        of_url = location.options
        found = resolve_other(location) or _resolve_url(location, target, _flavour(aio))
    else:
        found = _resolve_client(target, aio)
    given = {name: value for name, value in options.items() if name not in _NOT_GIVEN or value is not _NOT_GIVEN[name]}
    options = {"outage_wait": ENGINES[found.engine].outage_wait, **of_url, **given}
    for feature in ("replicas", "fence_floor"):
        if options.get(feature):
            require(feature, engine=found.engine, address=found.address)
    return found._replace(options=options)


def _fall_back_to_local() -> str:
    global _told  # noqa: PLW0603 (once per process)
    if not _told:
        _told = True
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "holdfast":
            level, frame = level + 1, frame.f_back  # up to the caller of Holdfast
        warnings.warn(
            "no server was named, so an embedded one on this machine is used (local://): locks reach no further than "
            "this machine. Name a server in HOLDFAST_URL or connect(url), or name local:// to silence this",
            LocalOnlyWarning,
            stacklevel=level,
        )
    return "local://"


def _is_aio(flavour: ModuleType) -> bool:
    return flavour.__name__ == "redis.asyncio.connection"


def _flavour(aio: bool) -> ModuleType:
    if aio:
        import redis.asyncio.connection as flavour
    else:
        import redis.connection as flavour  # type: ignore[no-redef]
    return flavour


def _resolve_url(location: Location, url: str, flavour: ModuleType) -> Target:
    if location.engine == "local":
        return _resolve_local(location, flavour)
    target = _target(location.address, *read_url(location.redis_url, url, flavour), flavour)
    if location.engine == "cluster":
        target = target._replace(engine="cluster", seeds=location.hosts)
    if location.engine == "sentinel":
        sentinel_class, settings = read_url(location.sentinel_url, url, flavour)
        nodes = [
            _node(sentinel_class, {**settings, "host": host, "port": port}, flavour) for host, port in location.hosts
        ]
        target = _behind(Sentinels(location.service, nodes), target, flavour)
    return target


def _resolve_local(location: Location, flavour: ModuleType) -> Target:
    directory = location.directory

    def prepare(_: float) -> dict[str, Any]:
        return {"path": ensure(directory)}

    async def prepare_async(timeout: float) -> dict[str, Any]:
        return await asyncio.to_thread(prepare, timeout)

    return Target(
        location.address,
        flavour.UnixDomainSocketConnection,
        cleaned(flavour.UnixDomainSocketConnection, {}, flavour),
        prepare_async if _is_aio(flavour) else prepare,
        starts_server=True,
        engine="local",
    )


def _behind(sentinels: Sentinels, target: Target, flavour: ModuleType) -> Target:
    """The same target, with the server that the Sentinels name as primary."""
    return target._replace(
        prepare=sentinels.find_async if _is_aio(flavour) else sentinels.find, sentinels=sentinels, engine="sentinel"
    )


def _node(connection_class: type[Any], settings: dict[str, Any], flavour: ModuleType) -> Node:
    address = f"{settings['host']}:{settings['port']}"
    check_settings(f"Sentinel {address}", connection_class, settings, flavour)
    return Node(address, connection_class, cleaned(connection_class, settings, flavour))


def _resolve_client(client: object, aio: bool) -> Target:
    import redis
    import redis.asyncio
    import redis.asyncio.cluster
    import redis.asyncio.sentinel
    import redis.cluster
    import redis.sentinel

    blocking, awaited = (redis.Redis, redis.cluster.RedisCluster), (redis.asyncio.Redis, redis.asyncio.RedisCluster)
    wanted, other = (awaited, blocking) if aio else (blocking, awaited)
    if isinstance(client, other):
        here, there = (
            ("holdfast.aio.connect", "holdfast.connect") if aio else ("holdfast.connect", "holdfast.aio.connect")
        )
        kind = f"{type(client).__module__}.{type(client).__name__}"
        raise InvalidConfig(f"{here}({kind})", f"hand this client to {there} instead")
    if isinstance(client, wanted[1]):
        return _resolve_cluster_client(client, _flavour(aio))
    if not isinstance(client, wanted):
        raise InvalidConfig(
            f"connect({type(client).__name__})",
            "give a URL, a redis client, or nothing for an embedded server",
        )
    assert isinstance(client, wanted[0])
    pool = client.connection_pool
    settings = dict(pool.connection_kwargs)
    connection_class = pool.connection_class
    if connection_class.__module__.split(".")[0] == "fakeredis":
        raise InvalidConfig(
            f"connect({type(client).__name__})",
            "fakeredis has no server to connect to: use connect('local://') in tests, which starts a real one",
        )
    if isinstance(pool, (redis.sentinel.SentinelConnectionPool, redis.asyncio.sentinel.SentinelConnectionPool)):
        return _resolve_sentinel_client(pool, _flavour(aio))
    return _target_of_client(_address(settings), connection_class, settings, _flavour(aio))


def _resolve_cluster_client(client: Any, flavour: ModuleType) -> Target:
    """The nodes that a RedisCluster knows, and its settings."""
    manager = client.nodes_manager
    nodes = list(
        {node.name: node for node in (*manager.startup_nodes.values(), *manager.nodes_cache.values())}.values()
    )
    if _is_aio(flavour):
        connection_class, settings = nodes[0].connection_class, dict(nodes[0].connection_kwargs)
    else:
        pool = nodes[0].redis_connection or manager.create_redis_node("localhost", 6379, **manager.connection_kwargs)
        connection_class, settings = pool.connection_pool.connection_class, dict(pool.connection_pool.connection_kwargs)
    for option in ("host", "port", "response_callbacks", "db"):
        settings.pop(option, None)
    seeds = tuple((node.host, int(node.port)) for node in nodes)
    where = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in seeds)
    tls = issubclass(connection_class, flavour.SSLConnection)
    address = f"{'rediss' if tls else 'redis'}+cluster://{where}"
    target = _target_of_client(address, connection_class, settings, flavour)
    return target._replace(engine="cluster", seeds=seeds, remap=manager.address_remap)


def _resolve_sentinel_client(pool: Any, flavour: ModuleType) -> Target:
    """The Sentinels and the service of a client that ``master_for`` has made."""
    if not pool.is_master:
        raise InvalidConfig(f"connect(a replica of {pool.service_name!r})", "a replica refuses writes: use master_for")
    manager, settings = pool.sentinel_manager, dict(pool.connection_kwargs)
    for option in ("connection_pool", "host", "port"):
        settings.pop(option, None)
    tls = issubclass(pool.connection_class, flavour.SSLConnection)
    nodes = [
        _node(sentinel.connection_pool.connection_class, dict(sentinel.connection_pool.connection_kwargs), flavour)
        for sentinel in manager.sentinels
    ]
    where, scheme = ",".join(node.address for node in nodes), "rediss+sentinel" if tls else "redis+sentinel"
    target = _target_of_client(
        f"{scheme}://{where}/{pool.service_name}/{settings.get('db') or 0}",
        flavour.SSLConnection if tls else flavour.Connection,
        settings,
        flavour,
    )
    sentinels = Sentinels(
        pool.service_name,
        nodes,
        fewest_others=manager.min_other_sentinels,
        forced_host=getattr(manager, "_force_master_ip", None),  # since redis-py 5.1
    )
    return _behind(sentinels, target, flavour)


def _target_of_client(
    address: str, connection_class: type[Any], settings: dict[str, Any], flavour: ModuleType
) -> Target:
    check_settings(f"the client of {address}", connection_class, settings, flavour)
    return _target(address, connection_class, settings, flavour)


def _target(address: str, connection_class: type[Any], settings: dict[str, Any], flavour: ModuleType) -> Target:
    kept = cleaned(connection_class, settings, flavour)
    if issubclass(connection_class, flavour.Connection):  # over TCP
        keep_alive(kept, flavour)
    return Target(address, connection_class, kept, tls=issubclass(connection_class, flavour.SSLConnection))


def _address(settings: dict[str, Any]) -> str:
    if path := settings.get("path"):
        return f"unix://{path}"
    return f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{settings.get('db') or 0}"
