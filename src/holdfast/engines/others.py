"""Engines other than Redis. Each is imported only when a URL names it, because it needs its own library.

An asyncio driver uses three parts of an engine: one for callers, one for the keeper, one for dedicated connections.
Engines that have only the first part use the classes of this module for the other two.
"""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.url import Location


def resolve_other(location: Location) -> Any:
    """The target of etcd or memcached; None if the URL names a Redis."""
    if location.engine == "etcd":
        from holdfast.engines.etcd.target import resolve_etcd

        return resolve_etcd(location)
    if location.engine == "memcached":
        from holdfast.engines.memcached.target import resolve_memcached

        return resolve_memcached(location)
    return None


class Connection:
    """One connection, for statistics."""

    lost = tracking = False

    def speaks_resp3(self) -> bool:
        return False


class Standby:
    """The keeper's part of an engine: it uses the same connections as the callers."""

    backlog: tuple[Any, ...] = ()

    def __init__(self, engine: Any) -> None:
        self.submit, self.call_each, self.listen, self.expire = (
            *(engine.submit, engine.call_each),
            *(engine.listen, engine.expire),
        )

    def connections(self) -> list[Any]:
        return []

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def forget(self) -> None: ...
    async def close(self) -> None: ...


class NoDedicated:
    """There are no dedicated connections: only recipes of Redis need them."""

    idle: tuple[Any, ...] = ()

    def connections(self) -> list[Any]:
        return []

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def forget(self) -> None: ...
    async def close_all(self) -> None: ...
