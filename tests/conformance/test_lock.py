"""One suite over the simulated world, asyncio and threads: what a lock is, wherever it runs."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.conformance.stages import until


def test_it_excludes_others(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await one.lock("a").acquire()
        assert lease
        assert await two.lock("a").acquire(blocking=False) is None
        async with two.lock("b", wait=0):
            pass
        await lease.release()
        async with two.lock("a", wait=0):
            pass

    play(scenario)


def test_a_waiter_gets_it_after_release(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        one, two = api.client(), api.client()
        order: list[str] = []
        lease = await one.lock("a").acquire()

        async def waiter() -> None:
            async with two.lock("a", wait=20):
                order.append("waiter")

        handle = api.spawn(waiter)
        await api.sleep(0.05)
        order.append("holder")
        await lease.release()
        await handle.join()
        return order

    assert play(scenario) == ["holder", "waiter"]


def test_no_update_of_a_counter_is_lost(play: Any) -> None:
    async def scenario(api: Any) -> int:
        counter = [0]

        async def add() -> None:
            client = api.client()
            for _ in range(5):
                async with client.lock("a", wait=30):
                    seen = counter[0]
                    await api.sleep(0.001)
                    counter[0] = seen + 1

        handles = [api.spawn(add) for _ in range(4)]
        for handle in handles:
            await handle.join()
        return counter[0]

    assert play(scenario) == 20


def test_waiting_ends_with_acquire_timeout(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lease = await one.lock("a").acquire()
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            async with two.lock("a", wait=1):
                raise AssertionError("entered")
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, holdfast.NotAcquired)
        assert caught.value.name == "a"
        assert "'a'" in str(caught.value)
        with pytest.raises(holdfast.AcquireTimeout):
            async with two.lock("a", wait=0):
                raise AssertionError("entered")
        assert await two.lock("a").acquire(timeout=1) is None
        await lease.release()

    play(scenario)


@pytest.mark.needs("fence")
def test_fences_rise(play: Any) -> None:
    async def scenario(api: Any) -> list[int]:
        fences = []
        for client in [api.client(), api.client()] * 5:
            async with client.lock("a") as lease:
                fences.append(lease.fence)
        return fences

    fences = play(scenario)
    assert fences == sorted(set(fences))


@pytest.mark.needs("fences that tell the time")
def test_a_fence_is_the_time_of_its_grant(play: Any) -> None:
    async def scenario(api: Any) -> int:
        async with api.client().lock("a") as lease:
            return int(lease.fence)

    assert play(scenario) > 10**15


@pytest.mark.needs("the keys of Redis")
def test_fences_rise_when_the_counter_is_ahead_of_the_clock(play: Any) -> None:
    async def scenario(api: Any) -> list[int]:
        client = api.client(cohort=0)  # else each grant would set some more aside
        async with client.lock("a") as lease:
            first = lease.fence
        await api.raw("SET", "a:hf1:fence:{a}", first + 10**9)
        fences = []
        for _ in range(3):
            async with client.lock("a") as lease:
                fences.append(lease.fence - first)
        left_ms = await api.raw("PTTL", "a:hf1:fence:{a}")
        assert left_ms > 3600_000 + 900_000, "the fence must be remembered until its own time has passed"
        return fences

    assert play(scenario) == [10**9 + 1, 10**9 + 2, 10**9 + 3]


@pytest.mark.needs("the keys of Redis")
def test_the_key_is_a_plain_string_with_the_token_and_a_ttl(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client(namespace="app:")
        async with client.lock("a", ttl=60, label="nightly run") as lease:
            assert await api.raw("GET", "app:a") == lease.token.encode()
            assert 50_000 < await api.raw("PTTL", "app:a") <= 60_000
            assert await api.raw("TYPE", "app:a") == b"string"
            assert lease.name == "a"
            assert "nightly" in lease.token
        assert await api.raw("EXISTS", "app:a") == 0

    play(scenario)


def test_a_lease_tells_about_itself(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("a", ttl=60).acquire()
        assert lease.held
        assert lease
        assert 50 < lease.remaining() <= 60 * 0.99
        assert not lease.lost.is_set()
        assert await lease.lost.wait(0.01) is False
        lease.check()
        await lease.release()
        assert not lease.held
        assert lease
        assert lease.remaining() == 0.0
        assert not lease.lost.is_set()
        with pytest.raises(holdfast.NotHeld):
            lease.check()

    play(scenario)


def test_releasing_what_is_not_held_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.lock("a")
        with pytest.raises(holdfast.NotHeld) as caught:
            await lock.release()
        assert isinstance(caught.value, RuntimeError)
        lease = await lock.acquire()
        await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await lock.release()
        with pytest.raises(holdfast.NotHeld):
            await lease.release()
        with pytest.raises(holdfast.NotHeld):
            await lease.extend(5)

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_locked_asks_the_server(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        assert await two.lock("a").locked() is False
        async with one.lock("a"):
            assert await two.lock("a").locked() is True
        assert await two.lock("a").locked() is False
        await api.raw("SET", "a", "somebody else's")
        assert await two.lock("a").locked() is True

    play(scenario)


def test_a_lease_is_renewed(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.lock("a", ttl=3) as lease:
            await api.sleep(4.0)
            assert lease.held
            assert await two.lock("a").acquire(blocking=False) is None

    play(scenario)


@pytest.mark.needs("fence")
def test_without_renewal_it_ends(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        lock = one.lock("a", ttl=1, renew=False)
        lease = await lock.acquire()
        assert await lease.lost.wait(5) is True
        assert not lease.held
        assert lease.remaining() == 0.0
        with pytest.raises(holdfast.LeaseLost, match="renew=False"):
            lease.check()
        other = await two.lock("a").acquire(timeout=5)
        assert other.fence > lease.fence
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        assert other.held, "a late release must not touch the successor"
        assert await api.raw("GET", "a") == other.token.encode()
        await other.release()

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_a_stolen_key_is_noticed(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        told: list[Any] = []
        lease = await client.lock("a", ttl=3, on_lost=told.append).acquire()
        await api.raw("SET", "a", "thief", "PX", 60_000)
        assert await lease.lost.wait(10) is True
        with pytest.raises(holdfast.LeaseLost, match="another holder"):
            lease.check()
        with pytest.raises(holdfast.LeaseLost):
            await lease.extend(5)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()
        assert await api.raw("GET", "a") == b"thief"
        await until(api, lambda: told)
        await api.sleep(0.05)
        assert [told_of.fence for told_of in told] == [lease.fence]

    play(scenario)


def test_release_reports_a_key_that_was_deleted(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.lock("a")
        await lock.acquire()
        await api.raw("DEL", "a")
        with pytest.raises(holdfast.LeaseLost, match="expired or was deleted"):
            await lock.release()
        with pytest.raises(holdfast.LeaseLost):
            async with lock:
                await api.raw("DEL", "a")
        async with lock:
            pass

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_extend_lengthens_and_never_shortens(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("a", ttl=2, renew=False) as lease:
            await lease.extend(60)
            assert 55 < lease.remaining() <= 60
            assert 55_000 < await api.raw("PTTL", "a") <= 60_000
            await lease.extend(1)
            assert lease.remaining() > 55
            assert await api.raw("PTTL", "a") > 55_000

    play(scenario)


def test_max_hold_puts_an_end_to_it(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        told: list[Any] = []
        lease = await one.lock("a", ttl=2, max_hold=5, on_lost=told.append).acquire()
        await api.sleep(2.5)
        assert lease.held, "it is renewed until max_hold"
        with pytest.raises(holdfast.InvalidConfig, match="max_hold"):
            await lease.extend(10)
        assert await lease.lost.wait(10) is True
        with pytest.raises(holdfast.LeaseLost, match="max_hold"):
            lease.check()
        async with two.lock("a", wait=5):
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()
        await until(api, lambda: told)
        await api.sleep(0.05)
        assert len(told) == 1

    play(scenario)


def test_a_lost_lease_occupies_its_object_until_released(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lock = client.lock("a", ttl=1.5, renew=False)
        lease = await lock.acquire()
        assert await lease.lost.wait(10)
        assert not lease.held
        assert await lock.acquire(blocking=False) is None
        with pytest.raises(holdfast.LeaseLost):
            await lock.release()
        assert await lock.acquire(blocking=False)
        await lock.release()

    play(scenario)


def test_an_object_has_one_lease_whoever_shares_it(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        lock = api.client().lock("a")
        order: list[str] = []
        await lock.acquire()

        async def other() -> None:
            lease = await lock.acquire()
            order.append("other")
            await lease.release()

        handle = api.spawn(other)
        await api.sleep(0.05)
        order.append("first")
        await lock.release()
        await handle.join()
        return order

    assert play(scenario) == ["first", "other"]


def test_somebody_else_may_release_the_object(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().lock("a")
        await lock.acquire()
        await api.spawn(lock.release).join()
        assert await lock.locked() is False

    play(scenario)


@pytest.mark.needs("fence")
def test_with_releases_the_lease_that_it_obtained(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().lock("a")
        async with lock as first:
            await lock.release()
            second = await lock.acquire()
            assert second.fence > first.fence
        assert second.held
        assert await lock.locked() is True
        await lock.release()

    play(scenario)


def test_a_lease_outlives_its_lock_object(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        lease = await client.lock("a", ttl=3).acquire()
        await api.sleep(4.0)
        assert lease.held
        await lease.release()

    play(scenario)


def test_the_error_of_the_body_comes_first_and_that_of_release_is_noted(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        with pytest.raises(KeyError) as caught:
            async with client.lock("a", on_lost=lambda lease: None):  # so that a loss found early does not cancel it
                await api.raw("DEL", "a")
                raise KeyError("the body's")
        assert "the body's" in str(caught.value)
        assert any("LeaseLost" in note for note in caught.value.__notes__)
        with pytest.raises(ZeroDivisionError) as plain:
            async with client.lock("a"):
                raise ZeroDivisionError
        assert not hasattr(plain.value, "__notes__")

    play(scenario)


def test_arguments_of_acquire_are_those_of_threading(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().lock("a")
        for wrong in ((False, 1), (True, -2), (True, float("nan"))):
            with pytest.raises(ValueError):
                await lock.acquire(*wrong)
        with pytest.raises(OverflowError):
            await lock.acquire(timeout=1e100)
        assert await lock.locked() is False

    play(scenario)


def test_a_hung_server_ends_the_wait_not_the_patience(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.lock("warm"):
            pass
        api.hang()
        try:
            with pytest.raises(holdfast.Unavailable, match=r"lock 'a'.* did not answer within [\d.]+ s"):
                async with client.lock("a", wait=0.3):
                    raise AssertionError("entered")
        finally:
            api.resume()
        async with client.lock("a", wait=10):
            pass
        for _ in range(100):
            if not await api.raw("EXISTS", "a"):
                break
            await api.sleep(0.05)
        else:
            raise AssertionError("an abandoned attempt left its key behind")

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_a_wrong_type_is_not_overwritten(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        await api.raw("HSET", "a", "field", "value")
        with pytest.raises(holdfast.HoldfastError):
            await client.lock("a").acquire(timeout=1)
        assert await api.raw("HGET", "a", "field") == b"value"

    play(scenario)


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.05])
def test_cancelled_while_asking_or_waiting_it_leaves_no_key(play: Any, seconds: float) -> None:
    async def scenario(api: Any) -> None:
        if api.Cancelled is None:
            return
        one, two = api.client(), api.client()
        lease = await one.lock("a").acquire()

        async def waiter() -> None:
            async with two.lock("a", ttl=60), two.lock("b", ttl=60):
                raise AssertionError("entered")

        handle = api.spawn(waiter)
        await api.sleep(seconds)
        handle.cancel()
        with pytest.raises(api.Cancelled):
            await handle.join()
        await lease.release()

        async def is_free() -> bool:
            return bool(await api.raw("EXISTS", "a", "b") == 0)

        if api.kind == "world":  # where the server is never slow
            assert await is_free()
        await until(api, is_free)  # else the keeper may clean up; the ttl would take longer

    play(scenario)


def test_cancelled_in_the_body_it_is_released(play: Any) -> None:
    async def scenario(api: Any) -> None:
        if api.Cancelled is None:
            return
        client = api.client()

        async def body() -> None:
            async with client.lock("a"):
                await api.sleep(60)

        handle = api.spawn(body)
        while await api.raw("EXISTS", "a") == 0:
            await api.sleep(0.05)
        handle.cancel()
        with pytest.raises(api.Cancelled):
            await handle.join()
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


def test_the_body_is_cancelled_when_the_lease_is_lost(play: Any) -> None:
    async def scenario(api: Any) -> None:
        if api.Cancelled is None:
            return
        client = api.client()
        with pytest.raises(holdfast.LeaseLost):
            async with client.lock("a", ttl=3):
                await api.raw("DEL", "a")
                await api.sleep(30)
                raise AssertionError("not cancelled")

    play(scenario)


def test_on_lost_ignore_leaves_the_body_alone(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        if api.Cancelled is None:
            return ["finished"]
        client = api.client()
        log = []
        with pytest.raises(holdfast.LeaseLost):
            async with client.lock("a", ttl=0.3, on_lost="ignore"):
                await api.raw("DEL", "a")
                await api.sleep(0.5)
                log.append("finished")
        return log

    assert play(scenario) == ["finished"]


def test_leaving_what_was_not_entered_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lock = api.client().lock("a")
        with pytest.raises(holdfast.NotHeld):
            await lock.__aexit__(None, None, None)

    play(scenario)
