"""The libraries, and how each of them is used.

``open_blocking`` and ``open_aio`` run in a worker. They return a function from a name to a lock, which is entered by
``with`` or ``async with``. A contender itself is a value that can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final, NamedTuple

import pottery
import redis
import redis.asyncio
import redis_lock  # type: ignore[import-untyped]

import holdfast
import holdfast.aio

__all__ = [
    "AIO",
    "AIO_WITHOUT_WAITING",
    "BLOCKING",
    "HOLDFAST",
    "POTTERY",
    "PYTHON_REDIS_LOCK",
    "REDIS_PY",
    "Contender",
    "NewLock",
    "open_aio",
    "open_blocking",
    "token_of",
]

HOLDFAST: Final = "Holdfast"
REDIS_PY: Final = "redis-py"
PYTHON_REDIS_LOCK: Final = "python-redis-lock"
POTTERY: Final = "pottery"
TTL: Final = 30

NewLock = Callable[[str], Any]


class Contender(NamedTuple):
    """A library with settings: ``poll`` seconds between two tries, ``pool`` connections; None is its default."""

    library: str
    poll: float | None = None
    pool: int | None = None

    @property
    def is_default(self) -> bool:
        return self == Contender(self.library)

    @property
    def settings(self) -> str:
        words = [] if self.poll is None else [f"polls every {self.poll * 1000:g} ms" if self.poll else "polls at once"]
        words += [] if self.pool is None else [f"{self.pool} connections"]
        return ", ".join(words)

    @property
    def short_name(self) -> str:
        words = [] if self.poll is None else [f"{self.poll * 1000:g} ms"]
        words += [] if self.pool is None else [f"{self.pool} conn."]
        return f"{self.library} ({', '.join(words)})" if words else self.library

    @property
    def name(self) -> str:
        return f"{self.library} ({self.settings})" if self.settings else self.library


# python-redis-lock has no setting for polling: it waits in BLPOP. With fewer connections, asyncio tasks wait for a free
# connection, and so poll less.
BLOCKING: Final = [
    Contender(HOLDFAST),
    Contender(REDIS_PY),
    *[Contender(REDIS_PY, poll=poll) for poll in (0.01, 0.003, 0.001, 0.0)],
    Contender(PYTHON_REDIS_LOCK),
    Contender(POTTERY),
    *[Contender(POTTERY, poll=poll) for poll in (0.02, 0.002)],
]
AIO: Final = [
    Contender(HOLDFAST),
    Contender(REDIS_PY),
    *[Contender(REDIS_PY, poll=poll, pool=pool) for poll, pool in ((0.01, None), (0.001, None), (0.01, 2), (None, 8))],
    Contender(POTTERY),
    Contender(POTTERY, poll=0.02),
]
AIO_WITHOUT_WAITING: Final = [
    Contender(HOLDFAST),
    Contender(REDIS_PY),
    *[Contender(REDIS_PY, pool=pool) for pool in (32, 8)],
    Contender(POTTERY),
]


def open_blocking(contender: Contender, url: str, stack: ExitStack) -> NewLock:
    if contender.library == HOLDFAST:
        return stack.enter_context(holdfast.connect(url)).lock
    client = stack.enter_context(redis.Redis.from_url(url))
    if contender.library == REDIS_PY:
        options = {"timeout": TTL} if contender.poll is None else {"timeout": TTL, "sleep": contender.poll}
        return lambda name: client.lock(name, **options)
    if contender.library == PYTHON_REDIS_LOCK:
        return lambda name: redis_lock.Lock(client, name, expire=TTL)
    masters = {client}

    class Redlock(pottery.Redlock):
        __slots__ = ()
        _RETRY_DELAY = pottery.Redlock._RETRY_DELAY if contender.poll is None else contender.poll

    return lambda name: Redlock(key=name, masters=masters, auto_release_time=TTL)


async def open_aio(contender: Contender, url: str, stack: AsyncExitStack) -> NewLock:
    if contender.library == HOLDFAST:
        return (await stack.enter_async_context(holdfast.aio.connect(url))).lock
    if contender.pool is None:
        client = redis.asyncio.Redis.from_url(url)  # its own limit of 100 is enough for 64 tasks
    else:
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=contender.pool, timeout=None)
        client = redis.asyncio.Redis.from_pool(pool)
    stack.push_async_callback(client.aclose)
    if contender.library == REDIS_PY:
        options = {"timeout": TTL} if contender.poll is None else {"timeout": TTL, "sleep": contender.poll}
        return lambda name: client.lock(name, **options)
    masters = {client}

    class Redlock(pottery.AIORedlock):
        __slots__ = ()
        _RETRY_DELAY = pottery.AIORedlock._RETRY_DELAY if contender.poll is None else contender.poll

    return lambda name: Redlock(key=name, masters=masters, auto_release_time=TTL)


def token_of(lock: Any, entered: Any) -> str:
    """The token of this acquisition on the server; empty if the library does not show it."""
    if isinstance(entered, holdfast.Lease | holdfast.aio.Lease):
        return entered.token
    if isinstance(lock, redis.lock.Lock):
        return str(lock.local.token.decode())
    return ""
