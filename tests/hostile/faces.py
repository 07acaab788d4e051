"""One way to write a worker for both faces.

A worker is a coroutine. On the blocking face its calls return at once with their results, so the coroutine never
suspends, and ``run_blocking`` drives it to its end in the calling thread. On the asyncio face it is a task.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import holdfast
import holdfast.aio

__all__ = ["FACES", "AioFace", "BlockingFace", "Face", "run_blocking"]


class Face:
    """What a worker needs of a face."""

    kind: str

    def connect(self, url: str, **options: Any) -> Any:
        raise NotImplementedError

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outcome = function(*args, **kwargs)
        return await outcome if inspect.isawaitable(outcome) else outcome

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def run_lanes(self, lanes: list[Coroutine[Any, Any, None]]) -> None:
        """Run them side by side to their end."""
        raise NotImplementedError


class BlockingFace(Face):
    """Lanes are threads."""

    kind = "blocking"

    def connect(self, url: str, **options: Any) -> Any:
        return holdfast.connect(url, **options)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def run_lanes(self, lanes: list[Coroutine[Any, Any, None]]) -> None:
        threads = [threading.Thread(target=run_blocking, args=(lane,), name="lane") for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class AioFace(Face):
    """Lanes are tasks; ``run_lanes`` is called from outside an event loop."""

    kind = "asyncio"

    def connect(self, url: str, **options: Any) -> Any:
        return holdfast.aio.connect(url, **options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run_lanes(self, lanes: list[Coroutine[Any, Any, None]]) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*lanes)

        asyncio.run(all_of_them())


FACES: dict[str, type[Face]] = {face.kind: face for face in (BlockingFace, AioFace)}


def run_blocking(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a worker of the blocking face has suspended")
