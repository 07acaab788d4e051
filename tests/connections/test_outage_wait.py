"""``outage_wait`` of a client, a URL and a lock: defaults, precedence, and what is refused. Nothing is contacted."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

import holdfast
import holdfast.aio

DEFAULTS: dict[str, float | None] = {
    "local:///tmp/x": 2.0,
    "redis://localhost/0": 2.0,
    "rediss://localhost": 2.0,
    "unix:///tmp/redis.sock": 2.0,
    "valkey://localhost": 2.0,
    "memcached://localhost": 2.0,
    "redis+sentinel://h1:26379,h2:26379/mymaster/0": None,
    "redis+cluster://h1:7000,h2:7001": None,
    "etcd://h1:2379,h2:2379": None,
}


@pytest.fixture(params=[holdfast, holdfast.aio], ids=["blocking", "aio"])
def face(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


def in_force(face: ModuleType, target: Any, of_lock: dict[str, Any] | None = None, **options: Any) -> float | None:
    """The ``outage_wait`` of a lock."""
    found: float | None = face.connect(target, **options).lock("x", **(of_lock or {}))._options.outage_wait
    return found


def with_option(url: str, option: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{option}"


@pytest.mark.parametrize("url", DEFAULTS)
def test_the_engine_has_a_default_which_url_client_and_lock_override(face: ModuleType, url: str) -> None:
    assert in_force(face, url) == DEFAULTS[url]
    assert in_force(face, with_option(url, "outage_wait=0.5")) == 0.5
    assert in_force(face, with_option(url, "outage_wait=none")) is None
    assert in_force(face, with_option(url, "outage_wait=0.5"), outage_wait=7) == 7
    assert in_force(face, with_option(url, "outage_wait=0.5"), outage_wait=None) is None
    assert in_force(face, url, {"outage_wait": 0}, outage_wait=7) == 0
    assert in_force(face, url, {"outage_wait": None}, outage_wait=7) is None
    assert in_force(face, url, {"outage_wait": float("inf")}) is None


def test_it_stands_beside_other_options_of_the_url() -> None:
    assert in_force(holdfast, "redis://localhost/0?db=3&outage_wait=1&replicas=1") == 1


def test_an_existing_client_has_the_default_of_its_kind() -> None:
    assert in_force(holdfast, redis.Redis()) == 2.0
    assert in_force(holdfast, Sentinel([("localhost", 26379)]).master_for("mymaster")) is None


@pytest.mark.parametrize("value", [-1, -0.1, float("nan"), True, "1", 1e300, [2]], ids=repr)
def test_what_is_no_number_of_seconds_is_refused_at_once(face: ModuleType, value: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="outage_wait="):
        face.connect("redis://localhost", outage_wait=value)
    with pytest.raises(holdfast.InvalidConfig, match="outage_wait="):
        face.connect("redis://localhost").lock("x", outage_wait=value)


@pytest.mark.parametrize("value", ["", "-1", "x", "nan", "inf", "1e5", "9" * 12])
@pytest.mark.parametrize("url", DEFAULTS)
def test_a_url_with_another_value_is_refused_at_once(url: str, value: str) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="the value of outage_wait cannot be used; give .*, or none"):
        holdfast.connect(with_option(url, f"outage_wait={value}"))
