"""Waiters for several names: their places in queues, and the keys that are watched for them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.lab.simulation.world import Fate, Message
from holdfast.protocol import mutex
from holdfast.protocol.effects import Command
from tests.protocol.harness import Play


def first_of(script: str, machine: str, **fate: Any) -> Any:
    """Give that fate to the first message of that machine with that step."""
    met: list[int] = []

    def choose(message: Message) -> Fate | None:
        if getattr(message.ops[0], "script", "") == script and message.machine.name == machine and not met:
            met.append(message.number)
            return Fate(**fate)
        return None

    return choose


def queue_of(play: Play, name: str) -> list[bytes]:
    return [*play.world.store.values.get(f"{name}:hf1:queue:{{{name}}}".encode(), ())]


def test_a_refusal_that_is_lost_leaves_no_place_in_the_queue_behind() -> None:
    """A holder must not stand in its own queue: the waiter behind it would not have the name watched."""
    play = Play()
    one, two, three = play.client("one"), play.client("two"), play.client("three")
    play.world.subscribe(two._driver)  # type: ignore[arg-type]  # it has waited before, and so it listens
    play.doom(first_of("multi_acquire", "two", reply_lost=True))

    async def visit(client: Any, names: str, hold: float) -> None:
        async with client.lock(*names, ttl=0.6) as lease:  # without an answer a client asks again after 0.2 s
            for name in names:
                assert lease.token.encode() not in queue_of(play, name)
            await play.sleep(client, hold)

    processes = [play.start(one, visit(one, "ac", 0.1))]
    play.run(0.01)
    processes.append(play.start(two, visit(two, "ab", 0.5)))
    play.run(0.01)
    processes.append(play.start(three, visit(three, "a", 0.1)))
    play.run(5)
    for process in processes:
        process.outcome()


@pytest.mark.parametrize("held", ["a", "b", "c", "ac"])
def test_a_waiter_is_woken_when_a_stranger_frees_the_name(held: str) -> None:
    """As with one name, the key is watched. Several are freed one by one, as the waiter stands at one of them."""
    play = Play()
    client = play.client("one")
    for name in held:
        play.world.execute(Command(("SET", name, "a stranger's, without a ttl")))
    served: list[float] = []

    async def wait_for_all() -> None:
        async with client.lock("a", "b", "c", ttl=30):
            served.append(play.world.now_us / 1e6)

    waiter = play.start(client, wait_for_all())
    for name in held:
        play.run(0.3)
        assert not served
        play.world.execute(Command(("DEL", name)))
        freed = play.world.now_us / 1e6
    play.run(2)
    waiter.outcome()
    assert served[0] - freed < 0.01


def test_a_waiter_refused_by_another_name_has_that_name_watched() -> None:
    play = Play()
    client: Any = play.client("one")
    watching = client._driver.router.watching
    for name in "ab":
        play.world.execute(Command(("SET", name, "a stranger's, without a ttl")))

    async def wait_for_both() -> None:
        async with client.lock("a", "b", ttl=30):
            pass

    waiter = play.start(client, wait_for_both())
    for name in "ab":
        play.run(0.2)
        assert name in watching
        play.world.execute(Command(("DEL", name)))
    play.run(0.2)
    waiter.outcome()
    assert not watching


def test_on_every_stage_a_stranger_wakes_the_waiter(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutex, "REFRESH", 60.0)  # so that nothing else would

    async def scenario(api: Any) -> None:
        client = api.client()
        await api.raw("SET", "b", "a stranger's, without a ttl")

        async def wait_for_all() -> None:
            async with client.lock("a", "b", "c", ttl=30, wait=20):
                pass

        waiter = api.spawn(wait_for_all)
        await api.sleep(0.5)
        await api.raw("DEL", "b")
        await waiter.join()

    play(scenario)
