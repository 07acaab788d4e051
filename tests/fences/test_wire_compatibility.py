"""Holdfast and redis-py's own Lock exclude each other, and fences only ever rise."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import as_bytes, eventually


def test_theirs_keeps_ours_out(face: Any, admin: redis.Redis) -> None:
    theirs = admin.lock("x", timeout=30)
    assert theirs.acquire(blocking=False)
    assert face.lock("x").acquire(blocking=False) is None
    assert face.lock("x").locked()
    with pytest.raises(holdfast.AcquireTimeout):
        with face.lock("x", wait=1):
            pass
    assert theirs.owned()
    assert theirs.reacquire()
    theirs.release()
    with face.lock("x", wait=5):
        pass


def test_ours_keeps_theirs_out(face: Any, admin: redis.Redis) -> None:
    theirs = admin.lock("x", timeout=30)
    with face.lock("x") as lease:
        assert not theirs.acquire(blocking=False)
        assert theirs.locked()
        assert admin.type("x") == b"string"
        assert 0 < admin.pttl("x") <= 30_000
        assert admin.get("x") == lease.token.encode()
    assert theirs.acquire(blocking=False)
    theirs.release()


def test_both_kinds_together_lose_no_update(client: holdfast.Client, server: Server) -> None:
    counter = 0

    def increment() -> None:
        nonlocal counter
        value = counter
        time.sleep(0.0005)
        counter = value + 1

    def ours() -> None:
        for _ in range(25):
            with client.lock("x"):
                increment()

    def theirs() -> None:
        with server.client() as plain:
            for _ in range(25):
                with plain.lock("x", timeout=30, sleep=0.001):
                    increment()

    threads = [threading.Thread(target=work) for work in (ours, theirs, ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter == 100


def test_fences_strictly_increase_over_ten_thousand_grants(client: holdfast.Client) -> None:
    # The order of the grants is the order inside the lock, so it is noted there.
    fences: list[int] = []

    def work() -> None:
        while len(fences) < 10_000:
            lease = client.lock("x").acquire()
            assert lease
            fences.append(lease.fence)
            lease.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fences) >= 10_000
    assert all(earlier < later for earlier, later in itertools.pairwise(fences))


def fence_of_next(face: Any) -> int:
    with face.lock("x", wait=10) as lease:
        fence: int = lease.fence
        return fence


def test_fences_rise_across_flush_and_restart(connect: Any) -> None:
    with Server() as server:
        face, admin = connect(server.url), server.client()
        fences = [fence_of_next(face)]
        for fault in (admin.flushall, server.restart, admin.flushall, server.restart):
            fault()
            fences += [fence_of_next(face), fence_of_next(face)]
        assert fences == sorted(set(fences))


def test_fence_rises_although_the_servers_clock_is_behind_the_last_one(face: Any, admin: redis.Redis) -> None:
    ahead = str(int(time.time() * 1_000_000) + 3_600_000_000)  # as after a clock that was put back by an hour
    admin.set("x:hf1:fence:{x}", ahead, px=60_000)
    first, second = fence_of_next(face), fence_of_next(face)
    assert int(ahead) < first < second
    assert admin.pttl("x:hf1:fence:{x}") > 3_600_000, "it must outlast the hour that the clock is behind"


def test_fence_key_expires(connect: Any, url: str, admin: redis.Redis) -> None:
    face = connect(url, fence_retention=1.0)
    fence = fence_of_next(face)
    assert 0 < admin.pttl("x:hf1:fence:{x}") <= 1000
    eventually(lambda: admin.keys("*") == [], 4.0, "no key is left for ever")
    assert fence_of_next(face) > fence


def test_side_keys_stay_in_the_slot_of_the_name(face: Any, admin: redis.Redis) -> None:
    with face.lock("plain"), face.lock("a{tag}b"):
        keys = {as_bytes(key).decode() for key in admin.keys("*")}
    assert keys == {"plain", "plain:hf1:fence:{plain}", "a{tag}b", "a{tag}b:hf1:fence"}
