"""A break in the simulated world, with a fault at each message: no other hold is ended, and no fence goes down.

Each run has a holder that does not release, a waiter and an operator. A fault hits one message of all that are sent:
it is lost, its reply is lost or late, or it arrives twice.
"""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from tests.protocol.harness import Play, at

TTL = 30.0
MOST_MESSAGES = 40
FAULTS = [{"lost": True}, {"reply_lost": True}, {"late_us": 300_000}, {"reply_late_us": 400_000}, {"again_us": 200_000}]


class Stuck(Play):
    """A holder that is stuck, a waiter behind it, and an operator that breaks the hold that it has seen."""

    told = ""

    def __init__(self) -> None:
        super().__init__()
        self.stuck, self.waits, self.operator = (self.client(name) for name in ("stuck", "waits", "operator"))
        self.broken: list[Any] = []
        self.refused: list[str] = []
        self.processes = [
            self.start(self.stuck, self.hold()),
            self.start(self.waits, self.wait()),
            self.start(self.operator, self.free()),
        ]

    def look(self) -> None:
        """Two may hold for a moment here: a holder that was broken does not know it yet."""

    async def hold(self) -> None:
        lease = await self.stuck.lock("a", ttl=TTL).acquire()
        assert lease is not None
        self.fences.append(lease.fence)
        while not lease.lost.is_set():
            await self.sleep(self.stuck, 0.05)
        self.told = lease.reason
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    async def wait(self) -> None:
        while not self.fences:  # the holder comes first
            await self.sleep(self.waits, 0.1)
        await self.cycle(self.waits, ttl=TTL)

    async def free(self) -> None:
        while not self.broken:
            await self.sleep(self.operator, 0.4)
            info = await self.operator.inspect("a")
            if info is None or not self.fences:
                continue  # the holder has not started
            try:
                fence = info.holders[0].fence
                self.broken.append(await self.operator.break_lock("a", fence=fence, reason="it is stuck"))
            except holdfast.NotHeld as refused:
                self.refused.append(str(refused))


def check(play: Stuck) -> None:
    play.run(3 * TTL)
    for process in play.processes:
        assert process.done
        process.outcome()
    assert len(play.fences) == 2
    stuck, later = play.fences
    assert later > stuck
    if play.broken:
        (broken,) = play.broken
        # An acquire step that arrived twice has made a second fence for the same hold.
        assert stuck <= broken.holder.fence < broken.fence < later
        entries = play.world.store.values[b"a:hf1:history:{a}"]
        assert len(entries) == 1, "one break, one entry, however often its step arrived"
    assert play.world.keys() == []


def test_a_break_without_a_fault_passes_the_lock_on_at_once() -> None:
    play = Stuck()
    play.run(1.0)
    assert play.told.endswith(": it is stuck")
    assert len(play.fences) == 2, "the waiter got the lock long before the ttl of the holder ended"
    check(play)


def test_a_waiter_whose_process_has_ended_is_shown_no_more() -> None:
    play = Play()
    holds, waits, operator = (play.client(name) for name in ("holds", "waits", "operator"))
    play.start(holds, play.cycle(holds, hold=10.0))
    play.run(0.1)
    play.start(waits, play.cycle(waits))
    seen: list[int] = []

    async def look() -> None:
        info = await operator.inspect("a")
        assert info is not None
        seen.append(len(info.waiters))

    play.run(0.6)
    play.start(operator, look())
    play.run(0.1)
    play.machines[1].crash()
    play.run(1.5)
    assert b"a:hf1:queue:{a}" in play.world.store.values, "no step has removed it since"
    play.start(operator, look())
    play.run(0.1)
    assert seen == [1, 0]


def test_a_break_of_a_permit_admits_the_next_waiter_at_once() -> None:
    """Without that it would be admitted, too, but only when it shows its presence, after half a second."""
    play = Play()
    play.look = lambda: None  # type: ignore[method-assign] # the broken holder does not know it yet
    stuck, waits, operator = (play.client(name) for name in ("stuck", "waits", "operator"))
    times: dict[str, float] = {}

    async def hold() -> None:
        lease = await stuck.semaphore("s", 1, ttl=TTL).acquire()
        assert lease is not None
        play.fences.append(lease.fence)
        await play.sleep(stuck, 2.0)
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    async def wait() -> None:
        async with waits.semaphore("s", 1, ttl=TTL):
            times["admitted"] = waits._driver.now()

    async def free() -> None:
        times["broken"] = operator._driver.now()
        await operator.break_lock("s", fence=play.fences[0], reason="it is stuck")

    play.start(stuck, hold())
    play.run(0.1)
    play.start(waits, wait())
    play.run(0.7)
    process = play.start(operator, free())
    play.run(3.0)
    process.outcome()
    assert 0 < times["admitted"] - times["broken"] < 0.1


def test_a_break_of_a_computation_wakes_its_waiters_at_once() -> None:
    """Without the notification they would look again, too, but only after half a second."""
    play = Play()
    stuck, waits, operator = (play.client(name) for name in ("stuck", "waits", "operator"))
    times: dict[str, float] = {}

    async def compute() -> str:
        await play.sleep(stuck, 10.0)
        return "old"

    async def compute_next() -> str:
        times["woken"] = waits._driver.now()
        return "new"

    async def free() -> None:
        info = await operator.inspect("a")
        assert info is not None
        times["broken"] = operator._driver.now()
        await operator.break_lock("a", holder_id=info.holders[0].id, reason="it is stuck")

    play.start(stuck, stuck.get_or_compute("a", compute))
    play.run(0.1)
    play.start(waits, waits.get_or_compute("a", compute_next))
    play.run(0.7)  # its second look is over, and the third comes half a second later
    process = play.start(operator, free())
    play.run(2.0)
    process.outcome()
    assert 0 < times["woken"] - times["broken"] < 0.1


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_at_any_message_ends_no_other_hold(fault: dict[str, Any]) -> None:
    faultless = Stuck()
    check(faultless)
    messages = len(faultless.world.sent)
    assert 10 < messages < MOST_MESSAGES
    for number in range(messages):
        play = Stuck()
        play.doom(at(number, **fault))
        check(play)
        assert play.broken, "it was never broken"


def test_a_holder_that_is_stopped_is_told_when_it_goes_on() -> None:
    play = Stuck()
    play.run(0.2)
    play.machines[0].pause()
    play.run(2.0)
    assert play.broken
    assert len(play.fences) == 2
    assert play.told == ""
    play.machines[0].resume()
    play.run(1.0)
    assert play.told.endswith(": it is stuck")
    check(play)


def test_a_late_acquire_of_a_broken_holder_is_refused() -> None:
    """Its reply was lost, so the holder sends its acquire step again: after the break, which must not be undone."""
    play = Play()
    stuck, operator = play.client("stuck"), play.client("operator")

    async def hold() -> Any:
        return await stuck.lock("a", ttl=TTL).acquire()

    async def free() -> Any:
        await play.sleep(operator, 0.01)
        info = await operator.inspect("a")
        assert info is not None
        return await operator.break_lock("a", fence=info.holders[0].fence, reason="it is stuck")

    play.doom(at(0, reply_lost=True))
    holder, breaker = play.start(stuck, hold()), play.start(operator, free())
    play.run(10)
    breaker.outcome()
    with pytest.raises(holdfast.NotAcquired, match="broken by operator: it is stuck"):
        holder.outcome()
    assert play.world.keys() == []


@pytest.mark.parametrize("ttl", [TTL, 20_000.0], ids=["short ttl", "ttl longer than the retention of fences"])
def test_the_fence_of_a_long_hold_is_known_as_long_as_it_is_held(ttl: float) -> None:
    play = Play()
    client = play.client("one")

    async def hold() -> None:
        async with client.lock("a", ttl=ttl) as lease, client.lock("b", "c", ttl=ttl) as both:
            for _ in range(5):
                await play.sleep(client, 3000)  # the record of a fence lasts an hour after the grant
                for name, fence in (("a", lease.fence), ("b", both.fence), ("c", both.fence)):
                    info = await client.inspect(name)
                    assert info is not None
                    assert info.holders[0].fence == fence

    process = play.start(client, hold())
    play.world.run(seconds=20_000)
    process.outcome()
