"""Cached values for a Redis user with few permissions: without pub/sub waiters only take longer."""

from __future__ import annotations

import threading

import pytest
import redis

import holdfast
from tests.contention.test_acl import BELLS, NEEDED, TRACKING, user
from tests.servers import Server
from tests.support import eventually

CACHE = [*NEEDED, "+hmget", "+hgetall", "+hlen"]


@pytest.mark.parametrize("more", [[*BELLS, *TRACKING], []], ids=["with bells", "without"])
def test_the_permissions_of_docs_cache_are_enough(server: Server, admin: redis.Redis, more: list[str]) -> None:
    with (
        user(server, admin, *CACHE, *more) as url,
        holdfast.connect(url) as one,
        holdfast.connect(url) as two,
    ):
        go = threading.Event()
        values: list[str] = []

        def compute() -> str:
            go.wait(10)
            return "value"

        first = threading.Thread(target=lambda: values.append(one.get_or_compute("app:k", compute)))
        first.start()
        eventually(lambda: admin.exists("app:k:hf1:cache:claim:{app:k}"))
        second = threading.Thread(target=lambda: values.append(two.get_or_compute("app:k", compute)))
        second.start()
        if more:
            eventually(lambda: admin.exists("app:k:hf1:cache:waiters:{app:k}"))
        go.set()
        for thread in (first, second):
            thread.join()
        assert values == ["value", "value"]
        assert one.invalidate("app:k")
        if more:
            assert admin.acl_log() == []
