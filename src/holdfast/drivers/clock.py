"""The clock and the tokens of a real process."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from functools import lru_cache, partial
from secrets import token_hex
from typing import Final

__all__ = ["new_token", "now"]

# A suspended machine must wake up knowing that its leases are over; CLOCK_MONOTONIC stands still meanwhile.
now: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


_DRAWN: Final = 64
_random: Final[list[str]] = []


def new_token(label: str) -> str:
    """Who holds it, readable, and 128 random bits that nobody can guess."""
    try:
        return _readable(label) + _random.pop()
    except IndexError:
        drawn = token_hex(16 * _DRAWN)  # many at once, for each time is a system call
        _random.extend(drawn[start : start + 32] for start in range(0, len(drawn), 32))
        return new_token(label)


@lru_cache(maxsize=256)
def _readable(label: str) -> str:
    parts = [socket.gethostname()[:24], str(os.getpid()), label[:24]]
    return "-".join(re.sub(r"[^A-Za-z0-9_.~]+", "_", part) for part in parts if part) + "."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_readable.cache_clear)  # for it names the process
    os.register_at_fork(after_in_child=_random.clear)  # or parent and child would draw the same
