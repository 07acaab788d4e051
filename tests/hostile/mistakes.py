"""Mistakes that can be planted in the workers, to show that the harness finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import redis

__all__ = ["MISTAKES"]


class SetWithoutNx:
    """A planted mistake: a lock that overwrites the other holder's token."""

    fences: dict[str, int]
    held = True
    reason = ""

    def __init__(self, worker: Any, name: str, *, ttl: float) -> None:
        self._client = redis.Redis.from_url(worker.url)
        self._name, self._ttl = name, ttl

    def acquire(self, timeout: float) -> SetWithoutNx:
        with contextlib.suppress(redis.RedisError):
            self._client.set(self._name, "mine", px=int(self._ttl * 1000))
        self.fences = {self._name: int(monotonic() * 1e9)}
        return self

    def release(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self._client.delete(self._name)
        self._client.close()

    def extend(self, n: float) -> None:
        """Nothing: it is held anyway."""


class Unrenewed:
    """A planted mistake: a lease that is believed in although its ttl is over."""

    held = True
    reason = ""

    def __init__(self, worker: Any, name: str, *, ttl: float) -> None:
        self._face = worker.face
        self._lock = worker.client.lock(name, ttl=0.1, renew=False)

    async def acquire(self, timeout: float) -> Unrenewed | None:
        lease = await self._face.call(self._lock.acquire, timeout=timeout)
        if lease is None:
            return None
        self.fences, self.release, self.extend = lease.fences, lease.release, lease.extend
        return self


class ReleasedEarly:
    """A planted mistake: a lease that is believed in although it was released."""

    held = True
    reason = ""

    def __init__(self, worker: Any, name: str, *, ttl: float) -> None:
        self._face = worker.face
        self._lock = worker.client.lock(name, ttl=ttl)

    async def acquire(self, timeout: float) -> ReleasedEarly | None:
        lease = await self._face.call(self._lock.acquire, timeout=timeout)
        if lease is None:
            return None
        self.fences, self.extend = lease.fences, lease.extend
        await self._face.call(lease.release)
        return self

    def release(self) -> None:
        """Nothing: it was released before."""


MISTAKES: dict[str, Callable[..., Any]] = {
    "": lambda worker, name, **terms: worker.client.lock(name, **terms),
    "set-without-nx": SetWithoutNx,
    "no-renewal": Unrenewed,
    "released-early": ReleasedEarly,
}
