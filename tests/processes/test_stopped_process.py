"""A process that was stopped for longer than its ttl knows it the moment it can think again."""

from __future__ import annotations

import signal
import time

import pytest
import redis

import holdfast
from tests.servers import Server
from tests.support import Script, eventually, lock_keys

BLOCKING = """
client = holdfast.connect(url)
lease = client.lock("x", ttl=0.6).acquire()
last = now = time.monotonic()  # before it says so: it may be stopped at once
say(lease.fence)
while now - last < 0.5:
    time.sleep(0.005)
    last, now = now, time.monotonic()
# The first thing it does on waking.
say(lease.held, lease.remaining(), lease.lost.is_set())
try:
    lease.check()
except holdfast.LeaseLost:
    say("check: lost")
try:
    lease.release()
except holdfast.LeaseLost:
    say("release: lost")
client.close()
"""

ASYNCIO = """
import asyncio
async def main():
    client = holdfast.aio.connect(url)
    lease = await client.lock("x", ttl=0.6).acquire()
    last = now = time.monotonic()
    say(lease.fence)
    while now - last < 0.5:
        await asyncio.sleep(0.005)
        last, now = now, time.monotonic()
    say(lease.held, lease.remaining(), lease.lost.is_set())
    try:
        lease.check()
    except holdfast.LeaseLost:
        say("check: lost")
    try:
        await lease.release()
    except holdfast.LeaseLost:
        say("release: lost")
    await client.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize("taken", [True, False], ids=["taken meanwhile", "free meanwhile"])
@pytest.mark.parametrize("code", [BLOCKING, ASYNCIO], ids=["blocking", "asyncio"])
def test_it_knows_at_once_and_touches_nobody_elses_lock(
    server: Server, client: holdfast.Client, admin: redis.Redis, code: str, taken: bool
) -> None:
    with Script(code, server.url) as script:
        fence = int(script.hear())
        time.sleep(0.05)  # it has begun to watch the clock
        script.send(signal.SIGSTOP)
        time.sleep(0.8)  # a gap that it cannot overlook, and longer than its ttl
        eventually(lambda: not admin.exists("x"), what="its lease has ended on the server")
        other = client.lock("x").acquire(timeout=5) if taken else None
        script.send(signal.SIGCONT)
        script.hear("False 0.0 True")
        script.hear("check: lost")
        script.hear("release: lost")
        if other:
            assert other.fence > fence
            assert admin.get("x") == other.token.encode()
            assert other.held
            other.release()
        script.finish()
        assert lock_keys(admin) == []


def test_with_block_of_a_stopped_process_ends_with_lease_lost(
    server: Server, client: holdfast.Client, admin: redis.Redis
) -> None:
    code = """
    client = holdfast.connect(url)
    told = []
    try:
        with client.lock("x", ttl=0.6, on_lost=told.append) as lease:
            last = now = time.monotonic()
            say("held")
            while now - last < 0.5:
                time.sleep(0.005)
                last, now = now, time.monotonic()
    except holdfast.LeaseLost as lost:
        say("lost", lost.fence == lease.fence)
    client.close()
    """
    with Script(code, server.url) as script:
        script.hear("held")
        time.sleep(0.05)  # it has begun to watch the clock
        script.send(signal.SIGSTOP)
        time.sleep(0.8)  # a gap that it cannot overlook, and longer than its ttl
        eventually(lambda: not admin.exists("x"), what="its lease has ended on the server")
        with client.lock("x") as other:
            script.send(signal.SIGCONT)
            script.hear("lost True")
            script.finish()
            assert admin.get("x") == other.token.encode()


def test_body_of_a_stopped_asyncio_process_is_cancelled(
    server: Server, client: holdfast.Client, admin: redis.Redis
) -> None:
    code = """
    import asyncio
    async def main():
        async with holdfast.aio.connect(url) as client:
            try:
                async with client.lock("x", ttl=0.6):
                    say("held")
                    await asyncio.sleep(60)
            except holdfast.LeaseLost:
                say("lost")
    asyncio.run(main())
    """
    with Script(code, server.url) as script:
        script.hear("held")
        time.sleep(0.05)  # it has begun to watch the clock
        script.send(signal.SIGSTOP)
        time.sleep(0.8)  # a gap that it cannot overlook, and longer than its ttl
        eventually(lambda: not admin.exists("x"), what="its lease has ended on the server")
        with client.lock("x") as other:
            script.send(signal.SIGCONT)
            script.hear("lost")
            script.finish()
            assert admin.get("x") == other.token.encode()
