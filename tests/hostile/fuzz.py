"""A fuzz of replies: clients of a real server behind a proxy that garbles, for a few milliseconds each.

One run is one client. It uses one to four locks while replies are garbled, then the proxy is honest again, and the
client is judged:

- only HoldfastError reaches the caller, and every call ends in time;
- it gets a fresh lock within RECOVERY seconds;
- a lease that says held has its key on the server, within one ttl of the proxy being honest (a forged reply can pass
  for a grant until the first renewal);
- it does not spin: the requests of a run are counted, and so is processor time, while open clients are idle and once
  all clients are closed;
- once closed, it leaves no thread, task or connection.

A seed and the number of a run decide what is garbled, and how.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from random import Random
from time import monotonic
from typing import Any

import redis

import holdfast
from tests.hostile.faces import FACES, Face
from tests.hostile.garble import Garbler
from tests.hostile.grounds.keys import tokens_in
from tests.hostile.proxy import Proxy, worst_lag_since
from tests.servers import Server

__all__ = ["Finding", "Fuzz", "main"]

LANES = 10
TTL = 1.0
CLIENT_TIMEOUT = 0.3
WAIT = 0.15
SLACK = 5.0
RECOVERY = 5.0
MOST_REQUESTS = 400  # of one run; a usual one has about 30
IDLE_EVERY = 400  # runs
IDLE_FOR = 0.5
MOST_IDLE_CPU = 0.6  # of one core


LONG_LAG = 0.2  # of the proxies: what came too late then was not the client's fault
TRIES = 4  # of a run that was late while the proxies were


class Finding(Exception):
    """Something that must not happen."""


class Late(Finding):
    """Something that must not take so long."""


class Run:
    """One client, and what it does."""

    def __init__(self, face: Face, proxy: Proxy, admin: redis.Redis, seed: int, number: int) -> None:
        self._face, self._proxy, self._admin = face, proxy, admin
        self._dice = Random(f"run {seed} {number}")
        self._prefix = f"f{number}:"
        self._garbler = Garbler(f"{seed} {number}", rate=self._dice.choice([0.05, 0.2, 0.5, 1.0]))
        self._leases: list[tuple[str, Any]] = []
        self._calls = 0
        self._client: Any = None

    async def run(self, while_idle: Callable[[], Awaitable[None]] | None = None) -> None:
        """Use the client, judge it, close it. ``while_idle`` runs before it is closed, when it holds nothing."""
        self._proxy.requests = 0
        after_hello = self._dice.random() < 0.7  # else the first replies are garbled, too
        if not after_hello:
            self._proxy.garbler = self._garbler
        self._client = self._face.connect(
            self._proxy.url, namespace=self._prefix, timeout=CLIENT_TIMEOUT, fence_retention=1.0
        )
        try:
            if after_hello:
                await self._bounded(CLIENT_TIMEOUT, self._lock)
                self._proxy.garbler = self._garbler
            for act in self._dice.sample(self._acts(), self._dice.randint(1, 4)):
                await self._bounded(2 * CLIENT_TIMEOUT + WAIT, act)
            self._proxy.garbler = None
            await self._recover()
            await self._check_keys()
            await self._release()
            if while_idle is not None:
                await while_idle()
        finally:
            self._proxy.garbler = None
            await self._release()
            await self._bounded(CLIENT_TIMEOUT, lambda: self._face.call(self._closing()))
        if self._proxy.requests > MOST_REQUESTS:
            raise Finding(f"{self._proxy.requests} requests in one run")
        until = monotonic() + SLACK
        while left := self._proxy.connections:
            if monotonic() > until:
                known = [each for each in self._admin.client_list() if each["addr"] in left]
                last = ", ".join(f"{each['cmd']} {each['idle']} s ago" for each in known)
                raise Late(f"{len(left)} connections are left {SLACK:g} s after close(): {last}")
            await self._face.sleep(0.005)

    def describe(self) -> str:
        return f"garbled: {' '.join(self._garbler.done[:12]) or 'nothing'}"

    def _closing(self) -> Callable[[], Any]:
        close: Callable[[], Any] = getattr(self._client, "aclose", self._client.close)
        return close

    async def _release(self) -> None:
        while self._leases:
            _, lease = self._leases.pop()
            await self._bounded(CLIENT_TIMEOUT, partial(self._face.call, lease.release))

    async def _bounded(self, bound: float, act: Callable[[], Awaitable[Any]]) -> Any:
        """Let it do that; what is raised must be ours, and it must end in time."""
        begun = monotonic()
        try:
            return await act()
        except holdfast.HoldfastError:
            return None
        except Finding:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise Finding(f"foreign exception {error!r} at {where.filename}:{where.lineno}") from error
        finally:
            if (took := monotonic() - begun) > bound + SLACK:
                raise Late(f"a call took {took:.1f} s instead of {bound:g} s")

    async def _recover(self) -> None:
        until = monotonic() + RECOVERY
        lock = self._client.lock("recovered", ttl=TTL)
        while True:
            lease = await self._bounded(1.0, lambda: self._face.call(lock.acquire, timeout=1.0))
            if lease is not None:
                self._leases.append(("recovered", lease))
                return
            if monotonic() > until:
                raise Late(f"no lock within {RECOVERY:g} s of the server being honest")
            await self._face.sleep(0.05)  # what is counted is how often the client asks, not how often this loop does

    async def _check_keys(self) -> None:
        """Every lease that says held has its key, once a renewal was answered honestly."""
        until = monotonic() + TTL + 0.5
        for name, lease in self._leases:
            while lease.held and not self._is_there(name, lease.token) and lease.held:
                if monotonic() > until:
                    raise Finding(f"the lease on {name!r} says held, and its key is not there")
                await self._face.sleep(0.02)

    def _is_there(self, name: str, token: str) -> bool:
        if self._admin.get(self._prefix + name) == token.encode():
            return True
        return any(found == token.encode() for _, found in tokens_in(self._admin, f"{self._prefix}{name}:hf1:*"))

    def _acts(self) -> list[Callable[[], Awaitable[Any]]]:
        return [
            *(self._lock, self._contended, self._several, self._rlock, self._read, self._write, self._semaphore),
            *(self._election, self._latch, self._cache, self._hand_over, self._extend, self._renewed),
        ]

    async def _take(self, name: str, lock: Any, *, wait: float = WAIT) -> Any:
        """Acquire. Half of the leases are released at once, the others are checked at the end."""
        lease = await self._face.call(lock.acquire, timeout=wait)
        if lease is not None and self._dice.random() < 0.5:
            await self._face.call(lease.release)
        elif lease is not None:
            self._leases.append((name, lease))
        return lease

    def _name(self) -> str:
        self._calls += 1
        return f"n{self._calls}"

    async def _lock(self) -> None:
        name = self._name()
        await self._take(name, self._client.lock(name, ttl=TTL))

    async def _contended(self) -> None:
        """A client of another library has it for a moment, so this one queues and subscribes."""
        name = self._name()
        self._admin.set(self._prefix + name, "foreign", px=30)
        await self._take(name, self._client.lock(name, ttl=TTL), wait=2 * WAIT)

    async def _several(self) -> None:
        one, other = self._name(), self._name()
        lease = await self._take(one, self._client.lock(one, other, ttl=TTL))
        if lease is not None and self._leases and self._leases[-1][1] is lease:
            self._leases.append((other, lease))

    async def _rlock(self) -> None:
        name = self._name()
        await self._take(name, self._client.rlock(name, ttl=TTL))

    async def _read(self) -> None:
        name = self._name()
        await self._take(name, self._client.rwlock(name, ttl=TTL).read)

    async def _write(self) -> None:
        name = self._name()
        await self._take(name, self._client.rwlock(name, ttl=TTL).write)

    async def _semaphore(self) -> None:
        name = self._name()
        await self._take(name, self._client.semaphore(name, 2, ttl=TTL))

    async def _election(self) -> None:
        name = self._name()
        election = self._client.election(name, ttl=TTL)
        await self._take(name, election.lead())
        await self._face.call(election.leader)

    async def _latch(self) -> None:
        latch = self._client.latch(self._name(), 1, retention=1.0)
        await self._face.call(latch.count_down)
        await self._face.call(latch.wait, WAIT)

    async def _cache(self) -> None:
        name = self._name()
        for _ in range(2):
            value = await self._face.call(self._client.get_or_compute, name, lambda: "value", 1.0, wait=WAIT)
            assert isinstance(value, object)
        await self._face.call(self._client.invalidate, name)

    async def _hand_over(self) -> None:
        name = self._name()
        lease = await self._face.call(self._client.lock(name, ttl=TTL).acquire, timeout=WAIT)
        if lease is not None:
            ticket = await self._face.call(lease.hand_over)
            self._leases.append((name, await self._face.call(self._client.adopt, ticket, ttl=TTL)))

    async def _extend(self) -> None:
        name = self._name()
        lease = await self._face.call(self._client.lock(name, ttl=TTL).acquire, timeout=WAIT)
        if lease is not None:
            self._leases.append((name, lease))
            await self._face.call(lease.extend, 2 * TTL)

    async def _renewed(self) -> None:
        """Long enough for the keeper to watch the key, and to renew it."""
        name = self._name()
        lease = await self._face.call(self._client.lock(name, ttl=0.3).acquire, timeout=WAIT)
        if lease is not None:
            self._leases.append((name, lease))
            await self._face.sleep(0.15)


class Fuzz:
    """Many runs on one face, in lanes side by side."""

    def __init__(self, face: str, seed: int, numbers: Sequence[int]) -> None:
        self.findings: list[str] = []
        self.repeated = 0  # runs that were late while the proxies were late
        self._face = FACES[face]()
        self._seed = seed
        self._numbers = iter(numbers)
        self._choosing = threading.Lock()

    def run(self) -> list[str]:
        before = set(threading.enumerate())
        with Server() as server, _no_stray_errors(self.findings):
            proxies = [Proxy(server.port) for _ in range(LANES)]
            before |= {thread for thread in threading.enumerate() if thread.name == "hostile-proxy"}
            while numbers := self._next():
                self._queue, self._to_be_idle = iter(numbers), LANES
                self._face.run_lanes([self._lane(proxy, server, lane) for lane, proxy in enumerate(proxies)])
                self._check_closed()
            for proxy in proxies:
                proxy.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(5.0)
            if thread.is_alive():
                self.findings.append(f"a thread is left: {thread.name}")
        return self.findings

    def _next(self) -> list[int]:
        return list(itertools.islice(self._numbers, IDLE_EVERY))

    async def _lane(self, proxy: Proxy, server: Server, lane: int) -> None:
        with server.client(client_name="fuzz") as admin:
            while True:
                with self._choosing:
                    number = next(self._queue, None)
                if number is None:
                    break
                await self._try(proxy, admin, number)
            # One more client, which stays open until those of all lanes were idle.
            await self._try(proxy, admin, -1 - lane, self._check_open)
            self._to_be_idle = 0  # if that one failed: the other lanes need not wait for it
        if self._face.kind == "asyncio":
            await asyncio.sleep(0.05)

    async def _try(
        self, proxy: Proxy, admin: redis.Redis, number: int, while_idle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        for attempt in range(1, TRIES + 1):
            begun = monotonic()
            run = Run(self._face, proxy, admin, self._seed, number)
            try:
                await run.run(while_idle)
            except Finding as finding:
                if isinstance(finding, Late) and worst_lag_since(begun) > LONG_LAG and attempt < TRIES:
                    self.repeated += 1
                    continue
                again = f"python -m tests.hostile --fuzz --seed {self._seed} --face {self._face.kind}"
                again += f" --first {number} --runs 1"
                self.findings.append(f"run {number}: {finding}\n    {run.describe()}\n    again: {again}")
            return

    async def _check_open(self) -> None:
        """Once all lanes are here, their clients are open and idle. The last lane to come measures, the others wait."""
        with self._choosing:
            self._to_be_idle -= 1
            last = self._to_be_idle == 0
        while self._to_be_idle > 0:
            await self._face.sleep(0.02)
        cpu = time.process_time()
        await self._face.sleep(IDLE_FOR)
        used = time.process_time() - cpu
        if last:
            self._judge_idle(used, "open clients are idle")

    def _check_closed(self) -> None:
        """All clients are closed, so no processor time is used."""
        gc.collect()
        cpu = time.process_time()
        time.sleep(IDLE_FOR)
        self._judge_idle(time.process_time() - cpu, "all clients are closed")

    def _judge_idle(self, used: float, when: str) -> None:
        if used > MOST_IDLE_CPU * IDLE_FOR:
            self.findings.append(f"{used:.2f} s of processor time in {IDLE_FOR:g} s while {when}")


@contextlib.contextmanager
def _no_stray_errors(findings: list[str]) -> Iterator[None]:
    """What fails in a background thread, or is logged with a traceback, is a finding; other log lines are dropped."""

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                findings.append(f"logged {record.getMessage()!r}: {record.exc_info[1]!r}")

    watch, log = Watch(), logging.getLogger("holdfast")
    log.addHandler(watch)
    propagated, log.propagate = log.propagate, False
    hook = threading.excepthook
    threading.excepthook = lambda args: findings.append(f"thread {args.thread}: {args.exc_value!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        threading.excepthook = hook
        log.removeHandler(watch)
        log.propagate = propagated


def main(seed: int, runs: int, first: int, faces: Sequence[str]) -> int:
    """Run each face in a process of its own, side by side; 1 if there was a finding."""
    if len(faces) > 1:
        share = [*("--fuzz", "--seed", str(seed), "--runs", str(-(-runs // len(faces)))), "--first", str(first)]
        command = [sys.executable, "-m", "tests.hostile", *share, "--face"]
        processes = [subprocess.Popen([*command, face]) for face in faces]
        return max(abs(process.wait()) for process in processes)
    begun = monotonic()
    work = Fuzz(faces[0], seed, range(first, first + runs))
    findings = work.run()
    took = f"{runs} runs in {monotonic() - begun:.0f} s, {work.repeated} repeated on a busy machine"
    print(f"fuzz {faces[0]}: {took}, {len(findings)} findings", flush=True)
    for finding in findings[:20]:
        print(f"  {finding}", flush=True)
    return int(bool(findings))
