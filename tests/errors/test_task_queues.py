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
