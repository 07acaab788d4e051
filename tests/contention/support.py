"""What the tests of contention share: a look at the queue, waiters in threads, and waiters in processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import redis

from tests.servers import Server
from tests.support import Script, as_bytes, eventually

__all__ = [
    "SOON",
    "Background",
    "OldServer",
    "Waiter",
    "acquire_later",
    "await_refresh",
    "check_nobody_queues",
    "next_served",
    "queue_of",
    "queued_pids",
    "seen_of",
    "wait_in_local_queue",
]

T = TypeVar("T")

# What takes milliseconds on an idle machine. A lease of these tests lasts much longer than this, so that no waiter is
# saved by its end.
SOON = 3.0


def queue_of(admin: redis.Redis, name: str = "x") -> list[str]:
    """The tokens of those who wait, the first one first."""
    return [as_bytes(token).decode() for token in admin.zrange(f"{name}:hf1:queue:{{{name}}}", 0, -1)]


def seen_of(admin: redis.Redis, token: str, name: str = "x") -> int:
    """When the server last heard of that waiter, in microseconds of its own time; 0 if it knows of none."""
    entry = admin.hget(f"{name}:hf1:waiters:{{{name}}}", token)
    return int(entry.split()[0]) if entry else 0


def await_refresh(admin: redis.Redis, name: str = "x") -> None:
    """Until the last in the queue has just asked: whatever it does in the next half second it was told to do."""
    token = queue_of(admin, name)[-1]
    time.sleep(0.2)  # the first times it asks sooner
    seen = seen_of(admin, token, name)
    eventually(lambda: seen_of(admin, token, name) != seen, 5.0, "it asks again")


def queued_pids(admin: redis.Redis, name: str = "x") -> list[int]:
    return [int(token.rpartition(".")[0].rsplit("-", 1)[1]) for token in queue_of(admin, name)]


def check_nobody_queues(admin: redis.Redis, name: str = "x") -> None:
    assert queue_of(admin, name) == []
    assert [token for token in admin.hkeys(f"{name}:hf1:waiters:{{{name}}}") if b"." in token] == [], (
        "a field of a waiter, unlike the others, is a token"
    )


class Background(Generic[T]):
    """Something that is done in a thread, and when that was over."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self.ended_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self.ended_at = time.monotonic()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self, timeout: float = 20.0) -> T:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"it has not ended within {timeout:g} s"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def error(self, timeout: float = 20.0) -> BaseException | None:
        """What it was ended by."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"it has not ended within {timeout:g} s"
        return self._error


def acquire_later(lock: Any, admin: redis.Redis, name: str = "x", timeout: float = 20.0) -> Background[Any]:
    """Somebody who waits for the lock: it is in the queue on return, behind whoever was there before."""
    before = set(queue_of(admin, name))
    waiter = Background(lambda: lock.acquire(timeout=timeout))
    eventually(lambda: set(queue_of(admin, name)) - before, 5.0, "it queues")
    return waiter


def wait_in_local_queue(face: Any, lock: Any) -> Background[Any]:
    """Somebody who waits behind another of the same process: it is the last in line on return."""
    before = sum(face.client.statistics().local_queues.values())
    waiter = Background(lambda: lock.acquire(timeout=20))
    eventually(lambda: sum(face.client.statistics().local_queues.values()) == before + 1, 5.0, "it waits")
    return waiter


def next_served(waiters: list[Background[Any]], timeout: float = 5.0) -> Background[Any]:
    """Whoever of them is served next, whoever that is; it is taken out of the list."""
    served = eventually(lambda: next((waiter for waiter in waiters if waiter.is_over()), None), timeout, "served")
    assert served is not None
    waiters.remove(served)
    return served


class OldServer(Server):
    """One that knows no HELLO, and so speaks RESP2 alone."""

    def __init__(self) -> None:
        super().__init__("--rename-command", "HELLO", "")

    def client(self, **kwargs: Any) -> redis.Redis:
        return super().client(**kwargs, protocol=2)

    def _probe(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, protocol=2)


_BLOCKING = """
    client = holdfast.connect(url)
    say("ready")
    sys.stdin.readline()
    lease = client.lock("x", ttl=float(sys.argv[2])).acquire()
    say(lease.fence, time.monotonic())
    lease.release()
    client.close()
"""
_ASYNCIO = """
    import asyncio

    async def main():
        async with holdfast.aio.connect(url) as client:
            say("ready")
            sys.stdin.readline()
            lease = await client.lock("x", ttl=float(sys.argv[2])).acquire()
            say(lease.fence, time.monotonic())
            await lease.release()

    asyncio.run(main())
"""


class Waiter:
    """A process that waits for the lock "x" when it is told to, and gives it back as soon as it has it."""

    def __init__(self, kind: str, url: str, *, ttl: float = 600) -> None:
        self.process = Script({"blocking": _BLOCKING, "asyncio": _ASYNCIO}[kind], url, ttl)

    @property
    def pid(self) -> int:
        return self.process.pid

    def queue_up(self, admin: redis.Redis) -> None:
        """It stands in the queue on return, as the last."""
        self.process.hear("ready")
        self.process.write("\n")
        eventually(lambda: self.pid in queued_pids(admin), 10.0, "it queues")

    def served(self) -> tuple[int, float]:
        """Its fence, and when it had the lock; this clock is the same in all processes."""
        fence, at = self.process.hear().split()
        return int(fence), float(at)

    def __enter__(self) -> Waiter:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.__exit__(None, None, None)  # SIGKILL also ends it if it is stopped
