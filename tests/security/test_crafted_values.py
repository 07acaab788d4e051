"""A client that writes nonsense, or worse, into the keys of a lock: other clients go on, and what they show is plain.

These tests are about what clients do; tests/protocol/test_untrusted.py is about the parser.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.aio
from holdfast.cli import main
from holdfast.drivers.observing import describe
from holdfast.holder import LockInfo
from holdfast.lab.servers.etcd import Etcd
from holdfast.lab.simulation.programs import use_etcd
from holdfast.lab.simulation.world import World
from holdfast.options import client_options
from holdfast.protocol.effects import wait
from holdfast.protocol.intents.requests import Put, Txn
from tests.conformance.stages import Scenario, WorldApi
from tests.security.crafted import RECORDS, SECRET, TOKENS, TOKENS_AT_RANDOM, check_plain
from tests.servers import Server

HEAD, TAIL = "k:hf1:", ":{k}"
ENTRY = b"1700000000000000 1 2 "


def side(part: str) -> str:
    return f"{HEAD}{part}{TAIL}"


async def answer_of(calling: Any) -> Any:
    """What a call returns, or the error of ours that it raises."""
    try:
        return await calling
    except holdfast.HoldfastError as error:
        return error


async def enter(lock: Any) -> None:
    async with lock:
        pass


async def all_of(locks: Any) -> list[Any]:
    return [each async for each in locks]


async def use_everything(client: Any) -> list[Any]:
    """All that a client does with what it reads of the lock ``k``."""
    return [
        await answer_of(enter(client.lock("k", wait=0))),
        await answer_of(enter(client.lock("k", wait=0.6))),
        await answer_of(enter(client.lock("k", "l", wait=0))),
        await answer_of(enter(client.semaphore("k", permits=2, wait=0))),
        await answer_of(enter(client.rwlock("k", wait=0).read)),
        await answer_of(client.latch("k", count=2).wait(0)),
        await answer_of(client.latch("k", count=2).count_down()),
        await answer_of(client.election("k").leader()),
        await answer_of(client.inspect("k")),
        await answer_of(all_of(client.locks("*"))),
        await answer_of(client.history("k")),
        await answer_of(client.get_or_compute("k", lambda: 1, wait=0)),
    ]


class Watched(WorldApi):
    """The simulated world, with clients that report events."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.events: list[Any] = []

    def client(self, **options: Any) -> Any:
        client = super().client(**options)
        machine: Any = client._driver
        machine.registry.observed = lambda: True
        machine.report = self.events.append
        return client


def check_events(events: list[Any]) -> None:
    for event in events:
        check_plain(describe(event))
        check_plain(event.as_dict())


# What is written where: a string, a member of a sorted set, a field of a hash, or an element of a list.
WRITES: dict[str, Callable[[bytes], tuple[Any, ...]]] = {
    "main": lambda value: ("SET", "k", value, "PX", 60_000),
    "fence": lambda value: ("SET", side("fence"), value, "PX", 60_000),
    "queue": lambda value: ("ZADD", side("queue"), 1, value),
    "holders": lambda value: ("ZADD", side("holders"), 9e15, value),
    "slots": lambda value: ("ZADD", side("holders"), 1, b"slot " + value),
    "waiters": lambda value: ("HSET", side("waiters"), b"t" + SECRET, value),
    "kind": lambda value: ("HSET", side("waiters"), "kind", value),
    "yield": lambda value: ("HSET", side("waiters"), "yield", value),
    "history": lambda value: ("LPUSH", side("history"), value),
    "entry": lambda value: ("LPUSH", side("history"), ENTRY + value),
    "latch": lambda value: ("SET", side("latch"), value, "PX", 60_000),
    "latch waiters": lambda value: ("ZADD", side("latch:waiters"), 1, value),
    "claim": lambda value: ("SET", side("cache:claim"), value, "PX", 60_000),
    "failure": lambda value: ("SET", side("cache:failure"), b"1 9000000000000000 " + value, "PX", 60_000),
    "cached": lambda value: ("HSET", side("cache:value"), "value", value, "fresh", "9e15", "cost", "1"),
}


@settings(max_examples=25)
@pytest.mark.parametrize("where", WRITES)
@given(value=st.one_of(RECORDS, TOKENS_AT_RANDOM))
def test_whatever_is_in_a_key_clients_go_on_and_show_plain_text(where: str, value: bytes) -> None:
    world = World(seed=1)
    api = Watched(world)

    async def scenario() -> Any:
        await api.raw("ZADD", side("queue"), 2, "t" + SECRET.decode())  # so that the name is listed
        await api.raw(*WRITES[where](value))
        return await use_everything(api.client())

    found = world.run(world.spawn(scenario(), api._here))
    check_plain(found)
    check_events(api.events)


@pytest.mark.parametrize("token", TOKENS, ids=range(len(TOKENS)))
def test_a_crafted_token_in_the_key_of_a_lock(play: Callable[[Scenario], Any], token: bytes) -> None:
    async def scenario(api: Any) -> Any:
        await api.raw("SET", "k", token, "PX", 60_000)
        await api.raw("SET", side("fence"), b"1700000000000000 1 " + token[-8:], "PX", 60_000)
        client = api.client()
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            async with client.lock("k", wait=0):
                pass
        info = await client.inspect("k")
        return caught.value, caught.value.holder, info, await client.election("k").leader()

    error, holder, info, leader = play(scenario)
    check_plain([error, holder, info, leader])
    assert len(info.holders) == 1
    assert holder.id == info.holders[0].id


@pytest.mark.parametrize("crafted", TOKENS, ids=range(len(TOKENS)))
def test_a_holder_is_told_of_its_loss_whatever_is_in_its_keys(play: Callable[[Scenario], Any], crafted: bytes) -> None:
    """Its key is another's, and the tombstone of its token says that it was broken by a process with such a name."""

    async def scenario(api: Any) -> Any:
        lease = await api.client().lock("k", ttl=60).acquire()
        await api.sleep(0.3)  # until its key is watched
        name = b"".join(crafted.split())
        notice = b"broken " + ENTRY + name + b" " + name + b" \x1b[31mwhy"
        await api.raw("SET", side(f"gone:{lease.token}"), notice, "PX", 60_000)
        await api.raw("SET", "k", crafted, "PX", 60_000)
        for _ in range(1000):
            if lease.lost.is_set():
                break
            await api.sleep(0.01)
        held, reason = lease.held, lease.reason
        with pytest.raises(holdfast.LeaseLost) as caught:
            await lease.release()
        return held, reason, caught.value

    held, reason, error = play(scenario)
    assert not held
    assert reason.startswith("it was broken by")
    check_plain([reason, error])


@pytest.mark.parametrize("token", [each for each in TOKENS if each.endswith(SECRET)], ids=str)
def test_a_crafted_token_cannot_forge_the_entry_of_its_break(play: Callable[[Scenario], Any], token: bytes) -> None:
    async def scenario(api: Any) -> Any:
        await api.raw("SET", "k", token, "PX", 60_000)
        client = api.client()
        holder = (await client.inspect("k")).holders[0]
        broken = await client.break_lock("k", holder_id=holder.id, reason="it is stuck", label="ops")
        return broken, await client.history("k")

    broken, history = play(scenario)
    check_plain([broken, history])
    (entry,) = history
    assert (entry.reason, entry.by.label) == ("it is stuck", "ops")


@example(words=[b"5", b"9" * 400, b"-1"])
@settings(max_examples=50)
@given(
    words=st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"ask", b"1" * 5000, b"-1", b"1"])), max_size=5)
)
def test_a_notification_about_a_waiter_with_anything_in_it_harms_nothing(words: list[bytes]) -> None:
    world = World(seed=1)
    api = WorldApi(world)

    async def scenario() -> Any:
        await api.raw("SET", "k", "another holder", "PX", 1500)
        client = api.client()
        waiting = api.spawn(lambda: enter(client.lock("k", wait=20)))
        router: Any = client._driver.router
        while not router.waiting:
            await api.sleep(0.01)
        (token,) = router.waiting
        router.deliver(b" ".join([token.encode(), *words]), world.now_us / 1e6)
        return await waiting.join()

    try:
        world.run(world.spawn(scenario(), api._here))
    except holdfast.LeaseLost:
        pass  # it was well formed: a forged grant, which is found out (tests/security/test_co_tenants.py)


# The command line.


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", [["who", "k"], ["ls"], ["history", "k"], ["watch", "k", "--for", "0.05"]], ids=str)
@pytest.mark.parametrize("token", TOKENS[:5], ids=range(5))
def test_commands_show_crafted_values_as_plain_text(
    server: Server, admin: Any, capsys: pytest.CaptureFixture[str], *, token: bytes, command: Any, options: Any
) -> None:
    admin.set("k", token, px=60_000)
    admin.zadd(side("queue"), {"": 0, b"t" + SECRET: 1})
    admin.hset(side("waiters"), "kind", b"lo\x1b[31mck\xc2\x9b")
    admin.zadd(side("holders"), {token: 9e15, b"slot " + token: 1, b"fence " + token: -1})
    name = b"".join(token.split())
    admin.lpush(side("history"), ENTRY + name + b" " + name + b" \x1b[31mwhy")
    with pytest.raises(SystemExit) as end:
        main([*command, "--url", server.url, *options])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in out + err), ascii(out + err)
    if options:
        for text in out.splitlines() if command[0] == "watch" else [out]:
            json.loads(text)


def test_a_name_with_marks_of_direction_is_escaped_in_json(
    server: Server, client: holdfast.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "k\u202e\u2066\U000e0041"
    with client.lock(name), pytest.raises(SystemExit):
        main(["ls", "--json", "--url", server.url])
    out = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in out)
    assert [each["name"] for each in json.loads(out)] == [name]


def test_a_log_record_about_a_crafted_holder_is_plain(
    url: str, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    admin.set("k", TOKENS[1], px=60_000)
    with caplog.at_level(logging.DEBUG, "holdfast"), holdfast.connect(url) as client:
        assert client.lock("k", wait=1).acquire() is None
    assert caplog.records
    for record in caplog.records:
        check_plain({name: value for name, value in vars(record).items() if name == "message" or "lock_" in name})


# etcd, on the lab's model of it.

INTENTS = (
    *("lock:", "semaphore:", "rwlock:any:", "rwlock:all:", "latch:state", "latch:x", "\udcff\x1b[31m:"),
    "",
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from(["\ud800", "h-" + "9" * 5000 + SECRET.decode(), "\n\x1b", 10**4000, 2**53, -1]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
VALUES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["[" * 100_000, "9" * 5000, "2 2", "9" * 5000 + " 2", '{"at": ' + "9" * 5000 + "}"]),
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("token", "at", "since", "names", "fence", "slot", "shared"), JSON)
    ).map(json.dumps),
)


def on_etcd(world: World) -> Any:
    machine = world.machine()
    use_etcd(machine)
    shared = client_options(timeout=2.0, fence_retention=3600.0, cohort=64)
    return holdfast.aio.Client(machine, namespace="", shared=shared)


@settings(max_examples=150)
@given(kind=st.sampled_from(INTENTS), value=VALUES, token=TOKENS_AT_RANDOM, history=RECORDS)
def test_whatever_is_in_an_intent_clients_go_on_and_show_plain_text(
    kind: str, value: str, token: bytes, history: bytes
) -> None:
    world = World(seed=1)
    store: Any = Etcd()
    world.store = store
    key = f"k:hf1:intent:{kind}{token.decode(errors='surrogateescape')}"
    puts = (Put(key, value), Put("k:hf1:history:x", history.decode(errors="replace")))
    store.execute("etcd", Txn((), puts), "")
    client = on_etcd(world)

    async def scenario() -> Any:
        found = [
            *[await answer_of(enter(client.lock(*names, wait=0))) for names in (("k",), ("k", "l"))],
            *[await answer_of(enter(client.semaphore("k", permits=n, wait=0))) for n in (1, 3)],
            *[await answer_of(enter(getattr(client.rwlock("k", wait=0), one))) for one in ("read", "write")],
            await answer_of(client.latch("k", count=2).wait(0)),
            await answer_of(client.latch("k", count=2).count_down()),
            await answer_of(client.election("k").leader()),
            await answer_of(client.history("k")),
        ]
        info = await answer_of(client.inspect("k"))
        if isinstance(info, LockInfo):
            for holder in info.holders[:1]:
                found.append(await answer_of(client.break_lock("k", holder_id=holder.id, reason="x")))
        return [*found, info]

    check_plain(world.run(world.spawn(scenario(), client._driver)))


@example(value="broken 1 1 1 h-" + "9" * 5000 + " h-" + "9" * 5000 + " x")
@settings(max_examples=100)
@given(value=VALUES)
def test_a_holder_on_etcd_is_told_of_its_loss_whatever_is_in_its_key(value: str) -> None:
    world = World(seed=1)
    store: Any = Etcd()
    world.store = store
    client = on_etcd(world)

    async def scenario() -> Any:
        lease = await client.lock("k", ttl=30).acquire()
        (key,) = (key for key in store.items if "intent" in key)
        for each in (key, f"k:hf1:gone:{lease.token}"):
            store.execute("etcd", Txn((), (Put(each, value),)), "")
        store.items.pop(key)
        await client._driver.run(wait(None, client._driver.now() + 12))  # until its next renewal
        assert lease.lost.is_set()
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        return lease.reason

    reason = world.run(world.spawn(scenario(), client._driver))
    assert reason
    check_plain(reason)
