"""Everything that can be handed over, and what it excludes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple


class Kind(NamedTuple):
    ask: Callable[..., Any]  # given a client and options: the lock
    rival: Callable[..., Any]  # likewise: one that cannot be had as long as the other is held


KINDS: Final = {
    "lock": Kind(lambda client, **terms: client.lock("a", **terms), lambda client, **terms: client.lock("a", **terms)),
    "several": Kind(
        lambda client, **terms: client.lock("a", "b", **terms), lambda client, **terms: client.lock("b", **terms)
    ),
    "rlock": Kind(
        lambda client, **terms: client.rlock("a", **terms), lambda client, **terms: client.lock("a", **terms)
    ),
    "permit": Kind(
        lambda client, **terms: client.semaphore("a", 1, **terms),
        lambda client, **terms: client.semaphore("a", 1, **terms),
    ),
    "read": Kind(
        lambda client, **terms: client.rwlock("a", **terms).read,
        lambda client, **terms: client.rwlock("a", **terms).write,
    ),
    "write": Kind(
        lambda client, **terms: client.rwlock("a", **terms).write,
        lambda client, **terms: client.rwlock("a", **terms).write,
    ),
}
