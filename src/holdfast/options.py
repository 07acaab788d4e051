"""Options and their limits, checked where they are given: bad input is refused before anything is sent."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Final, Generic, TypedDict, TypeVar

from holdfast.errors import InvalidConfig, rounded
from holdfast.lease import Terms

__all__ = ["LockOptions", "Options", "client_terms", "patience", "seconds", "terms_of", "whole"]

SHORTEST_TTL: Final = 0.01
LONGEST: Final = 366 * 86_400.0
LONGEST_LABEL: Final = 200


C = TypeVar("C")


class LockOptions(TypedDict, Generic[C], total=False):
    """The options of ``lock`` except ``wait``, on which the type of its result depends. C is the type of on_lost."""

    ttl: float
    renew: bool
    max_hold: float | None
    on_lost: C
    label: str
    cohort: int


class Options(LockOptions[Any], total=False):
    """All options of ``lock``."""

    wait: float | None


def seconds(what: str, value: Any, *, least: float = 0.0, most: float = LONGEST) -> float:
    """A finite number of seconds within limits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidConfig(f"{what}={_shown(value)}", "give a number of seconds")
    if not least <= value <= most:  # NaN compares false
        limit = f"at most {rounded(most)}" if value > most else f"at least {rounded(least)}"
        raise InvalidConfig(f"{what}={_shown(value)}", f"give {limit} seconds")
    return float(value)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an int with more digits than Python is willing to print
        return "a number too large to show"


def terms_of(
    *,
    ttl: float,
    wait: float | None,
    renew: bool,
    max_hold: float | None,
    on_lost: Callable[[Any], object] | str | None,
    label: str,
    cohort: int,
    shared: Terms,
    words: tuple[str, ...] = (),
) -> Terms:
    """The terms of one lock; ``shared`` has what all locks of a client share, ``words`` what on_lost may say."""
    wait = None if wait is None or wait == math.inf else seconds("wait", wait)
    if not isinstance(label, str) or len(label) > LONGEST_LABEL:
        raise InvalidConfig(f"label={_shown(label)}", f"give a text of at most {LONGEST_LABEL} characters")
    own, default = _check_on_lost(on_lost, words), shared.on_lost
    return Terms(
        ttl=seconds("ttl", ttl, least=SHORTEST_TTL),
        wait=wait,
        renew=bool(renew),
        max_hold=None if max_hold is None else seconds("max_hold", max_hold, least=SHORTEST_TTL),
        on_lost=default if own is None else own,
        label=label,
        cohort=min(shared.cohort, whole("cohort", cohort)),
        timeout=shared.timeout,
        fence_retention=shared.fence_retention,
        cancels=own == "cancel" or (own is None and "cancel" in words and default != "ignore"),
    )


def _check_on_lost(on_lost: Any, words: tuple[str, ...]) -> Any:
    if iscoroutinefunction(on_lost) and not words:
        raise InvalidConfig(f"on_lost={_shown(on_lost)}", "a coroutine function never runs here: use holdfast.aio")
    if callable(on_lost) or on_lost in (None, *words):
        return on_lost
    choice = "a callable that takes the lease" + "".join(f", or {word!r}" for word in words)
    raise InvalidConfig(f"on_lost={_shown(on_lost)}", f"give {choice}")


def client_terms(
    *, timeout: float, fence_retention: float, cohort: int, on_lost: Any = None, words: tuple[str, ...] = ()
) -> Terms:
    """What all locks of a client share."""
    return Terms(
        ttl=30.0,
        wait=None,
        renew=True,
        max_hold=None,
        on_lost=_check_on_lost(on_lost, words),
        label="",
        cohort=whole("cohort", cohort),
        timeout=seconds("timeout", timeout, least=0.01, most=3600.0),
        fence_retention=seconds("fence_retention", fence_retention, least=1.0),
    )


def whole(what: str, value: Any, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1_000_000:
        raise InvalidConfig(f"{what}={_shown(value)}", f"give a whole number from {least} to 1000000")
    return value


def patience(blocking: bool, timeout: float, wait: float | None) -> float | None:
    """Seconds that ``acquire(blocking, timeout)`` waits (None: for ever), checked as threading.Lock does.

    Without a timeout, that is the lock's own ``wait``.
    """
    if timeout == -1:
        return wait if blocking else 0.0
    if not blocking:
        raise InvalidConfig(f"acquire(blocking=False, timeout={_shown(timeout)})", "give one of the two")
    if not timeout >= 0:
        raise InvalidConfig(
            f"acquire(timeout={_shown(timeout)})", "give at least 0 seconds, or -1 for the lock's own wait"
        )
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError(f"timeout={_shown(timeout)} is more than threading.TIMEOUT_MAX")
    return float(timeout)
