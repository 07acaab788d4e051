"""What ``client.statistics()`` returns: counts of what a client has and does at one moment, for tests and for people.

Counting contacts no server and takes no lock: each number is read from a dict, deque or set that other threads may be
changing. So every number was true at some moment during the call. All of them together are true only if nothing changes
meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.protocol.hold import TRYING


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """What a client has at one server."""

    connections: int = 0  # open ones
    idle: int = 0  # of these, the unused ones in a pool
    queued: int = 0  # requests that are not sent yet, because no connection takes them
    subscribed: bool = False  # whether notifications arrive; without them, waiters poll
    resp3: bool = False  # whether a connection uses RESP3
    tracking: bool = False  # whether the server reports writes of other clients (client tracking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a client has and does at one moment. Recipes are not counted: nothing is kept about them."""

    holds: int  # leases and permits that are held, also within an election; computations of cached values
    active: int  # holds and waiters that are in contact with the server: at most one for each lock with a cohort
    waiters: int  # callers that ask or wait for a lock, in local queues or at the server
    local_queues: Mapping[str, int]  # by name of the lock: waiters behind another waiter or holder of this client
    latch_waiters: Mapping[str, int]  # by key on the server: callers that wait for a latch
    cache_callers: Mapping[str, int]  # by key on the server: callers that share one request for a cached value
    tracked: int  # keys whose writes the server should report, for holders and for first waiters
    cleanups: int  # holds whose keys must still be removed
    renewals: int  # answered by the server so far
    failed_renewals: int  # not answered, or answered with an error; each is tried again until the lease ends
    nodes: Mapping[str, NodeStatistics]  # by address, without password

    @property
    def connections(self) -> int:
        """Open connections to all nodes."""
        return sum(node.connections for node in self.nodes.values())


def count(driver: Any, calls: Mapping[str, Any], latches: Mapping[tuple[int, str, str], Any]) -> Statistics:
    """The statistics of a client: of its driver, its shared calls by key, and its latch waiters."""
    registry, router, cohorts = driver.registry, driver.router, driver.cohorts
    active = list(cohorts.active_holds.values())
    queued = [hold for queue in list(cohorts.local_queues.values()) for hold in list(queue)]
    latch_waiters: Counter[str] = Counter()
    for (_, key, _), waiters in list(latches.items()):
        latch_waiters[key] += len(waiters.members)
    return Statistics(
        holds=len(registry.holds),
        active=len(active),
        # As a set: a waiter that was just promoted may be in both.
        waiters=len({*queued, *(hold for hold in active if hold.phase is TRYING)}),
        local_queues=dict(Counter(hold.name for hold in queued)),
        latch_waiters=dict(latch_waiters),
        cache_callers={key: len(shared_call.participants) for key, shared_call in list(calls.items())},
        tracked=len({*registry.watched, *registry.monitors.monitored, *router.watching}),
        cleanups=len(registry.pending_cleanups()),
        renewals=registry.renewals,
        failed_renewals=registry.failed_renewals,
        nodes=driver.nodes(),
    )
