"""What goes wrong leaves no knots of frames and exceptions behind, for the collector to find some day.

An error that is kept in a variable of a frame that it went through keeps that frame alive, and all that this frame
knows: a lease that nobody has any more would be renewed until the collector comes by.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import pytest

import holdfast
import holdfast.aio
from tests.proxy import LOSE_REPLY, Proxy
from tests.servers import Server
from tests.support import asyncio_test, later


@contextmanager
def no_knots() -> Iterator[None]:
    """Afterwards nothing of ours is left to the collector: neither a frame nor an object."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        knotted = {
            f"{thing.f_code.co_qualname}, line {thing.f_lineno}"
            for thing in gc.garbage
            if isinstance(thing, FrameType) and "/holdfast/" in thing.f_code.co_filename
        } | {type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("holdfast")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not knotted


def fail() -> None:
    raise KeyError


# Blocking


def refused(client: holdfast.Client) -> None:
    with client.lock("x"):
        assert client.lock("x").acquire(blocking=False) is None
        with suppress(holdfast.AcquireTimeout), client.lock("x", wait=0.05):
            pass


def fails_inside(client: holdfast.Client) -> None:
    with suppress(KeyError), client.lock("x"):
        fail()


def released_twice(client: holdfast.Client) -> None:
    lock = client.lock("x")
    assert lock.acquire()
    lock.release()
    with suppress(holdfast.NotHeld):
        lock.release()


def misused(client: holdfast.Client) -> None:
    with client.semaphore("x", permits=1), suppress(holdfast.Unsupported):
        client.rwlock("x").read.acquire(blocking=False)


def failed_computation(client: holdfast.Client) -> None:
    with suppress(KeyError):
        client.get_or_compute("x", fail)


@pytest.mark.parametrize(
    "act", [refused, fails_inside, released_twice, misused, failed_computation], ids=lambda act: act.__name__
)
def test_errors(client: holdfast.Client, act: Callable[[holdfast.Client], None]) -> None:
    with client.lock("warm"):
        pass
    with no_knots():
        act(client)


def test_what_goes_well(client: holdfast.Client) -> None:
    with no_knots(), client.lock("x"), client.semaphore("y", permits=1), client.rwlock("z").read:
        client.get_or_compute("v", lambda: 1)
        client.get_or_compute("v", fail)


def test_nobody_there() -> None:
    with Server() as server:
        away = server.url
    with holdfast.connect(away) as client, no_knots(), suppress(holdfast.Unavailable):
        client.lock("x").acquire()


def test_a_server_that_hangs(server: Server) -> None:
    with holdfast.connect(server.url, timeout=1.0) as client:
        with client.lock("warm"):
            pass
        with no_knots():
            server.pause()
            with suppress(holdfast.HoldfastError):
                client.lock("x").acquire(timeout=0.3)
            server.resume()


def test_a_reply_that_is_lost(proxy: Proxy) -> None:
    with holdfast.connect(proxy.url) as client:
        with client.lock("warm"):
            pass
        with no_knots():
            proxy.on("acquire", LOSE_REPLY)
            with client.lock("x"):
                pass


def test_ctrl_c(client: holdfast.Client, url: str) -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with holdfast.connect(url) as other, other.lock("x"), no_knots():
            with later(0.1, signal.raise_signal, signal.SIGUSR1), suppress(KeyboardInterrupt), client.lock("x"):
                pass
    finally:
        signal.signal(signal.SIGUSR1, before)


# asyncio


async def aio_refused(client: holdfast.aio.Client) -> None:
    async with client.lock("x"):
        assert await client.lock("x").acquire(blocking=False) is None
        with suppress(holdfast.AcquireTimeout):
            async with client.lock("x", wait=0.05):
                pass


async def aio_fails_inside(client: holdfast.aio.Client) -> None:
    with suppress(KeyError):
        async with client.lock("x"):
            fail()


async def aio_released_twice(client: holdfast.aio.Client) -> None:
    lock = client.lock("x")
    assert await lock.acquire()
    await lock.release()
    with suppress(holdfast.NotHeld):
        await lock.release()


async def aio_misused(client: holdfast.aio.Client) -> None:
    async with client.semaphore("x", permits=1):
        with suppress(holdfast.Unsupported):
            await client.rwlock("x").read.acquire(blocking=False)


async def aio_failed_computation(client: holdfast.aio.Client) -> None:
    with suppress(KeyError):
        await client.get_or_compute("x", fail)


async def aio_cancelled(client: holdfast.aio.Client) -> None:
    async def wait() -> None:
        async with client.lock("x"):
            pass

    async with client.lock("x"):
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize(
    "act",
    [aio_refused, aio_fails_inside, aio_released_twice, aio_misused, aio_failed_computation, aio_cancelled],
    ids=lambda act: act.__name__,
)
@asyncio_test
async def test_asyncio_errors(url: str, act: Callable[[holdfast.aio.Client], Awaitable[None]]) -> None:
    async with holdfast.aio.connect(url) as client:
        async with client.lock("warm"):
            pass
        with no_knots():
            await act(client)


@asyncio_test
async def test_asyncio_nobody_there() -> None:
    with Server() as server:
        away = server.url
    async with holdfast.aio.connect(away) as client:
        with no_knots(), suppress(holdfast.Unavailable):
            await client.lock("x").acquire()


@asyncio_test
async def test_asyncio_a_server_that_hangs(server: Server) -> None:
    async with holdfast.aio.connect(server.url, timeout=1.0) as client:
        async with client.lock("warm"):
            pass
        with no_knots():
            server.pause()
            with suppress(holdfast.HoldfastError):
                await client.lock("x").acquire(timeout=0.3)
            server.resume()


@asyncio_test
async def test_asyncio_a_reply_that_is_lost(proxy: Proxy) -> None:
    async with holdfast.aio.connect(proxy.url) as client:
        async with client.lock("warm"):
            pass
        with no_knots():
            proxy.on("acquire", LOSE_REPLY)
            async with client.lock("x"):
                pass
