"""What a user imports, pinned."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

import holdfast
from holdfast import errors
from holdfast.holder import Holder


def test_the_names_are_these() -> None:
    assert sorted(holdfast.__all__) == [
        "AcquireTimeout",
        "Client",
        "ComputeFailed",
        "ComputeTimeout",
        "HoldfastError",
        "InvalidConfig",
        "InvalidName",
        "Lease",
        "LeaseLost",
        "LocalOnlyWarning",
        "Lock",
        "NotAcquired",
        "NotHeld",
        "OutcomeUnknown",
        "OverRelease",
        "SKIPPED",
        "StaleFence",
        "Unavailable",
        "UnknownOption",
        "UnsafeRecipeWarning",
        "Unsupported",
        "WouldDeadlock",
        "connect",
        "current_lease",
        "lock",
    ]
    assert len(holdfast.__all__) <= 25
    for name in holdfast.__all__:
        assert hasattr(holdfast, name)


def test_all_errors_can_be_imported_from_the_top() -> None:
    for name in errors.__all__:
        assert getattr(holdfast, name) is getattr(errors, name)


def test_the_tree_of_errors() -> None:
    assert issubclass(holdfast.AcquireTimeout, holdfast.NotAcquired | TimeoutError)
    assert issubclass(holdfast.AcquireTimeout, TimeoutError)
    assert issubclass(holdfast.ComputeTimeout, TimeoutError)
    assert issubclass(holdfast.NotHeld, RuntimeError)
    assert issubclass(holdfast.OverRelease, holdfast.NotHeld)
    assert issubclass(holdfast.OverRelease, ValueError)
    assert issubclass(holdfast.WouldDeadlock, holdfast.NotAcquired)
    assert issubclass(holdfast.Unavailable, ConnectionError)
    assert issubclass(holdfast.InvalidName, ValueError)
    assert issubclass(holdfast.InvalidConfig, ValueError)
    assert not issubclass(holdfast.AcquireTimeout, holdfast.Unavailable)
    assert not issubclass(holdfast.Unavailable, holdfast.AcquireTimeout)
    for name in errors.__all__:
        if not name.endswith("Warning"):
            assert issubclass(getattr(errors, name), holdfast.HoldfastError)


ERRORS = [
    errors.NotAcquired("a"),
    errors.AcquireTimeout("a", 1.5),
    errors.AcquireTimeout("a", 0.0),
    errors.AcquireTimeout("a", 1.5, holder=Holder("nightly", "web1", 42, remaining=3.0)),
    errors.Unavailable({"redis://h:1/0": "nothing listens there"}, "Start it", "lock 'a'"),
    errors.LeaseLost("a", 7, "its key expired"),
    errors.LeaseLost("a", None, "its key expired"),
    errors.NotHeld("a"),
    errors.OverRelease("a"),
    errors.WouldDeadlock("a"),
    errors.ComputeFailed("a", "ValueError", "no such user"),
    errors.ComputeFailed("a", "ValueError", ""),
    errors.ComputeTimeout("a", 1.5),
    errors.StaleFence("a", 7, 8, "state:42"),
    errors.StaleFence("a" * 500, 7, 7, "b" * 500),
    errors.StaleFence("a", 7, None, "orders id=42"),
    errors.OutcomeUnknown("a", "a release", "look at the fence"),
    errors.Unavailable({"redis://h:1/0": "nothing listens there"}, "Start it"),
    errors.Unsupported("a", "b"),
    errors.InvalidName("a" * 500, "it is long"),
    errors.InvalidConfig("ttl=-1", "give more"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.HoldfastError) -> None:
    """Because work that a lock guards is often done in a process pool."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "error", [*ERRORS, errors.HoldfastError("what happened")], ids=lambda error: type(error).__name__
)
def test_repr_of_an_error_says_what_its_message_says(error: errors.HoldfastError) -> None:
    """Because %r in a log, and the traceback of a group, show nothing else."""
    assert repr(error) == f"{type(error).__name__}({str(error)!r})"
    assert repr(copy.copy(error)) == repr(pickle.loads(pickle.dumps(error))) == repr(error)


@pytest.mark.parametrize("name", ["aio", "guard"])
def test_a_part_of_holdfast_is_imported_when_it_is_first_used(name: str) -> None:
    code = f"""
import sys, holdfast
assert "holdfast.{name}" not in sys.modules
assert holdfast.{name} is sys.modules["holdfast.{name}"]
assert not hasattr(holdfast, "nonsense")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_holdfast_imports_no_asyncio_driver() -> None:
    code = "import sys, holdfast; print(*sorted(m for m in sys.modules if m.startswith('holdfast') or m == 'lupa'))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "holdfast.blocking" in loaded
    assert not {"holdfast.aio", "holdfast.drivers.aio", "holdfast.engines.redis.aio.engine", "lupa", "holdfast.cli"} & {
        *loaded
    }
