"""The clock and the tokens of a real process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from holdfast.holder import encoded

# CLOCK_BOOTTIME runs on while the machine is suspended, so leases are over when it wakes up; CLOCK_MONOTONIC stops.
now: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


def new_token(label: str) -> str:
    """A token: host, process and label in readable form, and 128 random bits."""
    return _readable(label) + os.urandom(16).hex()


@lru_cache(maxsize=256)
def _readable(label: str) -> str:
    parts = [socket.gethostname(), str(os.getpid()), label]
    return "-".join(encoded(part) for part in parts if part) + "."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_readable.cache_clear)  # it contains the pid
