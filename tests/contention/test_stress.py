"""Processes, threads and tasks that want one lock, and give up, fail or hold it at random: no update is lost."""

from __future__ import annotations

import pytest
import redis

from tests.contention.support import check_nobody_queues
from tests.support import Script, as_bytes, lock_keys

SECONDS = 5

# What they share is a number that is read and written without any care but for the lock, and the last fence.
_HEAD = """
    import random
    seed, seconds = map(int, sys.argv[2:])
    store = redis.Redis.from_url(url)
    say("ready")
    sys.stdin.readline()
    until = time.monotonic() + seconds
    served = []

    class Failure(Exception):
        pass

    def begin(lease):
        assert lease.fence > int(store.get("guarded:fence") or 0), "a fence went back"
        store.set("guarded:fence", lease.fence)
        return int(store.get("guarded:count") or 0)

    def end(lease, count):
        lease.check()
        store.set("guarded:count", count + 1)
        served.append(lease.fence)
"""
_THREADS = """
    import threading
    client = holdfast.connect(url)
    errors = []

    def work(number):
        dice = random.Random(f"{seed}.{number}")
        try:
            while time.monotonic() < until:
                try:
                    with client.lock("x", wait=dice.choice([0, dice.uniform(0, 0.02), 5])) as lease:
                        count = begin(lease)
                        time.sleep(dice.choice([0, 0, dice.uniform(0, 0.005)]))
                        end(lease, count)
                        if dice.random() < 0.1:
                            raise Failure
                except (holdfast.AcquireTimeout, Failure):
                    pass
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    store.close()
    assert not errors, errors
    say(len(served))
"""
_TASKS = """
    import asyncio

    async def work(client, number):
        dice = random.Random(f"{seed}.{number}")
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(dice.choice([0.02, None])):
                    async with client.lock("x", wait=dice.choice([0, dice.uniform(0, 0.02), 5])) as lease:
                        count = begin(lease)
                        await asyncio.sleep(dice.choice([0, 0, dice.uniform(0, 0.005)]))
                        end(lease, count)
                        if dice.random() < 0.1:
                            raise Failure
            except (TimeoutError, Failure):
                pass

    async def main():
        async with holdfast.aio.connect(url) as client:
            await asyncio.gather(*(work(client, number) for number in range(4)))

    asyncio.run(main())
    store.close()
    say(len(served))
"""


@pytest.mark.long
def test_no_update_is_lost_in_a_crowd(url: str, admin: redis.Redis) -> None:
    crowd = [Script(_HEAD + code, url, seed, SECONDS) for seed, code in enumerate([_THREADS, _TASKS, _THREADS, _TASKS])]
    try:
        for process in crowd:
            process.hear("ready")
        for process in crowd:
            process.write("\n")
        served = [int(process.hear(timeout=SECONDS + 30)) for process in crowd]
        for process in crowd:
            process.finish()
    finally:
        for process in crowd:
            process.__exit__(None, None, None)
    assert int(as_bytes(admin.get("guarded:count"))) == sum(served)
    assert min(served) > 20, served
    admin.delete("guarded:count", "guarded:fence")
    assert lock_keys(admin) == []
    check_nobody_queues(admin)
    # Beside the fence there may be when the lock was last left free, and the tombstones of those who were cancelled.
    left = {as_bytes(key): admin.pttl(key) for key in admin.keys("*")}
    assert all(key.split(b":")[2] in (b"fence", b"waiters", b"gone") for key in left), left
    assert -1 not in left.values(), "each of them ends by itself"
