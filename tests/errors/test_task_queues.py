"""Errors and results that went through a task queue: Celery with its JSON serializer, and pickle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu.utils import json as kombu

import holdfast
from holdfast.errors import HoldfastError


def by_celery(error: HoldfastError) -> Any:
    """The error that a caller of ``AsyncResult.get()`` gets, with the default serializer, which is JSON."""
    backend = Celery("tests", backend="cache+memory://").backend
    stored = json.loads(json.dumps(backend.prepare_exception(error)))
    return backend.exception_to_python(stored)


def by_pickle(error: HoldfastError) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("way", [by_celery, by_pickle])
def test_a_busy_lock_still_says_which_holder_has_it(url: str, way: Callable[[HoldfastError], Any]) -> None:
    with (
        holdfast.connect(url, namespace="shop:") as one,
        holdfast.connect(url, namespace="shop:") as two,
        one.lock("nightly", label="the report"),
    ):
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            two.lock("nightly", wait=0).__enter__()
    error, again = caught.value, way(caught.value)
    assert type(again) is holdfast.AcquireTimeout
    assert str(again) == str(error)
    assert "label 'the report'" in str(again)
    assert error.holder is not None
    assert again.holder == error.holder
    assert again.holder.id == error.holder.id
    assert (again.name, again.key, again.refused) == ("nightly", "shop:nightly", "nightly")


@pytest.mark.parametrize("way", [by_celery, by_pickle])
def test_a_lost_lease_keeps_its_fence(way: Callable[[HoldfastError], Any]) -> None:
    error = holdfast.LeaseLost("nightly", 7, "its key was deleted", key="shop:nightly")
    again = way(error)
    assert type(again) is holdfast.LeaseLost
    assert str(again) == str(error)
    assert (again.fence, again.key) == (7, "shop:nightly")


def test_what_a_skipped_task_returns() -> None:
    """It is equal on both sides, although JSON knows no enum."""
    received: Any = kombu.loads(kombu.dumps(holdfast.SKIPPED))
    assert received == holdfast.SKIPPED
    assert received == "skipped"
    assert json.dumps({"report": holdfast.SKIPPED}) == '{"report": "skipped"}'
    assert pickle.loads(pickle.dumps(holdfast.SKIPPED)) is holdfast.SKIPPED
    assert not holdfast.SKIPPED
    assert repr(holdfast.SKIPPED) == str(holdfast.SKIPPED) == "holdfast.SKIPPED"


@pytest.mark.parametrize("name", ["LeaseLost", "NotHeld", "OutcomeUnknown", "ComputeTimeout"])
def test_an_error_that_an_older_version_pickled_can_be_shown(name: str) -> None:
    """It has no key: half of a fleet may not have it yet."""
    arguments: dict[str, tuple[Any, ...]] = {
        "LeaseLost": ("x", 3, "its key was deleted"),
        "NotHeld": ("x",),
        "OutcomeUnknown": ("x", "a release", "look"),
        "ComputeTimeout": ("x", 1.0),
    }
    error = getattr(holdfast, name)(*arguments[name])
    rebuild, (cls, args, facts) = error.__reduce__()
    del facts["key"]
    again = rebuild(cls, args, facts)
    assert str(again) == str(getattr(holdfast, name)(*arguments[name]))
    assert again.key == "x"


def test_a_holder_from_a_later_version() -> None:
    facts = {"host": "web1", "pid": 7, "of_a_later_version": True}
    error = holdfast.AcquireTimeout("x", 1.0, "", facts)
    assert error.holder is not None
    assert (error.holder.host, error.holder.pid) == ("web1", 7)


def test_without_a_namespace_args_are_those_of_older_versions() -> None:
    assert holdfast.LeaseLost("x", 3, "why").args == ("x", 3, "why")
    assert holdfast.LeaseLost("x", 3, "why", key="x").args == ("x", 3, "why")
    assert holdfast.LeaseLost("x", 3, "why", key="shop:x").args == ("x", 3, "why", "shop:x")


def test_a_skipped_call_is_not_cached(url: str) -> None:
    """As text it would be stored for a whole ttl, and true."""
    with holdfast.connect(url) as client, holdfast.connect(url) as other:
        report = client.cached("report", ttl=60)(client.exclusive("job", busy="skip")(lambda: {"rows": 1}))
        with other.lock("job"), pytest.raises(holdfast.InvalidConfig, match="value of 'report'.*was skipped"):
            report()
        assert report() == {"rows": 1}
