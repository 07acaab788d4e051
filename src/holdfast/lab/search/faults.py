"""The kinds of fault that a search tries, by name."""

from __future__ import annotations

from typing import Final

FAULTS: Final = {
    "crash": "a client ends at once, before or after its step was executed, or while it holds or waits",
    "stall": "a client does nothing for half a ttl, and then continues",
    "pause": "a client does nothing for longer than a ttl, and then continues",
    "skew": "the wall clock of a client is wrong by more than a ttl",
    "lost_request": "a step never reaches the server",
    "lost_reply": "a step is executed, and its reply is lost; or a wake-up is lost",
    "late_reply": "a step is executed, and its reply arrives late, perhaps after its sender has given it up",
    "duplicate": "a step is executed, and again later",
    "delay": "a step is executed only after its sender has given it up, and after later steps of the same client",
    "cancel": "the caller of a client is cancelled (asyncio) or interrupted by Ctrl-C",
    "script_flush": "the server loses its scripts",
    "restart": "the server restarts without its data",
    "failover": "a replica takes over, without the last writes",
    "eviction": "the server evicts the key to free memory",
    "clock_jump": "the server's clock jumps ahead by more than a ttl",
    "clock_back": "the server's clock is set back by half a ttl",
    "reshard": "the slot of the lock moves to another node of its cluster, at once or key by key",
    "refused": "a step that writes is executed, and then answered with an error, as by an etcd that is full",
    "unconfirmed": "a grant must be confirmed by replicas, and none of them answers in time",
}

SERVER_WIDE: Final = frozenset(
    {"restart", "failover", "eviction", "script_flush", "clock_jump", "clock_back", "reshard"}
)

# The kinds that are searched by default: the server is not a node of a cluster and is not full, and grants are not
# confirmed.
DEFAULT_FAULTS: Final = tuple(kind for kind in FAULTS if kind not in ("reshard", "refused", "unconfirmed"))

# Everyday faults are searched first, then faults of networks and impatient callers. Last come the faults that break any
# lock on one server: the server loses data, or its clock jumps.
DAILY: Final = frozenset({"crash", "stall", "pause"})
CLOCK: Final = frozenset({"clock_jump", "clock_back"})  # of the server
UNRELIABLE_SERVER: Final = CLOCK | {"restart", "failover", "eviction"}

# A verdict is about one of two servers. One keeps its data, and its clock does not jump, as docs/guarantees.md assumes.
# The other may lose its data, and its clock may jump.
KEEPS: Final = "keeps"
LOSES: Final = "loses"

# Kinds that docs/guarantees.md excludes, if a run has several faults. A doubled request alone breaks nothing. Beside
# another fault it can bring back a lock that was given up; only a proxy sends a request twice.
EXCLUDED: Final = UNRELIABLE_SERVER | {"duplicate"}
