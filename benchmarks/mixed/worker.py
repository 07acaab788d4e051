"""``python -m benchmarks.mixed.worker LIBRARY FACE URL NAME HOLD_S COUNTER``: acquire, hold, release, again and again.

Prints ``ask T``, ``had T N`` (N is the counter after its increment), ``left T`` and ``threw T``. T is the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack, ExitStack

import redis
import redis.asyncio

from benchmarks.contention.contenders import Contender, open_aio, open_blocking


def log(event: str, *more: object) -> None:
    print(event, f"{time.monotonic():.6f}", *more, flush=True)


def work(library: str, url: str, name: str, hold_s: float, counter: str) -> None:
    with ExitStack() as stack:
        plain = stack.enter_context(redis.Redis.from_url(url))
        new_lock = open_blocking(Contender(library), url, stack)
        while True:
            log("ask")
            try:
                with new_lock(name):
                    log("had", plain.incr(counter))
                    time.sleep(hold_s)
                    plain.decr(counter)
                log("left")
            except Exception as error:
                log("threw", type(error).__name__)


async def work_aio(library: str, url: str, name: str, hold_s: float, counter: str) -> None:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(redis.asyncio.Redis.from_url(url))
        new_lock = await open_aio(Contender(library), url, stack)
        while True:
            log("ask")
            try:
                async with new_lock(name):
                    log("had", await plain.incr(counter))
                    await asyncio.sleep(hold_s)
                    await plain.decr(counter)
                log("left")
            except Exception as error:
                log("threw", type(error).__name__)


if __name__ == "__main__":
    asked_library, face, asked_url, asked_name, asked_hold, asked_counter = sys.argv[1:]
    if face == "asyncio":
        asyncio.run(work_aio(asked_library, asked_url, asked_name, float(asked_hold), asked_counter))
    else:
        work(asked_library, asked_url, asked_name, float(asked_hold), asked_counter)
