"""Three stages for one play.

A scenario is a coroutine function that is given an ``Api`` and uses locks as under asyncio. The same text is played

- in the simulated world, where the asyncio face runs on a machine of the lab;
- under asyncio, on a real server;
- blocking, on a real server: every ``await`` is a plain call in the current thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.simulation.world import World
from holdfast.options import client_options
from holdfast.protocol.effects import Command
from tests.servers import Server

STAGES = ("world", "asyncio", "blocking")
Scenario = Callable[["Any"], Awaitable[Any]]


async def until(api: Any, condition: Callable[[], Any]) -> None:
    """Wait until the condition holds, however long this machine takes. It may be a question to the server."""
    for _ in range(6000):
        holds = condition()
        if await holds if isawaitable(holds) else holds:
            return
        await api.sleep(0.005)
    raise AssertionError("it did not come true")


def server_of_stage(request: pytest.FixtureRequest) -> Any:
    """The fixture ``server``, for a fixture with STAGES as its parameters; None in the simulated world.

    A test that connects depends on the clock, so tests/pulse.py may have it run again. One in virtual time must not.
    """
    return None if request.param == "world" else request.getfixturevalue("server")


class WorldApi:
    """The simulated world. Its time costs nothing."""

    kind = "world"
    Cancelled = Cancelled

    def __init__(self, world: World) -> None:
        self.world = world
        self._here = world.machine("here")

    def client(self, **options: Any) -> holdfast.aio.Client:
        shared = {"timeout": 5.0, "fence_retention": 3600.0, "cohort": 64}
        namespace = options.pop("namespace", "")
        return holdfast.aio.Client(
            self.world.machine(), namespace=namespace, shared=client_options(**{**shared, **options})
        )

    async def raw(self, *args: Any) -> Any:
        return self.world.execute(Command(args))

    async def sleep(self, seconds: float) -> None:
        from holdfast.protocol.effects import wait

        await self._here.run(wait(None, self._here.now() + seconds))

    def spawn(self, scenario: Callable[[], Awaitable[Any]]) -> WorldHandle:
        return WorldHandle(self, self.world.spawn(scenario(), self._here))

    def hang(self) -> None:
        self.world.hang()

    def resume(self) -> None:
        self.world.resume()

    @classmethod
    def play(cls, scenario: Scenario, server: Server | None) -> Any:
        world = World(seed=1)
        api = cls(world)
        return world.run(world.spawn(scenario(api), api._here))


class WorldHandle:
    def __init__(self, api: WorldApi, process: Any) -> None:
        self._api = api
        self._process = process

    def cancel(self) -> None:
        self._process.cancel()

    async def join(self) -> Any:
        while not self._process.done:
            await self._api.sleep(0.001)
        return self._process.outcome()


class AsyncioApi:
    kind = "asyncio"
    Cancelled = asyncio.CancelledError

    def __init__(self, server: Server) -> None:
        self.server = server
        self._admin = server.client()  # before the scenario: on a cluster that takes longer than some leases are young
        self._clients: list[holdfast.aio.Client] = []

    def client(self, **options: Any) -> holdfast.aio.Client:
        client = holdfast.aio.connect(self.server.url, **options)
        self._clients.append(client)
        return client

    async def raw(self, *args: Any) -> Any:
        return await asyncio.to_thread(self._admin.execute_command, *args)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, scenario: Callable[[], Awaitable[Any]]) -> AsyncioHandle:
        return AsyncioHandle(asyncio.ensure_future(scenario()))

    def hang(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    @classmethod
    def play(cls, scenario: Scenario, server: Server) -> Any:
        async def main() -> Any:
            api = cls(server)
            try:
                return await scenario(api)
            finally:
                for client in api._clients:
                    await client.aclose()

        return asyncio.run(main())


class AsyncioHandle:
    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()

    async def join(self) -> Any:
        return await self._task


class BlockingApi:
    kind = "blocking"
    Cancelled = None

    def __init__(self, server: Server) -> None:
        self.server = server
        self._admin = server.client()
        self._clients: list[holdfast.Client] = []

    def client(self, **options: Any) -> _Awaited:
        client = holdfast.connect(self.server.url, **options)
        self._clients.append(client)
        return _Awaited(client)

    async def raw(self, *args: Any) -> Any:
        return self._admin.execute_command(*args)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def spawn(self, scenario: Callable[[], Awaitable[Any]]) -> BlockingHandle:
        return BlockingHandle(scenario)

    def hang(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    @classmethod
    def play(cls, scenario: Scenario, server: Server) -> Any:
        api = cls(server)
        try:
            return _drive(scenario(api))
        finally:
            for client in api._clients:
                client.close()


def _drive(routine: Any) -> Any:
    """Run a coroutine that never really waits for a loop."""
    try:
        routine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking scenario awaited something that is not blocking")


class BlockingHandle:
    def __init__(self, scenario: Callable[[], Awaitable[Any]]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

        def body() -> None:
            try:
                self._result = _drive(scenario())
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    async def join(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


# What is awaited, and what makes something whose methods are.
AWAITED = {"acquire", "release", "locked", "extend", "wait", "hand_over", "adopt"}
AWAITED |= {"count_down", "count", "leader", "resign", "downgrade", "inspect", "break_lock", "history"}
AWAITED |= {"get_or_compute"}
MADE = {"lock", "rlock", "rwlock", "semaphore", "latch", "election", "lead", "terms", "locks"}


class _Awaited:
    """A blocking object whose methods can be awaited, and what they return likewise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name in AWAITED:

            async def method(*args: Any, **options: Any) -> Any:
                return _wrap(value(*args, **options))

            return method
        if name in MADE:
            return lambda *args, **options: _Awaited(value(*args, **options))
        return _wrap(value)

    def __aiter__(self) -> _Awaited:
        return self

    async def __anext__(self) -> Any:
        for value in self._inner:
            return _wrap(value)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._inner.close()

    async def __aenter__(self) -> Any:
        return _wrap(self._inner.__enter__())

    async def __aexit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def __bool__(self) -> bool:
        return bool(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)


def _wrap(value: Any) -> Any:
    return _Awaited(value) if isinstance(value, holdfast.Lease | holdfast.Lock | holdfast.blocking.Lost) else value


APIS: dict[str, Any] = {"world": WorldApi, "asyncio": AsyncioApi, "blocking": BlockingApi}
