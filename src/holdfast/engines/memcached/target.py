"""The memcached server that a URL names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import Unsupported, how_to_install
from holdfast.url import Location


class MemcachedTarget(NamedTuple):
    """How to reach memcached. The last fields are as in the Target of Redis."""

    address: str
    host: str
    port: int
    engine: str = "memcached"
    options: Mapping[str, Any] = {}
    passes: bool = True
    fenced: bool = False
    keys_expire: bool = True

    def blocking_engines(self, router: Any, now: Any) -> tuple[Any, Any]:
        from holdfast.engines.memcached.blocking import Engine

        engine = Engine(self, router, now)
        return engine, engine

    def aio_engines(self, timeout: float, router: Any, now: Any) -> tuple[Any, Any, Any]:
        from holdfast.engines.memcached.aio import Engine
        from holdfast.engines.others import NoDedicated, Standby

        engine = Engine(self, router, now)
        return engine, Standby(engine), NoDedicated()


def resolve_memcached(location: Location) -> MemcachedTarget:
    """The target of a URL; Unsupported if pymemcache is missing."""
    try:
        import pymemcache  # noqa: F401
    except ImportError:
        raise Unsupported(f"{location.address} without pymemcache", f"run: {how_to_install('memcached')}") from None
    ((host, port),) = location.hosts
    return MemcachedTarget(location.address, host, port)
