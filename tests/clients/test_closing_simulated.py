"""A client that is closed while its tasks ask, wait, hold and release: no key stays, and no task gets a lost lease."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.protocol.harness import Play

TTL = 30.0


async def work(play: Play, client: holdfast.aio.Client, kind: str, name: str, lost: list[str]) -> None:
    locks: dict[str, Any] = {
        "lock": lambda: client.lock(name, ttl=TTL),
        "semaphore": lambda: client.semaphore(name, 1, ttl=TTL),
        "write": lambda: client.rwlock(name, ttl=TTL).write,
    }
    while True:
        lease = await locks[kind]().acquire()
        if not lease.held:
            lost.append(name)
        await play.sleep(client, 0.0003)
        await lease.release()


@pytest.mark.long
@pytest.mark.parametrize("names", ["aaa", "abc"], ids=["one lock", "a lock each"])
@pytest.mark.parametrize("kind", ["lock", "semaphore", "write"])
def test_closed_at_any_moment_it_leaves_no_key(names: str, kind: str) -> None:
    for moment in range(90):
        play = Play(seed=moment)
        client = play.client("one")
        lost: list[str] = []
        workers = [play.start(client, work(play, client, kind, name, lost)) for name in names]
        for _ in range(moment):
            play.step()
        closing = play.start(client, client.aclose())
        play.run(8.0)
        closing.outcome()
        for worker in workers:
            assert isinstance(worker.error, holdfast.HoldfastError), f"moment {moment}: {worker.error!r}"
        kept = (b":fence:", b":gone:", b":waiters:")  # counters, tombstones, and what is remembered of an empty queue
        left = [key for key in play.world.store.values if not any(notification in key for notification in kept)]
        assert left == [], f"moment {moment}"
        assert lost == [], f"moment {moment}"
        play.end()
