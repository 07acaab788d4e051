"""Faults in a tight loop beside many who lock: no update is lost, no error surfaces but what must, nothing is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

import holdfast
import holdfast.aio
from tests.servers import Server
from tests.support import async_eventually, asyncio_test, eventually, later, lock_keys

SECONDS = 1.0


class Register:
    """What the locks guard. It refuses a fence that is lower than one it has seen, as a guarded resource should."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._highest = 0
        self.value = 0
        self.accepted = 0
        self.refused = 0
        self.regressions = 0

    def read(self, fence: int) -> int | None:
        with self._guard:
            if fence <= self._highest:
                self.regressions += 1
                return None
            self._highest = fence
            return self.value

    def write(self, fence: int, value: int) -> None:
        with self._guard:
            if fence < self._highest:
                self.refused += 1
                return
            self.value = value
            self.accepted += 1


@contextmanager
def storm(strike: Callable[[], object], pause: float) -> Iterator[list[int]]:
    """Strike again and again, in a thread, for as long as the block lasts."""
    over = threading.Event()
    count = [0]

    def rage() -> None:
        while not over.wait(pause):
            strike()
            count[0] += 1

    thread = threading.Thread(target=rage)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


def kill_connections(server: Server) -> Callable[[], None]:
    """A strike that ends every connection but those of the test's own, which have a name."""
    striker = server.client(client_name="spared")

    def strike() -> None:
        for connection in striker.client_list():
            if connection["name"] != "spared":
                striker.client_kill_filter(_id=connection["id"])

    return strike


def flush_scripts(server: Server) -> Callable[[], object]:
    striker = server.client(client_name="spared")
    return lambda: striker.script_flush()


STRIKES = [(flush_scripts, 0.0), (kill_connections, 0.004)]


def work_with_threads(client: holdfast.Client, register: Register) -> list[BaseException]:
    """Four threads go on for a while; what surfaced."""
    until = time.monotonic() + SECONDS
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            while time.monotonic() < until:
                try:
                    with client.lock("x", wait=30) as lease:
                        value = register.read(lease.fence)
                        time.sleep(0.0005)
                        if value is not None:
                            register.write(lease.fence, value + 1)
                    with client.lock(f"own{number}", wait=30):
                        pass
                except holdfast.HoldfastError as error:
                    errors.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


async def work_with_tasks(client: holdfast.aio.Client, register: Register) -> list[BaseException]:
    """Sixteen tasks go on for a while; what surfaced."""
    until = time.monotonic() + SECONDS
    errors: list[BaseException] = []

    async def work(number: int) -> None:
        while time.monotonic() < until:
            try:
                async with client.lock("x", wait=30) as lease:
                    value = register.read(lease.fence)
                    await asyncio.sleep(0.0005)
                    if value is not None:
                        register.write(lease.fence, value + 1)
                async with client.lock(f"own{number}", wait=30):
                    pass
            except holdfast.HoldfastError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(work(number))
    return errors


# The client of each test meets the server before the storm begins, because a first contact that fails is an error.


@pytest.mark.long
@pytest.mark.parametrize(("strike", "pause"), STRIKES, ids=lambda value: getattr(value, "__name__", ""))
def test_storm_beside_four_threads(server: Server, strike: Any, pause: float) -> None:
    register = Register()
    admin = server.client(client_name="spared")
    with holdfast.connect(server.url) as client:
        with client.lock("met"):
            pass
        with storm(strike(server), pause) as strikes:
            errors = work_with_threads(client, register)
    assert errors == []
    assert strikes[0] > 20
    assert register.value == register.accepted > 20
    assert register.refused == register.regressions == 0
    eventually(lambda: lock_keys(admin) == [], what="nothing is left")


@pytest.mark.long
@pytest.mark.parametrize(("strike", "pause"), STRIKES, ids=lambda value: getattr(value, "__name__", ""))
@asyncio_test
async def test_storm_beside_sixteen_tasks(server: Server, strike: Any, pause: float) -> None:
    register = Register()
    admin = server.client(client_name="spared")
    async with holdfast.aio.connect(server.url) as client:
        async with client.lock("met"):
            pass
        with storm(strike(server), pause) as strikes:
            errors = await work_with_tasks(client, register)
    assert errors == []
    assert strikes[0] > 20
    assert register.value == register.accepted > 20
    assert register.refused == register.regressions == 0
    await async_eventually(lambda: lock_keys(admin) == [], what="nothing is left")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_connections_killed_all_the_time_delay_nobody_for_long(server: Server, kind: str) -> None:
    # Connections die while they are being made, and in the moment in which one changes hands within the client.
    worst = [0.0]

    def note(started: float) -> None:
        worst[0] = max(worst[0], time.monotonic() - started)

    async def cycles(client: holdfast.aio.Client, name: str, until: float) -> None:
        while time.monotonic() < until:
            started = time.monotonic()
            async with client.lock(name, wait=30):
                pass
            note(started)

    async def with_tasks() -> None:
        async with holdfast.aio.connect(server.url) as client:
            async with client.lock("met"):
                pass
            with storm(kill_connections(server), 0.002) as strikes:
                async with asyncio.TaskGroup() as group:
                    for number in range(4):
                        group.create_task(cycles(client, f"own{number}", time.monotonic() + 1.5))
            assert strikes[0] > 20

    def with_a_thread() -> None:
        with holdfast.connect(server.url) as client:
            with client.lock("met"):
                pass
            with storm(kill_connections(server), 0.002) as strikes:
                until = time.monotonic() + 1.2
                while time.monotonic() < until:
                    started = time.monotonic()
                    with client.lock("own", wait=30):
                        pass
                    note(started)
            assert strikes[0] > 20

    if kind == "asyncio":
        asyncio.run(with_tasks())
    else:
        with_a_thread()
    assert worst[0] < 4.0, f"somebody waited {worst[0]:.1f} s although the server was there all the time"


@pytest.fixture
def mortal() -> Iterator[Server]:
    """A server of one's own, to be killed."""
    with Server() as server:
        yield server


def check_restarts(register: Register, errors: list[BaseException], restarts: int) -> None:
    assert restarts > 2
    # A restart takes the keys with it, so whoever was inside has lost its lease, and is told. Nothing else surfaces.
    surprises = [error for error in errors if not isinstance(error, holdfast.LeaseLost | holdfast.OutcomeUnknown)]
    assert surprises == []
    # Two may be inside then, and the fence is what keeps the older one's write out.
    assert register.value == register.accepted > 20
    assert register.regressions <= len(errors) + register.refused


@pytest.mark.long
def test_restarts_beside_four_threads(mortal: Server) -> None:
    register = Register()
    with holdfast.connect(mortal.url) as client:
        with client.lock("met"):
            pass
        with storm(mortal.restart, 0.2) as restarts:
            errors = work_with_threads(client, register)
    check_restarts(register, errors, restarts[0])
    with mortal.client() as admin:
        eventually(lambda: lock_keys(admin) == [], what="nothing is left")


@pytest.mark.long
@asyncio_test
async def test_restarts_beside_sixteen_tasks(mortal: Server) -> None:
    register = Register()
    async with holdfast.aio.connect(mortal.url) as client:
        async with client.lock("met"):
            pass
        with storm(mortal.restart, 0.2) as restarts:
            errors = await work_with_tasks(client, register)
    check_restarts(register, errors, restarts[0])
    with mortal.client() as admin:
        await async_eventually(lambda: lock_keys(admin) == [], what="nothing is left")


def test_killed_connections_do_not_make_a_try_without_waiting_fail(face: Any, admin: redis.Redis) -> None:
    for _ in range(20):
        lease = face.lock("x").acquire(blocking=False)
        assert lease
        admin.client_kill_filter(_type="normal", skipme=True)
        lease.release()
        admin.client_kill_filter(_type="normal", skipme=True)
    assert lock_keys(admin) == []


def test_lease_survives_a_restart_that_lost_nothing(connect: Any, mortal: Server) -> None:
    face = connect(mortal.url)
    lease = face.lock("x", ttl=6).acquire(timeout=5)
    mortal.restart(empty=False)
    before = face.client.statistics().renewals
    eventually(lambda: face.client.statistics().renewals > before, 10.0, "it is renewed there")
    assert lease.held
    lease.release()


def test_restart_that_lost_the_key_is_noticed_by_the_keeper(connect: Any, mortal: Server) -> None:
    face = connect(mortal.url)
    lease = face.lock("x", ttl=1.5).acquire(timeout=5)
    mortal.restart()
    assert lease.lost.wait(3.0)
    assert not lease.held
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_first_contact_with_a_dead_server_fails_at_once_and_later_outages_are_waited_out(
    connect: Any, mortal: Server
) -> None:
    with connect(mortal.url).lock("x"):
        pass
    known = connect(mortal.url)
    with known.lock("x"):
        pass
    mortal.kill()
    started = time.monotonic()
    with pytest.raises(holdfast.Unavailable, match="nothing listens there"):
        connect(mortal.url).lock("x").acquire(timeout=30)
    assert time.monotonic() - started < 10
    with later(0.7, mortal.restart):
        lease = known.lock("x").acquire(timeout=20)
    assert lease
    lease.release()
