"""What people see of an error: the line of theirs, one frame of ours, and the message."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.aio
from tests.proxy import LOSE_REPLY, MUTE_REPLY, Proxy
from tests.servers import Server

HOME = str(Path(holdfast.__file__).parent)


def internal_frames(error: BaseException | None) -> list[str]:
    """All that is printed of ours, down the whole chain."""
    shown = []
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.startswith(HOME) or "/redis/" in frame.filename:
                shown.append(f"{frame.filename}:{frame.lineno} {frame.name}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return shown


def check(error: BaseException, *, lines: int = 14) -> None:
    assert isinstance(error, holdfast.HoldfastError)
    assert len(internal_frames(error)) <= 1, internal_frames(error)
    text = "".join(traceback.format_exception(error))
    assert len(text.splitlines()) <= lines, text
    assert __file__ in text, "it shows the line of the caller"


def unavailable(client: Any) -> Any:
    return client.lock("x").acquire()


def entered(client: Any) -> Any:
    return client.lock("x").__enter__() if hasattr(client.lock("x"), "__enter__") else client.lock("x").__aenter__()


def looked(client: Any) -> Any:
    return client.lock("x").locked()


def waited(client: Any) -> Any:
    return client.latch("x", count=1).wait(1)


def led(client: Any) -> Any:
    return client.election("x").leader()


def permitted(client: Any) -> Any:
    return client.semaphore("x", permits=2).acquire()


CALLS = pytest.mark.parametrize(
    "call",
    [unavailable, entered, looked, waited, led, permitted],
    ids=lambda call: call.__name__,
)


def run(aio: bool, url: str, call: Callable[[Any], Any]) -> BaseException:
    async def use() -> None:
        async with holdfast.aio.connect(url, timeout=0.5) as client:
            await call(client)

    with pytest.raises(holdfast.HoldfastError) as caught:
        if aio:
            asyncio.run(use())
        else:
            with holdfast.connect(url, timeout=0.5) as client:
                call(client)
    return caught.value


@CALLS
@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "asyncio"])
def test_a_dead_server(aio: bool, call: Callable[[Any], Any]) -> None:
    with Server() as server:
        away = server.url
    check(run(aio, away, call), lines=24 if aio else 14)  # asyncio.run has frames, too


@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("fault", [MUTE_REPLY, LOSE_REPLY], ids=lambda fault: fault.kind)
def test_a_server_that_does_not_answer(aio: bool, proxy: Proxy, fault: Any) -> None:
    proxy.on("*", fault, times=500)
    check(run(aio, proxy.url, lambda client: client.lock("x").acquire(timeout=0.3)), lines=24 if aio else 14)


@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "asyncio"])
def test_the_cause_is_named_where_it_says_more(aio: bool) -> None:
    with Server() as server:
        away = server.url
    error = run(aio, away, unavailable)
    assert isinstance(error.__cause__, ConnectionRefusedError)
    assert error.__cause__.__traceback__ is None


def test_an_error_of_the_body_keeps_its_frames(client: holdfast.Client) -> None:
    def work(lease: holdfast.Lease) -> None:
        lease.release()
        lease.release()

    with pytest.raises(holdfast.NotHeld) as caught:
        with client.lock("x") as lease:
            work(lease)
    assert "work" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_of_the_body_keeps_its_frames_under_asyncio(url: str) -> None:
    async def work(lease: Any) -> None:
        await lease.release()
        await lease.release()

    async def use() -> None:
        async with holdfast.aio.connect(url) as client:
            async with client.lock("x") as lease:
                await work(lease)

    with pytest.raises(holdfast.NotHeld) as caught:
        asyncio.run(use())
    assert "work" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_mistake_of_ours_keeps_all_of_its_frames(client: holdfast.Client) -> None:
    def broken() -> Any:
        yield 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        client._driver.run(broken())
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_what_a_program_prints_when_nobody_listens() -> None:
    with Server() as server:
        away = server.url
    program = f"import holdfast\nclient = holdfast.connect({away!r})\nclient.lock('x').acquire()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) <= 12, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("holdfast.errors.Unavailable: ")
    assert "nothing listens there" in last
