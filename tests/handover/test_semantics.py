"""Handing a hold over: the same in the simulated world, under asyncio and with threads."""

from __future__ import annotations

import json
import pickle
from base64 import urlsafe_b64encode
from typing import Any
from zlib import crc32

import pytest

import holdfast
from tests.conformance.stages import until
from tests.inspection.test_semantics import waiters_of

pytestmark = pytest.mark.needs("hand_over")


def test_a_hold_passes_with_a_new_token_and_a_greater_fence(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker, other = api.client(), api.client(), api.client()
        lease = await giver.lock("a", ttl=5).acquire()
        ticket = await lease.hand_over()
        assert not lease.held
        assert not lease.lost.is_set()
        assert await other.lock("a").acquire(blocking=False) is None, "between the two it is not free"
        taken = await taker.adopt(ticket, ttl=20, label="taker")
        assert taken.held
        assert taken.name == "a"
        assert taken.token != lease.token
        assert "taker" in taken.token
        set_aside = lease._hold.options.fences - 1
        assert taken.fence > lease.fence + set_aside, "beyond what was set aside for the giver's cohort"
        assert 15 < taken.remaining() <= 20
        assert await api.raw("GET", "a") == taken.token.encode()
        assert await other.lock("a").acquire(blocking=False) is None
        await taken.extend(60)
        await taken.release()
        async with other.lock("a", wait=0) as later:
            assert later.fence > taken.fence

    play(scenario)


def test_the_giver_has_nothing_any_more(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.lock("a")
        lease = await lock.acquire()
        ticket = await lease.hand_over()
        for attempt in (lease.release, lock.release, lambda: lease.extend(60), lease.hand_over):
            with pytest.raises(holdfast.NotHeld, match="'a' was handed over"):
                await attempt()
        with pytest.raises(holdfast.NotHeld, match="'a' was handed over"):
            lease.check()
        assert lease.remaining() == 0
        taken = await client.adopt(ticket)
        with pytest.raises(holdfast.NotHeld):
            await lease.release()
        assert taken.held
        assert await lock.acquire(blocking=False) is None
        await taken.release()
        async with lock:
            pass

    play(scenario)


def test_of_a_reentrant_lock_it_is_said_too_that_it_was_handed_over(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().rlock("a")
        lease = await lock.acquire()
        await lease.hand_over()
        for attempt in (lease.release, lock.release, lambda: lease.extend(60), lease.hand_over):
            with pytest.raises(holdfast.NotHeld, match="'a' was handed over"):
                await attempt()
        again = await api.client().rlock("b").acquire()
        await again.release()
        with pytest.raises(holdfast.NotHeld, match="acquire it first"):
            await again.release()

    play(scenario)


def test_a_ticket_serves_once(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, taker = api.client(), api.client()
        ticket = await (await client.lock("a").acquire()).hand_over()
        taken = await taker.adopt(ticket)
        with pytest.raises(holdfast.NotAcquired, match="adopted already"):
            await taker.adopt(ticket)
        await taken.release()
        with pytest.raises(holdfast.NotAcquired, match="released since"):
            await client.adopt(ticket)
        assert await api.raw("EXISTS", "a") == 0, "it never takes a lock that is free"
        async with client.lock("a"):
            with pytest.raises(holdfast.NotAcquired, match="another holder"):
                await taker.adopt(ticket)

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_its_time_is_one_ttl_from_the_hand_over(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, taker = api.client(), api.client()
        lock = client.lock("a", ttl=2, renew=False)
        lease = await lock.acquire()
        await api.sleep(1.2)
        ticket = await lease.hand_over()
        assert await api.raw("PTTL", "a") > 1000
        await api.sleep(1.0)
        taken = await taker.adopt(ticket, ttl=1, renew=False)
        ticket = await taken.hand_over()
        await api.sleep(1.1)
        with pytest.raises(holdfast.NotAcquired, match="time ran out"):
            await taker.adopt(ticket)

    play(scenario)


def test_it_goes_from_hand_to_hand(play: Any) -> None:
    async def scenario(api: Any) -> list[int]:
        clients = [api.client() for _ in range(3)]
        lease = await clients[0].lock("a").acquire()
        fences = [lease.fence]
        for turn in range(9):
            lease = await clients[turn % 3].adopt(await lease.hand_over())
            fences.append(lease.fence)
        await lease.release()
        assert await api.raw("EXISTS", "a") == 0
        return fences

    fences = play(scenario)
    assert fences == sorted(set(fences))


@pytest.mark.needs("the keys of Redis")
def test_an_adopted_lease_is_kept_by_its_new_keeper(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        ticket = await (await giver.lock("a", ttl=60).acquire()).hand_over()
        taken = await taker.adopt(ticket, ttl=3)
        await api.sleep(4.0)
        assert taken.held
        assert await api.raw("PTTL", "a") <= 3000, "the options are the adopter's"
        await taken.release()

    play(scenario)


def test_the_taker_is_told_of_a_loss(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        told: list[Any] = []
        taken = await taker.adopt(
            await (await giver.lock("a").acquire()).hand_over(), ttl=0.3, renew=False, on_lost=told.append
        )
        assert await taken.lost.wait(5)
        await until(api, lambda: told)
        await api.sleep(0.05)
        assert [lease.fence for lease in told] == [taken.fence]
        with pytest.raises(holdfast.LeaseLost):
            await taken.release()

    play(scenario)


def test_who_waits_goes_on_waiting_and_is_woken_by_the_taker(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        giver, taker, other = api.client(), api.client(), api.client()
        order: list[str] = []
        lease = await giver.lock("a", ttl=20).acquire()

        async def waiter(client: Any, name: str) -> None:
            async with client.lock("a", wait=20):
                order.append(name)

        handles = []
        for client, name in ((other, "other"), (giver, "giver"), (taker, "taker")):
            handles.append(api.spawn(lambda client=client, name=name: waiter(client, name)))
            await until(api, lambda: waiters_of(giver, "a", 1))  # the other is the first of them
        taken = await taker.adopt(await lease.hand_over())
        await api.sleep(0.3)
        assert order == []
        await taken.release()
        for handle in handles:
            await handle.join()
        return order

    assert play(scenario)[0] == "other"


def test_leaving_the_block_in_which_it_was_handed_over_is_quiet(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("a") as lease:
            ticket = await lease.hand_over()
        assert await api.raw("EXISTS", "a") == 1
        await (await client.adopt(ticket)).release()
        async with client.rlock("a") as lease:
            async with client.rlock("a"):
                with pytest.raises(holdfast.Unsupported, match="inner"):
                    await lease.hand_over()
            ticket = await lease.hand_over()
        await (await client.adopt(ticket)).release()

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_what_is_lost_or_not_of_that_kind_cannot_be_handed_over(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("a", ttl=1, renew=False).acquire()
        assert await lease.lost.wait(5)
        with pytest.raises(holdfast.LeaseLost):
            await lease.hand_over()
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        lease = await client.lock("b").acquire()
        await api.raw("SET", "b", "thief")
        for attempt in (lease.hand_over, lease.release):
            with pytest.raises(holdfast.LeaseLost):
                await attempt()
        assert await api.raw("GET", "b") == b"thief"

    play(scenario)


def test_namespaces_must_agree(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, same, other = api.client(namespace="app:"), api.client(namespace="app:"), api.client()
        lease = await giver.lock("a").acquire()
        ticket = await lease.hand_over()
        with pytest.raises(holdfast.InvalidConfig, match="namespace"):
            await other.adopt(ticket)
        taken = await same.adopt(ticket)
        assert taken.name == "a"
        assert await api.raw("GET", "app:a") == taken.token.encode()
        await taken.release()

    play(scenario)


NOT_TICKETS = [None, 7, b"hf1-x", "", "x", "hf1-", "hf1-%%%", "hf1-AAAA", "hf1-" + "A" * 9999, "hf1-\u20ac", "hf2-AAAA"]


@pytest.mark.parametrize("bad", NOT_TICKETS, ids=lambda bad: repr(bad)[:20])
def test_what_is_no_ticket_is_refused_before_anything_is_sent(bad: Any) -> None:
    with holdfast.connect("redis://127.0.0.1:1/0") as client, pytest.raises(holdfast.InvalidConfig) as caught:
        client.adopt(bad)
    assert "hand_over()" in str(caught.value)


def test_a_ticket_that_was_cut_or_changed_is_recognised(client: holdfast.Client) -> None:
    lease = client.lock("a").acquire()
    assert lease
    ticket = lease.hand_over()
    for bad in (ticket[:-1], ticket[:-4], ticket + "A", ticket[:9] + ("B" if ticket[9] == "A" else "A") + ticket[10:]):
        with pytest.raises(holdfast.InvalidConfig) as caught:
            client.adopt(bad)
        assert bad not in str(caught.value)
    with pytest.raises(holdfast.InvalidConfig):
        client.adopt(ticket, ttl=-1)
    client.adopt(ticket).release()


def forged(*lines: str) -> str:
    said = "\n".join(lines).encode()
    packed = urlsafe_b64encode(crc32(said).to_bytes(4, "big") + said)
    return "hf1-" + packed.decode().rstrip("=")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (("lock", "token", "", "a"), holdfast.NotAcquired),
        (("semaphore n3", "token", "", "a"), holdfast.NotAcquired),
        (("semaphore n0", "token", "", "a"), holdfast.Unsupported),
        (("semaphore n9999999", "token", "", "a"), holdfast.InvalidConfig),
        (("semaphore", "token", "", "a"), holdfast.Unsupported),
        (("semaphore n3", "token", "", "a", "b"), holdfast.Unsupported),
        (("rwlock some", "token", "", "a"), holdfast.Unsupported),
        (("barrier", "token", "", "a"), holdfast.Unsupported),
        (("lock all", "token", "", "a"), holdfast.Unsupported),
        (("lock", "token", "", ""), holdfast.InvalidName),
        (("lock", "token", "", "a", "a"), holdfast.InvalidName),
        (("lock", "token", "", *(str(number) for number in range(33))), holdfast.InvalidName),
        (("lock", "token", ""), holdfast.InvalidConfig),
        (("lock",), holdfast.InvalidConfig),
    ],
    ids=lambda value: ",".join(value)[:30] if isinstance(value, tuple) else value.__name__,
)
def test_a_ticket_that_says_odd_things_takes_nothing(
    client: holdfast.Client, lines: tuple[str, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.adopt(forged(*lines))


def test_the_longest_names_fit_into_a_ticket(client: holdfast.Client) -> None:
    names = [f"{number:02}" + "x" * 510 for number in range(32)]
    lease = client.lock(*names, label="\N{GRINNING FACE}" * 64).acquire()
    assert lease
    taken = client.adopt(lease.hand_over())
    assert taken.fences.keys() == {*names}
    taken.release()


def test_who_leads_can_hand_that_over(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await one.election("e").lead().acquire()
        taken = await two.adopt(await lease.hand_over(), label="two")
        leader = await one.election("e").leader()
        assert leader.fence == taken.fence
        assert "two" in str(leader)
        await taken.release()
        assert await one.election("e").leader() is None

    play(scenario)


def test_a_ticket_is_a_short_str_safe_in_urls_that_keeps_to_itself(client: holdfast.Client) -> None:
    lease = client.lock("order:42").acquire()
    assert lease
    ticket = lease.hand_over()
    assert isinstance(ticket, str)
    assert ticket.isascii()
    assert ticket.replace("-", "").replace("_", "").isalnum()
    assert len(ticket) < 200
    assert ticket not in repr(ticket)
    assert ticket not in repr([ticket])
    assert json.loads(json.dumps(ticket)) == ticket
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert repr(pickle.loads(pickle.dumps(ticket))) == "<ticket>"
    client.adopt(str(ticket)).release()


def test_an_adopted_rlock_is_an_rlock(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        ticket = await (await giver.rlock("a").acquire()).hand_over()
        lease = await taker.adopt(ticket)

        async def another() -> None:
            assert await taker.rlock("a").acquire(blocking=False) is None
            with pytest.raises(holdfast.NotHeld, match="another thread or task"):
                await lease.release()

        async with taker.rlock("a", wait=0) as again:
            assert again.fence == lease.fence
            await api.spawn(another).join()
            with pytest.raises(holdfast.Unsupported, match="acquired 2 times"):
                await lease.hand_over()
        assert lease.held
        lock = taker.rlock("a", wait=0)
        assert await lock.acquire()
        await lock.release()
        await lock.release()
        assert not lease.held
        with pytest.raises(holdfast.NotHeld):
            await lock.release()
        async with giver.lock("a", wait=0):
            pass

    play(scenario)


def test_a_ticket_of_a_version_that_knew_no_rlock_gives_a_plain_lease(play: Any) -> None:
    async def scenario(api: Any) -> None:
        giver, taker = api.client(), api.client()
        lease = await giver.rlock("a").acquire()
        said = f"lock\n{lease.token}\n\na".encode()
        ticket = "hf1-" + urlsafe_b64encode(crc32(said).to_bytes(4, "big") + said).decode().rstrip("=")
        await lease.hand_over()
        taken = await taker.adopt(ticket)
        assert await taker.rlock("a").acquire(blocking=False) is None
        await taken.release()

    play(scenario)
