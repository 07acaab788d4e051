"""Which tokens a Redis or Valkey server has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import redis

__all__ = ["pool_keys", "tokens_in"]

_NO_HOLD = (b"fence", b"gone", b"waiters")


def tokens_in(admin: Any, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
    """The tokens of holders and waiters, with the key that each is in; not those whose time is over."""
    now_us = int(time.time() * 1e6)
    for key in admin.keys(pattern):
        if b":hf1:" in key and key.split(b":hf1:")[1].split(b":")[0] in _NO_HOLD:
            continue
        with contextlib.suppress(redis.ResponseError):  # it ended between the two requests, or is no lock
            kind = admin.type(key)
            if kind == b"string":
                yield key.decode(), admin.get(key) or b""
            elif kind == b"zset":
                for token, score in admin.zrange(key, 0, -1, withscores=True):
                    if b":queue" in key or score > now_us:  # of a pool: when the lease ends
                        yield key.decode(), token
            elif kind == b"hash":
                for token in admin.hkeys(key):
                    yield key.decode(), token


def pool_keys(admin: Any, name: str) -> list[bytes]:
    """The side keys of a name that say which tokens hold it."""
    return [
        key for key in admin.keys(f"{name}:hf1:*") if key.split(b":hf1:")[1].split(b":")[0] not in (*_NO_HOLD, b"queue")
    ]
