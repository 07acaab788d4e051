"""The watches of a client, without the client: what they tell is written down."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from holdfast.engines.etcd.conversation import Members
from holdfast.engines.etcd.target import resolve_etcd
from holdfast.engines.etcd.watches import Watches
from holdfast.protocol.intents.session import Session
from holdfast.url import locate

__all__ = ["all_ended", "watches_at"]


class _Router:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def deliver(self, data: bytes, now: float) -> None:
        self._told.append(data.decode().partition(" ")[0])

    def touched(self, key: str) -> None:
        self._told.append(key)


def watches_at(url: str) -> tuple[Watches, list[str]]:
    """Watches of this cluster, and a list of the tokens of waiters and the keys of holders that they have told."""
    told: list[str] = []
    router: Any = _Router(told)
    return Watches(Members(resolve_etcd(locate(url))), Session(), router, time.monotonic), told


async def all_ended(watches: Watches, within: float = 20.0) -> bool:
    """Whether all streams end by themselves."""
    tasks = [stream.task for stream in watches.by_key.values() if stream.task is not None]
    _, running = await asyncio.wait(tasks, timeout=within)
    return not running and not watches.by_key
