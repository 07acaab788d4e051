"""The primitives, each as a row of a search: what is explored, and what is asked of it.

To add one is to add an entry to ``PRIMITIVES``. Three clients take each step in one move; where there are two, replies
may also be overtaken by notifications (``late_replies``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from holdfast.lab.cache import cache_config
from holdfast.lab.cache_promises import CACHE_PROMISES
from holdfast.lab.check import CHECKS
from holdfast.lab.cohort import cohort_config
from holdfast.lab.election import election_config
from holdfast.lab.faults import FAULTS, TREACHERY
from holdfast.lab.handover import handover_config
from holdfast.lab.latch import latch_config
from holdfast.lab.rlock import rlock_config
from holdfast.lab.rows import crowd_config, rwlock_config, semaphore_config
from holdfast.lab.several import SEVERAL_PROMISES, several_config
from holdfast.lab.state import Config
from holdfast.lab.visits import AT_ONCE

__all__ = ["DAILY_KINDS", "PRIMITIVES", "Primitive", "late_replies"]

# What befalls clients and messages. A server that loses what it has acknowledged is another matter; and so is a wall
# clock that is wrong, at which none of these looks.
DAILY_KINDS: Final = tuple(kind for kind in FAULTS if kind not in {*TREACHERY, "skew", "script_flush", "duplicate"})

_LOCK: Final = tuple(CHECKS)
_ROOM: Final = ("NoFalseHold", "NoOrphan", "NoLostWakeup", "FenceMonotone", "AcquireTotality")
# Who is refused by another name waits there instead; and who has a ticket is served before those who wait.
_UNORDERED: Final = tuple(name for name in CHECKS if name != "Fifo")
# Not all clients want the same name: two may hold a lock at once, and fences of different names have no common order.
_NAMES: Final = (*SEVERAL_PROMISES, "NoFalseHold", "NoOrphan", "NoLostWakeup", "AcquireTotality")
_FAILING_CACHE: Final = (*CACHE_PROMISES, "NoOrphan", "NoLostWakeup", "AcquireTotality")
_CACHE: Final = tuple(name for name in _FAILING_CACHE if name != "FailureShared")
_LATCH: Final = ("ShutUntilZero", "CountedOnce", "NoLostWakeup", "NoOrphan")


class Primitive(NamedTuple):
    config: Callable[..., Config]  # given bounds, which are fields of Config
    invariants: tuple[str, ...]
    kinds: tuple[str, ...] = DAILY_KINDS  # the faults by which none of these may be broken


PRIMITIVES: Final[dict[str, Primitive]] = {
    "semaphore": Primitive(semaphore_config, ("PermitCount", *_ROOM)),
    "rwlock": Primitive(rwlock_config, ("ModeExclusion", *_ROOM)),
    "rwlock:WRW": Primitive(partial(rwlock_config, "WRW"), ("ModeExclusion", *_ROOM)),
    "several": Primitive(partial(several_config, "ab", "ba", "b", leaves_us=AT_ONCE), (*_UNORDERED, *SEVERAL_PROMISES)),
    "several:beside": Primitive(partial(several_config, "ab", "a", "b", leaves_us=AT_ONCE), _NAMES),
    "several:three": Primitive(partial(several_config, "abc", "ba", "c", leaves_us=AT_ONCE), _NAMES),
    "cohort": Primitive(partial(cohort_config, overtaking=True), _LOCK),
    "crowd": Primitive(crowd_config, _LOCK),
    "crowd:semaphore": Primitive(partial(crowd_config, semaphore_config, permits=1), ("PermitCount", *_ROOM)),
    "crowd:rwlock": Primitive(partial(crowd_config, rwlock_config), ("ModeExclusion", *_ROOM)),
    "latch": Primitive(latch_config, _LATCH, (*DAILY_KINDS, "duplicate")),
    "latch:barrier": Primitive(partial(latch_config, "BBB", 3), _LATCH, (*DAILY_KINDS, "duplicate")),
    "rlock": Primitive(rlock_config, (*_LOCK, "LevelCount")),
    "election": Primitive(election_config, (*_LOCK, "LeaderKnown", "StepsDown")),
    "election:terms": Primitive(partial(election_config, "TRR"), (*_LOCK, "StepsDown")),
    "hand_over": Primitive(partial(handover_config, leaves_us=AT_ONCE), _UNORDERED),
    "hand_over:race": Primitive(partial(handover_config, roles="gtt", leaves_us=AT_ONCE), _UNORDERED),
    "hand_over:several": Primitive(
        partial(handover_config, partial(several_config, "ab", "ab", "b"), leaves_us=AT_ONCE), _UNORDERED
    ),
    "hand_over:semaphore": Primitive(partial(handover_config, semaphore_config, "bbb"), ("PermitCount", *_ROOM)),
    "hand_over:read": Primitive(partial(handover_config, partial(rwlock_config, "RRW")), ("ModeExclusion", *_ROOM)),
    "hand_over:write": Primitive(partial(handover_config, partial(rwlock_config, "WWR")), ("ModeExclusion", *_ROOM)),
    "cache": Primitive(partial(cache_config, leaves_us=AT_ONCE), _CACHE),
    "cache:failing": Primitive(partial(cache_config, "VFI", leaves_us=AT_ONCE), _FAILING_CACHE),
    "cache:stale": Primitive(partial(cache_config, "RLI", ttl=0.05, stale=60.0, leaves_us=AT_ONCE), _CACHE),
}


def late_replies(primitive: Primitive) -> Config:
    """The first two clients of a row, whose replies may be overtaken by notifications of later events."""
    return primitive.config(kinds=primitive.kinds)._replace(clients=2, overtaking=True)
