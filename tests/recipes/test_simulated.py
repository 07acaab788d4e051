"""The same recipes in the simulated world, and the one that no real server here can run."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.servers.memcached import Memcached
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.world import World
from holdfast.options import client_options
from holdfast.protocol.effects import wait
from holdfast.protocol.recipes import RECIPES, make

SHARED = client_options(timeout=5.0, fence_retention=3600.0, cohort=64)


def world_for(name: str) -> World:
    world = World(seed=1)
    if RECIPES[name].server == "memcached":
        world.store = Memcached()  # type: ignore[assignment]
    return world


def client_of(machine: Machine) -> holdfast.aio.Client:
    return holdfast.aio.Client(machine, namespace="", shared=SHARED)


@pytest.mark.parametrize("name", RECIPES)
def test_machines_increment_a_counter(name: str) -> None:
    world = world_for(name)
    counter = 0

    async def work(machine: Machine) -> None:
        nonlocal counter
        recipe = client_of(machine).recipe(name, "foo")
        for _ in range(20):
            async with recipe:
                value = counter
                await machine.run(wait(None, machine.now() + 0.001))
                counter = value + 1

    for process in [world.spawn(work(machine), machine) for machine in (world.machine() for _ in range(3))]:
        world.run(process)
    assert (counter == 60) == (name != "watch_blind")
    assert not world.store.values


def test_memcached_add_frees_its_own_and_nothing_else() -> None:
    world = world_for("memcached_add")

    async def play() -> None:
        first, second = (client_of(world.machine()).recipe("memcached_add", "foo", ttl=2) for _ in range(2))
        lease = await first.acquire()
        assert lease
        assert lease.token.encode() == world.store.values[b"foo"]
        assert await second.locked()
        assert await second.acquire(blocking=False) is None
        world.store.remove(b"foo")  # evicted
        assert await second.acquire(blocking=False), "two hold"
        with pytest.raises(holdfast.LeaseLost):
            await first.release()
        assert await second.locked()
        await second.release()
        assert not await second.locked()

    world.run(world.spawn(play(), world.machine()))


@pytest.mark.parametrize(
    ("name", "options", "value", "expires_us", "until_us"),
    [
        ("setnx", {}, b"1", None, None),
        ("set_nx", {}, b"token", 1_700_000_000_000_000, 1_700_000_000_000_000),
        ("getset", {}, b"1700000000000001", None, 1_700_000_000_000_001),
        ("getset", {"unit": "ms"}, b"1700000000000", None, 1_700_000_000_000_000),
        ("getset", {"unit": "s", "owner_prefix": True}, b"a.b.1700000000", None, 1_700_000_000_000_000),
        ("getset_equal", {"unit": "s"}, b"no number", None, 0),
    ],
)
def test_until_when_a_key_keeps_others_out(
    name: str, options: dict[str, Any], value: bytes, *, expires_us: int | None, until_us: int | None
) -> None:
    recipe = make(World().machine(), name, "foo", namespace="app:", options=options)
    assert recipe.deadline_us(value, expires_us) == until_us
    assert recipe.key == f"app:{RECIPES[name]().prefix}foo"


@pytest.mark.parametrize("name", ["getset", "getset_equal"])
def test_past_means_strictly_less(name: str) -> None:
    scheme = RECIPES[name]()
    assert [scheme.is_past(value, 5) for value in (b"4", b"5", b"6")] == [True, False, False]  # type: ignore[attr-defined]
    assert scheme.is_past(None, 5)  # type: ignore[attr-defined]
