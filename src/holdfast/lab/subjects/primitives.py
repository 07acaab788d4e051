"""The primitives: the configuration and the invariants of each.

To add one, add an entry to ``PRIMITIVES``. With three clients a step and its reply are one move; with two clients,
notifications may also overtake replies (``late_replies``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from holdfast.lab.invariants.cache import CACHE_CHECKS
from holdfast.lab.invariants.locks import CHECKS
from holdfast.lab.invariants.several import SEVERAL_CHECKS
from holdfast.lab.search.failover import two_holders
from holdfast.lab.search.faults import DEFAULT_FAULTS, UNRELIABLE_SERVER
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.subjects import etcd
from holdfast.lab.subjects.breaking import breaking_config
from holdfast.lab.subjects.cache import cache_config
from holdfast.lab.subjects.cohort import cohort_config
from holdfast.lab.subjects.election import election_config
from holdfast.lab.subjects.etcd import etcd_config
from holdfast.lab.subjects.handover import handover_config
from holdfast.lab.subjects.latch import latch_config
from holdfast.lab.subjects.memcached import Resumed, memcached_config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.lab.subjects.rlock import rlock_config
from holdfast.lab.subjects.rows import crowd_config, fenced_config
from holdfast.lab.subjects.several import several_config

# The daily faults are those of clients and messages. Excluded: a server that loses acknowledged writes, and a wrong
# wall clock, because no primitive reads the wall clock.
_NOT_DAILY: Final = UNRELIABLE_SERVER | {"skew", "script_flush", "duplicate"}
DAILY_KINDS: Final = tuple(kind for kind in DEFAULT_FAULTS if kind not in _NOT_DAILY)

_LOCK: Final = tuple(CHECKS)
_POOL: Final = ("NoFalseHold", "NoOrphan", "NoLostWakeup", "FenceMonotone", "AcquireTotality")
# Without Fifo: if one name refuses a client, it waits in that queue first; and a ticket is served before the waiters.
_UNORDERED: Final = tuple(name for name in CHECKS if name != "Fifo")
# An operator removes a key of another client, and the holder whose lock was broken may notice late.
_BROKEN: Final = tuple(name for name in CHECKS if name not in ("MutualExclusion", "OwnerOnlyRelease"))
# No single key shows the owner; and the order of arrival is that of created keys, not of first requests.
_ON_ETCD: Final = tuple(name for name in _UNORDERED if not name.startswith("OwnerOnly"))
# The keys that a client has handed over have its name, so what a client leaves behind cannot be judged.
_OF_HOLDERS: Final = ("MutualExclusion", "FencedSafety", "NoFalseHold", "FenceMonotone")
# No fences, and no queue.
_ON_MEMCACHED: Final = tuple(name for name in _UNORDERED if "Fence" not in name)
# Not all clients want the same name: two may hold a lock at once, and fences of different names have no common order.
_NAMES: Final = (*SEVERAL_CHECKS, "NoFalseHold", "NoOrphan", "NoLostWakeup", "AcquireTotality")
_FAILING_CACHE: Final = (*CACHE_CHECKS, "NoOrphan", "NoLostWakeup", "AcquireTotality")
_CACHE: Final = tuple(name for name in _FAILING_CACHE if name != "FailureShared")
_LATCH: Final = ("ShutUntilZero", "CountedOnce", "NoLostWakeup", "NoOrphan")


# When its database is full, etcd executes a request and then refuses it.
ETCD_KINDS: Final = (*DAILY_KINDS, "refused")
# A slot that moves loses nothing. A failover loses what no replica had; with ``replicas=`` every grant was confirmed.
_MOVING: Final = (*DAILY_KINDS, "reshard")
# "replicas:paused" searches a holder that is paused when a renewal is lost.
_REPLACED: Final = (*(kind for kind in DAILY_KINDS if kind != "pause"), "failover", "unconfirmed")
# Without Fifo: a grant has not returned while it is being confirmed, so later waiters seem to be passed over.
_REPLICAS: Final = partial(fenced_config, replicas=1, lag=3, leaves_us=AT_ONCE)
# Two clients, which come at any time, try once, and hold the lock for long.
_LONG: Final = partial(fenced_config, clients=2, alike=False, late=True, patience=0.0, stay_us=3_500_000, leaves_us=())
_SENTINELS: Final = partial(_LONG, sentinels=((0, 1, 1), (1, 1, 0)), looks=two_holders)
_CUT_OFF: Final = partial(_LONG, replicas=1, sentinels=((), (0,)))


class Primitive(NamedTuple):
    config: Callable[..., Config]  # given bounds, which are fields of Config
    invariants: tuple[str, ...]
    kinds: tuple[str, ...] = DAILY_KINDS  # the faults that are searched
    limits: tuple[str, ...] = ()  # invariants that these faults break, as the search must show; the others must hold


PRIMITIVES: Final[dict[str, Primitive]] = {
    "semaphore": Primitive(semaphore_config, ("PermitCount", *_POOL)),
    "rwlock": Primitive(rwlock_config, ("ModeExclusion", *_POOL)),
    "rwlock:WRW": Primitive(partial(rwlock_config, "WRW"), ("ModeExclusion", *_POOL)),
    "several": Primitive(partial(several_config, "ab", "ba", "b", leaves_us=AT_ONCE), (*_UNORDERED, *SEVERAL_CHECKS)),
    "several:beside": Primitive(partial(several_config, "ab", "a", "b", leaves_us=AT_ONCE), _NAMES),
    "several:three": Primitive(partial(several_config, "abc", "ba", "c", leaves_us=AT_ONCE), _NAMES),
    "cohort": Primitive(partial(cohort_config, overtaking=True), _LOCK),
    "crowd": Primitive(crowd_config, _LOCK),
    "crowd:semaphore": Primitive(partial(crowd_config, semaphore_config, permits=1), ("PermitCount", *_POOL)),
    "crowd:rwlock": Primitive(partial(crowd_config, rwlock_config), ("ModeExclusion", *_POOL)),
    "reshard": Primitive(partial(fenced_config, leaves_us=AT_ONCE), _LOCK, _MOVING),
    "reshard:semaphore": Primitive(
        partial(semaphore_config, permits=1, leaves_us=AT_ONCE), ("PermitCount", *_POOL), _MOVING
    ),
    "reshard:several": Primitive(
        partial(several_config, "ab", "ba", "b", leaves_us=AT_ONCE), (*_UNORDERED, *SEVERAL_CHECKS), _MOVING
    ),
    "reshard:latch": Primitive(latch_config, _LATCH, _MOVING),
    # A failover may lose the clean-up after a grant that was confirmed.
    "replicas": Primitive(partial(_REPLICAS, promotes="confirmed"), _UNORDERED, _REPLACED, ("AcquireTotality",)),
    "replicas:any": Primitive(
        partial(_REPLICAS, promotes="any"), _UNORDERED, _REPLACED, ("MutualExclusion", "AcquireTotality")
    ),
    "replicas:paused": Primitive(
        partial(fenced_config, replicas=1, promotes="confirmed", clients=2, late=True, stay_us=3_100_000, leaves_us=()),
        ("MutualExclusion", "FencedSafety", "FenceMonotone"),
        ("failover", "pause"),
    ),
    # The first client is cut off with the old primary; the other asks the Sentinels.
    "replicas:cut": Primitive(_CUT_OFF, ("MutualExclusion", "FencedSafety"), ("crash", "pause")),
    "replicas:beside": Primitive(
        partial(_CUT_OFF, beside=True), ("MutualExclusion",), ("crash", "pause"), ("MutualExclusion",)
    ),
    "sentinel": Primitive(_SENTINELS, ("OnePrimary", "OneHolder"), ("crash", "pause")),
    "sentinel:resumes": Primitive(partial(_SENTINELS, hangs=True), ("OnePrimary", "OneHolder"), ("crash", "pause")),
    "sentinel:late": Primitive(
        partial(_SENTINELS, hangs=True, stuck=True), ("OnePrimary", "OneHolder"), ("crash", "pause")
    ),
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
    "hand_over:semaphore": Primitive(partial(handover_config, semaphore_config, "bbb"), ("PermitCount", *_POOL)),
    "hand_over:read": Primitive(partial(handover_config, partial(rwlock_config, "RRW")), ("ModeExclusion", *_POOL)),
    "hand_over:write": Primitive(partial(handover_config, partial(rwlock_config, "WWR")), ("ModeExclusion", *_POOL)),
    "break": Primitive(partial(breaking_config, leaves_us=AT_ONCE), _BROKEN),
    "etcd": Primitive(etcd_config, _ON_ETCD, ETCD_KINDS),
    "etcd:semaphore": Primitive(etcd.SEMAPHORE, ("PermitCount", *_POOL), ETCD_KINDS),
    "etcd:rwlock": Primitive(etcd.RWLOCK, ("ModeExclusion", *_POOL), ETCD_KINDS),
    "etcd:several": Primitive(
        partial(etcd_config, partial(several_config, "ab", "ba", "b", leaves_us=AT_ONCE)),
        (*_ON_ETCD, *SEVERAL_CHECKS),
        ETCD_KINDS,
    ),
    "etcd:hand_over": Primitive(
        partial(etcd_config, partial(handover_config, roles="gt", clients=2, leaves_us=AT_ONCE)), _ON_ETCD, ETCD_KINDS
    ),
    "etcd:hand_over:again": Primitive(etcd.AGAIN, _OF_HOLDERS, ETCD_KINDS),
    "etcd:hand_over:extended": Primitive(etcd.EXTENDED, _OF_HOLDERS, ETCD_KINDS),
    "etcd:hand_over:fails": Primitive(etcd.FAILS, _ON_ETCD, ETCD_KINDS),
    "etcd:try": Primitive(etcd.TRIES, ("PermitCount", *_POOL), ETCD_KINDS),
    "etcd:downgrade": Primitive(etcd.READER, ("ModeExclusion", *_POOL), ETCD_KINDS),
    "memcached": Primitive(partial(memcached_config, leaves_us=AT_ONCE), _ON_MEMCACHED),
    "memcached:resumed": Primitive(
        partial(memcached_config, Resumed, renew=False, stay_us=2_900_000, leaves_us=AT_ONCE), _ON_MEMCACHED
    ),
    "cache": Primitive(partial(cache_config, leaves_us=AT_ONCE), _CACHE),
    "cache:failing": Primitive(partial(cache_config, "VFI", leaves_us=AT_ONCE), _FAILING_CACHE),
    "cache:stale": Primitive(partial(cache_config, "RLI", ttl=0.05, stale=60.0, leaves_us=AT_ONCE), _CACHE),
}


def late_replies(primitive: Primitive) -> Config:
    """The first two clients of a row; notifications of later events may overtake their replies."""
    return primitive.config(kinds=primitive.kinds)._replace(clients=2, overtaking=True)
