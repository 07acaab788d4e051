"""CPython's own tests of its RLock, with ours as the lock."""

from __future__ import annotations

import itertools

import pytest

import holdfast
from tests.conformance.test_cpython_locks import run_case

# What speaks of CPython's internals, and not of how a lock behaves.
LEFT_OUT = {
    "test__is_owned": "calls the private _is_owned()",
    "test_recursion_count": "calls the private _recursion_count()",
    "test_release_save_unacquired": "calls the private _release_save()",
}

lock_tests = pytest.importorskip("test.lock_tests", reason="this Python comes without its test package")

numbers = itertools.count()
TESTS = [name for name in dir(lock_tests.RLockTests) if name.startswith("test_") and name not in LEFT_OUT]


@pytest.mark.filterwarnings("ignore:a lease on:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", TESTS)
def test_threading(name: str, client: holdfast.Client) -> None:
    class Tests(lock_tests.RLockTests):  # type: ignore[misc, name-defined]
        locktype = staticmethod(lambda: client.rlock(f"cpython:{next(numbers)}"))

    with client.rlock("cpython:warm"):
        pass  # the keeper's thread starts here, so that none of the tests counts it as leaked
    run_case(Tests(name))


def test_what_is_left_out_still_exists() -> None:
    assert {*LEFT_OUT} <= {*dir(lock_tests.RLockTests)}
    assert len(TESTS) >= 15
