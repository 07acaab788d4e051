"""What a cached value is, in the simulated world, under asyncio and with threads: one suite for all three."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import until

pytestmark = pytest.mark.needs("get_or_compute")


class Source:
    """Something slow, which counts how often it was asked."""

    def __init__(self, api: Any, cost: float = 0.02) -> None:
        self.api = api
        self.cost = cost
        self.asked = 0
        self.held: set[int] = set()  # those of its computations that are not to end yet
        self.value: Any = None
        self.broken: Exception | None = None

    async def __call__(self) -> Any:
        self.asked += 1
        number = self.asked
        await self.api.sleep(self.cost)
        await until(self.api, lambda: number not in self.held)
        if self.broken is not None:
            raise self.broken
        return {"number": number} if self.value is None else self.value


async def together(api: Any, *calls: Callable[[], Any]) -> list[Any]:
    return [await handle.join() for handle in [api.spawn(call) for call in calls]]


def test_it_is_computed_once_and_then_found(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        for client in (one, two, one):
            assert await client.get_or_compute("k", source, ttl=60) == {"number": 1}
        assert source.asked == 1
        assert await one.get_or_compute("other", source, ttl=60) == {"number": 2}

    play(scenario)


def test_those_who_come_meanwhile_wait_for_the_value(play: Any) -> None:
    async def scenario(api: Any) -> tuple[list[Any], int]:
        clients = [api.client() for _ in range(3)]
        source = Source(api, 0.1)
        calls = [lambda client=client: client.get_or_compute("k", source) for client in clients for _ in range(4)]
        return await together(api, *calls), source.asked

    values, asked = play(scenario)
    assert values == [{"number": 1}] * 12
    assert asked == 1


def test_a_value_ends_with_its_ttl(play: Any) -> None:
    async def scenario(api: Any) -> list[int]:
        client = api.client()
        source = Source(api, 0.0)
        seen = []
        for _ in range(3):
            seen.append((await client.get_or_compute("k", source, ttl=0.15))["number"])
            await api.sleep(0.2)
        await client.get_or_compute("k", source, ttl=60)
        assert 0 < await api.raw("PTTL", "k:hf1:cache:value:{k}") <= 60_000
        return seen

    assert play(scenario) == [1, 2, 3]


def test_none_is_a_value_and_so_is_everything_that_is_false(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        values: tuple[Any, ...] = (None, False, 0, "", [], {}, b"")
        for value in values:
            asked = 0

            async def compute(value: Any = value) -> Any:
                nonlocal asked
                asked += 1
                return value

            key = f"k-{value!r:.4}".replace("{", "(").replace("}", ")")
            for _ in range(3):
                found = await client.get_or_compute(key, compute)
                assert found == value
                assert type(found) is type(value)
            assert asked == 1

    play(scenario)


def test_values_come_back_as_they_were(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        for number, value in enumerate(["é \0 \ud800 漢", b"\x00\xff\r\n", 1.5, {"a": [1, None]}, "x" * 300_000]):

            async def compute(value: Any = value) -> Any:
                return value

            for _ in range(2):
                assert await client.get_or_compute(f"k{number}", compute) == value

    play(scenario)


def test_whoever_computed_it_gets_it_as_everybody_else_does(play: Any) -> None:
    async def scenario(api: Any) -> list[Any]:
        client = api.client()

        async def compute() -> Any:
            return {1: (2, 3)}

        return [await client.get_or_compute("k", compute) for _ in range(2)]

    assert play(scenario) == [{"1": [2, 3]}] * 2


def test_each_caller_has_a_value_of_its_own(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api, 0.05)
        one, two = await together(api, *[lambda: client.get_or_compute("k", source)] * 2)
        one["number"] = "changed"
        assert two == {"number": 1}

    play(scenario)


def test_another_serializer_can_be_given(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def compute() -> Any:
            return {1: (2, {3})}

        for _ in range(2):
            assert await client.get_or_compute("k", compute, serializer=pickle) == {1: (2, {3})}

    play(scenario)


def test_what_cannot_be_written_is_the_computers_error_and_leaves_nothing(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def compute() -> Any:
            return {1, 2}

        with pytest.raises(TypeError) as caught:
            await client.get_or_compute("k", compute)
        assert "'k', which is of type set." in caught.value.__notes__[0]
        assert "serializer=" in caught.value.__notes__[0]
        assert await client.get_or_compute("k", Source(api)) == {"number": 1}

    play(scenario)


def test_a_value_that_cannot_be_loaded_is_computed_once_more(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        await one.get_or_compute("k", Source(api), serializer=pickle)
        source = Source(api)
        clients = [one, two, one, two]
        found = await together(api, *(lambda client=client: client.get_or_compute("k", source) for client in clients))
        assert found == [{"number": 1}] * 4
        assert source.asked == 1
        assert await two.get_or_compute("k", source, wait=0) == {"number": 1}
        await one.get_or_compute("k", Source(api), serializer=pickle)  # which cannot load JSON
        assert await one.get_or_compute("k", source, wait=0) == {"number": 2}

    play(scenario)


def test_an_old_value_that_cannot_be_loaded_is_not_served(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        options: dict[str, Any] = {"ttl": 0.05, "stale": 60}
        await one.get_or_compute("k", Source(api), serializer=pickle, **options)
        await api.sleep(0.1)
        source = Source(api)
        source.broken = LookupError("no such user")
        with pytest.raises(LookupError):
            await one.get_or_compute("k", source, **options)
        source.broken = None
        calls = [lambda client=client: client.get_or_compute("k", source, stale=60) for client in (one, two, one)]
        assert await together(api, *calls) == [{"number": 2}] * 3

    play(scenario)


def test_a_cached_function_is_called_again_if_its_value_cannot_be_loaded(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        @client.cached("double:{x}")
        async def double(x: int) -> int:
            return 2 * x

        async def other() -> Any:
            return b"\xff"

        await client.get_or_compute(double.key(2), other, serializer=pickle)
        assert await double(2) == 4

    play(scenario)


def test_a_namespace_is_in_front_of_every_key(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client, other = api.client(namespace="app:"), api.client()
        source = Source(api)
        await client.get_or_compute("k", source)
        assert await api.raw("EXISTS", "app:k:hf1:cache:value:{app:k}") == 1
        assert await other.get_or_compute("k", source) == {"number": 2}
        assert await other.get_or_compute("app:k", source) == {"number": 1}

    play(scenario)


def test_a_lock_of_the_same_name_is_another_thing(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        ran = []

        @client.exclusive("k")
        async def work() -> None:
            ran.append(await client.get_or_compute("k", Source(api)))

        await work()
        assert ran == [{"number": 1}]
        assert await api.raw("EXISTS", "k") == 0

    play(scenario)


def test_a_stored_value_leaves_nothing_else_behind(play: Any) -> None:
    async def scenario(api: Any) -> Any:
        one, two = api.client(), api.client()
        source = Source(api, 0.05)
        await together(api, *[lambda client=client: client.get_or_compute("k", source) for client in (one, two)])
        return await api.raw("KEYS", "*")

    assert play(scenario) == [b"k:hf1:cache:value:{k}"]


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failure_is_raised_as_it_is_and_the_next_caller_tries_again(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api)
        source.broken = KeyError("user 42")
        with pytest.raises(KeyError):
            await client.get_or_compute("k", source)
        source.broken = None
        assert await client.get_or_compute("k", source) == {"number": 2}

    play(scenario)


def test_those_who_waited_share_the_failure_instead_of_trying_in_turn(play: Any) -> None:
    async def scenario(api: Any) -> tuple[list[Any], int]:
        clients = [api.client() for _ in range(3)]
        source = Source(api)
        source.broken = ValueError("no such user")
        source.held = {1}
        outcomes: list[Any] = []

        async def call(client: Any) -> None:
            try:
                await client.get_or_compute("k", source)
            except Exception as error:
                outcomes.append(error)

        async def all_wait() -> bool:
            callers = [client.statistics().cache_callers.get("k:hf1:cache:value:{k}") for client in clients]
            waiters = await api.raw("HLEN", "k:hf1:cache:waiters:{k}")  # one for each process that does not compute
            return callers == [3, 3, 3] and waiters >= 2

        calls = [api.spawn(lambda client=client: call(client)) for client in clients for _ in range(3)]
        await until(api, all_wait)
        source.held.clear()
        for handle in calls:
            await handle.join()
        return outcomes, source.asked

    outcomes, asked = play(scenario)
    assert asked == 1
    assert sorted(type(error).__name__ for error in outcomes) == ["ComputeFailed"] * 8 + ["ValueError"]
    told = [error for error in outcomes if isinstance(error, holdfast.ComputeFailed)]
    assert {(error.name, error.kind, error.message) for error in told} == {("k", "ValueError", "no such user")}
    assert sum(isinstance(error.__cause__, ValueError) for error in told) == 2, "those in the computer's own process"


def test_a_failure_can_be_remembered_for_a_moment(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api, 0.0)
        source.broken = ConnectionError("the database is down")
        with pytest.raises(ConnectionError):
            await one.get_or_compute("k", source, errors=60)
        for client in (one, two):
            with pytest.raises(holdfast.ComputeFailed, match="'k'.*ConnectionError: the database is down"):
                await client.get_or_compute("k", source)
        assert source.asked == 1
        with pytest.raises(ConnectionError):
            await one.get_or_compute("soon", source, errors=0.05)
        source.broken = None
        await api.sleep(0.1)
        assert await two.get_or_compute("soon", source) == {"number": 3}

    play(scenario)


def test_a_long_message_is_cut_and_an_odd_one_does_no_harm(play: Any) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    async def scenario(api: Any) -> None:
        client = api.client()
        for number, broken in enumerate([ValueError("x" * 10_000), ValueError("a\n\0\ud800b"), Odd()]):
            source = Source(api)
            source.broken = broken
            with pytest.raises(type(broken)):
                await client.get_or_compute(f"k{number}", source, errors=5)
            with pytest.raises(holdfast.ComputeFailed) as caught:
                await client.get_or_compute(f"k{number}", source)
            assert len(caught.value.message) <= 1000
        assert caught.value.kind.endswith("Odd")

    play(scenario)


# ---- old values ----------------------------------------------------------------------------------------------------


def test_an_old_value_is_served_while_one_caller_computes_the_new_one(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api, 0.0)
        options: dict[str, Any] = {"ttl": 0.1, "stale": 60}
        await one.get_or_compute("k", source, **options)
        await api.sleep(0.15)
        source.held = {2}
        refreshing = api.spawn(lambda: one.get_or_compute("k", source, ttl=60))
        await until(api, lambda: source.asked == 2)
        for client in (one, two, one, two):
            assert await client.get_or_compute("k", source, **options) == {"number": 1}
        assert source.asked == 2
        source.held.clear()
        assert await refreshing.join() == {"number": 2}, "the caller that refreshes gets the new value"
        assert await two.get_or_compute("k", source, **options) == {"number": 2}

    play(scenario)


def test_a_value_older_than_stale_is_gone(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api, 0.0)
        await client.get_or_compute("k", source, ttl=0.05, stale=0.1)
        await api.sleep(0.2)
        assert await api.raw("KEYS", "*") == []
        assert await client.get_or_compute("k", source, ttl=0.05, stale=0.1) == {"number": 2}

    play(scenario)


def test_a_failed_refresh_serves_the_old_value_and_says_so(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api, 0.0)
        options: dict[str, Any] = {"ttl": 0.05, "stale": 60, "errors": 60}
        await one.get_or_compute("k", source, **options)
        await one.get_or_compute("soon", source, **options)
        await api.sleep(0.1)
        source.broken = ConnectionError("the database is down")
        for client in (one, two, one):
            assert await client.get_or_compute("k", source, **options) == {"number": 1}
        assert source.asked == 3, "no caller tries while the failure is remembered"
        options["errors"] = 0.05
        assert await one.get_or_compute("soon", source, **options) == {"number": 2}
        source.broken = None
        await api.sleep(0.1)
        assert await two.get_or_compute("soon", source, **options) == {"number": 5}

    play(scenario)
    assert [re.findall("'(.*?)'", record.getMessage())[0] for record in caplog.records] == ["k", "soon"]
    assert all(record.exc_info for record in caplog.records)


def test_early_refresh_comes_before_the_time_and_costs_nobody_else_anything(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api, 0.05)
        await client.get_or_compute("k", source, ttl=60)
        for _ in range(20):
            await client.get_or_compute("k", source, ttl=60, early=1)
        assert source.asked == 1, "a minute before its time, 50 ms of work are no reason"
        await api.raw("HSET", "k:hf1:cache:value:{k}", "cost", 10**12)
        assert await client.get_or_compute("k", source, ttl=60) == {"number": 1}, "not unless asked for"
        source.held = {2}
        refreshing = api.spawn(lambda: client.get_or_compute("k", source, ttl=60, early=50))
        await until(api, lambda: source.asked == 2)
        assert await client.get_or_compute("k", source, ttl=60, early=50) == {"number": 1}
        source.held.clear()
        assert await refreshing.join() == {"number": 2}

    play(scenario)


# ---- waiting, invalidating -----------------------------------------------------------------------------------------


def test_max_compute_may_be_shorter_than_the_claim(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        source.held = {1}
        hanging = api.spawn(lambda: one.get_or_compute("k", source, compute_ttl=60, max_compute=0.3))
        await until(api, lambda: source.asked == 1)
        for client in (one, two):  # in the same process, and in another
            assert await client.get_or_compute("k", source, wait=20) == {"number": 2}
        source.held.clear()
        assert await hanging.join() == {"number": 1}

    play(scenario)


@pytest.mark.parametrize("wait", [0, 1])
def test_patience_ends_with_compute_timeout(play: Any, wait: float) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        source.held = {1}
        computing = api.spawn(lambda: one.get_or_compute("k", source))
        await until(api, lambda: source.asked == 1)
        for client in (one, two):
            with pytest.raises(holdfast.ComputeTimeout, match="'k'") as caught:
                await client.get_or_compute("k", source, wait=wait)
            assert isinstance(caught.value, TimeoutError)
        source.held.clear()
        assert await computing.join() == {"number": 1}
        for client in (one, two):
            assert await client.get_or_compute("k", source, wait=0) == {"number": 1}

    play(scenario)


def test_invalidate_forgets_the_value(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        assert await one.invalidate("k") is False
        await one.get_or_compute("k", source)
        assert await two.invalidate("k") is True
        assert await one.get_or_compute("k", source) == {"number": 2}

    play(scenario)


def test_what_was_begun_before_an_invalidation_is_not_stored_after_it(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        source.held = {1, 2}
        computing = api.spawn(lambda: one.get_or_compute("k", source))
        await until(api, lambda: source.asked == 1)
        await two.invalidate("k")
        again = api.spawn(lambda: two.get_or_compute("k", source))
        await until(api, lambda: source.asked == 2)
        source.held.remove(1)
        assert await computing.join() == {"number": 1}, "it asked before, and gets what it has computed"
        later = api.spawn(lambda: one.get_or_compute("k", source))
        await api.sleep(0.1)
        source.held.remove(2)
        assert await later.join() == await again.join() == {"number": 2}

    play(scenario)


def test_whoever_asks_after_an_invalidation_gets_nothing_older(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api, 0.2)
        first = api.spawn(lambda: client.get_or_compute("k", source))
        second = api.spawn(lambda: client.get_or_compute("k", source))
        await until(api, lambda: source.asked == 1)
        await client.invalidate("k")
        assert (await client.get_or_compute("k", source))["number"] > 1
        assert {(await first.join())["number"], (await second.join())["number"]} <= {1, 2}

    play(scenario)


def test_whoever_asks_after_an_invalidation_does_not_wait_for_what_counts_no_more(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        source = Source(api)
        source.held = {1}
        ended = []

        async def first() -> None:
            ended.append(await client.get_or_compute("k", source))

        computing = api.spawn(first)
        await until(api, lambda: source.asked == 1)
        await client.invalidate("k")
        assert await client.get_or_compute("k", source) == {"number": 2}
        assert not ended
        source.held.clear()
        await computing.join()

    play(scenario)


def test_a_computation_that_asks_for_itself_is_told_so(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        async def compute() -> Any:
            return await client.get_or_compute("k", compute)

        with pytest.raises(holdfast.InvalidConfig, match="wait for itself"):
            await client.get_or_compute("k", compute)
        assert await client.get_or_compute("k", Source(api)) == {"number": 1}

    play(scenario)


def test_a_computation_may_ask_for_other_values(play: Any) -> None:
    async def scenario(api: Any) -> Any:
        client = api.client()

        async def outer() -> Any:
            return [await client.get_or_compute("inner", Source(api)), "outer"]

        return await client.get_or_compute("outer", outer)

    assert play(scenario) == [{"number": 1}, "outer"]


def test_a_long_computation_keeps_its_claim(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api, 3.0)
        computing = api.spawn(lambda: one.get_or_compute("k", source, compute_ttl=2))
        await until(api, lambda: source.asked == 1)
        assert await two.get_or_compute("k", source) == {"number": 1}
        assert await computing.join() == {"number": 1}

    play(scenario)


def test_a_computation_that_hangs_is_replaced_after_max_compute(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        source = Source(api)
        source.held = {1}
        hanging = api.spawn(lambda: one.get_or_compute("k", source, compute_ttl=1, max_compute=1.5))
        await until(api, lambda: source.asked == 1)
        assert await two.get_or_compute("k", source) == {"number": 2}
        source.held.clear()
        assert await hanging.join() == {"number": 1}, "it has computed that, but too late for other callers"
        assert await one.get_or_compute("k", source) == {"number": 2}

    play(scenario)


# ---- the decorator -------------------------------------------------------------------------------------------------


def test_cached_names_calls_by_their_arguments(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        calls: list[Any] = []

        @client.cached("user:{user_id}:{lang}", ttl=60)
        async def load(user_id: int, lang: str = "en", *, verbose: bool = False) -> Any:
            """Load a user."""
            calls.append((user_id, lang))
            return [user_id, lang]

        assert load.__name__ == "load"
        assert load.__doc__ == "Load a user."
        assert await load(1) == await load(user_id=1) == await load(1, "en") == await load(1, verbose=True) == [1, "en"]
        assert await load(1, "de") == [1, "de"]
        assert calls == [(1, "en"), (1, "de")]
        assert load.key(1) == "user:1:en"
        assert await load.invalidate(1) is True
        assert await load.invalidate(lang="en", user_id=1) is False
        await load(1)
        await load(1, "de")
        assert calls == [(1, "en"), (1, "de"), (1, "en")]
        assert await client.get_or_compute("user:1:de", Source(api)) == [1, "de"]

    play(scenario)


def test_cached_methods(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        class Shop:
            tenant = "acme"
            asked = 0

            @client.cached("price:{self.tenant}:{item}")
            async def price(self, item: str) -> int:
                self.asked += 1
                return len(item)

        shop = Shop()
        assert await shop.price("tea") == await shop.price(item="tea") == 3
        assert shop.asked == 1
        assert Shop.price.key(shop, "tea") == "price:acme:tea"
        await Shop.price.invalidate(shop, "tea")
        await shop.price("tea")
        assert shop.asked == 2

    play(scenario)


def test_a_wrong_call_of_a_cached_function_is_a_type_error(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        @client.cached("user:{user_id}")
        async def load(user_id: int) -> int:
            return user_id

        for args, kwargs in [((), {}), ((1, 2), {}), ((), {"other": 1})]:
            with pytest.raises(TypeError):
                await load(*args, **kwargs)
        with pytest.raises(TypeError, match="user_id"):
            load.key()

    play(scenario)


# ---- exclusive -----------------------------------------------------------------------------------------------------


class Report:
    """A function that runs until a number of other calls were refused, and counts how many run at once."""

    def __init__(
        self, api: Any, client: Any, name: str = "report:{user_id}", *, turned_away: int = 0, **options: Any
    ) -> None:
        self.running = self.most = self.done = 0
        self.ended: list[Any] = []  # what the calls have come to

        @client.exclusive(name, **options)
        async def run(user_id: int) -> str:
            self.running += 1
            self.most = max(self.most, self.running)
            await api.sleep(0.05)
            await until(api, lambda: len(self.ended) >= turned_away)
            self.running -= 1
            self.done += 1
            return f"report of {user_id}"

        self.run = run


async def outcomes_of(api: Any, report: Report, *users: int) -> list[Any]:
    async def outcome(user: int) -> Any:
        came: Any = None
        try:
            came = await report.run(user)
        except holdfast.HoldfastError as error:
            came = type(error)
        finally:
            report.ended.append(came)
        return came

    return await together(api, *[lambda user=user: outcome(user) for user in users])


def test_exclusive_raises_when_it_is_busy(play: Any) -> None:
    async def scenario(api: Any) -> None:
        report = Report(api, api.client(), turned_away=2)
        got = await outcomes_of(api, report, 1, 1, 1, 2)
        assert sorted(map(str, got[:3])) == sorted(map(str, ["report of 1", *[holdfast.AcquireTimeout] * 2]))
        assert got[3] == "report of 2", "another name"
        assert await report.run(1) == "report of 1"

    play(scenario)


def test_exclusive_skips_when_it_is_busy(play: Any) -> None:
    async def scenario(api: Any) -> None:
        report = Report(api, api.client(), "all", turned_away=2, busy="skip")
        assert sorted(await outcomes_of(api, report, 1, 1, 1), key=str) == [holdfast.SKIPPED] * 2 + ["report of 1"]
        report = Report(api, api.client(), "all", turned_away=1, busy="skip", default=None)
        assert sorted(await outcomes_of(api, report, 1, 1), key=str) == [None, "report of 1"]
        report = Report(api, api.client(), "all", turned_away=1, busy="skip", default="busy")
        assert sorted(await outcomes_of(api, report, 1, 1)) == ["busy", "report of 1"]

    play(scenario)


def test_exclusive_waits_when_it_is_busy(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        for options in ({"busy": "wait"}, {"wait": 30}, {"busy": "skip", "wait": None}):
            report = Report(api, client, **options)
            assert await outcomes_of(api, report, 1, 1, 1) == ["report of 1"] * 3
            assert report.most == 1
        report = Report(api, client, turned_away=1, busy="wait", wait=0.05)
        assert holdfast.AcquireTimeout in await outcomes_of(api, report, 1, 1)

    play(scenario)


def test_a_busy_lock_within_the_function_is_not_taken_for_its_own(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        @client.exclusive("inner")
        async def inner() -> None:
            await inner()

        @client.exclusive("outer", busy="skip")
        async def outer() -> None:
            await inner()

        with pytest.raises(holdfast.AcquireTimeout, match="'inner'"):
            await outer()

    play(scenario)


def test_exclusive_gives_the_lock_back_whatever_the_function_does(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        @client.exclusive("a", ttl=30)
        async def fail() -> None:
            assert await api.raw("PTTL", "a") > 29_000
            raise LookupError

        for _ in range(2):
            with pytest.raises(LookupError):
                await fail()
        assert await api.raw("EXISTS", "a") == 0

    play(scenario)


def test_exclusive_says_when_the_lock_was_lost_meanwhile(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()

        @client.exclusive("a", ttl=1)
        async def work() -> str:
            await api.raw("DEL", "a")
            await api.sleep(1.5)
            return "done"

        with pytest.raises(holdfast.LeaseLost, match="'a'"):
            await work()

    play(scenario)
