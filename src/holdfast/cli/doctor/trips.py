"""How long a round trip takes, on engines that do not tell the ttls of all leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.cli.doctor.findings import NOTE, OK, WARNING, Finding
from holdfast.cli.doctor.leases import SLOW
from holdfast.errors import rounded

DEFAULT_TTL: Final = 30.0  # seconds
_NOTED: Final = 0.1  # seconds
_TRIES: Final = 5


def fastest(ask: Callable[[], object]) -> float:
    """The seconds of the fastest of some tries."""
    took = []
    for _ in range(_TRIES):
        began = time.monotonic()
        ask()
        took.append(time.monotonic() - began)
    return min(took)


def judged(trip: float, server: str = "") -> Finding:
    """A round trip beside the ttls that locks can have."""
    message = f"a round trip takes {rounded(trip * 1000)} ms"
    if trip < _NOTED:
        return Finding("round trip", OK, message, server=server)
    level = WARNING if trip > SLOW * DEFAULT_TTL else NOTE
    advice = f"give ttls of {rounded(trip / SLOW)} s or more, or find out what is slow: a renewal must be in time"
    return Finding("round trip", level, message, advice, server)
