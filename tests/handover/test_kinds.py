"""Whatever is held can be handed over: the same in the simulated world, under asyncio and with threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import until
from tests.handover.kinds import KINDS, Kind
from tests.inspection.test_semantics import waiters_of

pytestmark = pytest.mark.needs("hand_over")

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def rises(later: Any, earlier: Any) -> bool:
    """Whether the fence of each name has."""
    assert later.fences.keys() == earlier.fences.keys()
    return all(fence > earlier.fences[name] for name, fence in later.fences.items())


@EVERY_KIND
def test_a_hold_passes_with_a_new_token_and_greater_fences(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        giver, taker, other = api.client(), api.client(), api.client()
        lease = await kind.ask(giver, ttl=5).acquire()
        ticket = await lease.hand_over()
        assert not lease.held
        assert not lease.lost.is_set()
        rival = kind.rival(other)
        assert await rival.acquire(blocking=False) is None, "between the two it is not free"
        taken = await taker.adopt(ticket, ttl=20, label="taker")
        assert taken.held
        assert type(taken.token) is str
        assert taken.token != lease.token
        assert "taker" in taken.token
        assert rises(taken, lease)
        assert 15 < taken.remaining() <= 20
        assert await rival.acquire(blocking=False) is None
        await taken.extend(60)
        assert taken.remaining() > 50
        await taken.release()
        assert await rival.acquire(blocking=False)
        await rival.release()
        async with kind.ask(other, wait=0) as later:
            assert rises(later, taken)

    play(scenario)


@EVERY_KIND
def test_the_giver_has_nothing_any_more_and_leaves_its_block_quietly(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = kind.ask(client)
        async with lock as lease:
            ticket = await lease.hand_over()
        taken = await api.client().adopt(ticket)
        for attempt in (lease.release, lock.release, lambda: lease.extend(60), lease.hand_over):
            with pytest.raises(holdfast.NotHeld):
                await attempt()
        with pytest.raises(holdfast.NotHeld):
            lease.check()
        assert lease.remaining() == 0
        assert taken.held
        await taken.release()
        async with lock:
            pass

    play(scenario)


@EVERY_KIND
def test_a_ticket_serves_once_and_takes_nothing_that_is_free(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        client, taker = api.client(), api.client()
        ticket = await (await kind.ask(client).acquire()).hand_over()
        taken = await taker.adopt(ticket)
        with pytest.raises(holdfast.NotAcquired, match="adopted already.* Acquire it, or ask for another ticket"):
            await taker.adopt(ticket)
        assert taken.held
        await taken.release()
        with pytest.raises(holdfast.NotAcquired, match="adopted"):
            await client.adopt(ticket)
        async with kind.rival(client, wait=0):
            with pytest.raises(holdfast.NotAcquired):
                await taker.adopt(ticket)

    play(scenario)


@EVERY_KIND
@pytest.mark.needs("expiry within 2 s")
def test_its_time_is_one_ttl_from_the_hand_over(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        client, taker = api.client(), api.client()
        lease = await kind.ask(client, ttl=2, renew=False).acquire()
        await api.sleep(1.2)
        ticket = await lease.hand_over()
        await api.sleep(1.2)
        taken = await taker.adopt(ticket, ttl=1, renew=False)
        ticket = await taken.hand_over()
        await api.sleep(1.1)
        with pytest.raises(holdfast.NotAcquired, match="time ran out"):
            await taker.adopt(ticket)
        async with kind.rival(client, wait=0):
            pass

    play(scenario)


@EVERY_KIND
def test_it_goes_from_hand_to_hand(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        clients = [api.client() for _ in range(3)]
        lease = await kind.ask(clients[0]).acquire()
        for turn in range(6):
            last, lease = lease, await clients[turn % 3].adopt(await lease.hand_over())
            assert rises(lease, last)
        await lease.release()
        async with kind.rival(clients[0], wait=0):
            pass

    play(scenario)


@EVERY_KIND
def test_an_adopted_lease_is_kept_by_its_new_keeper_and_its_loss_is_told(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        told: list[Any] = []
        ticket = await (await kind.ask(giver, ttl=60).acquire()).hand_over()
        taken = await taker.adopt(ticket, ttl=3)
        await api.sleep(3.5)
        assert taken.held
        taken = await giver.adopt(await taken.hand_over(), ttl=0.3, renew=False, on_lost=told.append)
        assert await taken.lost.wait(5)
        await until(api, lambda: told)
        await api.sleep(0.05)
        assert [lease.fence for lease in told] == [taken.fence]
        with pytest.raises(holdfast.LeaseLost):
            await taken.hand_over()
        with pytest.raises(holdfast.LeaseLost):
            await taken.release()
        async with kind.rival(giver, wait=10):
            pass

    play(scenario)


@EVERY_KIND
def test_who_waits_goes_on_waiting_and_is_woken_by_the_taker(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> list[str]:
        giver, taker, other = api.client(), api.client(), api.client()
        order: list[str] = []
        lease = await kind.ask(giver, ttl=20).acquire()

        async def waiter(client: Any, name: str) -> None:
            async with kind.rival(client, wait=20):
                order.append(name)
                await api.sleep(0.05)

        handles = []
        waited_for = "b" if kind is KINDS["several"] else "a"
        for client, name in ((other, "other"), (taker, "taker")):
            handles.append(api.spawn(lambda client=client, name=name: waiter(client, name)))
            await until(api, lambda: waiters_of(giver, waited_for, len(handles)))
        taken = await taker.adopt(await lease.hand_over())
        await api.sleep(0.3)
        assert order == []
        await taken.release()
        for handle in handles:
            await handle.join()
        return order

    assert play(scenario) == ["other", "taker"]


@EVERY_KIND
def test_the_giver_is_told_that_it_was_handed_over(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        lease = await kind.ask(api.client()).acquire()
        await lease.hand_over()
        for attempt in (lease.release, lambda: lease.extend(60), lease.hand_over):
            with pytest.raises(holdfast.NotHeld, match="was handed over"):
                await attempt()
        with pytest.raises(holdfast.NotHeld, match="was handed over"):
            lease.check()

    play(scenario)


@EVERY_KIND
def test_namespaces_must_agree(play: Any, kind: Kind) -> None:
    async def scenario(api: Any) -> None:
        giver, same, other = api.client(namespace="app:"), api.client(namespace="app:"), api.client()
        ticket = await (await kind.ask(giver).acquire()).hand_over()
        with pytest.raises(holdfast.InvalidConfig, match="namespace 'app:'"):
            await other.adopt(ticket)
        taken = await same.adopt(ticket)
        assert "a" in taken.fences
        await taken.release()

    play(scenario)


def test_a_permit_keeps_its_slot(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        permits = giver.semaphore("a", 3)
        leases = [await permits.acquire() for _ in range(3)]
        ticket = await leases[1].hand_over()
        assert await permits.locked(), "its place is still taken"
        theirs = taker.semaphore("a", 3, ttl=7, label="theirs")
        taken = await theirs.adopt(ticket)
        assert taken.slot == 1
        assert taken.fence > max(lease.fence for lease in leases)
        assert "theirs" in taken.token
        assert 5 < taken.remaining() <= 7
        with pytest.raises(holdfast.NotAcquired, match="adopted already") as refused:
            await giver.adopt(ticket)
        assert "another holder" not in str(refused.value), "a permit may have others beside it"
        assert await theirs.acquire(blocking=False) is None
        ticket = await taken.hand_over()
        taken = await taker.adopt(ticket)
        assert taken.slot == 1
        ticket = await taken.hand_over()
        fewer = await taker.semaphore("a", 1).adopt(ticket)
        assert fewer.slot == 1, "a smaller number takes no permit from a holder"
        with pytest.raises(holdfast.OverRelease):
            await theirs.release()
        await fewer.release()
        again = await permits.acquire(blocking=False)
        assert again.slot == 1
        assert again.fence > fewer.fence
        for lease in (leases[0], again, leases[2]):
            await lease.release()

    play(scenario)


def test_an_object_gives_back_what_it_has_adopted(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        asks: tuple[Callable[[Any], Any], ...] = (
            lambda client: client.semaphore("a", 2),
            lambda client: client.rwlock("b").read,
            lambda client: client.rwlock("b").write,
        )
        for ask in asks:
            lock = ask(taker)
            taken = await lock.adopt(await (await ask(giver).acquire()).hand_over())
            assert taken.held
            assert "1 held" in repr(lock)
            await lock.release()
            assert not taken.held
            with pytest.raises(holdfast.NotHeld):
                await lock.release()

    play(scenario)


def test_who_has_adopted_a_reading_reads(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker, other = api.client(), api.client(), api.client()
        lock = taker.rwlock("a")
        taken = await lock.read.adopt(await (await giver.rwlock("a").read.acquire()).hand_over())
        with pytest.raises(holdfast.WouldDeadlock):
            await lock.write.acquire()
        async with other.rwlock("a").read, giver.rwlock("a").read:
            assert taken.held
        await taken.release()
        async with lock.write:
            pass

    play(scenario)


def test_who_has_adopted_a_writing_may_downgrade_it_and_hand_that_over(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker, other = api.client(), api.client(), api.client()
        taken = await taker.adopt(await (await giver.rwlock("a").write.acquire()).hand_over())
        assert await other.rwlock("a").read.acquire(blocking=False) is None
        await taken.downgrade()
        async with other.rwlock("a").read:
            pass
        ticket = await taken.hand_over()
        with pytest.raises(holdfast.InvalidConfig, match="ticket for the reading side of 'a': this is the writing"):
            await taker.rwlock("a").write.adopt(ticket)
        reading = await taker.rwlock("a").read.adopt(ticket)
        assert await other.rwlock("a").write.acquire(blocking=False) is None
        async with other.rwlock("a").read:
            pass
        await reading.release()

    play(scenario)


def test_an_object_in_use_can_adopt_all_the_same(play: Any) -> None:
    """A caller may wait for that very object, and gets the lock when the adopted hold is released."""

    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        lease = await giver.rwlock("a").write.acquire()
        writer = taker.rwlock("a").write

        async def wait() -> int:
            async with writer as waited:
                return int(waited.fence)

        handle = api.spawn(wait)
        await api.sleep(0.1)
        taken = await writer.adopt(await lease.hand_over())
        await api.sleep(0.1)
        assert taken.held
        await taken.release()
        assert await handle.join() > taken.fence

    play(scenario)


WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "another name": (
        lambda client: client.semaphore("a", 2),
        lambda client: client.semaphore("b", 2),
        "a permit of the semaphore 'a': this is a permit of the semaphore 'b'",
    ),
    "another kind": (
        lambda client: client.semaphore("a", 2),
        lambda client: client.rwlock("a").read,
        "a permit of the semaphore 'a': this is the reading side of 'a'",
    ),
    "a lock": (
        lambda client: client.lock("a"),
        lambda client: client.semaphore("a", 2),
        "the lock 'a': this is a permit of the semaphore 'a'",
    ),
    "several": (
        lambda client: client.lock("a", "b"),
        lambda client: client.rwlock("a").write,
        "a lock on 'a', 'b': this is the writing side of 'a'",
    ),
    "reading as writing": (
        lambda client: client.rwlock("a").read,
        lambda client: client.rwlock("a").write,
        "the reading side of 'a': this is the writing side of 'a'",
    ),
    "writing as reading": (
        lambda client: client.rwlock("a").write,
        lambda client: client.rwlock("a").read,
        "the writing side of 'a': this is the reading side of 'a'",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_ticket_for_something_else_is_refused_and_stays_good(play: Any, which: str) -> None:
    given, wrong, said = WRONG[which]

    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await given(client).acquire()
        ticket = await lease.hand_over()
        with pytest.raises(holdfast.InvalidConfig, match=said) as caught:
            await wrong(client).adopt(ticket)
        assert "client.adopt, which takes every ticket" in str(caught.value)
        assert lease.token not in str(caught.value)
        taken = await client.adopt(ticket)
        assert taken.held
        await taken.release()

    play(scenario)


def test_names_may_come_in_any_order_and_each_has_its_fence(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker, other = api.client(), api.client(), api.client()
        async with other.lock("c"):
            lease = await giver.lock("b", "a").acquire()
        ticket = await lease.hand_over()
        taken = await taker.adopt(ticket)
        assert taken.fences.keys() == {"a", "b"}
        assert taken.fence == max(taken.fences.values())
        for name in "ab":
            assert await api.raw("GET", name) == taken.token.encode()
        async with other.lock("c", wait=0):
            pass
        await taken.release()

    play(scenario)


@pytest.mark.parametrize("stolen", ["DEL", pytest.param("SET", marks=pytest.mark.needs("the keys of Redis"))])
def test_several_names_are_adopted_all_or_none(play: Any, stolen: str) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        lease = await giver.lock("a", "b", "c").acquire()
        ticket = await lease.hand_over()
        await api.raw(*(("DEL", "b") if stolen == "DEL" else ("SET", "b", "thief", "PX", 300)))
        with pytest.raises(holdfast.NotAcquired, match="time ran out"):
            await taker.adopt(ticket)
        for name in "ac":
            assert await api.raw("GET", name) == lease.token.encode(), "as it was, until its ttl is over"
        again = await giver.lock("a", "b").acquire(blocking=False)
        assert again is None

    play(scenario)
