"""A fault at each byte of what a server says first on a connection: AUTH, SELECT, CLIENT SETNAME, HELLO, TRACKING,
SUBSCRIBE. Once the server is honest again, an asyncio client is notified and told of losses again within five seconds.

The clients run side by side, each behind a relay of its own that harms every connection at one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import async_eventually, asyncio_test

PLACES = range(0, 320, 8)
CUT, GARBLE, SWALLOW = "cut", "garble", "swallow"


class Relay:
    """Passes bytes on to the server and back. While it is faulty, the byte at ``place`` is where each connection is
    harmed; connections that it had before are cut when it becomes so."""

    def __init__(self, port: int, fault: str, place: int, dice: random.Random) -> None:
        self._upstream = port
        self._fault = fault
        self._place = place
        self._garbage = bytes([dice.randrange(256)])
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.faulty = False
        self.harmed = 0

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, out = await asyncio.open_connection("127.0.0.1", self._upstream)
        writers = {back, out}
        self._writers |= writers

        def abort(_: object) -> None:
            for writer in writers:
                writer.transport.abort()

        for task in (asyncio.create_task(self._pass_on(near, out)), asyncio.create_task(self._hand_back(far, back))):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(abort)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)

    async def _hand_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                at = self._place - passed
                passed += len(data)
                if self.faulty and 0 <= at < len(data):
                    self.harmed += 1
                    if self._fault == CUT:
                        writer.write(data[:at])
                        return
                    data = data[:at] + (self._garbage if self._fault == GARBLE else b"") + data[at + 1 :]
                writer.write(data)


class Subject:
    """A client that holds one lock and waits for another, whatever happens."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.client = holdfast.aio.connect(f"redis://:secret@127.0.0.1:{port}/1?client_name={name}")
        self.lease: holdfast.aio.Lease | None = None
        self.served = asyncio.Event()

    async def hold(self) -> None:
        while True:
            with contextlib.suppress(holdfast.HoldfastError):
                async with self.client.lock(f"held by {self.name}", ttl=60, on_lost="ignore") as lease:
                    self.lease = lease
                    await lease.lost.wait()
            await asyncio.sleep(0.05)

    async def wait(self) -> None:
        while not self.served.is_set():
            with contextlib.suppress(holdfast.HoldfastError):
                async with self.client.lock(f"wanted by {self.name}"):
                    self.served.set()
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.hold()), asyncio.create_task(self.wait())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.client.aclose()


def is_well(admin: redis.Redis, names: set[str]) -> Callable[[], bool]:
    """Whether the server tracks for each of these clients, and may notify it."""

    def ask() -> bool:
        found = [found for found in admin.client_list() if found["name"] in names]
        tracked = {one["name"] for one in found if "t" in one["flags"]}
        subscribed = {one["name"] for one in found if one["sub"] == "1"}
        return tracked == subscribed == names

    return ask


@pytest.mark.long
@pytest.mark.parametrize("fault", [CUT, GARBLE, SWALLOW])
@asyncio_test
async def test_a_client_recovers_from_a_fault_at_any_byte_of_the_handshake(fault: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    shift = dice.randrange(PLACES.step)
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(Server("--requirepass", "secret"))
        admin = stack.enter_context(redis.Redis(port=server.port, db=1, password="secret"))
        relays = [Relay(server.port, fault, place + shift, dice) for place in PLACES]
        subjects = [Subject(f"{relay._place}", await stack.enter_async_context(relay.serve())) for relay in relays]
        names = {subject.name for subject in subjects}
        admin.mset({f"wanted by {name}": "foreign" for name in names})
        for subject in subjects:
            await stack.enter_async_context(subject.run())
        await async_eventually(is_well(admin, names), timeout=20.0, what="all is well before")

        for relay in relays:
            relay.faulty = True
            relay.cut()
        await asyncio.sleep(1.5)
        for relay in relays:
            relay.faulty = False
        await async_eventually(is_well(admin, names), timeout=5.0, what="all is well again")
        assert sum(relay.harmed > 0 for relay in relays) > len(relays) / 2

        leases = [subject.lease for subject in subjects if subject.lease is not None]
        admin.delete(*(f"held by {name}" for name in names), *(f"wanted by {name}" for name in names))
        await async_eventually(lambda: all(lease.lost.is_set() for lease in leases), what="all losses are told")
        await async_eventually(lambda: all(subject.served.is_set() for subject in subjects), what="all waiters had it")
