"""Errors in frameworks that know an error by its type and its ``args``, and the numbers in their messages."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from holdfast import errors
from holdfast.holder import Holder

# For each class the arguments of a full call, and of the shortest one.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "HoldfastError": [("what happened",), ()],
    "NotAcquired": [("a", "its time ran out"), ("a",)],
    "AcquireTimeout": [("a", 1.5, "", Holder("job", "host", 7)), ("a", 0.0)],
    "WouldDeadlock": [("a", "this thread writes it"), ("a",)],
    "LeaseLost": [("a", 7, "its key expired"), ("a", None, "its key expired")],
    "NotHeld": [("a", "was handed over"), ("a",)],
    "OverRelease": [("a", "", 2, 5), ("a",)],
    "ComputeFailed": [("a", "ValueError", "no such user")],
    "ComputeTimeout": [("a", 1.5)],
    "StaleFence": [("a", 7, 8, "state:42"), ("a", 7, None, "state:42")],
    "OutcomeUnknown": [("a", "a release", "look at the fence")],
    "Unavailable": [
        ({"redis://h:1/0": "nothing listens there"}, "Start it", "lock 'a'"),
        ({"h": "full"}, "Look"),
    ],
    "Unsupported": [("a", "b")],
    "InvalidName": [("a:hf1:b", "it is reserved")],
    "InvalidConfig": [("ttl=-1", "give more")],
    "UnknownOption": [("timeout=10 of lock()", "here it is called ttl")],
}
ERRORS = [getattr(errors, name)(*args) for name, calls in CALLS.items() for args in calls]


def test_every_error_is_among_them() -> None:
    assert {name for name in errors.__all__ if not name.endswith("Warning")} == set(CALLS)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_type_and_args_give_the_same_error_again(error: errors.HoldfastError) -> None:
    """As Celery's JSON result backend does it, which sends no more than these."""
    again = type(error)(*json.loads(json.dumps(error.args)))
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert again.args == error.args


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_args_survive_pickle_and_copy(error: errors.HoldfastError, duplicate: Any) -> None:
    error.add_note("a note")
    try:
        again = duplicate(error)
        assert type(again) is type(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        assert repr(again) == repr(error) == f"{type(error).__name__}({str(error)!r})"
    finally:
        del error.__notes__  # other tests use the same error


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_message_has_at_most_two_sentences(error: errors.HoldfastError) -> None:
    assert str(error).count(". ") <= 1


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.5000001, "0.5"),
        (1.23456, "1.23"),
        (30.0, "30"),
        (999.4, "999"),
        (999.7, "1000"),
        (86400.0, "86400"),
        (0.01, "0.01"),
    ],
)
def test_times_are_rounded_for_people(seconds: float, shown: str) -> None:
    assert f"within {shown} s:" in str(errors.AcquireTimeout("a", seconds))
    assert f"after {shown} s." in str(errors.ComputeTimeout("a", seconds))


def test_fences_are_shown_in_full() -> None:
    assert "fence 1794845481323964)" in str(errors.LeaseLost("a", 1794845481323964, "its key expired"))
