"""What a type checker sees of ``acquire``. Read by mypy in test_typing.py, and never run."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import holdfast
import holdfast.aio
from holdfast.aio import Lease as AioLease
from holdfast.aio import Permit as AioPermit
from holdfast.aio import RLease as AioRLease
from holdfast.aio import WriteLease as AioWriteLease
from holdfast.blocking import Lease, Permit, RLease, WriteLease

client = holdfast.connect(on_lost=lambda lease: print(lease.reason))
wait: float | None = 5

# Without a limit it waits until it has the lock.
assert_type(client.lock("a").acquire(), Lease)
assert_type(client.lock("a", "b", wait=None, ttl=5).acquire(), Lease)
assert_type(client.lock("a").acquire(True, -1), Lease)
assert_type(client.rlock("a").acquire(), RLease)
assert_type(client.semaphore("a", 5).acquire(), Permit)
assert_type(client.rwlock("a").read.acquire(), Lease)
assert_type(client.rwlock("a", wait=None).write.acquire(), WriteLease)
assert_type(holdfast.lock("a").acquire(), Lease)
client.lock("a").acquire().release()

# With one it may come back without.
assert_type(client.lock("a", wait=5).acquire(), Lease | None)
assert_type(client.lock("a", wait=wait).acquire(), Lease | None)
assert_type(client.rlock("a", wait=0).acquire(), RLease | None)
assert_type(client.semaphore("a", 5, wait=5).acquire(), Permit | None)
assert_type(client.rwlock("a", wait=5).read.acquire(), Lease | None)
assert_type(client.rwlock("a", wait=5).write.acquire(), WriteLease | None)
assert_type(holdfast.lock("a", wait=5).acquire(), Lease | None)
client.lock("a", wait=5).acquire().release()  # type: ignore[union-attr]

# So it may if the call names the limit, whatever the lock's is.
assert_type(client.lock("a").acquire(blocking=False), Lease | None)
assert_type(client.lock("a").acquire(timeout=1.5), Lease | None)
assert_type(client.rlock("a").acquire(False), RLease | None)
assert_type(client.semaphore("a", 5).acquire(timeout=1), Permit | None)
assert_type(client.rwlock("a").write.acquire(True, 1), WriteLease | None)
assert_type(client.lock("a").acquire(wait=5), Lease | None)
assert_type(client.lock("a", wait=5).acquire(wait=None), Lease)
assert_type(client.lock("a", ttl=timedelta(minutes=5)).acquire(timeout=timedelta(seconds=5)), Lease | None)
client.lock("a").acquire(blocking_timeout=5)  # type: ignore[call-overload]

with client.lock("a", wait=5) as lease, client.semaphore("a", 5, wait=5) as permit:
    assert_type(lease, Lease)
    assert_type(permit, Permit)


def use(lock: holdfast.Lock) -> None:
    assert_type(lock.acquire(), Lease | None)


use(client.lock("a"))
use(client.lock("a", wait=5))
use(client.rlock("a"))
use(client.semaphore("a", 5))
client.lock("a", on_lost=lambda lease: lease.fence)
client.lock("a", on_lost="cancel")  # type: ignore[call-overload]
client.lock("a", blocking=False)  # type: ignore[call-overload]

awaiting = holdfast.aio.connect(on_lost="cancel")


async def main() -> None:
    assert_type(await awaiting.lock("a").acquire(), AioLease)
    assert_type(await awaiting.rlock("a").acquire(), AioRLease)
    assert_type(await awaiting.semaphore("a", 5).acquire(), AioPermit)
    assert_type(await awaiting.rwlock("a").read.acquire(), AioLease)
    assert_type(await awaiting.rwlock("a").write.acquire(), AioWriteLease)
    assert_type(await holdfast.aio.lock("a").acquire(), AioLease)
    assert_type(await awaiting.lock("a", wait=5).acquire(), AioLease | None)
    assert_type(await awaiting.rlock("a", wait=5).acquire(), AioRLease | None)
    assert_type(await awaiting.semaphore("a", 5, wait=5).acquire(), AioPermit | None)
    assert_type(await awaiting.rwlock("a", wait=5).read.acquire(), AioLease | None)
    assert_type(await awaiting.rwlock("a", wait=5).write.acquire(), AioWriteLease | None)
    assert_type(await holdfast.aio.lock("a", wait=5).acquire(), AioLease | None)
    assert_type(await awaiting.lock("a").acquire(blocking=False), AioLease | None)
    assert_type(await awaiting.lock("a").acquire(timeout=1.5), AioLease | None)
    awaiting.lock("a", on_lost="cancel")
