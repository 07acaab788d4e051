"""The guard of ``holdfast run`` is told to kill before the lease ends, not when it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli.margins import margins
from holdfast.cli.supervise import Run
from holdfast.drivers.clock import now
from tests.lab.mutations import in_python, plant

AT_THE_END = in_python(
    Run,
    "_tell_guard",
    "now() + self._lease.remaining() - self._margins.last / 2",
    "now() + self._lease.remaining()",
)


def time_left_at_the_kill(ttl: float, remaining: float) -> float:
    """How much of that lease is left when the guard kills, if it hears no more; at least."""
    told: list[float] = []
    run: Any = object.__new__(Run)
    run._lease = SimpleNamespace(remaining=lambda: remaining)
    run._margins = margins(ttl)
    run._termination = None
    run._told_guard = 0.0
    before = now()
    run._tell_guard(SimpleNamespace(good_until=told.append))
    (when,) = told
    assert when > before, "a lease that is well is not cut short"
    return now() + remaining - when


@pytest.mark.parametrize("ttl", [1.0, 3.0, 30.0])
def test_the_guard_kills_before_the_lease_ends(ttl: float) -> None:
    left = time_left_at_the_kill(ttl, ttl * 0.9)
    assert left >= margins(ttl).last / 2 > 0


def test_a_guard_that_kills_at_the_end_of_the_lease_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(AT_THE_END, monkeypatch)
    with pytest.raises(AssertionError):
        test_the_guard_kills_before_the_lease_ends(30.0)
