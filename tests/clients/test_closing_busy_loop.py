"""Closing an asyncio client on an event loop that gets busy: no error of another library, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import redis

import holdfast
import holdfast.aio
from tests.support import async_eventually, asyncio_test, connections_of


@pytest.mark.parametrize("turns", range(6))
@asyncio_test
async def test_aclose_while_the_loop_is_busy_for_longer_than_the_timeout(
    url: str, admin: redis.Redis, turns: int
) -> None:
    before = connections_of(admin)

    async def hog() -> None:
        while True:
            time.sleep(0.15)
            await asyncio.sleep(0)

    client = holdfast.aio.connect(url, timeout=0.1)
    for _ in range(50):
        with contextlib.suppress(holdfast.HoldfastError):  # a busy machine may need longer than this timeout
            async with client.lock("x"):
                break
    else:
        pytest.fail("the client never got its lock")
    closing = asyncio.create_task(client.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    busy = asyncio.create_task(hog())
    try:
        await closing
    finally:
        busy.cancel()
    await async_eventually(lambda: connections_of(admin) <= before, what="the connection is closed")
