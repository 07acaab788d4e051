"""Names that are kept for a waiter that wants others as well, in the simulated world.

After a tenth of a second in vain, a waiter stands in the queues of all its names, and a name that comes free at its
turn is kept for it. So it is served beside a constant load on each of them, and what that costs others has bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
import holdfast.aio
from holdfast.lab.servers.values import SortedSet
from holdfast.lab.simulation.machine import Machine
from holdfast.lab.simulation.process import Process
from holdfast.lab.simulation.world import Fate
from holdfast.protocol.effects import Command
from tests.multi.test_simulated import Crowd
from tests.protocol.harness import Play, at
from tests.support import as_bytes


def key(name: str, part: str) -> bytes:
    return f"{name}:hf1:{part}:{{{name}}}".encode()


class Market(Play):
    """Machines that hold a or b again and again, and others that want both."""

    def __init__(self, singles: str = "aabb", hold: float = 0.005) -> None:
        super().__init__(1)
        self.waits: list[float] = []
        self.grants: dict[str, int] = {}
        for number, name in enumerate(singles):
            client = self.client(f"s{number}")
            self.start(client, self.hold_for_ever(client, name, hold))
        self.run(0.2)

    async def hold_for_ever(self, client: holdfast.aio.Client, name: str, hold: float) -> None:
        while True:
            async with client.lock(name):
                self.grants[name] = self.grants.get(name, 0) + 1
                await self.sleep(client, hold)

    async def buy(self, client: holdfast.aio.Client, names: str, times: int, hold: float = 0.005) -> None:
        for _ in range(times):
            came = self.world.now_us
            async with client.lock(*names) as lease:
                self.waits.append((self.world.now_us - came) / 1e6)
                assert {*lease.fences} == {*names}
                await self.sleep(client, hold)

    def owner(self, name: str) -> str:
        """The machine whose token is in the key."""
        token = as_bytes(self.world.store.values.get(name.encode(), b""))
        return token.decode().partition("-")[0]

    def queue(self, name: str) -> dict[bytes, float]:
        queue = self.world.store.values.get(key(name, "queue"), SortedSet())
        assert isinstance(queue, SortedSet)
        return queue

    def is_kept(self, name: str, machine: str) -> bool:
        return self.owner(name) == machine and self.world.store.values[name.encode()] in self.queue(name)

    def until(self, condition: Callable[[], bool], within: float) -> float:
        """Go on until that is so; how long it took."""
        began = self.world.now_us
        while not condition():
            assert self.world.now_us - began < within * 1e6, "it took too long"
            self.step()
        return (self.world.now_us - began) / 1e6


def machine_of(client: holdfast.aio.Client) -> Machine:
    machine: Machine = client._driver  # type: ignore[assignment]
    return machine


@pytest.mark.parametrize("baskets", [("ab",), ("ab", "ba", "ab"), ("abc", "ab", "bc")], ids="-".join)
def test_a_basket_is_bought_beside_busy_items(baskets: tuple[str, ...]) -> None:
    market = Market("aabbcc" if "abc" in baskets else "aabb")
    buyers = [market.client(f"m{number}") for number in range(len(baskets))]
    processes = [
        market.start(client, market.buy(client, names, 10)) for client, names in zip(buyers, baskets, strict=True)
    ]
    singles = sum(market.grants.values())
    began = market.world.now_us
    market.until(lambda: all(process.done for process in processes), 30)
    for process in processes:
        process.outcome()
    lasted = (market.world.now_us - began) / 1e6
    assert len(market.waits) == 10 * len(baskets)
    assert max(market.waits) < 1.0
    assert len(market.waits) / lasted > 4
    assert (sum(market.grants.values()) - singles) / lasted > 150, "the others go on as well"
    market.end()


def waiting(held: str = "b", singles: str = "") -> tuple[Market, holdfast.aio.Client, Process, Process]:
    """A waiter W for a and b, of which one is held for long, so that the other is kept for it."""
    market = Market(singles)
    holder, waiter = market.client("H"), market.client("W")
    first = market.start(holder, market.buy(holder, held, 1, 60.0))
    market.run(0.05)
    second = market.start(waiter, market.buy(waiter, "ab", 1))
    market.run(0.3)
    kept = "a" if held == "b" else "b"
    assert market.is_kept(kept, "W")
    return market, waiter, first, second


def start_single(market: Market, name: str) -> Process:
    client = market.client("S")
    process = market.start(client, market.buy(client, name, 1))
    market.run(0.05)
    return process


@pytest.mark.parametrize("held", ["a", "b"])
def test_a_kept_name_is_nobodys_until_all_of_them_are_free(held: str) -> None:
    market, waiter, _, process = waiting(held)
    assert not machine_of(waiter).registry.holds
    market.run(5)
    assert market.is_kept("a" if held == "b" else "b", "W"), "its presence makes it last"
    machine_of_holder = next(machine for machine in market.machines if machine.name == "H")
    machine_of_holder.crash()  # its lease ends after its ttl
    market.run(31)
    process.outcome()
    assert market.world.keys() == []
    market.end()


ENDS: dict[str, tuple[Callable[[Market, Machine, Process], None], float]] = {
    # How its wait ends, and within which time the kept name must be free for another waiter.
    "is cancelled": (lambda market, machine, process: process.cancel(), 0.01),
    "crashes": (lambda market, machine, process: machine.crash(), 0.51),
    "freezes": (lambda market, machine, process: machine.pause(), 1.6),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_kept_for_a_waiter_is_free_soon_after_it(end: str) -> None:
    market, waiter, _, process = waiting()
    single = start_single(market, "a")
    strike, bound = ENDS[end]
    strike(market, machine_of(waiter), process)
    assert market.until(lambda: single.done, bound + 0.01) <= bound
    single.outcome()
    market.end()


def test_a_frozen_waiter_starts_anew_and_takes_nothing_from_the_next_holder() -> None:
    market, waiter, _, process = waiting()
    machine_of(waiter).pause()
    single = start_single(market, "a")
    market.until(lambda: single.done, 1.7)
    machine_of(waiter).resume()
    market.until(lambda: market.is_kept("a", "W"), 1)
    assert not process.done
    market.end()


def test_a_kept_name_gives_way_to_an_earlier_arrival() -> None:
    """Else each of two waiters could keep what the other needs: here the first one lost its subscriber for a moment."""
    market = Market("")
    holder = market.client("H")
    market.start(holder, market.buy(holder, "ab", 1, 1.0))
    market.run(0.01)
    first, second = market.client("V"), market.client("W")
    processes = []
    for client in (first, second):
        processes.append(market.start(client, market.buy(client, "ab", 1)))
        market.run(0.2)
    arrivals = {token.decode()[0]: score for token, score in market.queue("a").items()}
    assert arrivals == {token.decode()[0]: score for token, score in market.queue("b").items()}
    assert arrivals["V"] < arrivals["W"]
    earlier, later = sorted(market.queue("a"), key=lambda token: token.decode()[0])
    market.until(lambda: market.is_kept("a", "V"), 2)
    for name, token in (("a", later), ("b", earlier)):
        market.world.execute(Command(("SET", name, token.decode(), "PX", "1500")))
    served = market.until(lambda: all(process.done for process in processes), 2)
    assert served < 1
    assert market.waits[1] > market.waits[2], "the one that came first was served first"
    market.end()


def test_a_waiter_that_was_struck_off_in_one_queue_arrives_anew_in_all() -> None:
    market, _, _, process = waiting()
    (token,) = market.queue("b")
    single = start_single(market, "b")
    before = market.queue("a")[token]
    market.world.execute(Command(("ZREM", key("b", "queue").decode(), token.decode())))
    market.until(lambda: token in market.queue("b"), 0.6)
    assert market.queue("a")[token] == market.queue("b")[token] > before
    assert min(market.queue("b"), key=market.queue("b").__getitem__) != token, "the other waiter is before it now"
    assert not process.done
    assert not single.done
    market.end()


@pytest.mark.parametrize("names", ["a", "ac"])
@pytest.mark.parametrize("wait", [0, 0.4])
def test_a_refusal_says_for_whom_a_name_is_reserved(names: str, wait: float) -> None:
    market, _, _, _ = waiting()
    client = market.client("S")

    async def try_it() -> None:
        async with client.lock(*names, wait=wait):
            raise AssertionError("it was reserved")

    process = market.start(client, try_it())
    market.run(1)
    with pytest.raises(holdfast.AcquireTimeout, match="'?(it|a)'? is reserved for W, which also waits") as info:
        process.outcome()
    assert info.value.holder is not None
    assert info.value.holder.host == "W"
    assert info.value.holder.mode == "reserved"
    assert info.value.refused == "a"
    assert info.value.holder.remaining is not None
    assert 0 < info.value.holder.remaining <= 1.5
    market.end()


@pytest.mark.parametrize("end", ENDS)
def test_waiters_for_which_the_keeper_speaks_learn_that_a_kept_name_is_free(end: str) -> None:
    market, waiter, _, process = waiting()
    client = market.client("S")
    machine_of(client).router.crowd.most_alone = 0
    single = market.start(client, market.buy(client, "a", 1))
    market.run(0.05)
    strike, bound = ENDS[end]
    strike(market, machine_of(waiter), process)
    market.until(lambda: single.done, bound + 0.6)
    single.outcome()
    market.end()


FAULTS: dict[str, dict[str, Any]] = {
    "request lost": {"lost": True},
    "reply lost": {"reply_lost": True},
    "late": {"late_us": 700_000},
    "very late": {"late_us": 4_500_000},
    "crash before": {"sender_crashes": "before"},
    "crash after": {"sender_crashes": "after"},
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_message_of_long_waits(fault: str) -> None:
    """Holds of 0.15 s, so that waiters stand in all their queues and names are kept."""
    wants = ("ab", "ba", "a", "bc")

    def crowd() -> Crowd:
        return Crowd(3, wants, cycles=2, hold=0.15)

    plain = crowd()
    plain.finish(10)
    messages = len(plain.world.sent)
    plain.end()
    for number in range(messages):
        struck = crowd()
        struck.doom(at(number, **FAULTS[fault]))
        struck.finish(25)
        struck.end()


def test_a_long_wait_is_served_without_any_notification() -> None:
    crowd = Crowd(5, ("ab", "ba", "a", "b"), cycles=2, hold=0.15)
    crowd.world.fate_of_notification = lambda number: Fate(lost=True)
    crowd.finish(60)


@pytest.mark.parametrize("kept", ["a", "b"])
@pytest.mark.parametrize("queue", [0, 3])
@pytest.mark.parametrize("waited", [0.3, 35.0])
@pytest.mark.parametrize("wants", ["kept", "both"])
def test_a_holder_that_asks_for_a_kept_name_gets_it(kept: str, queue: int, waited: float, wants: str) -> None:
    """Nested locks: H holds what W waits for, and asks for what is kept for W, perhaps behind other waiters."""
    market = Market("")
    holder, waiter = market.client("H"), market.client("W")
    held = "b" if kept == "a" else "a"
    nests: list[float] = []

    async def nest() -> None:
        async with holder.lock(held):
            await market.sleep(holder, waited + 0.2)
            for _ in range(3):
                came = market.world.now_us
                async with holder.lock(kept, *("c" if wants == "both" else "")):
                    nests.append((market.world.now_us - came) / 1e6)

    nested = market.start(holder, nest())
    market.run(0.05)
    process = market.start(waiter, market.buy(waiter, "ab", 1))
    market.run(waited)
    assert market.is_kept(kept, "W")
    others = [market.client(f"s{number}") for number in range(queue)]
    singles = [market.start(client, market.buy(client, kept, 1)) for client in others]
    market.until(lambda: nested.done and process.done, 5)
    nested.outcome()
    process.outcome()
    assert max(nests) < 0.2
    assert not any(single.done for single in singles), "W was before them"
    market.until(lambda: all(single.done for single in singles), 1)
    market.end()


def test_locks_nested_in_sorted_order_form_no_cycle_with_a_waiter() -> None:
    """X1 holds a and waits for b, X2 holds b and asks for c, which is kept for W; W waits for a."""
    market = Market("")
    one, two, waiter = market.client("X1"), market.client("X2"), market.client("W")
    order: list[str] = []

    async def nest(client: holdfast.aio.Client, outer: str, inner: str, pause: float) -> None:
        async with client.lock(outer):
            await market.sleep(client, pause)
            async with client.lock(inner):
                order.append(outer + inner)

    nested = [market.start(one, nest(one, "a", "b", 0.1)), market.start(two, nest(two, "b", "c", 1.0))]
    market.run(0.05)
    process = market.start(waiter, market.buy(waiter, "ac", 1))
    market.run(0.5)
    assert market.is_kept("c", "W")
    market.until(lambda: process.done and all(each.done for each in nested), 0.6)
    for each in (*nested, process):
        each.outcome()
    assert order == ["bc", "ab"]
    market.end()


def test_a_holder_that_waits_in_another_way_is_not_held_up_for_ever() -> None:
    """H waits for another client, which wants what is kept for W, behind three others: the server is not told."""
    market = Market("")
    holder, waiter = market.client("H"), market.client("W")
    other = market.client("O")
    asked: list[Process] = []

    async def wait_for_the_other() -> None:
        async with holder.lock("b"):
            await market.sleep(holder, 0.4)
            while not (asked and asked[0].done):
                await market.sleep(holder, 0.1)

    nested = market.start(holder, wait_for_the_other())
    market.run(0.05)
    process = market.start(waiter, market.buy(waiter, "ab", 1))
    market.run(0.3)
    for number in range(3):
        client = market.client(f"s{number}")
        market.start(client, market.buy(client, "a", 1))
        market.run(0.01)
    asked.append(market.start(other, market.buy(other, "a", 1)))
    market.until(lambda: nested.done and process.done, 60)
    nested.outcome()
    process.outcome()
    market.end()


def test_a_kept_name_is_lent_now_and_then_and_no_place_is_lost() -> None:
    """One hold of it after 2 s, 6 s, 12 s of waiting in all queues."""
    market, _, holder, process = waiting(singles="aa")
    before = market.grants.get("a", 0)
    began = market.world.now_us
    served: list[float] = []
    while market.world.now_us - began < 35e6:
        market.step()
        if market.grants.get("a", 0) > before:
            before = market.grants["a"]
            served.append((market.world.now_us - began) / 1e6)
    assert [round(at) for at in served] == [2, 6, 12, 20, 30]
    holder.cancel()
    market.until(lambda: process.done, 0.6)
    process.outcome()
    market.end()


def test_long_holds_of_both_names_do_not_starve_a_waiter() -> None:
    market = Market("aabb", hold=5.0)
    client = market.client("W")
    process = market.start(client, market.buy(client, "ab", 1))
    market.until(lambda: process.done, 60)
    process.outcome()
    market.end()


def test_a_try_without_waiting_finds_what_was_kept_for_a_killed_waiter_free() -> None:
    market, waiter, _, _ = waiting()
    machine_of(waiter).crash()
    client = market.client("S")
    attempt = market.start(client, client.lock("a").acquire(blocking=False))
    market.run(0.01)
    assert attempt.outcome() is not None
    market.end()


def test_a_kept_name_that_is_given_back_goes_to_the_next_waiter_at_once() -> None:
    """Within its first tenth of a second a waiter stands in one queue. The name that is kept for it there is of no use
    while another name is refused: the next waiter in that queue has it, without asking again."""
    play = Play()
    holder, other, both, next_one = (play.client(name) for name in ("holder", "other", "both", "next"))
    play.start(holder, hold(play, holder, "a", after=0.0, seconds=0.05))
    play.start(both, hold(play, both, "a", "b", after=0.01))
    served = play.start(next_one, hold(play, next_one, "a", after=0.02))
    play.start(other, hold(play, other, "b", after=0.03, seconds=60.0))
    play.run(0.049)
    assert not served.done
    play.run(0.011)
    assert served.done, "the name is free, and its next waiter does not know"


async def hold(play: Play, client: holdfast.aio.Client, *names: str, after: float, seconds: float = 0.0) -> None:
    await play.sleep(client, after)
    async with client.lock(*names):
        await play.sleep(client, seconds)
