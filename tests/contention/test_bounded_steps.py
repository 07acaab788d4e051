"""One step does bounded work, whatever stands in the queue: in the world, where the steps are the same Lua files."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast.aio
from holdfast.lab.servers.store import Store
from holdfast.lab.simulation.process import Process
from holdfast.lab.simulation.world import perform
from holdfast.protocol.effects import Step
from tests.protocol.harness import Play

TTL = 30.0
SEARCHED = 500  # as in lua/include/queue.lua
QUEUE, WAITERS = "a:hf1:queue:{a}", "a:hf1:waiters:{a}"


class Crowded(Play):
    """A holder, and entries that were written into the queue by hand."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.holder = self.client("holder")
        self.waiter = self.client("waiter")

    def call(self, *words: bytes | str | int) -> Any:
        return self.world.store.execute(*words)

    def forge(self, number: int, entry: str, score: str = "") -> None:
        for each in range(number):
            self.call("ZADD", QUEUE, score or each, f"forged{each}")
            self.call("HSET", WAITERS, f"forged{each}", entry)

    def ask(self, client: holdfast.aio.Client, **options: Any) -> Process:
        return self.start(client, client.lock("a", ttl=TTL, **options).acquire())

    def entry(self, *, ago: float = 0.0, ttl: str = "30000", fences: str = "64", channel: str = "no-such") -> str:
        return f"{self.world.store.now_us - round(ago * 1e6)} {ttl} 3600000 {fences} 0 {channel}"


def test_one_step_strikes_off_a_bounded_number_of_stale_entries() -> None:
    play = Crowded()
    play.forge(2 * SEARCHED, play.entry(ago=10))
    first = play.ask(play.holder, wait=0.0)
    play.run(0.01)
    assert first.outcome() is not None, "stale entries keep no newcomer out"
    assert play.call("ZCARD", QUEUE) == play.call("HLEN", WAITERS) == SEARCHED


def test_steps_go_on_until_the_waiter_behind_stale_entries_is_served() -> None:
    play = Crowded()
    held = play.ask(play.holder)
    play.run(0.01)
    play.forge(3 * SEARCHED, play.entry(ago=10))
    waiter = play.ask(play.waiter)
    play.run(0.01)
    assert not waiter.done
    play.start(play.holder, held.outcome().release())
    play.run(0.6)
    assert waiter.done, "its own next step finds the lock free"
    assert waiter.outcome().fence > held.outcome().fence
    play.start(play.waiter, waiter.outcome().release())
    play.run(10)
    assert play.call("EXISTS", QUEUE) == 0


@pytest.mark.parametrize("known", [True, False], ids=["same channel", "a channel each"])
def test_present_entries_without_a_subscriber_do_not_hide_the_waiter_behind_them(known: bool) -> None:
    play = Crowded()
    held = play.ask(play.holder)
    play.run(0.01)
    for each in range(200):
        play.call("ZADD", QUEUE, each, f"forged{each}")
        play.call("HSET", WAITERS, f"forged{each}", play.entry(channel="no-such" if known else f"no-such-{each}"))
    waiter = play.ask(play.waiter)
    play.run(0.05)
    play.start(play.holder, held.outcome().release())
    play.run(0.01)
    assert waiter.done
    assert play.call("ZCARD", QUEUE) == 200, "they are passed over and keep their places"


def test_a_lock_on_several_names_does_not_overtake_the_waiter_behind_them() -> None:
    play = Crowded()
    play.world.tracking = False
    held = play.ask(play.holder)
    play.run(0.01)
    for each in range(40):
        play.call("ZADD", QUEUE, each, f"forged{each}")
        play.call("HSET", WAITERS, f"forged{each}", play.entry())
    waiter = play.ask(play.waiter)
    play.run(0.05)
    play.holder._driver.crash()  # type: ignore[attr-defined]
    play.call("DEL", "a")
    late = play.client("late")
    several = play.start(late, late.lock("a", "b", ttl=TTL, wait=0.0).acquire())
    play.run(0.01)
    assert several.outcome() is None
    assert waiter.outcome().fence > held.outcome().fence


POOLS: dict[str, Any] = {
    "semaphore": lambda client: client.semaphore("a", 1, ttl=TTL),
    "writer": lambda client: client.rwlock("a", ttl=TTL).write,
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_killed_client_with_forty_waiters_does_not_delay_the_next_one_at_a_pool(kind: str) -> None:
    play = Play(seed=1)
    holder, crowd, follower = play.client("holder"), play.client("crowd"), play.client("follower")
    pool = POOLS[kind]
    held = play.start(holder, pool(holder).acquire())
    play.run(0.01)
    for _ in range(40):
        play.start(crowd, pool(crowd).acquire())
    play.run(0.1)
    waiter = play.start(follower, pool(follower).acquire())
    play.run(0.1)
    assert play.world.store.execute("ZCARD", QUEUE) == 42, "and the entry that stands for the pool"
    crowd._driver.crash()  # type: ignore[attr-defined]
    play.start(holder, held.outcome().release())
    play.run(0.01)
    assert waiter.done


def test_a_killed_client_with_forty_waiters_does_not_delay_the_next_one() -> None:
    play = Play(seed=1)
    holder, crowd, follower = play.client("holder"), play.client("crowd"), play.client("follower")
    held = play.start(holder, holder.lock("a", ttl=TTL).acquire())
    play.run(0.01)
    for _ in range(40):
        play.start(crowd, crowd.lock("a", ttl=TTL, cohort=0).acquire())
    play.run(0.1)
    waiter = play.start(follower, follower.lock("a", ttl=TTL).acquire())
    play.run(0.1)
    assert play.world.store.execute("ZCARD", QUEUE) == 41
    crowd._driver.crash()  # type: ignore[attr-defined]
    play.start(holder, held.outcome().release())
    play.run(0.01)
    assert waiter.done


def test_waiters_whose_subscriber_comes_back_keep_their_places() -> None:
    play = Play(seed=1)
    holder, crowd, follower = play.client("holder"), play.client("crowd"), play.client("follower")
    held = play.start(holder, holder.lock("a", ttl=TTL).acquire())
    play.run(0.01)
    first = [play.start(crowd, crowd.lock("a", ttl=TTL, cohort=0).acquire()) for _ in range(20)]
    play.run(0.1)
    waiter = play.start(follower, follower.lock("a", ttl=TTL).acquire())
    play.run(0.1)
    machine: Any = crowd._driver
    play.world.unsubscribe(machine)
    play.start(holder, held.outcome().release())
    play.run(0.001)
    assert waiter.done
    assert play.world.store.execute("ZCARD", QUEUE) == 20
    play.world.subscribe(machine)
    play.start(follower, waiter.outcome().release())
    play.run(0.6)
    assert sum(process.done for process in first) == 1


MALFORMED = {
    "text": "nonsense",
    "no channel": "{now} 30000 3600000 64",
    "no ttl": "{now} 0 3600000 64 bell:waiter",
    "a ttl of millennia": "{now} 99999999999999 3600000 64 bell:waiter",
    "a ttl beyond all numbers": "{now} " + "9" * 400 + " 3600000 64 bell:waiter",
    "a retention of millennia": "{now} 30000 99999999999999 64 bell:waiter",
    "too many fences": "{now} 30000 3600000 9999999999999999 bell:waiter",
    "another kind's wish": "{now} 30000 3600000 n5 bell:waiter",
    "seen in the far future": "9999999999999999 30000 3600000 64 bell:waiter",
}


@pytest.mark.parametrize("entry", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("score", ["0", "-inf", "-1e300", "1e300", "inf"])
def test_an_entry_that_is_not_ours_fails_no_step(entry: str, score: str) -> None:
    play = Crowded()
    held = play.ask(play.holder)
    play.run(0.01)
    play.forge(1, entry.format(now=play.world.store.now_us), score)
    waiter = play.ask(play.waiter)
    play.run(0.1)
    assert waiter.error is None
    release = play.start(play.holder, held.outcome().release())
    play.run(0.6)
    assert release.done
    assert waiter.done
    release.outcome()
    waiter.outcome()


@pytest.mark.parametrize("score", ["9007199254740991", "1e300", "inf"])
def test_a_score_beyond_all_times_keeps_the_order_of_those_who_come(score: str) -> None:
    play = Crowded()
    held = play.ask(play.holder)
    play.run(0.01)
    play.forge(1, play.entry(ago=10), score)
    waiters = []
    for number in range(12):
        client = play.client(f"w{(7 * number) % 12}")  # so that tokens are not in the order of coming
        waiters.append(play.ask(client))
        play.run(0.01)
    play.start(play.holder, held.outcome().release())
    for waiter in waiters:
        play.run(0.15)
        assert waiter.done
        play.start(play.holder, waiter.outcome().release())


@pytest.mark.parametrize("wants", ["abc", "n", "n1x", "ALL", "5"])
def test_a_waiter_of_a_pool_that_wants_nonsense_is_struck_off(wants: str) -> None:
    play = Crowded()
    held = play.start(play.holder, play.holder.semaphore("a", permits=1, ttl=TTL).acquire())
    play.run(0.01)
    play.call("ZADD", QUEUE, 1, "forged")
    play.call("HSET", WAITERS, "forged", play.entry(fences=wants, channel="-"))
    waiter = play.start(play.waiter, play.waiter.semaphore("a", permits=1, ttl=TTL).acquire())
    play.run(0.05)
    play.start(play.holder, held.outcome().release())
    play.run(0.05)
    assert waiter.outcome() is not None
    assert play.call("ZSCORE", QUEUE, "forged") is None


def test_one_step_takes_out_a_bounded_number_of_ended_holders() -> None:
    play = Crowded()
    holders = "a:hf1:holders:{a}"
    number = 3 * SEARCHED
    for each in range(number):
        ended, fence = play.world.store.now_us - 1_000_000, -play.world.store.now_us
        play.call("ZADD", holders, ended, f"forged{each}", each, f"slot forged{each}", fence, f"fence forged{each}")
    play.call("ZADD", QUEUE, 0, "")
    play.call("HSET", WAITERS, "kind", "semaphore")
    attempts = 0
    while True:
        attempt = play.start(play.waiter, play.waiter.semaphore("a", permits=2, ttl=TTL).acquire(blocking=False))
        play.run(0.01)
        attempts += 1
        left = play.call("ZCARD", holders) // 3
        if attempt.outcome() is not None:
            break
        assert left >= number - attempts * (SEARCHED + 50)
        assert attempts < 10
    assert attempts > 2
    assert left == 1


@pytest.mark.parametrize("mode", ["semaphore", "write", "read"])
def test_stale_waiters_keep_no_newcomer_out_of_a_free_pool(mode: str) -> None:
    """However many a killed process has left behind: it does not wait until all of them are removed."""
    play = Crowded()
    play.forge(3 * SEARCHED, play.entry(ago=10, fences="n1" if mode == "semaphore" else "all"))
    play.call("ZADD", QUEUE, "-inf", "")
    play.call("HSET", WAITERS, "kind", "semaphore" if mode == "semaphore" else "rwlock")
    client = play.waiter
    lock = client.semaphore("a", permits=1, ttl=TTL) if mode == "semaphore" else getattr(client.rwlock("a"), mode)
    attempt = play.start(client, lock.acquire(blocking=False))
    play.run(0.01)
    assert attempt.outcome() is not None
    assert play.call("ZCARD", QUEUE) > SEARCHED, "the work of one step stays bounded"
    again = play.start(play.holder, play.holder.rwlock("a").write.acquire(blocking=False)) if mode == "read" else None
    play.run(0.01)
    assert again is None or again.outcome() is None, "what is held is held"


def test_entries_of_the_hash_alone_and_of_the_queue_alone_are_harmless() -> None:
    play = Crowded()
    for each in range(100):
        play.call("HSET", WAITERS, f"lone{each}", play.entry())
        play.call("ZADD", QUEUE, each, f"bare{each}")
    first = play.ask(play.holder, wait=0.0)
    play.run(0.01)
    assert first.outcome() is not None
    assert play.call("ZCARD", QUEUE) == 0


def test_a_look_at_a_latch_strikes_off_a_bounded_number() -> None:
    play = Crowded()
    waiters = "a:hf1:latch:waiters:{a}"
    for each in range(100):
        play.call("ZADD", waiters, each, f"forged{each} no-such")

    async def wait() -> bool:
        return await play.waiter.latch("a", 1).wait(0.3)

    process = play.start(play.waiter, wait())
    play.run(0.2)
    steps = [op for message in play.world.sent for op in message.ops if isinstance(op, Step)]
    looks = sum(step.script == "latch_look" and step.args[2] not in ("", "-") for step in steps)
    assert looks
    assert play.call("ZCARD", waiters) == 100 - 16 * looks + 1
    play.run(1)
    assert process.outcome() is False


def test_a_latch_that_opens_tells_a_bounded_number_of_waiters() -> None:
    store = Store()
    keys = [f"a:hf1:{part}:{{a}}" for part in ("latch", "latch:waiters")] + ["a", QUEUE, WAITERS, "a:hf1:gone:t:{a}"]
    for each in range(1500):
        store.execute("ZADD", keys[1], each, f"forged{each} channel{each}")
    store.execute("ZADD", keys[1], 2000, "a-member-without-a-channel")
    opened = perform(store, Step("latch_count_down", tuple(keys), ("t", "1", "1", "60000", "60000")))
    assert opened == [0, 1]
    assert [channel for channel, _ in store.outbox] == [f"channel{each}".encode() for each in range(501, 1500)]


@pytest.mark.parametrize(("waiters", "told"), [(1000, 1000), (1001, 0)])
def test_a_change_of_a_cached_value_tells_a_bounded_number_of_waiters(waiters: int, told: int) -> None:
    store = Store()
    keys = tuple(f"a:hf1:cache:{part}:{{a}}" for part in ("value", "claim", "waiters", "failure"))
    for each in range(waiters):
        store.execute("HSET", keys[2], f"channel{each}", "token")
    assert perform(store, Step("cache_drop", keys, ())) == 0
    assert len(store.outbox) == told
    assert store.execute("EXISTS", keys[2]) == 0
