"""What the tests against real servers share."""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis

import holdfast
import holdfast.aio

__all__ = [
    "FACES",
    "LEASE_LOGGED",
    "AioFace",
    "BlockingFace",
    "Script",
    "as_bytes",
    "async_eventually",
    "asyncio_test",
    "connections_of",
    "eventually",
    "is_subscribed",
    "lock_keys",
    "took",
]

T = TypeVar("T")
# Log lines about leases. Many tests lose one; and on a busy machine any renewal may be late.
LEASE_LOGGED = re.compile(
    r"\w+ '.*'( \(\w+\))? "
    r"(lost after [\d.]+ s, fence (\d+|None): |could not be renewed and has |renewed with .*: renewals are slow)"
)
ROOT = Path(__file__).parent.parent


def eventually(predicate: Callable[[], T], timeout: float = 5.0, what: str = "") -> T:
    """Ask again and again until it is true; fail when it is not in time."""
    deadline = time.monotonic() + timeout
    while not (outcome := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}")
        time.sleep(0.01)
    return outcome


async def async_eventually(predicate: Callable[[], T], timeout: float = 5.0, what: str = "") -> T:
    """The same, letting other tasks run."""
    deadline = time.monotonic() + timeout
    while not (outcome := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}")
        await asyncio.sleep(0.01)
    return outcome


def asyncio_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, and fail it for every task that it has left behind."""

    async def run(*args: Any, **kwargs: Any) -> None:
        await test(*args, **kwargs)
        mine = asyncio.current_task()
        # A task that was just cancelled needs a turn of the loop to end.
        for _ in range(5):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not mine]
        assert not left, f"tasks were left behind: {left}"

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(run(*args, **kwargs))

    return wrapper


@contextmanager
def took(*, less_than: float, at_least: float = 0.0) -> Iterator[None]:
    """The block must end, by whatever means, within these seconds."""
    started = time.monotonic()
    try:
        yield
    finally:
        passed = time.monotonic() - started
        assert at_least <= passed < less_than, f"took {passed:.2f} s, not {at_least:g} to {less_than:g}"


@contextmanager
def later(seconds: float, act: Callable[..., object], *args: object) -> Iterator[None]:
    """Do this in another thread after a while. It is over when the block is: nothing runs on into the next test."""
    timer = threading.Timer(seconds, act, args)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def as_bytes(reply: object) -> bytes:
    """The reply, which must be bytes. Annotations of redis-py and of the simulated store allow other types, too."""
    assert isinstance(reply, bytes), reply
    return reply


def lock_keys(server: redis.Redis) -> list[str]:
    """The keys that are locks: whatever is there, less the side keys."""
    return sorted(key.decode() for key in map(as_bytes, server.keys("*")) if b":hf1:" not in key)


def is_subscribed(client: holdfast.Client | holdfast.aio.Client) -> bool:
    return all(node.subscribed for node in client.statistics().nodes.values())


def connections_of(server: redis.Redis) -> int:
    """How many connections the server has, beside the one that asks."""
    return len(server.client_list()) - 1


class BlockingFace:
    """The blocking face, as the tests that run on both want it."""

    kind = "blocking"

    def __init__(self, target: Any = None, **options: Any) -> None:
        self.client = holdfast.connect(target, **options)

    def lock(self, *names: str, **options: Any) -> Any:
        return self.client.lock(*names, **options)

    def close(self) -> None:
        self.client.close()


class AioFace:
    """The asyncio face, driven from outside its event loop, which runs in a thread.

    So a test that only asks what comes of a fault is written once and runs on both faces. Whatever is particular to
    asyncio (cancellation, what ``async with`` does to its body) has tests of its own.
    """

    kind = "asyncio"

    def __init__(self, target: Any = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client = self._call(_made(lambda: holdfast.aio.connect(target, **options)))

    def _call(self, awaitable: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(60.0)

    def lock(self, *names: str, **options: Any) -> Any:
        return _AioLock(self, self.client.lock(*names, **options))

    def close(self) -> None:
        self._call(self.client.aclose())
        self._call(_let_tasks_end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()


async def _made(make: Callable[[], T]) -> T:
    return make()


async def _let_tasks_end() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class _Awaited:
    """An object of the asyncio face whose coroutine methods are run to their end."""

    def __init__(self, face: AioFace, real: Any) -> None:
        self._face = face
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if isinstance(found, holdfast.aio.Lost):
            return _Awaited(self._face, found)
        if not callable(found):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            outcome = found(*args, **kwargs)
            return self._face._call(outcome) if asyncio.iscoroutine(outcome) else outcome

        return method


class _AioLock(_Awaited):
    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        lease = self._face._call(self._real.acquire(*args, **kwargs))
        return None if lease is None else _Awaited(self._face, lease)

    def __enter__(self) -> Any:
        # Entering and leaving are the same task's business, so one task waits in the body on our behalf.
        entered: Any = asyncio.run_coroutine_threadsafe(_made(asyncio.Future), self._face._loop).result()
        self._leave = asyncio.run_coroutine_threadsafe(_made(asyncio.Event), self._face._loop).result()
        self._body = asyncio.run_coroutine_threadsafe(self._hold(entered), self._face._loop)
        return _Awaited(self._face, self._face._call(_result_of(entered)))

    async def _hold(self, entered: asyncio.Future[Any]) -> None:
        try:
            async with self._real as lease:
                entered.set_result(lease)
                await self._leave.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
                return
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._face._loop.call_soon_threadsafe(self._leave.set)
        self._body.result(60.0)


async def _result_of(future: Awaitable[T]) -> T:
    return await future


FACES = [BlockingFace, AioFace]


class Script:
    """A Python process of its own, for what cannot be done to the one that runs the tests.

    Its code finds ``url`` and ``say(word)``; ``hear()`` is what it said next.
    """

    _HEAD = """
import os, signal, sys, time
import redis
import holdfast, holdfast.aio
url = sys.argv[1]
def say(*words):
    print(*words, flush=True)
"""

    def __init__(self, code: str, url: str, *arguments: object, environment: dict[str, str] | None = None) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", self._HEAD + textwrap.dedent(code), url, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle of saying so
                self._said.put(line)
        self._said.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, expected: str | None = None, timeout: float = 20.0) -> str:
        """The next line that it says, which must be the expected one, if there is one."""
        try:
            line = self._said.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"it has said nothing for {timeout:g} s, instead of {expected!r}") from None
        if line is None:
            raise AssertionError(f"it ended instead of saying {expected!r}:\n{self._complaint()}")
        line = line.rstrip("\n")
        assert expected is None or line == expected
        return line

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def write(self, text: str) -> None:
        """Type something for it to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def finish(self, timeout: float = 60.0, *, quiet: bool = True) -> str:
        """Wait for its end, which must be a good one, and without complaint if ``quiet``; the rest of what it said."""
        code = self._process.wait(timeout)
        self._listener.join(timeout)
        out = "".join(iter(self._said.get_nowait, None))
        complaint = self._complaint()
        assert code == 0, f"it ended with {code}:\n{out}\n{complaint}"
        assert not (quiet and complaint), complaint
        return out

    def wait(self, timeout: float = 30.0) -> int:
        """Its exit status."""
        return self._process.wait(timeout)

    def _complaint(self) -> str:
        """What it wrote to stderr, without the log lines about leases."""
        assert self._process.stderr is not None
        return "".join(line for line in self._process.stderr if not LEASE_LOGGED.match(line))

    def __enter__(self) -> Script:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._listener.join(5.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
