"""An outage never looks busy: the last step decides, and a call that does not wait for a lock has one timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.world import Fate, failed
from holdfast.protocol.effects import Step
from tests.protocol.harness import Play, at

TTL = 3.0
TIMEOUT = 5.0  # of the clients of a Play
A_LITTLE = 0.15


def try_lock(client: holdfast.aio.Client) -> Any:
    return client.lock("a").acquire(blocking=False)


# What waits for no lock, and may not take longer than the client's timeout.
QUICK: dict[str, Callable[[holdfast.aio.Client], Any]] = {
    "acquire(blocking=False)": try_lock,
    "locked": lambda client: client.lock("a").locked(),
    "semaphore.locked": lambda client: client.semaphore("a", 2).locked(),
    "rwlock.read.locked": lambda client: client.rwlock("a").read.locked(),
    "leader": lambda client: client.election("a").leader(),
    "latch.count": lambda client: client.latch("a", 2).count(),
    "latch.wait(0)": lambda client: client.latch("a", 2).wait(0),
    "get_or_compute": lambda client: client.get_or_compute("a", lambda: 1),
    "invalidate": lambda client: client.invalidate("a"),
}


@pytest.mark.parametrize("what", QUICK)
def test_a_call_that_waits_for_no_lock_ends_after_the_clients_timeout(what: str) -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.world.hang()

    async def ask() -> Any:
        return await QUICK[what](client)

    process = play.start(client, ask())
    play.run(TIMEOUT + A_LITTLE)
    with pytest.raises(holdfast.Unavailable, match="did not answer within 5"):
        process.outcome()


# What waits, for half a second.
PATIENT: dict[str, Callable[[holdfast.aio.Client], Any]] = {
    "lock": lambda client: client.lock("a").acquire(timeout=0.5),
    "several names": lambda client: client.lock("a", "b").acquire(timeout=0.5),
    "rlock": lambda client: client.rlock("a").acquire(timeout=0.5),
    "semaphore": lambda client: client.semaphore("a", 2).acquire(timeout=0.5),
    "read": lambda client: client.rwlock("a").read.acquire(timeout=0.5),
    "write": lambda client: client.rwlock("a").write.acquire(timeout=0.5),
    "election": lambda client: client.election("a").lead().acquire(timeout=0.5),
    "latch": lambda client: client.latch("a", 2).wait(0.5),
    "value": lambda client: client.get_or_compute("a", lambda: 1, wait=0.5),
}


@pytest.mark.parametrize("what", PATIENT)
def test_a_wait_on_a_hung_server_ends_in_time_as_an_outage(what: str) -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.world.hang()

    async def ask() -> Any:
        return await PATIENT[what](client)

    process = play.start(client, ask())
    play.run(0.5 + A_LITTLE)
    with pytest.raises(holdfast.Unavailable) as caught:
        process.outcome()
    assert not isinstance(caught.value, TimeoutError)
    assert "'a" in str(caught.value), "it says what could not be had"


@pytest.mark.parametrize("what", [what for what in PATIENT if what not in ("latch", "value")])
def test_an_error_reply_says_more_than_a_last_try_that_the_end_of_the_wait_cuts_short(what: str) -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.world.down = True

    async def ask() -> Any:
        return await PATIENT[what](client)

    process = play.start(client, ask())
    play.run(0.2)
    play.world.down = False
    play.world.hang()
    play.run(0.3 + 2 * A_LITTLE)
    with pytest.raises(holdfast.Unavailable, match="nothing listens there") as caught:
        process.outcome()
    assert "did not answer" not in str(caught.value)


@pytest.mark.parametrize("what", PATIENT)
def test_a_process_that_is_stopped_between_two_tries_at_a_hung_server_blames_the_server(what: str) -> None:
    """It comes too late to ask again, but it has asked before, and got no answer."""
    play = Play(seed=1)
    client = play.client("one")
    play.world.hang()

    async def ask() -> Any:
        return await PATIENT[what](client)

    process = play.start(client, ask())
    machine: Machine = client._driver  # type: ignore[assignment]
    play.run(0.17)  # half a second's third, in which the first try has failed, and a bit of the pause
    machine.pause()
    play.run(1.0)
    machine.resume()
    play.run(A_LITTLE + 0.3)
    with pytest.raises(holdfast.Unavailable, match=r"'a.*did not answer within"):
        process.outcome()


@pytest.mark.parametrize("shared", [False, True], ids=["a Lock object each", "one Lock object"])
def test_all_waiters_of_a_process_see_the_outage_and_none_finds_it_busy(shared: bool) -> None:
    """One of them asks the server, the others stand in the local queue behind it."""
    play = Play(seed=1)
    client = play.client("one")
    lock = client.lock("a", wait=0.5)
    play.world.hang()

    async def ask() -> None:
        async with lock if shared else client.lock("a", wait=0.5):
            raise AssertionError("entered")

    processes = [play.start(client, ask()) for _ in range(10)]
    play.run(1.0)
    for process in processes:
        with pytest.raises(holdfast.Unavailable):
            process.outcome()


def test_tries_that_do_not_wait_see_the_outage_beside_one_that_waits() -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.world.hang()

    async def wait_for_it() -> None:
        await client.lock("a").acquire(timeout=20)

    async def ask() -> Any:
        return await client.lock("a").acquire(blocking=False)

    play.start(client, wait_for_it())
    play.run(0.1)
    tries = [play.start(client, ask()) for _ in range(3)]
    play.run(TIMEOUT + A_LITTLE)
    for process in tries:
        with pytest.raises(holdfast.Unavailable):
            process.outcome()


def test_a_try_beside_a_local_waiter_asks_the_server_and_finds_it_busy() -> None:
    play = Play(seed=1)
    client, other = play.client("one"), play.client("two")
    play.start(other, play.cycle(other, hold=2.0, ttl=TTL))
    play.run(0.1)
    play.start(client, play.cycle(client, ttl=TTL))
    play.run(0.1)

    async def ask() -> Any:
        return await client.lock("a").acquire(blocking=False)

    asked = play.start(client, ask())
    play.run(0.1)
    assert asked.outcome() is None
    play.run(4.0)
    assert len(play.fences) == 2
    assert play.world.keys() == []


@pytest.mark.parametrize("cohort", [0, 64])
def test_a_try_on_a_lock_object_that_another_task_waits_for_leaves_that_one_alone(cohort: int) -> None:
    play = Play(seed=1)
    client, other = play.client("one"), play.client("two")
    play.start(other, play.cycle(other, hold=1.0, ttl=TTL))
    play.run(0.1)
    lock = client.lock("a", ttl=TTL, cohort=cohort)
    leases: list[Any] = []

    async def wait_for_it() -> None:
        leases.append(await lock.acquire(timeout=20))

    async def ask() -> Any:
        return await lock.acquire(blocking=False)

    waiter = play.start(client, wait_for_it())
    play.run(0.1)
    asked = play.start(client, ask())
    play.run(0.5)
    assert asked.outcome() is None
    play.run(2.0)
    waiter.outcome()
    assert leases[0].held

    async def give_back() -> None:
        await lock.release()

    play.start(client, give_back())
    play.run(1.0)
    assert play.world.keys() == []


def test_a_server_that_falls_silent_in_the_middle_of_a_wait_is_an_outage() -> None:
    play = Play(seed=1)
    client, other = play.client("one"), play.client("two")
    play.start(other, play.cycle(other, hold=60, ttl=120))
    play.run(0.1)
    process = play.start(client, play.cycle(client, ttl=TTL, wait=3.0))
    play.run(1.0)
    play.world.hang()
    play.run(2.0 + A_LITTLE)
    with pytest.raises(holdfast.Unavailable):
        process.outcome()


def test_a_server_that_answers_again_before_the_end_is_busy_not_silent() -> None:
    play = Play(seed=1)
    client, other = play.client("one"), play.client("two")
    play.start(other, play.cycle(other, hold=60, ttl=120, label="nightly"))
    play.run(0.1)
    process = play.start(client, play.cycle(client, ttl=TTL, wait=6.0))
    play.run(1.0)
    play.world.hang()
    play.run(2.0)
    play.world.resume()
    play.run(4.0)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        process.outcome()
    assert caught.value.holder is not None
    assert (caught.value.holder.host, caught.value.holder.label) == ("two", "nightly")


@pytest.mark.parametrize("wait", [0.0, 0.7, 1.2])
@pytest.mark.parametrize("kind", ["lock", "rlock", "write", "read", "semaphore", "several names"])
def test_a_refused_lock_says_who_holds_it(kind: str, wait: float) -> None:
    play = Play(seed=1)
    holder, client = play.client("holder"), play.client("asker")

    def make(client: holdfast.aio.Client, **options: Any) -> Any:
        if kind == "semaphore":
            return client.semaphore("a", 1, **options)
        if kind in ("read", "write"):
            side = client.rwlock("a", **options)
            return side.write if client is holder or kind == "write" else side.read
        names = ("a", "b") if kind == "several names" else ("a",)
        return client.rlock("a", **options) if kind == "rlock" else client.lock(*names, **options)

    async def hold() -> None:
        async with make(holder, ttl=60, label="nightly"):
            await play.sleep(holder, 30)

    async def ask() -> None:
        async with make(client, wait=wait):
            raise AssertionError("entered")

    play.start(holder, hold())
    play.run(0.1)
    asked = play.start(client, ask())
    play.run(2.0)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        asked.outcome()
    found = caught.value.holder
    assert found is not None
    assert (found.host, found.label) == ("holder", "nightly")
    assert found.remaining is not None
    assert 0 < found.remaining <= 60
    assert "." * 1 + "0" * 22 not in str(caught.value) + repr(found), "a token is a capability"


def test_a_waiter_behind_a_local_holder_is_told_of_this_very_process() -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.start(client, play.cycle(client, hold=10, ttl=TTL, label="mine"))
    play.run(0.1)

    async def ask() -> None:
        async with client.lock("a", wait=0.5):
            raise AssertionError("entered")

    asked = play.start(client, ask())
    play.run(1.0)
    with pytest.raises(holdfast.AcquireTimeout) as caught:
        asked.outcome()
    assert caught.value.holder is not None
    assert caught.value.holder.label == "mine"


# A wait that goes on although the server cannot be used.


def test_a_wait_without_end_says_so_at_once_and_then_ever_more_rarely() -> None:
    play = Play(seed=1)
    client = play.client("one")
    machine: Machine = client._driver  # type: ignore[assignment]
    warm = play.start(client, play.cycle(client, ttl=TTL))
    play.run(1.0)
    warm.outcome()
    play.doom(lambda message: Fate(lost=True))
    play.start(client, play.cycle(client, ttl=TTL))
    play.run(1.5)
    assert len(machine.warnings) >= 1
    assert "no contact" in machine.warnings[0]
    assert "did not answer" in machine.warnings[0]
    play.run(600)
    assert 8 <= len(machine.warnings) <= 20, machine.warnings


def test_a_lost_connection_is_no_reason_for_a_warning() -> None:
    play = Play(seed=1)
    client = play.client("one")
    machine: Machine = client._driver  # type: ignore[assignment]
    lost: list[int] = []

    def lose(message: Any) -> Fate | None:
        if not lost and isinstance(message.ops[0], Step) and message.ops[0].script == "acquire":
            lost.append(message.number)
            return Fate(reply_lost=True)
        return None

    broke = failed("the connection was lost", sent=True, connection_broke=True)
    play.world.silence = lambda timeout: broke  # type: ignore[method-assign]
    play.doom(lose)
    process = play.start(client, play.cycle(client, ttl=TTL))
    play.run(6.0)
    process.outcome()
    assert lost
    assert machine.warnings == []


@pytest.mark.parametrize("patience", [2.0, 0.3])
@pytest.mark.parametrize("fault", ["lost", "reply_lost"])
def test_a_request_or_reply_that_was_swallowed_does_not_cost_the_lock(patience: float, fault: str) -> None:
    """The first try has a third of the time; the second one gets through."""
    play = Play(seed=1)
    client = play.client("one")
    play.doom(at(0, **{fault: True}))

    async def ask() -> None:
        async with client.lock("a", ttl=TTL, wait=patience):
            pass

    process = play.start(client, ask())
    play.run(patience)
    process.outcome()


@pytest.mark.parametrize("fault", ["lost", "reply_lost"])
def test_a_try_that_does_not_wait_survives_a_swallowed_message_too(fault: str) -> None:
    play = Play(seed=1)
    client = play.client("one")
    play.doom(at(0, **{fault: True}))

    async def ask() -> Any:
        lease = await client.lock("a", ttl=TTL).acquire(blocking=False)
        assert lease is not None
        await lease.release()

    process = play.start(client, ask())
    play.run(TIMEOUT)
    process.outcome()
    assert play.world.keys() == []
