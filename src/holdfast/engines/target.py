"""Where the server is: what ``connect`` was given, turned into a way to make connections of our own.

Connections are redis-py's, made with the settings of the user's client (TLS, credentials, database), but they are
ours: its pool is never drained, its retries never resend a step behind our back, and how it decodes replies does not
matter. RESP2 is spoken, whatever the client speaks.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 (else the first look-up of a host imports it, and a fork just then hangs the child)
import inspect
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, Final, NamedTuple

from holdfast.engines import greenlets, local
from holdfast.errors import InvalidConfig, LocalOnlyWarning, Unavailable, Unsupported
from holdfast.url import Location, locate, redact

__all__ = ["Target", "aim"]

_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# Seconds, but for the last: how long what was sent may stay unconfirmed, in ms.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
_MOST_READS: Final = 256  # of 64 KiB at most, for one handshake

_told = False


class Target(NamedTuple):
    """How to make a connection: a class of redis-py's, its settings, and whatever must happen first."""

    address: str
    connection_class: type[Any]
    settings: dict[str, Any]
    prepare: Callable[[], dict[str, Any]] | None = None
    tls: bool = False

    def __repr__(self) -> str:
        return f"<Target {self.address}>"  # the settings hold a password, and tracebacks may show locals

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
    """That parser of redis-py's, with a limit. It reads the replies of the handshake, which are short."""
    from redis.exceptions import InvalidResponse

    class Limited(parser_class):  # type: ignore[misc]
        reads = 0

        def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:  # or a coroutine, under asyncio
            self.reads += 1
            if self.reads > _MOST_READS:
                raise InvalidResponse("a reply of the handshake is too long")
            return super().read_from_socket(*args, **kwargs)

    Limited.__module__ = parser_class.__module__  # also as far as knots of objects are concerned, which it makes
    return Limited


def aim(target: object, *, aio: bool) -> Target:
    """The server that ``connect(target)`` means. Nothing is contacted yet."""
    greenlets.refuse_eventlet()
    if target is None:
        target = os.environ.get("HOLDFAST_URL") or _fall_back_to_local()
    if isinstance(target, str):
        return _aim_at_url(locate(target), target, _flavour(aio))
    return _aim_at_client(target, aio)


def _fall_back_to_local() -> str:
    global _told  # noqa: PLW0603 (once per process, whoever asks)
    if not _told:
        _told = True
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "holdfast":
            level, frame = level + 1, frame.f_back  # up to whoever called us
        warnings.warn(
            "no server was named, so an embedded one on this machine is used (local://): locks reach no further than "
            "this machine. Name a server in HOLDFAST_URL or connect(url), or name local:// to silence this",
            LocalOnlyWarning,
            stacklevel=level,
        )
    return "local://"


def _flavour(aio: bool) -> ModuleType:
    if aio:
        import redis.asyncio.connection as flavour
    else:
        import redis.connection as flavour  # type: ignore[no-redef]
    return flavour


def _aim_at_url(location: Location, url: str, flavour: ModuleType) -> Target:
    if location.engine == "local":
        directory = location.directory

        def prepare() -> dict[str, Any]:
            return {"path": local.ensure(directory)}

        return Target(location.address, flavour.UnixDomainSocketConnection, _ours({}, flavour), prepare)
    try:
        settings = dict(flavour.parse_url(location.redis_url))
    except ValueError as error:
        # Its text may quote the URL; what matters in it is which of the options that redis-py knows is wrong.
        named = re.search(r"value for '(\w+)'", str(error))
        problem = f"the value of {named[1]} cannot be read" if named else "it cannot be read"
        raise InvalidConfig(f"URL {redact(url)!r}", problem) from None
    connection_class = settings.pop("connection_class", flavour.Connection)
    target = _target(location.address, connection_class, settings, flavour)
    try:
        connection_class(**target.settings)  # opens nothing, but knows which options there are
    except TypeError as error:
        # With credentials among the options, the unknown one may be a part of them that was not percent-encoded.
        secret = re.search(r"[?&][^=&]*(password|username)", url)
        option = "one of its options" if secret else str(error).rpartition("argument ")[2]
        raise InvalidConfig(f"URL {redact(url)!r}", f"{option} is no option of a connection") from None
    return target


def _aim_at_client(client: object, aio: bool) -> Target:
    import redis
    import redis.asyncio
    import redis.asyncio.cluster
    import redis.cluster

    if isinstance(client, (redis.cluster.RedisCluster, redis.asyncio.cluster.RedisCluster)):
        raise Unsupported("a RedisCluster client", "this version speaks to single servers; hand over a redis.Redis")
    wanted, other = (redis.asyncio.Redis, redis.Redis) if aio else (redis.Redis, redis.asyncio.Redis)
    if isinstance(client, other):
        here, there = (
            ("holdfast.aio.connect", "holdfast.connect") if aio else ("holdfast.connect", "holdfast.aio.connect")
        )
        raise InvalidConfig(f"{here}({type(client).__module__}.Redis)", f"hand this client to {there} instead")
    if not isinstance(client, wanted):
        raise InvalidConfig(
            f"connect({type(client).__name__})",
            "give a URL, a redis client, or nothing for an embedded server",
        )
    pool = client.connection_pool
    settings = dict(pool.connection_kwargs)
    connection_class = pool.connection_class
    if connection_class.__module__.split(".")[0] == "fakeredis":
        raise InvalidConfig(
            f"connect({type(client).__name__})",
            "fakeredis has no server to connect to: use connect('local://') in tests, which starts a real one",
        )
    return _target(_address(settings), connection_class, settings, _flavour(aio))


def _target(address: str, connection_class: type[Any], settings: dict[str, Any], flavour: ModuleType) -> Target:
    kept = _ours(settings, flavour)
    if issubclass(connection_class, flavour.Connection):  # over TCP
        _keep_alive(kept, flavour)
    return Target(address, connection_class, kept, tls=issubclass(connection_class, flavour.SSLConnection))


def _keep_alive(settings: dict[str, Any], flavour: ModuleType) -> None:
    """Let the kernel find out that a peer is gone, unless the user has said how, or that it should not.

    A listener, or a resting connection, may be silent for hours, and a router forgets it meanwhile.
    """
    unset = inspect.signature(flavour.Connection.__init__).parameters["socket_keepalive_options"].default
    if settings.get("socket_keepalive") is False or settings.get("socket_keepalive_options", unset) is not unset:
        return
    settings["socket_keepalive"] = True
    settings["socket_keepalive_options"] = {
        getattr(socket, option): value for option, value in _KEEP_ALIVE.items() if hasattr(socket, option)
    }


def _address(settings: dict[str, Any]) -> str:
    if path := settings.get("path"):
        return f"unix://{path}"
    return f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{settings.get('db') or 0}"


def _ours(settings: dict[str, Any], flavour: ModuleType) -> dict[str, Any]:
    """The user's settings, less what belongs to their pool and to redis-py's own way of calling."""
    kept = {
        option: value
        for option, value in settings.items()
        if not option.startswith(("maint_notifications", "oss_cluster_maint", "orig_", "himport", "event_dispatcher"))
    }
    kept.update(
        decode_responses=False,
        encoding="utf-8",
        protocol=2,
        health_check_interval=0,
        retry=flavour.Retry(flavour.NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
    )
    # What redis-py says about itself on connecting costs two round trips, and a permission. How to make it keep silent
    # depends on its version.
    known = inspect.signature(flavour.AbstractConnection.__init__).parameters
    kept.update({"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None})
    return kept
