"""An outage fails fast: calls with a bounded wait end soon after contact was lost, later ones at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Process
from holdfast.lab.simulation.world import Fate
from holdfast.protocol.wait.contact import PROBE_EVERY
from tests.protocol.harness import Play

OUTAGE_WAIT = 2.0
ANSWER_TIME = OUTAGE_WAIT / 3
SLACK = 0.25
LATER = 0.3


def swallow(play: Play) -> None:
    play.doom(lambda message: Fate(lost=True))


def kill(play: Play) -> None:
    play.world.down = True


def stop(play: Play) -> None:
    play.world.hang()


def heal(play: Play) -> None:
    play.doom(lambda message: None)
    play.world.down = False
    play.world.resume()


FAULTS: dict[str, Callable[[Play], None]] = {"killed": kill, "stopped": stop, "swallowed": swallow}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Callable[[Play], None]:
    return FAULTS[request.param]


class Timed:
    """A call, when it began and how it ended."""

    def __init__(self, play: Play, client: holdfast.aio.Client, call: Callable[[holdfast.aio.Client], Any]) -> None:
        self.began = play.world.now_us / 1e6
        self.ended = 0.0
        self.result: Any = None
        self.process: Process = play.start(client, self._run(play, client, call))

    async def _run(self, play: Play, client: holdfast.aio.Client, call: Callable[[holdfast.aio.Client], Any]) -> None:
        try:
            self.result = await call(client)
        except holdfast.HoldfastError as error:
            self.result = error
        self.ended = play.world.now_us / 1e6

    @property
    def took(self) -> float:
        assert self.ended, "it still runs"
        return self.ended - self.began


def warm_client(play: Play, **options: Any) -> holdfast.aio.Client:
    client = play.client("one", **options)
    warm = play.start(client, play.cycle(client))
    play.run(1.0)
    warm.outcome()
    return client


def acquire(name: str, wait: float | None = 5.0, **options: Any) -> Callable[[holdfast.aio.Client], Any]:
    async def call(client: holdfast.aio.Client) -> Any:
        async with client.lock(name, wait=wait, **options) as lease:
            return lease

    return call


CALLS: dict[str, Callable[[holdfast.aio.Client], Any]] = {
    "lock": acquire("a"),
    "acquire": lambda client: client.lock("a").acquire(timeout=5),
    "several names": lambda client: client.lock("a", "b", wait=5).acquire(),
    "rlock": lambda client: client.rlock("a").acquire(timeout=5),
    "semaphore": lambda client: client.semaphore("s", 2).acquire(timeout=5),
    "read": lambda client: client.rwlock("r").read.acquire(timeout=5),
    "write": lambda client: client.rwlock("r").write.acquire(timeout=5),
    "election": lambda client: client.election("e", wait=5).lead().acquire(),
    "latch": lambda client: client.latch("l", 2).wait(5),
    "value": lambda client: client.get_or_compute("v", lambda: 1, wait=5),
    "value without a limit": lambda client: client.get_or_compute("v", lambda: 1),
    "try": lambda client: client.lock("a").acquire(blocking=False),
    "locked": lambda client: client.lock("a").locked(),
    "leader": lambda client: client.election("e").leader(),
    "count_down": lambda client: client.latch("l", 2).count_down(),
    "count": lambda client: client.latch("l", 2).count(),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_ends_when_contact_has_been_lost_for_that_long(what: str, fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    call = Timed(play, client, CALLS[what])
    play.run(6.0)
    assert isinstance(call.result, holdfast.Unavailable | holdfast.OutcomeUnknown), call.result
    assert call.took <= OUTAGE_WAIT + SLACK
    assert call.took >= 2 * ANSWER_TIME or what == "try", "it has tried for a while"


@pytest.mark.parametrize("after", [0.3, 0.7, 1.0, 1.3, 1.6, 1.9])
@pytest.mark.parametrize("what", ["lock", "latch", "value", "try", "locked"])
def test_a_call_that_begins_soon_after_has_time_for_two_tries(
    what: str, after: float, fault: Callable[[Play], None]
) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    first = Timed(play, client, acquire("z"))
    play.run(after)
    call = Timed(play, client, CALLS[what])
    play.run(6.0)
    assert isinstance(call.result, holdfast.Unavailable), call.result
    assert call.ended <= max(first.began + OUTAGE_WAIT, call.began + 2 * ANSWER_TIME) + SLACK
    assert call.took >= 2 * ANSWER_TIME or what == "try", "it has tried for a while"


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_begins_later_ends_at_once(what: str, fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    first = Timed(play, client, acquire("z"))
    play.run(4.0)
    assert isinstance(first.result, holdfast.Unavailable)
    later = [Timed(play, client, CALLS[what]) for _ in range(5)]
    play.run(2.0)
    again = Timed(play, client, CALLS[what])
    play.run(2.0)
    for call in (*later, again):
        assert isinstance(call.result, holdfast.Unavailable | holdfast.OutcomeUnknown), call.result
        assert call.took <= LATER


@pytest.mark.parametrize("names", [1, 80], ids=["one lock", "a lock each"])
def test_eighty_callers_end_together(names: int, fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    calls = []
    for number in range(80):
        calls.append(Timed(play, client, acquire(f"n{number % names}")))
        play.run(0.02)
    play.run(5.0)
    lost_at = calls[0].began
    for call in calls:
        assert isinstance(call.result, holdfast.Unavailable), call.result
        assert call.ended <= max(lost_at + OUTAGE_WAIT, call.began + 2 * ANSWER_TIME) + SLACK


def test_a_call_that_begins_after_the_server_is_back_succeeds(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    for _ in range(20):
        Timed(play, client, acquire("x"))
        play.run(0.3)
    heal(play)
    play.run(PROBE_EVERY)
    calls = [Timed(play, client, acquire("x")) for _ in range(10)]
    play.run(3.0)
    assert all(isinstance(call.result, holdfast.aio.Lease) for call in calls), [call.result for call in calls]


def test_callers_that_arrive_during_a_probe_share_its_verdict() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    stop(play)
    Timed(play, client, acquire("x"))
    play.run(4.0)
    probe = Timed(play, client, acquire("x"))
    play.run(0.1)
    others = [Timed(play, client, acquire(f"x{number}")) for number in range(10)]
    sent = len(play.world.sent)
    play.run(0.1)
    assert len(play.world.sent) == sent, "they send nothing"
    heal(play)
    play.run(1.0)
    assert isinstance(probe.result, holdfast.aio.Lease), probe.result
    assert all(isinstance(call.result, holdfast.aio.Lease) for call in others)


def test_a_wait_without_a_limit_waits_for_the_server(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    call = Timed(play, client, acquire("x", wait=None))
    play.run(30.0)
    assert not call.ended
    heal(play)
    play.run(6.0)
    assert isinstance(call.result, holdfast.aio.Lease)


def test_without_outage_wait_a_call_tries_as_long_as_it_waits(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play, outage_wait=None)
    fault(play)
    call = Timed(play, client, acquire("x"))
    one = Timed(play, client, acquire("y", outage_wait=1.0))
    play.run(4.9)
    assert not call.ended
    assert one.took <= 1.0 + SLACK
    play.run(1.0)
    assert isinstance(call.result, holdfast.Unavailable)


def test_local_waiters_behind_a_holder_of_their_process_end_too(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = play.start(client, play.cycle(client, hold=20.0))
    play.run(1.0)
    waiters = [Timed(play, client, acquire("a", wait=15.0)) for _ in range(3)]
    play.run(1.0)
    fault(play)
    play.run(14.0)  # the keeper renews after 10 s
    lost_by = 12.0
    for call in waiters:
        assert isinstance(call.result, holdfast.Unavailable), call.result
        assert call.took <= lost_by + OUTAGE_WAIT
    assert not holder.done, "the holder keeps what it has"


def test_a_lost_lease_is_told_at_once(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    call = Timed(play, client, acquire_and_hold(play, "a", ttl=2.0))
    play.run(0.3)
    fault(play)
    play.run(3.0)
    assert isinstance(call.result, holdfast.LeaseLost)
    assert call.took <= 2.3 + 0.05


def test_an_outage_is_logged_once_for_all_locks(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    machine: Machine = client._driver  # type: ignore[assignment]
    held = [Timed(play, client, acquire_and_hold(play, f"h{number}")) for number in range(5)]
    waiting = [Timed(play, client, acquire(f"w{number}", wait=None)) for number in range(5)]
    play.run(1.0)
    del waiting
    fault(play)
    more = [Timed(play, client, acquire(f"v{number}", wait=None)) for number in range(5)]
    play.run(10.0)
    assert 3 <= len(machine.warnings) <= 6, machine.warnings
    assert "5 leases are held" in machine.warnings[0]
    heal(play)
    play.run(10.0)
    assert "contact with the world's server is back after" in machine.warnings[-1]
    assert len(machine.warnings) <= 7
    assert all(not call.ended for call in held), "they are renewed again"
    assert all(call.ended for call in more)


def acquire_and_hold(
    play: Play, name: str, seconds: float = 60.0, **options: Any
) -> Callable[[holdfast.aio.Client], Any]:
    async def call(client: holdfast.aio.Client) -> None:
        async with client.lock(name, **options):
            await play.sleep(client, seconds)

    return call


def test_waiters_behind_a_release_without_an_answer_report_the_outage(fault: Callable[[Play], None]) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    holder = Timed(play, client, acquire_and_hold(play, "a", 0.3, ttl=30))
    play.run(0.05)
    waiters = [Timed(play, client, acquire("a", wait=wait)) for wait in (1.5, 2.0, 2.0)]
    play.run(0.1)
    fault(play)
    play.run(10)
    for waiter in waiters:
        assert isinstance(waiter.result, holdfast.Unavailable), waiter.result
    assert isinstance(holder.result, holdfast.HoldfastError)


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_request_that_fails_once_is_no_outage_for_waiters_behind_a_holder_of_their_process(begins: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    held = Timed(play, client, lambda client: client.lock("hot", ttl=30).acquire())
    play.run(0.1)
    waiting = [Timed(play, client, acquire("hot", wait=8))] if begins == "before" else []
    play.doom(lambda message: Fate(lost=True))
    failed = Timed(play, client, lambda client: client.lock("other").acquire(timeout=0.5))
    play.run(0.7)
    assert isinstance(failed.result, holdfast.Unavailable)
    heal(play)
    play.run(0.5)
    waiting.append(Timed(play, client, acquire("hot", wait=8)))
    play.run(4)
    assert not any(call.ended for call in waiting)
    play.start(client, held.result.release())
    play.run(1)
    assert [type(call.result) for call in waiting] == [holdfast.aio.Lease] * len(waiting)


@pytest.mark.parametrize("what", CALLS)
def test_a_server_that_is_too_slow_for_a_probe_is_found(what: str) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    kill(play)
    Timed(play, client, acquire("z"))
    play.run(70)  # longer than anything that the keeper has to clean up
    heal(play)
    play.doom(lambda message: Fate(reply_late_us=350_000))
    call = acquire("a", wait=1) if what == "lock" else CALLS[what]
    for _ in range(4):
        last = Timed(play, client, call)
        play.run(8)
        if isinstance(last.result, holdfast.aio.Lease) and last.result.held:
            play.start(client, last.result.release())
            play.run(3)
    assert not isinstance(last.result, holdfast.HoldfastError), last.result


@pytest.mark.parametrize("after", [0.3, 0.7, 1.0, 1.3, 1.6, 1.8, 1.9])
def test_a_caller_that_joins_the_look_up_of_another_tries_for_its_own_time(
    fault: Callable[[Play], None], after: float
) -> None:
    play = Play(seed=1)
    client = warm_client(play)
    fault(play)
    Timed(play, client, CALLS["value"])
    play.run(after)
    call = Timed(play, client, CALLS["value"])
    play.run(6)
    assert isinstance(call.result, holdfast.Unavailable)
    assert 2 * ANSWER_TIME <= call.took <= max(OUTAGE_WAIT, 2 * ANSWER_TIME) + SLACK


@pytest.mark.parametrize("options", [{"ttl": 10}, {"ttl": 4, "renew": False}, {"ttl": 10, "max_hold": 3.6}], ids=str)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("offset", [0.0, 0.15, 0.45, 1.0])
def test_a_body_is_cancelled_when_its_lease_is_over_whatever_the_keeper_waits_for(
    options: dict[str, Any], others: bool, offset: float, fault: Callable[[Play], None]
) -> None:
    """Other leases of its client are renewed, and calls that failed are cleaned up: the server does not answer."""
    play = Play(seed=1)
    client = warm_client(play)
    late: list[float] = []

    async def work(client: holdfast.aio.Client) -> None:
        async with client.lock("mine", **options) as lease:
            over = 0.0
            try:
                while True:
                    if lease.held:
                        over = max(over, play.world.now_us / 1e6 + lease.remaining())
                    await play.sleep(client, 0.01)
            finally:
                late.append(play.world.now_us / 1e6 - over)

    work_done = Timed(play, client, work)
    for number, ttl in enumerate((2.5, 3, 4, 30) if others else ()):
        Timed(play, client, acquire_and_hold(play, f"other{number}", ttl=ttl))
    play.run(0.5 + offset)
    fault(play)
    for number in range(120):
        Timed(play, client, acquire(f"x{number}", wait=5, ttl=10))
        play.run(0.1)
    assert isinstance(work_done.result, holdfast.LeaseLost)
    assert late[0] <= SLACK


def test_a_failed_release_names_its_lock_and_says_what_becomes_of_it() -> None:
    play = Play(seed=1)
    client = warm_client(play)
    held = Timed(play, client, lambda client: client.lock("order:42", ttl=10).acquire())
    play.run(0.1)
    kill(play)
    released = Timed(play, client, lambda _: held.result.release())
    play.run(12)
    assert isinstance(released.result, holdfast.Unavailable)
    assert "the release of lock 'order:42': cannot use" in str(released.result)
    assert "It is repeated in the background, and the lease ends by itself in about" in str(released.result)
