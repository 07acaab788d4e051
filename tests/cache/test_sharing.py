"""What those of one process share, and what each must find out for itself: values, failures, and a server's silence."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis

import holdfast
from holdfast.lab.simulation.process import Process
from holdfast.lab.simulation.world import Fate
from tests.cache.test_simulated import CLAIM, KEY, VALUE, Storm
from tests.servers import Server
from tests.support import eventually

SILENCE = 5.0  # for so long a server may be silent: the client's timeout


class Weather(Storm):
    """A storm whose callers come one by one, and whose computations may fail."""

    def __init__(self, machines: int, **options: Any) -> None:
        super().__init__(0, (0,) * machines, **options)
        self.broken: set[int] = set()  # which computations fail

    def come(self, machine: int = 0, **options: Any) -> Process:
        client = self.clients[machine]
        asked = client.get_or_compute(KEY, lambda: self.compute(client), **{**self.options, **options})
        process = self.start(client, asked)
        self.processes.append(process)
        return process

    async def compute(self, client: holdfast.aio.Client) -> int:
        number = await super().compute(client)
        if number in self.broken:
            raise LookupError(number)
        return number


@pytest.mark.parametrize("fault", ["hung", "down"])
def test_a_silent_server_is_tried_for_all_together_and_not_by_one_after_the_other(fault: str) -> None:
    weather = Weather(1)
    weather.come()
    weather.finish(1.0)
    setattr(weather.world, fault, True)
    waiting = [weather.come() for _ in range(20)]
    weather.run(2 * SILENCE + CLAIM)
    assert all(process.done for process in waiting)
    errors = [process.error for process in waiting]
    assert {type(error) for error in errors} == {holdfast.Unavailable}
    assert len({id(error) for error in errors}) == 20, "each has an error of its own"


def test_whoever_has_less_patience_than_the_others_gives_up_alone() -> None:
    weather = Weather(1)
    weather.world.hung = True
    hasty, patient = weather.come(wait=0.3), weather.come()
    weather.run(1.0)
    assert isinstance(hasty.error, holdfast.Unavailable)
    assert not patient.done
    weather.world.resume()
    weather.run(2.0)
    assert patient.outcome() == 1


def test_a_failure_is_not_told_to_somebody_who_came_after_it() -> None:
    """The notification is lost, so the waiter learns of it half a second later; meanwhile another caller has come."""
    weather = Weather(2, cost=0.05)
    weather.broken = {1}
    weather.world.fate_of_notification = lambda number: Fate(lost=True)
    computing = weather.come(0)
    weather.run(0.01)
    waiting = weather.come(1)
    weather.run(0.1)
    assert isinstance(computing.error, LookupError)
    late = weather.come(1)
    weather.run(1.0)
    assert isinstance(waiting.error, holdfast.ComputeFailed)
    assert late.outcome() == 2, "it tries anew"


def test_those_who_came_before_a_failure_share_it_whoever_asked_for_them() -> None:
    weather = Weather(2, cost=0.05)
    weather.broken = {1}
    weather.come(0)
    weather.run(0.01)
    waiting = [weather.come(1)]
    weather.run(0.02)
    waiting += [weather.come(1) for _ in range(5)]
    weather.run(1.0)
    assert [type(process.error) for process in waiting] == [holdfast.ComputeFailed] * 6
    assert weather.begun == 1


def test_a_failure_from_before_an_invalidation_is_not_told_after_it() -> None:
    weather = Weather(2, cost=0.1)
    weather.broken = {1}
    computing = weather.come(0)
    weather.run(0.01)
    weather.start(weather.clients[1], weather.clients[1].invalidate(KEY))
    weather.run(0.01)
    late = weather.come(0)  # in the process that computes, which does not know of the invalidation
    weather.run(1.0)
    assert isinstance(computing.error, LookupError)
    assert late.outcome() == 2


def test_nobody_waits_for_a_computation_that_counts_no_more() -> None:
    """It hangs, and its claim is over: another caller takes over, also in the same process."""
    weather = Weather(2, cost=30.0, max_compute=1.0)
    weather.come(0)
    weather.run(0.5)
    waiting = [weather.come(0), weather.come(0)]
    weather.cost = 0.01
    weather.run(1.0)
    assert [process.outcome() for process in waiting] == [2, 2]


def test_nobody_waits_for_a_computation_that_another_process_has_invalidated() -> None:
    weather = Weather(2, cost=30.0)
    weather.come(0)
    weather.run(0.5)
    waiting = weather.come(0)
    weather.cost = 0.01
    weather.start(weather.clients[1], weather.clients[1].invalidate(KEY))
    weather.run(0.1)
    assert waiting.outcome() == 2


@pytest.mark.parametrize("wait", [None, 0.05], ids=["another waits", "another gives up"])
def test_a_notification_reaches_every_caller_of_a_process_that_waits(wait: float | None) -> None:
    """An invalidation lets a later caller of the same process ask for itself, beside the one that waits already."""
    weather = Weather(3, cost=30.0)
    weather.come(0)
    weather.run(0.01)
    early = weather.come(1)
    weather.run(0.01)
    weather.machines[0].crash()
    weather.world.fate_of_notification = lambda number: Fate(lost=True)  # so that the third machine claims the value
    weather.start(weather.clients[1], weather.clients[1].invalidate(KEY))
    weather.run(0.01)
    weather.world.fate_of_notification = lambda number: Fate()
    weather.cost = 0.7
    weather.come(2)
    weather.run(0.57)  # the early one has asked once more, and is the one to be notified
    late = weather.come(1, wait=wait)
    weather.run(0.14)
    assert early.outcome() == 2, "it was notified, and did not have to ask again by itself"
    assert isinstance(late.error, holdfast.ComputeTimeout) if wait else late.outcome() == 2


def test_a_caller_that_gives_up_leaves_nothing_in_a_shared_call_that_goes_on() -> None:
    weather = Weather(1, cost=5.0)
    weather.come()
    weather.run(0.01)
    for _ in range(20):
        hasty = weather.come(wait=0)
        later = weather.come(wait=0.05)
        weather.run(0.2)
        assert isinstance(hasty.error, holdfast.ComputeTimeout)
        assert isinstance(later.error, holdfast.ComputeTimeout)
    assert weather.clients[0].statistics().cache_callers == {VALUE.decode(): 1}


def test_on_a_full_server_those_of_one_process_share_what_cannot_be_stored(
    client: holdfast.Client, admin: redis.Redis
) -> None:
    computed: list[int] = []
    values: list[Any] = []

    def compute() -> str:
        computed.append(1)
        eventually(lambda: client.statistics().cache_callers == {"k:hf1:cache:value:{k}": 4})
        admin.config_set("maxmemory", "1mb")
        return "value" * 1000

    try:
        threads = [
            threading.Thread(target=lambda: values.append(client.get_or_compute("k", compute))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        admin.config_set("maxmemory", 0)
    assert values == ["value" * 1000] * 4
    assert len(computed) == 1


@pytest.mark.parametrize("options", [{"early": 100}, {"stale": 60}], ids=["early", "stale"])
def test_a_full_server_still_serves_what_is_there(
    client: holdfast.Client, admin: redis.Redis, options: dict[str, Any]
) -> None:
    """A value is to be refreshed, and there is no memory for the claim: that is no reason to withhold it."""
    assert client.get_or_compute("k", lambda: "value", ttl=60, **options) == "value"
    admin.hset("k:hf1:cache:value:{k}", mapping={"cost": 10**12} if "early" in options else {"fresh": 1})
    admin.config_set("maxmemory", "1mb")
    try:
        assert client.get_or_compute("k", lambda: "new", ttl=60, **options) == "value"
    finally:
        admin.config_set("maxmemory", 0)
    assert client.get_or_compute("k", lambda: "new", ttl=60, **options) == "new"


@pytest.mark.parametrize("errors", [0.0, 60.0], ids=["value", "failure"])
def test_keys_that_were_damaged_by_hand_count_as_missing(
    client: holdfast.Client, admin: redis.Redis, errors: float
) -> None:
    value, failure = "k:hf1:cache:value:{k}", "k:hf1:cache:failure:{k}"
    damages: list[Callable[[], object]] = [
        lambda: admin.hset(value, "value", b"\xff\xfe{"),
        lambda: admin.hset(value, "fresh", "soon"),
        lambda: admin.hdel(value, "cost"),
        lambda: (admin.delete(value), admin.set(value, "text")),
        lambda: (admin.delete(value), admin.set(failure, "why?")),
    ]
    for number, damage in enumerate(damages):
        assert client.get_or_compute("k", partial(int, number), errors=errors) == number
        damage()
        assert client.get_or_compute("k", partial(int, number + 1), errors=errors) == number + 1
        assert client.get_or_compute("k", lambda: -1, errors=errors) == number + 1, "it was stored"


def test_a_value_that_cannot_be_loaded_is_logged_once_for_each_key_and_client(
    client: holdfast.Client, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def read_all(reader: holdfast.Client) -> None:
        for key in ("one", "two", "one"):
            client.get_or_compute(key, lambda: "secret", serializer=pickle)
            client.invalidate(key)
            client.get_or_compute(key, lambda: "secret", serializer=pickle)
            assert reader.get_or_compute(key, lambda: 1) == 1
            client.invalidate(key)

    with holdfast.connect(server.url) as other:
        read_all(client)
        read_all(other)
    said = [record.getMessage() for record in caplog.records]
    assert [re.findall("'(.*?)'", text) for text in said] == [["one"], ["two"]] * 2
    assert all("(UnicodeDecodeError)" in text and "serializer" in text and "secret" not in text for text in said)
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_what_cannot_be_read_back_is_not_stored(client: holdfast.Client, admin: redis.Redis) -> None:
    class OneWay:
        dumps = staticmethod(repr)

        @staticmethod
        def loads(data: bytes) -> Any:
            raise ValueError("what is this?")

    with pytest.raises(ValueError, match="what is this") as caught:
        client.get_or_compute("k", lambda: 1, serializer=OneWay())
    assert "'k'" in caught.value.__notes__[0]
    assert not admin.exists("k:hf1:cache:value:{k}")
    assert client.get_or_compute("k", lambda: 1) == 1
