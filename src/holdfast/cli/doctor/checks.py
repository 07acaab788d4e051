"""What the doctor checks on each server. A check returns what it has found, good or bad, in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.cli.doctor.findings import DANGER, NOTE, OK, WARNING, Finding, Server
from holdfast.errors import rounded

OLDEST: Final = (6, 2)
LARGEST_LAG: Final = 1  # seconds
LARGEST_SKEW: Final = 1.0
SLOW: Final = 0.1  # of the shortest lease, for one round trip

Findings = Iterable[Finding]


def version(server: Server) -> Findings:
    info = server.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get("valkey_version") or info.get("redis_version", "")
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        yield Finding("version", NOTE, "its version is not known: this user may not ask for INFO server")
    elif name == "Redis" and (int(found[1]), int(found[2])) < OLDEST:
        yield Finding("version", DANGER, f"it is Redis {text}", "Holdfast needs Redis 6.2 or later, or any Valkey")
    elif info.get("redis_mode") == "cluster" and int(found[1]) < 7:
        advice = "upgrade to 7.0, which has sharded channels"
        yield Finding("version", WARNING, f"it is a cluster of {name} {text}, where waiters poll", advice)
    else:
        yield Finding("version", OK, f"it is {name} {text}")


def eviction(server: Server) -> Findings:
    info = server.info("memory")
    if not info:
        yield Finding("eviction", NOTE, "its eviction policy is not known: this user may not ask for INFO memory")
        return
    policy, limit, used = info.get("maxmemory_policy", ""), _int(info, "maxmemory"), _int(info, "used_memory")
    if not limit:
        yield Finding("eviction", OK, f"it has no maxmemory, so no lock is evicted (policy: {policy})")
    elif policy == "noeviction":
        yield Finding("eviction", OK, "no lock is evicted when memory is full (noeviction)")
    else:
        yield Finding(
            "eviction",
            DANGER,
            f"when memory is full it evicts keys, and locks among them (maxmemory-policy {policy})",
            "CONFIG SET maxmemory-policy noeviction, or keep locks on a server of their own",
        )
    if limit and used > 0.9 * limit:
        advice = "raise maxmemory, or free some: a full server grants no lock"
        yield Finding("memory", WARNING, f"its memory is nearly full: {used:,} of {limit:,} bytes", advice)


def persistence(server: Server) -> Findings:
    info = server.info("persistence")
    if not info:
        yield Finding("persistence", NOTE, "it is not known what survives a restart: this user may not ask for INFO")
        return
    failed = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    if failed:
        advice = "see its log and its disk: by default it refuses writes, and so locks, until this is repaired"
        yield Finding("persistence", DANGER, f"it cannot save its data ({', '.join(failed)})", advice)
    if info.get("loading", "0") != "0":
        yield Finding("persistence", WARNING, "it is loading its data, and answers nothing else meanwhile", "wait")
    if info.get("aof_enabled") == "1":
        sync = server.setting("appendfsync")
        loses = {"always": "no grant", "everysec": "the grants of the last second"}.get(sync or "", "the last grants")
        level = NOTE if sync != "always" else OK
        yield Finding(
            "persistence", level, f"a crash loses {loses} (appendfsync {sync or 'unknown'}); fences still rise"
        )
        return
    yield Finding(
        "persistence",
        NOTE,
        "after a restart it knows no holds, or old ones: another client can get a lock that is still believed held",
        "CONFIG SET appendonly yes, or let the resource check the fence (docs/guard.md)",
    )


def replication(server: Server) -> Findings:
    info = server.info("replication")
    if not info:
        yield Finding("replication", NOTE, "its role is not known: this user may not ask for INFO replication")
        return
    if info.get("role") != "master":
        yield Finding("replication", DANGER, "it is a replica, which grants no lock", "connect to its primary")
        return
    replicas = [info[f"slave{number}"] for number in range(_int(info, "connected_slaves")) if f"slave{number}" in info]
    if not replicas:
        yield Finding("replication", OK, "it has no replica, so no failover can lose a grant")
        return
    lags = [int(found[1]) for text in replicas if (found := re.search(r"lag=(\d+)", text)) is not None]
    least = server.setting("min-replicas-to-write") or "0"
    yield Finding(
        "replication",
        NOTE if least == "0" else OK,
        f"it has {len(replicas)} replicas; a failover can lose the grants of the last moments"
        + ("" if least == "0" else f"; it stops writing with fewer than {least}"),
        "connect(..., replicas=1) confirms each grant; docs/engines.md says what is left" if least == "0" else "",
    )
    if lags and max(lags) > LARGEST_LAG:
        advice = "see the network and the load of the replica: a failover to it loses that much"
        yield Finding("replication", WARNING, f"a replica is {max(lags)} s behind", advice)
    if len(lags) < len(replicas) or any("state=online" not in text for text in replicas):
        yield Finding("replication", WARNING, "a replica is not online", "see its log")


def clock_and_network(server: Server, shortest: float | None) -> Findings:
    trip, ahead = server.round_trip()
    if abs(ahead) > LARGEST_SKEW + trip:
        side = "ahead of" if ahead > 0 else "behind"
        message = f"its clock is {rounded(abs(ahead))} s {side} this machine's"
        advice = "set both by NTP. Locks do not depend on it; times in listings do, and fences after a failover"
        yield Finding("clock", WARNING, message, advice)
    else:
        yield Finding("clock", OK, f"its clock and this machine's differ by {abs(ahead) * 1000:.0f} ms")
    lease = "" if shortest is None else f"; the shortest lease seen has {rounded(shortest)} s left"
    if shortest is not None and trip > SLOW * shortest:
        message = f"a round trip takes {rounded(trip * 1000)} ms{lease}"
        advice = "give longer ttls, or find out what is slow: a renewal must be in time"
        yield Finding("round trip", WARNING, message, advice)
    else:
        yield Finding("round trip", OK, f"a round trip takes {rounded(trip * 1000)} ms{lease}")


def _int(info: dict[str, str], name: str) -> int:
    text = info.get(name, "0")
    return int(text) if text.isdecimal() else 0


CHECKS: Final[tuple[Callable[[Server], Findings], ...]] = (version, eviction, persistence, replication)
