"""What an election is, wherever it runs: the simulated world, asyncio and threads."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

import holdfast
from holdfast.protocol.kinds.election import Leader, leader_of

pytestmark = pytest.mark.needs("election")


@pytest.mark.needs("fences that tell the time")
def test_one_leads_and_everybody_can_see_who(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two, guest = api.client(), api.client(), api.client()
        assert await guest.election("a").leader() is None
        async with one.election("a", label="first").lead() as lease:
            leader = await guest.election("a").leader()
            assert leader.fence == lease.fence
            assert leader.label == "first"
            assert leader.host
            assert leader.since == lease.fence / 1e6
            assert str(leader).startswith(leader.host)
            assert lease.token not in repr(leader)
            with pytest.raises(holdfast.AcquireTimeout):
                async with two.election("a", wait=0).lead():
                    raise AssertionError("two lead")
        assert await guest.election("a").leader() is None
        async with two.election("a", wait=0, label="second").lead() as later:
            assert later.fence > lease.fence
            leader = await one.election("a").leader()
            assert (leader.label, leader.fence) == ("second", later.fence)

    play(scenario)


def test_to_lead_is_to_hold_the_lock_of_that_name(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client(cohort=0)
        async with one.election("a").lead():
            assert await two.lock("a").acquire(blocking=False) is None
        async with two.lock("a", label="plain") as lease:
            leader = await one.election("a").leader()
            assert (leader.label, leader.fence) == ("plain", lease.fence)

    play(scenario)


def test_a_name_in_use_as_another_kind_has_no_leader_to_be_asked_for(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.semaphore("a", 2):
            with pytest.raises(holdfast.Unsupported, match="election 'a': it is in use as a semaphore"):
                await two.election("a").leader()
        assert await two.election("a").leader() is None
        await one.latch("b", 2).count_down()
        with pytest.raises(holdfast.Unsupported, match="in use as a latch"):
            await two.election("b").leader()

    play(scenario)


def test_resigning_wakes_the_next(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        election = one.election("a")
        led: list[int] = []

        async def campaign() -> None:
            async with two.election("a", wait=20).lead() as lease:
                led.append(lease.fence)

        async with election.lead() as lease:
            handle = api.spawn(campaign)
            await api.sleep(0.1)
            assert led == []
            await election.resign()
            assert not lease.held
            with pytest.raises(holdfast.NotHeld):
                lease.check()
            assert not lease.lost.is_set(), "it was given back, not lost"
            await handle.join()
        assert led[0] > lease.fence

    play(scenario)


def test_whoever_does_not_lead_cannot_resign(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        with pytest.raises(holdfast.NotHeld, match="'a' is not led by this candidate"):
            await two.election("a").resign()
        async with one.election("a").lead() as lease:
            with pytest.raises(holdfast.NotHeld, match="'a' is not led by this candidate"):
                await two.election("a").resign()
            with pytest.raises(holdfast.NotHeld, match="'a' is not led by this candidate"):
                await one.election("a").resign()  # another object is another candidate
            lease.check()

    play(scenario)


def test_a_leader_that_is_told_of_its_loss_cannot_resign(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a", on_lost=lambda lease: None)
        lease = await election.lead().acquire()
        await api.raw("DEL", "a")
        assert await lease.lost.wait(20)
        with pytest.raises(holdfast.LeaseLost):
            await election.resign()
        async with election.lead():
            pass

    play(scenario)


def test_terms_follow_each_other(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a")
        guest = api.client().election("a")
        fences: list[int] = []
        leases: list[Any] = []
        async for lease in election.terms():
            assert lease.held
            assert all(not earlier.held for earlier in leases)
            assert (await guest.leader()).fence == lease.fence
            fences.append(lease.fence)
            leases.append(lease)
            if len(fences) == 4:
                break
        assert fences == sorted(set(fences))
        while api.kind != "blocking" and await guest.leader() is not None:  # in a blocking loop it was waited for
            await api.sleep(0.01)
        assert await guest.leader() is None
        assert not lease.held

    play(scenario)


def test_terms_take_turns(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        led: list[str] = []
        inside: list[str] = []

        async def campaign(name: str) -> None:
            election = api.client().election("a")
            async for lease in election.terms():
                assert inside == []
                inside.append(name)
                led.append(name)
                await api.sleep(0.02)
                while len(led) == 1 and await api.raw("ZCARD", "a:hf1:queue:{a}") < 2:
                    await api.sleep(0.02)  # the others may have been slow to come
                assert lease.held
                inside.remove(name)
                if led.count(name) == 3:
                    break

        handles = [api.spawn(lambda name=name: campaign(name)) for name in "xyz"]
        for handle in handles:
            await handle.join()
        return led

    led = play(scenario)
    assert sorted(led) == list("xxxyyyzzz")
    assert led[0] != led[1], "the next in the queue comes first, not the last leader"


def test_a_term_ends_when_its_leader_resigns(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a")
        rounds = 0
        async for lease in election.terms():
            rounds += 1
            if rounds == 3:
                break
            await election.resign()
            assert not lease.held
            assert await election.leader() is None
        assert rounds == 3

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_a_lost_term_is_followed_by_another(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: Any) -> list[int]:
        election = api.client().election("a", ttl=30)
        fences: list[int] = []
        async for lease in election.terms():
            fences.append(lease.fence)
            if len(fences) == 2:
                break
            await api.raw("SET", "a", "a thief", "PX", 300)
            assert await lease.lost.wait(20)
            assert not lease.held
            with pytest.raises(holdfast.LeaseLost):
                lease.check()
        return fences

    with caplog.at_level(logging.INFO, "holdfast"):
        fences = play(scenario)
    assert fences == sorted(set(fences))
    assert len(fences) == 2
    assert "lost the lead of 'a'" in caplog.text


def test_a_term_is_no_longer_than_max_hold(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a", max_hold=0.3)
        rounds = 0
        async for lease in election.terms():
            assert await lease.lost.wait(20)
            rounds += 1
            if rounds == 2:
                break

    play(scenario)


def test_terms_wait_as_long_as_they_were_told_to(play: Any) -> None:
    async def scenario(api: Any) -> None:
        async with api.client().lock("a"):
            with pytest.raises(holdfast.AcquireTimeout, match="'a'"):
                async for _ in api.client().election("a", wait=1).terms():
                    raise AssertionError("two lead")

    play(scenario)


def test_an_error_in_the_body_ends_the_loop_and_the_term(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a")

        async def work() -> None:
            async for _ in election.terms():
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()
        async with api.client().election("a", wait=10).lead():
            pass

    play(scenario)


def test_terms_can_be_closed(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a")
        terms = election.terms()
        lease = await anext(terms)
        assert lease.held
        await terms.aclose()
        assert not lease.held
        assert await election.leader() is None
        await terms.aclose()
        async for _ in terms:
            raise AssertionError("closed is over")
        async for lease in election.terms():
            assert lease.held, "but others can be had"
            await terms.aclose()
            assert lease.held, "to close what is closed ends no other term"
            break
        terms = election.terms()
        await terms.aclose()  # there was none yet
        async for _ in terms:
            raise AssertionError("closed is over")

    play(scenario)


def test_closing_terms_ends_a_loop_elsewhere(play: Any) -> None:
    """In its body, or while it campaigns: then it steps down as soon as it leads."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        terms = one.election("a").terms()
        began: list[Any] = []

        async def lead() -> None:
            async for lease in terms:
                began.append(lease)
                while lease.held:
                    await api.sleep(0.01)

        leads = api.spawn(lead)
        while not began:
            await api.sleep(0.01)
        await terms.aclose()
        await leads.join()
        terms = one.election("a").terms()
        async with two.election("a").lead():
            leads = api.spawn(lead)
            await api.sleep(0.2)
            await terms.aclose()
        await leads.join()
        assert len(began) == 1
        assert await one.election("a").leader() is None

    play(scenario)


def test_one_object_leads_once_at_a_time(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a", wait=0)
        async with election.lead():
            with pytest.raises(holdfast.AcquireTimeout, match="Nested by mistake"):
                async with election.lead():
                    raise AssertionError("nested")
            with pytest.raises(holdfast.AcquireTimeout, match="Nested by mistake"):
                async for _ in election.terms():
                    raise AssertionError("nested")

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_the_lock_of_another_library_has_a_leader_without_a_name(play: Any) -> None:
    async def scenario(api: Any) -> None:
        election = api.client().election("a")
        async with election.lead():
            pass
        await api.raw("SET", "a", "0b0e4c1e-7f3b", "PX", 5000)
        leader = await election.leader()
        assert leader == Leader("", None, "", None, None)
        assert str(leader) == "unknown"

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_something_else_under_that_name_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        await api.raw("RPUSH", "a", "x")
        with pytest.raises(holdfast.HoldfastError):
            await api.client().election("a").leader()

    play(scenario)


def test_bad_input_is_refused(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        names: tuple[Any, ...] = ("", 7, [], "a:hf1:b")
        for name in names:
            with pytest.raises(holdfast.InvalidName):
                client.election(name)
        with pytest.raises(holdfast.InvalidConfig, match="ttl"):
            client.election("a", ttl=0)

    play(scenario)


SECRET = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        (f"web1-42-nightly.{SECRET}", ("web1", 42, "nightly")),
        (f"web1.example.org-42.{SECRET}", ("web1.example.org", 42, "")),
        (f"web1-42-v1.2.{SECRET}", ("web1", 42, "v1.2")),
        (f"web%2D1-42-a%2Db%20%E4%B8%AD%E6%96%87%25.{SECRET}", ("web-1", 42, "a-b 中文%")),
        (f"web1-42-%FF%.{SECRET}", ("web1", 42, "\ufffd%")),
        ("m1-label.0000000000000000000001", ("m1", None, "label")),
        (SECRET, ("", None, "")),
        (f"eyJhbGciOiJIUzI1NiJ9.eyJuYW1lIjoiYm9zcyJ9.{'Sfl9KxwRJSMeKKF2QT4f' * 2}", ("", None, "")),
        (f".{SECRET}", ("", None, "")),
        ("a.b", ("", None, "")),
        ("", ("", None, "")),
        ("\udcff.", ("", None, "")),
    ],
)
def test_only_the_readable_part_of_a_token_is_shown(token: str, seen: tuple[Any, ...]) -> None:
    leader = leader_of(token.encode(errors="surrogateescape"), 1_700_000_000_000_000)
    assert leader[:3] == seen
    assert SECRET not in repr(leader)
    if leader.host:
        assert (leader.fence, leader.since) == (1_700_000_000_000_000, 1_700_000_000.0)


def test_it_tells_about_itself_and_cannot_be_pickled(client: holdfast.Client) -> None:
    election = client.election("a")
    assert election.name == "a"
    assert "not leading" in repr(election)
    with election.lead():
        assert "<leading holdfast.blocking.Election object 'a'" in repr(election)
        leader = election.leader()
        assert pickle.loads(pickle.dumps(leader)) == leader
    for thing in (election, election.terms()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing)
