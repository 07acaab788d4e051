"""What each engine offers and what it survives, as data.

``Unsupported`` errors, the table in docs/engines.md (``scripts/derive_engines.py``) and the tests that an engine skips
all come from this module, so they always agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.errors import Unsupported

__all__ = ["ENGINES", "FEATURES", "EngineCapabilities", "require"]

# What a program may ask for, by the name that errors and pages use.
FEATURES: Final = (
    "lock",
    "fence",
    "rlock",
    "rwlock",
    "semaphore",
    "latch",
    "election",
    "a lock on several names",
    "one fence for several names",
    "hand_over",
    "get_or_compute",
    "recipe for redis",
    "recipe for memcached",
    "inspect",
    "locks",
    "break_lock",
    "holdfast run --at-least",
    "local waiters in inspect",
    "replicas",
    "fence_floor",
    "fences that tell the time",
    "expiry within 2 s",  # of a holder that has crashed, if its ttl is as short
    "the keys of Redis",  # locks of other libraries, keys changed by hand: what commands of Redis do to a lock
)
_OF_REDIS: Final = (
    "holdfast run --at-least",
    "local waiters in inspect",
    "fences that tell the time",
    "expiry within 2 s",
    "the keys of Redis",
)
_REDIS: Final = frozenset(FEATURES) - {"fence_floor", "recipe for memcached"}


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """One engine. The texts are rows of the table in docs/engines.md."""

    name: str
    url: str  # an example
    features: frozenset[str]
    use: str  # when to use it
    queue: str  # in which order waiters are served
    notifications: str  # how a waiter learns that it is its turn
    fences: str  # where they come from, and until when they rise
    server_crash: str
    failover: str
    clock_jump: str
    partition: str
    # The default of ``outage_wait``. Where a failover is expected to end an outage, a call waits for it.
    outage_wait: float | None = None


_QUEUE: Final = "first come, first served, kept on the server"
_POLLED: Final = "waiters ask every 4 to 100 ms"
_PUSHED: Final = f"pushed by the server; where pub/sub is forbidden, {_POLLED}"
_FENCES: Final = (
    "`max(last + 1, server time in µs)`; they rise if the server still has the last fence, or if its clock is not "
    "behind the last grant"
)
_CLOCK: Final = "a jump forward ends leases early, and a second holder may start; fences rise"
_REPLICATED: Final = (
    "replication is asynchronous: a grant of the last moments can be lost, and a second holder may start. The first is "
    "told at its next renewal; its fence is lower"
)

ENGINES: Final = {
    "local": EngineCapabilities(
        name="local",
        url="local://",
        features=_REDIS - {"replicas"},
        use="tests, and programs on one machine",
        queue=_QUEUE,
        notifications=_PUSHED,
        fences=_FENCES,
        server_crash="the next client starts a new server, without holds; fences rise",
        failover="there is none",
        clock_jump=_CLOCK,
        partition="there is none: all clients are on one machine",
        outage_wait=2.0,
    ),
    "redis": EngineCapabilities(
        name="one Redis or Valkey server",
        url="redis://localhost:6379/0",
        features=_REDIS,
        use="most programs: one server to look after, and nothing is lost as long as it runs and evicts nothing",
        queue=_QUEUE,
        notifications=_PUSHED,
        fences=_FENCES,
        server_crash="locks wait until it is back. Without persistence it forgets its holds; fences rise",
        failover="none by itself. If an address moves to a replica, as behind a proxy, see Sentinel",
        clock_jump=_CLOCK,
        partition="a client that is cut off loses its leases at their deadline; nothing is granted twice",
        outage_wait=2.0,
    ),
    "sentinel": EngineCapabilities(
        name="Sentinel",
        url="redis+sentinel://h1:26379,h2:26379,h3:26379/mymaster/0",
        features=_REDIS,
        use="locks that must be back within seconds after a server has died, with a [guard](guard.md) where it matters",
        queue=_QUEUE + "; waiters queue again after a failover that lost it",
        notifications=_PUSHED,
        fences=_FENCES,
        server_crash="a replica takes over, as in a failover",
        failover=_REPLICATED,
        clock_jump=_CLOCK,
        partition="an old primary that is cut off grants and renews locks until it is demoted. `replicas=1`, beside "
        "the server's `min-replicas-to-write`, [limits that](#grants-that-replicas-have)",
    ),
    "cluster": EngineCapabilities(
        name="Cluster",
        url="redis+cluster://h1:7000,h2:7001,h3:7002",
        features=_REDIS - {"one fence for several names"},
        use="more locks than one server can serve; each name lives on one node",
        queue=_QUEUE + "; waiters queue again after a failover that lost it",
        notifications=f"pushed by the node; where pub/sub is forbidden, and before Redis 7, {_POLLED}",
        fences=_FENCES + "; a lock on names of several slots has one fence for each slot",
        server_crash="a replica takes over the slots of its primary, as in a failover",
        failover=_REPLICATED,
        clock_jump=_CLOCK,
        partition="an old primary that is cut off grants and renews locks for `cluster-node-timeout`. `replicas=1`, "
        "beside the server's `min-replicas-to-write`, [limits that](#grants-that-replicas-have)",
    ),
    "etcd": EngineCapabilities(
        name="etcd",
        url="etcd://h1:2379,h2:2379,h3:2379",
        features=frozenset(FEATURES)
        - {"get_or_compute", "recipe for redis", "recipe for memcached", "replicas", *_OF_REDIS},
        use="locks that must survive the loss of any minority of machines, with nothing granted twice "
        "([one exception](etcd.md#what-is-not))",
        queue=_QUEUE,
        notifications="pushed by the server for up to 200 waiters of a client; every 0.5 s for further ones",
        fences="the revision of etcd, which rises as long as the cluster keeps its data; `fence_floor=` is added to it",
        server_crash="a majority of the members goes on, with all holds",
        failover="nothing is lost; requests wait until there is a leader again, within seconds",
        clock_jump="nothing: leases are counted by a clock that does not jump",
        partition="the majority goes on. A client that is cut off from it loses its leases at their deadline; nothing "
        "is granted twice",
    ),
    "memcached": EngineCapabilities(
        name="memcached",
        url="memcached://localhost:11211",
        features=frozenset({"lock", "recipe for memcached"}),
        use="work that is merely wasteful if done twice, where memcached is all there is",
        queue="none: the first to ask once it is free has it",
        notifications="none: a waiter asks after 4 to 100 ms",
        fences="none: `lease.fence` is None",
        server_crash="all holds are lost; each holder is told at its next renewal",
        failover="there is none",
        clock_jump="nothing: it counts seconds since its start",
        partition="a client that is cut off loses its leases at their deadline. A server that is out of memory may "
        "evict a lock, and a second holder may start",
        outage_wait=2.0,
    ),
}


def require(feature: str, *, engine: str, address: str) -> None:
    """Raise Unsupported, with the engines to use instead, unless this engine offers the feature."""
    if feature not in ENGINES[engine].features:
        others = [offer.url for offer in ENGINES.values() if feature in offer.features]
        advice = f"use {' or '.join(others)}" if others else "no engine of this version offers it. Use client.lock"
        raise Unsupported(f"{feature} is not supported by {address}", advice)
