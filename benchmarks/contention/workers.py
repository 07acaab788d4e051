"""One process of participants: threads or asyncio tasks that acquire and release a lock again and again.

The messages on the pipe, in this order:

1. worker: ``READY`` (it is connected, and has locked once);
2. field: ``GO``;
3. worker: ``ASKED`` (every participant has asked for its lock);
4. field: the window, two times on the monotonic clock, which all processes share;
5. worker: its Outcome, once the window is closed and all participants have left.

If the process of the field ends, the pipe is closed, and the worker ends too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from array import array
from contextlib import AsyncExitStack, ExitStack
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

from benchmarks.contention.contenders import Contender, NewLock, open_aio, open_blocking, token_of
from benchmarks.contention.ground import Ground

__all__ = ["ASKED", "GO", "READY", "Job", "Outcome", "work"]

READY: Final = "ready"
GO: Final = "go"
ASKED: Final = "asked"
STACK_BYTES: Final = 256 * 1024  # a thousand threads need not reserve 8 MB each


class Job(NamedTuple):
    """What one process has to do."""

    contender: Contender
    url: str
    ground: Path
    is_aio: bool
    participants: int
    locks: int
    first: int  # the number of its first participant; no participant has number 0
    cores: frozenset[int] = frozenset()  # where to run; empty: the kernel decides
    dwell: float | None = None  # seconds to hold the lock, so that two holders would overlap; fences are checked too
    with_tokens: bool = False


class Outcome(NamedTuple):
    """What the participants of one process did and saw."""

    counts: list[int]  # acquisitions within the window, by participant
    waits: bytes  # doubles: seconds from the request to the grant
    acquisitions: int  # all of them, also outside the window
    violations: int  # holders that were not alone, or whose fence was not greater than the last fence
    errors: list[str]
    tokens: list[list[str]]  # by participant, one for each acquisition


class Window:
    """When to count, and when to stop. Known only once all participants have asked."""

    def __init__(self) -> None:
        self.begin = self.end = inf


class Participant:
    """One thread or task, and its records: pairs of when it asked and when it was granted the lock."""

    def __init__(self, job: Job, number: int, ground: Ground, window: Window) -> None:
        self.number = number
        lock = (number - 1) % job.locks
        self.lock_name = f"bench:{lock}"
        self.enter, self.leave = ground.steps(lock)
        self.rises = ground.fence(lock)
        self.window = window
        self.times = array("d")
        self.violations = 0
        self.error: str | None = None
        self.has_asked = False
        self.tokens: list[str] = []
        self._job = job

    def look_closer(self, lock: Any, entered: Any) -> None:
        """Record tokens and check fences, in runs that are not timed."""
        if self._job.with_tokens:
            self.tokens.append(token_of(lock, entered))
        if self._job.dwell is not None and (fence := getattr(entered, "fence", None)) is not None:
            self.violations += not self.rises(fence)

    def count(self) -> int:
        return sum(self.window.begin <= had < self.window.end for had in self.times[1::2])

    def waits(self) -> list[float]:
        """The waits that ended within the window, and the wait that was open when the window closed."""
        begin, end = self.window.begin, self.window.end
        pairs = zip(self.times[::2], self.times[1::2], strict=True)
        return [min(had, end) - asked for asked, had in pairs if had >= begin and asked < end]


def work(pipe: Connection, job: Job) -> None:
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    ground = Ground(job.ground, job.locks)
    window = Window()
    participants = [Participant(job, job.first + index, ground, window) for index in range(job.participants)]
    gc.freeze()  # the collector need not visit the records of ten thousand participants
    try:
        if job.is_aio:
            asyncio.run(run_tasks(pipe, job, participants))
        else:
            run_threads(pipe, job, participants)
    except EOFError:
        return  # the process of the field has ended
    waits = array("d")
    for participant in participants:
        waits.extend(participant.waits())
    pipe.send(
        Outcome(
            counts=[participant.count() for participant in participants],
            waits=waits.tobytes(),
            acquisitions=sum(len(participant.times) // 2 for participant in participants),
            violations=sum(participant.violations for participant in participants),
            errors=[participant.error for participant in participants if participant.error],
            tokens=[participant.tokens for participant in participants],
        )
    )


def expect(pipe: Connection, message: str) -> None:
    received = pipe.recv()
    if received != message:
        raise RuntimeError(f"the field sent {received!r}, not {message!r}")


def run_threads(pipe: Connection, job: Job, participants: list[Participant]) -> None:
    threading.stack_size(STACK_BYTES)
    with ExitStack() as stack:
        new_lock = open_blocking(job.contender, job.url, stack)
        with new_lock(f"bench:warm-up:{job.first}"):
            pass
        threads = [threading.Thread(target=want, args=(job, new_lock, one), daemon=True) for one in participants]
        pipe.send(READY)
        expect(pipe, GO)
        for thread in threads:
            thread.start()
        while not all(participant.has_asked for participant in participants):
            time.sleep(0.002)
        pipe.send(ASKED)
        participants[0].window.begin, participants[0].window.end = pipe.recv()
        for thread in threads:
            thread.join()


def want(job: Job, new_lock: NewLock, me: Participant) -> None:
    number, name, enter, leave, window, times = me.number, me.lock_name, me.enter, me.leave, me.window, me.times
    is_close = job.with_tokens or job.dwell is not None
    had = 0.0
    try:
        while had < window.end:
            me.has_asked = True
            asked = monotonic()
            lock = new_lock(name)
            with lock as entered:
                had = monotonic()
                if not enter(number):
                    me.violations += 1
                if is_close:
                    me.look_closer(lock, entered)
                    if job.dwell:
                        time.sleep(job.dwell)
                if not leave(number):
                    me.violations += 1
            times.append(asked)
            times.append(had)
    except Exception as error:
        me.has_asked = True
        me.error = f"{type(error).__name__}: {error}"


async def run_tasks(pipe: Connection, job: Job, participants: list[Participant]) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        new_lock = await open_aio(job.contender, job.url, stack)
        async with new_lock(f"bench:warm-up:{job.first}"):
            pass
        pipe.send(READY)
        await loop.run_in_executor(None, expect, pipe, GO)
        tasks = [asyncio.create_task(want_aio(job, new_lock, participant)) for participant in participants]
        while not all(participant.has_asked for participant in participants):
            await asyncio.sleep(0.002)
        pipe.send(ASKED)
        participants[0].window.begin, participants[0].window.end = await loop.run_in_executor(None, pipe.recv)
        await asyncio.gather(*tasks)


async def want_aio(job: Job, new_lock: NewLock, me: Participant) -> None:
    number, name, enter, leave, window, times = me.number, me.lock_name, me.enter, me.leave, me.window, me.times
    is_close = job.with_tokens or job.dwell is not None
    had = 0.0
    try:
        while had < window.end:
            me.has_asked = True
            asked = monotonic()
            lock = new_lock(name)
            async with lock as entered:
                had = monotonic()
                if not enter(number):
                    me.violations += 1
                if is_close:
                    me.look_closer(lock, entered)
                    if job.dwell is not None:
                        await asyncio.sleep(job.dwell)
                if not leave(number):
                    me.violations += 1
            times.append(asked)
            times.append(had)
    except Exception as error:
        me.has_asked = True
        me.error = f"{type(error).__name__}: {error}"
