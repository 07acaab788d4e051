"""Keys of a permit pool that are deleted by hand, at any time, in virtual time.

A holder whose entry is gone is told, and any other goes on. Newcomers find a clean pool, and no waiter is stuck.
test_damage_real.py shows the same on a real server.
"""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.process import Cancelled
from holdfast.lab.subjects.pools import PoolView as RoomView
from holdfast.names import keys_of
from holdfast.protocol.effects import Command
from tests.pools.harness import PERMITS, RoomPlay, place_of

TTL = 3.0  # renewed every second
TOLD = 1.3  # seconds until a holder knows: one look a second, or the next renewal
CASTS = {
    "permits": ("permit",) * 5,
    "writer first": ("write", "read", "read", "write", "read"),
    "readers first": ("read", "read", "write", "read", "read"),
}
MOMENTS = (0.0025, 0.0125, 0.2, 0.55, 1.01, 1.3, 2.2)
SIDE_KEYS = 4  # holders, queue, waiters and fence
VIEW = RoomView(keys_of("a"), {})


class DamagePlay(RoomPlay):
    """A world in which the holders that the server knows exclude each other, and the others are told in time."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self._missing: dict[str, float] = {}  # tokens of holders that the server does not know, and since when

    def look(self) -> None:
        now = self.world.now_us / 1e6
        known = VIEW.inside(self.world.store)
        holds = [hold for machine in self.machines for hold in machine.registry.holds.values() if hold.valid(now)]
        missing = [hold.token for hold in holds if hold.token.encode() not in known]
        self._missing = {token: self._missing.get(token, now) for token in missing}
        for token, since in self._missing.items():
            assert now - since <= TOLD, f"{token} was not told"
        self.check_places([place_of(hold) for hold in holds if hold.token.encode() in known])

    def delete(self, subset: int) -> list[str]:
        """The side keys of which that number has a bit, in the order of their names."""
        keys = sorted(key.decode() for key in self.world.store.values if b":hf1:" in key and b":gone:" not in key)
        deleted = [key for number, key in enumerate(keys) if subset >> number & 1]
        if deleted:
            self.world.execute(Command(("DEL", *deleted)))
        return deleted

    def begin(self, cast: str, crowded: bool) -> list[Any]:
        """Five clients that come one after the other, so that some hold and some wait."""
        processes = []
        for number, mode in enumerate(CASTS[cast]):
            client = self.client(f"c{number}")
            if crowded:
                client._driver.router.crowd.most_alone = 0
            processes.append(self.start(client, self._come(client, number, mode)))
        return processes

    async def _come(self, client: holdfast.aio.Client, number: int, mode: str) -> None:
        await self.sleep(client, number * 0.005)
        await self.visit(client, mode, ttl=TTL, hold=0.6 + 0.3 * number)


def assert_the_pool_is_clean(play: DamagePlay, cast: str) -> None:
    """As many as may hold together do, at once; and nothing is left."""
    mode = "permit" if cast == "permits" else "read"
    slots: set[int] = set()

    async def stay(client: holdfast.aio.Client) -> None:
        async with play.lock(client, mode, ttl=TTL, wait=0) as lease:
            slots.add(lease._hold.slot)
            await play.sleep(client, 0.5)

    late = [play.start(client, stay(client)) for client in (play.client(f"late{n}") for n in range(PERMITS))]
    play.run(2.0)
    for process in late:
        process.outcome()
    assert slots == ({0, 1} if mode == "permit" else {-1})
    assert play.left() == []


@pytest.mark.long
@pytest.mark.parametrize("crowded", [False, True], ids=["few", "crowd"])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("subset", range(1, 2**SIDE_KEYS))
def test_keys_are_deleted_while_some_hold_and_some_wait(subset: int, cast: str, crowded: bool) -> None:
    for moment in MOMENTS:
        play = DamagePlay()
        processes = play.begin(cast, crowded)
        play.run(moment)
        deleted = play.delete(subset)
        robbed = any(":holders:" in key for key in deleted)
        play.run(12.0)
        for process in processes:
            assert process.done, f"stuck after {deleted} at {moment}"
            lost = isinstance(process.error, holdfast.LeaseLost | Cancelled)
            assert process.error is None or (robbed and lost), f"{process.error!r} after {deleted} at {moment}"
        assert len(set(play.fences)) == len(play.fences)
        play.run(TTL + 3)
        assert play.left() == [], f"after {deleted} at {moment}"
        assert_the_pool_is_clean(play, cast)


# Entries of holders.

HOLDERS = "a:hf1:holders:{a}"


@pytest.mark.parametrize("entry", ["{}", "slot {}"])
def test_a_holder_whose_entry_is_removed_is_told_and_the_others_go_on(play: Any, entry: str) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        leases = [await client.semaphore("a", 3, ttl=TTL, on_lost=print).acquire() for _ in range(3)]
        await api.raw("ZREM", HOLDERS, entry.format(leases[1].token))
        newcomer = await client.semaphore("a", 3).acquire(blocking=False)
        assert newcomer.slot == 1, "any step mends the pool"
        assert await leases[1].lost.wait(5)
        with pytest.raises(holdfast.LeaseLost):
            await leases[1].release()
        assert [lease.held for lease in leases] == [True, False, True]
        assert await client.semaphore("a", 3).acquire(blocking=False) is None
        for lease in (leases[0], newcomer, leases[2]):
            await lease.release()

    play(scenario)


@pytest.mark.parametrize(
    "entries",
    [
        ("0", "nobody"),
        ("1", "slot nobody"),
        ("9e15", "nobody"),
        ("-2", "slot nobody"),
        ("0", "nobody", "1", "no one"),
        ("-9e15", "fence nobody"),
        ("-9e15", "fence nobody", "1", "slot nobody", "1", "nobody"),
        ("-9e15", "nobody"),
    ],
    ids=" ".join,
)
def test_entries_added_by_hand_are_no_holders(play: Any, entries: tuple[str, ...]) -> None:
    async def scenario(api: Any) -> None:
        semaphore = api.client().semaphore("a", 2, ttl=TTL)
        first = await semaphore.acquire()
        await api.raw("ZADD", HOLDERS, *entries)
        second = await semaphore.acquire(blocking=False)
        assert [first.slot, second.slot] == [0, 1]
        assert await semaphore.acquire(blocking=False) is None
        await semaphore.release(2)
        assert await api.raw("EXISTS", HOLDERS) == 0

    play(scenario)


@pytest.mark.parametrize("kind", ["permit", "read", "write"])
def test_a_holder_whose_fence_entry_is_removed_goes_on(play: Any, kind: str) -> None:
    """The entry is for inspectors. An earlier version, which does not know it, removes it."""

    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        locks = [
            each.semaphore("a", 1, ttl=TTL) if kind == "permit" else getattr(each.rwlock("a", ttl=TTL), kind)
            for each in (client, other)
        ]
        lease = await locks[0].acquire()
        await api.raw("ZREM", HOLDERS, f"fence {lease.token}")
        if kind == "read":
            assert await other.rwlock("a").write.acquire(blocking=False) is None
        else:
            assert await locks[1].acquire(blocking=False) is None
        assert float(await api.raw("ZSCORE", HOLDERS, f"fence {lease.token}")) == -(2**40), "not known"
        await lease.extend(2 * TTL)
        await lease.release()
        assert await api.raw("EXISTS", HOLDERS) == 0

    play(scenario)


@pytest.mark.parametrize("beside", [("0", "slot nobody"), ("-2", "slot nobody")], ids=" ".join)
def test_a_writer_is_alone_although_its_fence_became_another_slot(play: Any, beside: tuple[str, str]) -> None:
    """The number of entries is right, and their ranks are not."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await one.rwlock("a", ttl=TTL).write.acquire()
        await api.raw("ZREM", HOLDERS, f"fence {lease.token}")
        await api.raw("ZADD", HOLDERS, *beside)
        assert await two.rwlock("a").read.acquire(blocking=False) is None
        await lease.release()

    play(scenario)


def test_holders_of_an_earlier_version_keep_their_permits(play: Any) -> None:
    """It wrote two entries for each holder."""

    async def scenario(api: Any) -> None:
        client = api.client()
        now_us = int((await api.raw("TIME"))[0]) * 10**6
        for number in range(3):
            await api.raw("ZADD", HOLDERS, now_us + 10**8, f"old{number}", number, f"slot old{number}")
        lease = await client.semaphore("a", 4, ttl=TTL).acquire(blocking=False)
        assert lease.slot == 3
        assert await client.semaphore("a", 4).acquire(blocking=False) is None
        await lease.release()
        assert await api.raw("ZCARD", HOLDERS) == 9

    play(scenario)


def test_a_holder_has_both_of_its_entries_or_none() -> None:
    """Two holders lose one entry each, so there are as many ends as slots. Both are told; the rest ends by its ttl."""
    play = DamagePlay()
    clients = [play.client(f"c{number}") for number in range(3)]
    processes = [play.start(client, play.visit(client, "permit", ttl=TTL, hold=5)) for client in clients[:2]]
    play.run(0.5)
    tokens = list(VIEW.inside(play.world.store))
    play.world.execute(Command(("ZREM", HOLDERS, tokens[0].decode(), f"slot {tokens[1].decode()}")))
    play.run(0.1)
    for process in processes:
        assert isinstance(process.error, holdfast.LeaseLost | Cancelled)
    play.run(TTL)
    assert_the_pool_is_clean(play, "permits")


def test_a_damaged_pool_that_is_too_large_to_mend_in_one_step_is_emptied(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lost = await one.rwlock("a", ttl=TTL).read.acquire()
        ends = 9 * 10**15
        others = [(ends, f"t{number}", -1, f"slot t{number}", -ends, f"fence t{number}") for number in range(1000)]
        await api.raw("ZADD", HOLDERS, *(str(word) for other in others for word in other))
        assert await two.rwlock("a").write.acquire(blocking=False) is None
        await api.raw("ZREM", HOLDERS, "t7")
        written = await two.rwlock("a", ttl=TTL).write.acquire(blocking=False)
        assert written
        assert await lost.lost.wait(5)
        with pytest.raises(holdfast.LeaseLost):
            await lost.release()
        await written.release()

    play(scenario)


# The mark by which other kinds of lock know that the name is a pool.

MARKS = (("queue",), ("waiters",), ("queue", "waiters"))


@pytest.mark.parametrize("deleted", MARKS, ids="+".join)
@pytest.mark.parametrize("kind", ["semaphore", "rwlock"])
def test_a_pool_stays_of_its_kind(play: Any, kind: str, deleted: tuple[str, ...]) -> None:
    """Another kind of pool is refused at once, and a mutex after the next step of any client of the pool."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        makers = {
            "semaphore": lambda client: client.semaphore("a", 3, ttl=TTL),
            "rwlock": lambda client: client.rwlock("a", ttl=TTL).read,
        }
        (other,) = makers.keys() - {kind}
        async with makers[kind](one):
            for step in ("acquire", "renew"):
                await api.raw("DEL", *(f"a:hf1:{each}:{{a}}" for each in deleted))
                with pytest.raises(holdfast.Unsupported, match=f"in use as a {kind}"):
                    await makers[other](two).acquire(blocking=False)
                if step == "renew":
                    await api.sleep(1.5)
                else:
                    async with makers[kind](two):
                        pass
                for names in (("a",), ("a", "b")):
                    with pytest.raises(holdfast.Unsupported, match=f"in use as a ({kind}|permit pool or latch)"):
                        await two.lock(*names).acquire(blocking=False)
        async with two.lock("a", wait=0):
            pass

    play(scenario)


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one name", "several"])
def test_no_mutex_beside_a_pool_whose_waiters_were_deleted(play: Any, names: tuple[str, ...]) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.semaphore("a", 1, ttl=TTL):
            await api.raw("DEL", "a:hf1:waiters:{a}")
            for how in ({"blocking": False}, {"timeout": 0.3}):
                with pytest.raises(holdfast.Unsupported, match="in use as a permit pool or latch"):
                    await two.lock(*names).acquire(**how)
        async with two.lock(*names, wait=0):
            pass

    play(scenario)


@pytest.mark.parametrize("theirs", ["semaphore", "rwlock", "semaphorepool", "rwlockpool", "latch"])
def test_names_that_an_earlier_version_uses_are_refused(play: Any, theirs: str) -> None:
    """Earlier versions wrote the kind into a field without a name, and the same mark into the queue."""

    async def scenario(api: Any) -> None:
        client = api.client()
        await api.raw("ZADD", "a:hf1:queue:{a}", "0", "")
        await api.raw("HSET", "a:hf1:waiters:{a}", "", theirs)
        for lock in (client.semaphore("a", 2), client.rwlock("a").write):
            with pytest.raises(holdfast.Unsupported, match=f"in use as a {theirs} of an earlier version of Holdfast"):
                await lock.acquire(blocking=False)
        for names in (("a",), ("a", "b")):
            with pytest.raises(holdfast.Unsupported, match="in use as a permit pool or latch"):
                await client.lock(*names).acquire(blocking=False)
        with pytest.raises(holdfast.Unsupported, match="in use as a lock"):
            await client.latch("a", 1).count_down()

    play(scenario)


def test_permits_of_the_version_before_this_one_are_counted(play: Any) -> None:
    """It had its holders in the same key, so a fleet of both versions shares the permits."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.semaphore("a", 2, ttl=TTL):
            await api.raw("HDEL", "a:hf1:waiters:{a}", "kind")
            await api.raw("HSET", "a:hf1:waiters:{a}", "", "semaphorepool")
            async with two.semaphore("a", 2, ttl=TTL) as lease:
                assert lease.slot == 1
                assert await two.semaphore("a", 2).acquire(blocking=False) is None

    play(scenario)
