"""Closing a client: what it still holds is lost to the holder, then given back."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import until
from tests.conformance.test_wait import KINDS, kind_of_lock


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_lost_and_then_given_back(play: Any, kind: str) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lost: list[Any] = []
        lease = await kind_of_lock(
            client, kind, on_lost=lambda lease: lost.append((lease.held, lease.reason))
        ).acquire()
        assert lease.reason == ""
        await client.aclose()
        assert lost == [(False, "its client was closed")]
        assert not lease.held
        assert lease.lost.is_set()
        assert lease.reason == "its client was closed"
        taken = await kind_of_lock(other, "write" if kind == "read" else kind).acquire(blocking=False)
        assert taken is not None, "it was given back"
        with pytest.raises(holdfast.LeaseLost, match="closed"):
            await lease.release()
        assert lease.reason == "its client was closed"
        assert taken.held
        await taken.release()

    play(scenario)


def test_on_lost_is_called_before_the_key_is_given_back(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        keys: list[int] = []
        on_lost: Any
        if api.kind == "blocking":
            admin = api.server.client()

            def on_lost(_: Any) -> None:
                time.sleep(0.05)
                keys.append(admin.exists("a"))

        elif api.kind == "asyncio":

            async def on_lost(_: Any) -> None:
                keys.append(await api.raw("EXISTS", "a"))

        else:

            def on_lost(_: Any) -> None:
                keys.append(api.world.keys().count("a"))

        lease = await client.lock("a", on_lost=on_lost).acquire()
        await client.aclose()
        assert keys == [1]
        assert await api.raw("EXISTS", "a") == 0
        assert not lease.held

    play(scenario)


def test_a_waiter_elsewhere_gets_it_at_once(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(), api.client()
        lease = await client.lock("a", ttl=60).acquire()

        async def wait() -> None:
            async with other.lock("a", wait=20):
                pass

        waiting = api.spawn(wait)
        await api.sleep(0.2)
        await client.aclose()
        await waiting.join()
        assert not lease.held

    play(scenario)


def test_leaving_the_block_raises_lease_lost(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        with pytest.raises(holdfast.LeaseLost, match="its client was closed"):
            async with client.lock("a", on_lost="ignore" if api.kind != "blocking" else None):
                await client.aclose()
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


def test_a_block_that_closes_its_own_client_is_cancelled_after_that(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        client = api.client()
        went_on: list[str] = []
        with pytest.raises(holdfast.LeaseLost, match="its client was closed"):
            async with client.lock("a"):
                await client.aclose()
                await api.sleep(0.1)
                went_on.append("went on")
        assert await api.raw("EXISTS", "a") == 0
        with pytest.raises(holdfast.Unavailable, match="closed"):
            await client.lock("a").acquire()
        return went_on if api.kind != "blocking" else []  # a thread cannot be cancelled

    assert play(scenario) == []


def test_a_block_of_another_task_or_thread_ends_with_lease_lost(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        went: list[str] = []

        async def hold() -> None:
            async with client.lock("a"):
                went.append("inside")
                await until(api, lambda: "closed" in went)  # a task is cancelled; a thread cannot be

        holding = api.spawn(hold)
        await until(api, lambda: went)
        await client.aclose()
        went.append("closed")
        with pytest.raises(holdfast.LeaseLost, match="its client was closed"):
            await holding.join()

    play(scenario)


def test_a_silent_server_does_not_hold_up_closing(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: Any) -> None:
        client = api.client(timeout=0.5)
        lost: list[Any] = []
        lease = await client.lock("a", ttl=60, on_lost=lost.append).acquire()
        api.hang()
        try:
            with caplog.at_level(logging.WARNING):
                await client.aclose()
            assert len(lost) == 1
            assert not lease.held
            assert "1 locks were not given back" in caplog.text
            with pytest.raises(holdfast.LeaseLost, match="closed"):
                await lease.release()
        finally:
            api.resume()

    play(scenario)


@pytest.mark.needs("semaphore", "rlock")
def test_on_lost_of_the_client_is_for_all_locks_that_have_none(play: Any) -> None:
    async def scenario(api: Any) -> None:
        shared: list[str] = []
        own: list[str] = []
        client = api.client(on_lost=lambda lease: shared.append(lease.name))
        leases = [await client.lock("a").acquire(), await client.semaphore("b", 1).acquire()]
        leases.append(await client.rlock("c", on_lost=lambda lease: own.append(lease.name)).acquire())
        await client.aclose()
        assert sorted(shared) == ["a", "b"]
        assert own == ["c"]
        assert [lease.held for lease in leases] == [False] * 3

    play(scenario)


def test_reason_says_why_a_lease_was_lost_also_after_its_release(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        deleted = await client.lock("b").acquire()
        kept = await client.lock("c").acquire()
        over = await client.lock("a", ttl=1, renew=False).acquire()
        assert [lease.reason for lease in (over, deleted, kept)] == ["", "", ""]
        await api.raw("DEL", "b")
        await api.sleep(1.2)
        for lease, reason in ((over, "its ttl of 1 s ran out"), (deleted, "its key expired or was deleted")):
            with pytest.raises(holdfast.LeaseLost) as caught:
                await lease.release()
            assert lease.reason == caught.value.reason
            assert reason in lease.reason
        await kept.release()
        assert kept.reason == ""

    play(scenario)


def test_lost_shows_its_state(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("a").acquire()
        lost = lease.lost
        assert repr(lost).endswith("Lost of 'a' [unset]>")
        await client.aclose()
        assert repr(lost).endswith("Lost of 'a' [set: its client was closed]>")

    play(scenario)
