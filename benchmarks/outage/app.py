"""The web service under test: one endpoint that takes a lock, with Holdfast or with redis-py.

Its handlers are plain functions, so each waits in a thread of FastAPI's pool, as most handlers that call a database do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import anyio.to_thread
import redis
from fastapi import FastAPI
from fastapi.responses import JSONResponse

import holdfast

URL: Final = os.environ["BENCH_URL"]
WAIT: Final = 5.0
TTL: Final = 10.0

_make_lock: Callable[[str], AbstractContextManager[Any]]
if os.environ["BENCH_LOCK"] == "holdfast":
    _client = holdfast.connect(URL)
    _make_lock = lambda name: _client.lock(name, ttl=TTL, wait=WAIT)  # noqa: E731
else:
    _redis = redis.Redis.from_url(URL)
    _make_lock = lambda name: _redis.lock(name, timeout=TTL, blocking_timeout=WAIT)  # noqa: E731

app = FastAPI()


@app.get("/pool")
async def pool() -> dict[str, float]:
    """How many threads of the pool are in use, and how many there are."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    return {"used": limiter.borrowed_tokens, "size": limiter.total_tokens}


@app.get("/work/{name}")
def work(name: str) -> JSONResponse:
    try:
        with _make_lock(name):
            return JSONResponse({"detail": "done", "worker": os.getpid()})
    except (holdfast.AcquireTimeout, redis.exceptions.LockError):
        return JSONResponse({"detail": "busy"}, 409)
    except (holdfast.HoldfastError, redis.exceptions.RedisError) as error:
        return JSONResponse({"detail": type(error).__name__}, 503)
