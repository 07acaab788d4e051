"""The two faces: the same names, the same arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import holdfast.aio
import holdfast.blocking
from holdfast.options import OF_CLIENT, OF_ENGINE

CLASSES = [
    *("Cached", "Client", "Election", "Latch", "Lock", "Locks", "Lease", "Lost", "Permit", "RLease", "RLock", "RWLock"),
    *("ReadLock", "MultiLock", "Recipe", "RecipeLease", "Semaphore", "Terms", "WriteLease", "WriteLock"),
]
OTHER_NAME = {"close": "aclose", "__enter__": "__aenter__", "__exit__": "__aexit__"}
SAID_DIFFERENTLY = {"on_lost", "fn"}  # under asyncio also a str, and a coroutine function


def members(cls: type) -> dict[str, Any]:
    shown = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
    return {
        name: member
        for name, member in inspect.getmembers(cls)
        if (not name.startswith("_") or name in shown) and not inspect.isclass(member)
    }


def test_the_modules_export_the_same() -> None:
    assert holdfast.aio.__all__ == holdfast.blocking.__all__
    for name in holdfast.blocking.__all__:
        assert hasattr(holdfast.aio, name)


@pytest.mark.parametrize("name", CLASSES)
def test_the_classes_have_the_same_members(name: str) -> None:
    blocking = members(getattr(holdfast.blocking, name))
    aio = members(getattr(holdfast.aio, name))
    assert {OTHER_NAME.get(member, member) for member in blocking} == set(aio) - {"close"}  # an alias of aclose
    assert blocking


@pytest.mark.parametrize("name", CLASSES)
def test_the_methods_take_the_same(name: str) -> None:
    aio = members(getattr(holdfast.aio, name))
    for member, method in members(getattr(holdfast.blocking, name)).items():
        twin = aio[OTHER_NAME.get(member, member)]
        if isinstance(method, property):
            assert isinstance(twin, property)
            continue
        assert_same_parameters(method, twin)


@pytest.mark.parametrize("name", ["connect", "lock"])
def test_the_functions_take_the_same(name: str) -> None:
    assert_same_parameters(getattr(holdfast.blocking, name), getattr(holdfast.aio, name))


def assert_same_parameters(method: Any, twin: Any) -> None:
    ours, theirs = inspect.signature(method).parameters, inspect.signature(twin).parameters
    assert list(ours) == list(theirs), method
    for name, parameter in ours.items():
        assert parameter.default == theirs[name].default, (method, name)
        assert parameter.kind == theirs[name].kind, (method, name)
        if name not in SAID_DIFFERENTLY:
            assert parameter.annotation == theirs[name].annotation, (method, name)


@pytest.mark.parametrize("connect", [holdfast.connect, holdfast.aio.connect], ids=["blocking", "asyncio"])
def test_an_option_that_does_not_exist_is_a_type_error(connect: Any) -> None:
    client: Any = connect("redis://127.0.0.1:1")
    for make in (client.lock, client.rlock, client.rwlock, client.election, client.exclusive, client.cached):
        with pytest.raises(TypeError, match="tll"):
            make("a", tll=1)
    with pytest.raises(TypeError, match="tll"):
        client.semaphore("a", 3, tll=1)
    with pytest.raises(TypeError, match="cohort"):
        client.election("a", cohort=1)


def test_an_adopted_hold_has_no_wait_and_no_cohort() -> None:
    with holdfast.connect("redis://127.0.0.1:1") as client:
        adopt: Any = client.adopt
        for option in ("wait", "cohort"):
            assert option not in inspect.signature(adopt).parameters
            with pytest.raises(TypeError, match=option):
                adopt("a ticket", **{option: 1})


def test_options_that_are_equal_but_of_other_types_are_checked_anew() -> None:
    with holdfast.connect("redis://127.0.0.1:1") as client:
        lock: Any = client.lock
        lock("a", ttl=1, renew=True)
        with pytest.raises(holdfast.InvalidConfig):
            lock("a", ttl=True, renew=True)
        with pytest.raises(holdfast.InvalidConfig):
            lock("a", renew=1, ttl=True)


def test_what_waits_for_the_server_is_awaited() -> None:
    for name in CLASSES:
        aio = members(getattr(holdfast.aio, name))
        for member, method in members(getattr(holdfast.blocking, name)).items():
            talks = inspect.isfunction(method) and "_driver.run" in inspect.getsource(method)
            twin = aio[OTHER_NAME.get(member, member)]
            if talks:
                is_awaited = "Awaitable" in str(inspect.signature(twin).return_annotation)
                assert inspect.iscoroutinefunction(twin) or is_awaited, (name, member)


def test_the_signature_of_lock_is_the_promised_one() -> None:
    parameters = inspect.signature(holdfast.Client.lock).parameters
    assert {name: parameter.default for name, parameter in parameters.items() if name not in ("self", "names")} == {
        "ttl": 30.0,
        "wait": None,
        "renew": True,
        "max_hold": None,
        "on_lost": None,
        "label": "",
        "cohort": 64,
        "outage_wait": OF_CLIENT,
    }
    assert parameters["names"].kind is inspect.Parameter.VAR_POSITIONAL
    assert {name: parameter.default for name, parameter in inspect.signature(holdfast.connect).parameters.items()} == {
        "target": None,
        "namespace": "",
        "timeout": 5.0,
        "outage_wait": OF_ENGINE,
        "fence_retention": 3600.0,
        "cohort": 64,
        "replicas": None,
        "fence_floor": None,
        "on_lost": None,
        "on_event": None,
    }


def test_the_signatures_of_the_cache_are_the_promised_ones() -> None:
    options = {
        "ttl": 60.0,
        "stale": 0.0,
        "errors": 0.0,
        "early": 0.0,
        "compute_ttl": 10.0,
        "max_compute": None,
        "wait": None,
        "serializer": None,
    }
    for method in (holdfast.Client.get_or_compute, holdfast.Client.cached):
        parameters = inspect.signature(method).parameters
        assert {name: parameters[name].default for name in options} == options
        assert set(parameters) - set(options) <= {"self", "key", "fn"}
    exclusive = inspect.signature(holdfast.Client.exclusive).parameters
    lock = inspect.signature(holdfast.Client.lock).parameters
    own = {"wait": 0.0, "busy": "raise", "default": holdfast.SKIPPED}
    assert {name: exclusive[name].default for name in own} == own
    for name in set(lock) - {"self", "names", "wait"}:
        assert exclusive[name].default == lock[name].default, f"exclusive passes {name} on to lock"
