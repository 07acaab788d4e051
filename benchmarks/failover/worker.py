"""One worker process: takes the lock, writes to a resource that remembers fences, releases, again and again."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any, Final, NamedTuple, Protocol

import redis
import redis.cluster
import redis.exceptions
import redis.lock
import redis.sentinel

import holdfast
from benchmarks.failover.history import Record, Told, Wait

TTL: Final = 2.0
_WORK: Final = 0.02  # seconds of work under the lock
_LOOKS: Final = 4  # how often the worker checks during that time whether it still holds the lock
_WAIT: Final = 30.0  # seconds for which an attempt waits
_PAUSE: Final = 0.02  # seconds before an attempt that failed is made again


class Address(NamedTuple):
    """How workers reach the servers: the URL for Holdfast, and what redis-py needs for the same servers."""

    url: str
    nodes: tuple[tuple[str, int], ...]
    service: str = ""  # of Sentinel; a cluster has none

    def redis_client(self) -> Any:
        """A client as a user of redis-py would make it, with short timeouts, so that it notices failovers."""
        options: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
        if not self.service:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in self.nodes]
            return redis.cluster.RedisCluster(startup_nodes=nodes, **options)
        sentinel = redis.sentinel.Sentinel(list(self.nodes), **options)
        return sentinel.master_for(self.service, **options)


class Hold(Protocol):
    @property
    def fence(self) -> int: ...
    def held(self) -> bool: ...
    def release(self) -> bool:
        """Release the lock; False if it was no longer held."""


class OfHoldfast(NamedTuple):
    lease: holdfast.Lease

    @property
    def fence(self) -> int:
        return self.lease.fence

    def held(self) -> bool:
        return self.lease.held

    def release(self) -> bool:
        try:
            self.lease.release()
        except holdfast.LeaseLost:
            return False
        except holdfast.HoldfastError:
            pass  # no server answers: the key expires by its ttl
        return True


class OfRedisPy(NamedTuple):
    lock: redis.lock.Lock
    fence: int = 0

    def held(self) -> bool:
        return True  # redis-py does not notify the holder

    def release(self) -> bool:
        try:
            self.lock.release()
        except redis.exceptions.LockError:
            return False
        except redis.exceptions.RedisError:
            pass
        return True


@contextlib.contextmanager
def holdfast_acquirer(address: Address, name: str) -> Iterator[Callable[[], Hold | None]]:
    with holdfast.connect(address.url) as client:

        def acquire() -> Hold | None:
            lease = client.lock(name, ttl=TTL).acquire(timeout=_WAIT)
            return OfHoldfast(lease) if lease else None

        yield acquire


@contextlib.contextmanager
def redis_py_acquirer(address: Address, name: str) -> Iterator[Callable[[], Hold | None]]:
    client: Any = None

    def acquire() -> Hold | None:
        nonlocal client
        client = client or address.redis_client()  # this asks the cluster, so it may fail
        lock = redis.lock.Lock(client, name, timeout=TTL, blocking_timeout=_WAIT)
        return OfRedisPy(lock) if lock.acquire() else None

    try:
        yield acquire
    finally:
        if client is not None:
            client.close()


LIBRARIES: Final[dict[str, Callable[[Address, str], Any]]] = {
    "holdfast": holdfast_acquirer,
    "redis-py": redis_py_acquirer,
}


def work(  # noqa: PLR0917 (a process passes its arguments by position)
    library: str, address: Address, name: str, highest: Synchronized[int], ready: Any, stop: Event, results: Any
) -> None:
    """The main function of a worker process. ``highest`` is the resource: the highest fence that has written."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # drop its log: the table shows more
    records: list[Record] = []
    errors, ungranted = 0, None
    with LIBRARIES[library](address, name) as acquire:
        ready.release()
        asked = time.monotonic()
        while not stop.is_set():
            hold = None
            try:
                hold = acquire()
            except Exception:  # of either library, of redis-py's parts, of the system: the next attempt may succeed
                errors += 1
            if hold is None:
                time.sleep(_PAUSE)
                ungranted = Wait(asked, time.monotonic())
                continue
            ungranted = None
            records.append(_hold_once(hold, asked, highest))
            asked = time.monotonic()
    results.put(json.dumps((records, errors, ungranted)))


def _hold_once(hold: Hold, asked: float, highest: Synchronized[int]) -> Record:
    granted = relied_until = time.monotonic()
    for _ in range(_LOOKS):
        time.sleep(_WORK / _LOOKS)
        if not hold.held():
            break
        relied_until = time.monotonic()
    with highest.get_lock():
        refused = 0 < hold.fence < highest.value
        if not refused:
            highest.value = max(highest.value, hold.fence)
    lost = not hold.release()
    return Record(asked, granted, relied_until, hold.fence, refused, lost)


class Team:
    """The worker processes of one library, on one lock."""

    def __init__(self, library: str, address: Address, name: str, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._library = library
        self._stop, self._ready = context.Event(), context.Semaphore(0)
        self._results = context.Queue()
        self._highest = context.Value("q", 0)  # kept here: a worker cannot open a semaphore that was collected
        self._processes = [
            context.Process(
                target=work,
                args=(library, address, name, self._highest, self._ready, self._stop, self._results),
                daemon=True,
            )
            for _ in range(size)
        ]
        for process in self._processes:
            process.start()

    def wait_until_ready(self) -> None:
        for _ in self._processes:
            if not self._ready.acquire(timeout=120):
                sys.exit(f"a worker of {self._library} did not start")

    def finish(self) -> Told:
        """Let all workers end, and return what they have seen."""
        self._stop.set()
        records: list[Record] = []
        errors, ungranted = 0, []
        for _ in self._processes:
            try:
                theirs, failed, waited = json.loads(self._results.get(timeout=_WAIT + 60))
            except queue.Empty:
                sys.exit(f"a worker of {self._library} has ended, or hangs")
            records += [Record(*one) for one in theirs]
            errors += failed
            ungranted += [Wait(*waited)] if waited else []
        for process in self._processes:
            process.join(timeout=10)
        if not records:
            sys.exit(f"no worker of {self._library} was granted the lock, so the run shows nothing")
        return Told(records, ungranted, errors)
