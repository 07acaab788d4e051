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


# urandom() releases the interpreter's lock, which a process with many busy threads is slow to get back. So one call
# serves many tokens (benchmarks.before: "16 threads, 16 locks").
_DRAWN_AT_ONCE: Final = 64
_drawn: Final[list[str]] = []  # the random parts of the next tokens


def new_token(label: str) -> str:
    """A token: host, process and label in readable form, and 128 random bits."""
    try:
        return _readable(label) + _drawn.pop()
    except IndexError:
        bits = os.urandom(16 * _DRAWN_AT_ONCE).hex()
        _drawn.extend(bits[start : start + 32] for start in range(0, len(bits), 32))
        return new_token(label)


@lru_cache(maxsize=256)
def _readable(label: str) -> str:
    parts = [socket.gethostname(), str(os.getpid()), label]
    return "-".join(encoded(part) for part in parts if part) + "."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_readable.cache_clear)  # it contains the pid
    os.register_at_fork(after_in_child=_drawn.clear)  # else parent and child would draw the same tokens
