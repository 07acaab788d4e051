"""What the doctor checks on each server. A check returns what it has found, good or bad, in plain words.

A check that the server does not allow raises Refused, and ``findings_of`` says so: nothing is known then, which is not
the same as good.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING, Finding, Refused, Server, acl_line
from holdfast.errors import rounded

OLDEST: Final = (6, 2)
LARGEST_LAG: Final = 1  # seconds
LARGEST_SKEW: Final = 1.0

Findings = Iterable[Finding]


def findings_of(check: str, server: Server, find: Callable[[Server], Findings]) -> list[Finding]:
    """What the check has found; or that it could not be made."""
    found: list[Finding] = []
    try:
        found.extend(find(server))
    except Refused as refused:  # what was found before that stays
        found.append(server.unchecked(check, refused))
    return found


def version(server: Server) -> Findings:
    info = server.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get("valkey_version") or info.get("redis_version", "")
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        yield _not_said("version", "its version")
    elif name == "Redis" and (int(found[1]), int(found[2])) < OLDEST:
        yield Finding("version", DANGER, f"it is Redis {text}", "Holdfast needs Redis 6.2 or later, or any Valkey")
    elif info.get("redis_mode") == "cluster" and int(found[1]) < 7:
        advice = "upgrade to 7.0, which has sharded channels"
        yield Finding("version", WARNING, f"it is a cluster of {name} {text}, where waiters poll", advice)
    else:
        yield Finding("version", OK, f"it is {name} {text}")


def eviction(server: Server) -> Findings:
    info = server.info("memory")
    policy, limit, used = info.get("maxmemory_policy", ""), _int(info, "maxmemory"), _int(info, "used_memory")
    if "maxmemory" not in info or (limit and not policy):
        yield _not_said("eviction", "its maxmemory and maxmemory-policy")
    elif not limit:
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
        yield _not_said("persistence", "what it saves")
        return
    failed = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    if failed:
        advice = "see its log and its disk: by default it refuses writes, and so locks, until this is repaired"
        yield Finding("persistence", DANGER, f"it cannot save its data ({', '.join(failed)})", advice)
    if info.get("loading", "0") != "0":
        yield Finding("persistence", WARNING, "it is loading its data, and answers nothing else meanwhile", "wait")
    if info.get("aof_enabled") == "1":
        sync, advice = _setting(server, "appendfsync")
        loses = {"always": "no grant", "everysec": "the grants of the last second"}.get(sync, "the last grants")
        level = NOTE if sync != "always" else OK
        message = f"a crash loses {loses} (appendfsync {sync}); fences still rise"
        yield Finding("persistence", level, message, advice)
        return
    yield Finding(
        "persistence",
        NOTE,
        "after a restart it knows no holds, or old ones: another client can get a lock that is still believed held",
        "CONFIG SET appendonly yes, or let the resource check the fence (docs/guard.md)",
    )


def replication(server: Server) -> Findings:
    info = server.info("replication")
    if "role" not in info:
        yield _not_said("replication", "its role")
        return
    if info["role"] != "master":
        yield Finding("replication", DANGER, "it is a replica, which grants no lock", "connect to its primary")
        return
    replicas = [info[f"slave{number}"] for number in range(_int(info, "connected_slaves")) if f"slave{number}" in info]
    if server.is_watched and not any("state=online" in text for text in replicas):
        message = "no replica is connected to it: if it fails, nothing can take over, and locks wait until it is back"
        advice = "start a replica, or see in the log of the replica why it does not follow"
        yield Finding("replication", WARNING, message, advice)
    elif not replicas:
        yield Finding("replication", OK, "it has no replica, so no failover can lose a grant")
    if not replicas:
        return
    yield _lossy(server, len(replicas))
    lags = [int(found[1]) for text in replicas if (found := re.search(r"lag=(\d+)", text)) is not None]
    if lags and max(lags) > LARGEST_LAG:
        advice = "see the network and the load of the replica: a failover to it loses that much"
        yield Finding("replication", WARNING, f"a replica is {max(lags)} s behind", advice)
    if len(lags) < len(replicas) or any("state=online" not in text for text in replicas):
        yield Finding("replication", WARNING, "a replica is not online", "see its log")


def _lossy(server: Server, count: int) -> Finding:
    """What a failover to a replica can lose, and how to lose less."""
    least, _ = _setting(server, "min-replicas-to-write")
    message = f"it has {count} replicas; a failover can lose the grants of the last moments"
    if least not in ("0", _UNKNOWN):
        return Finding("replication", OK, f"{message}; it stops writing with fewer than {least}")
    if least == _UNKNOWN:
        message += f" (min-replicas-to-write {least})"
    needs = "" if server.may("WAIT", 0, 1) else f", if its user may use WAIT: {acl_line(server.user, ['+wait'])}"
    advice = f"connect(..., replicas=1) confirms each grant{needs}; docs/engines.md says what is left"
    return Finding("replication", NOTE, message, advice)


def clock(trip: float, ahead: float) -> Finding:
    """``ahead``: how far the server's clock is ahead of this machine's, in seconds."""
    if abs(ahead) <= LARGEST_SKEW + trip:
        return Finding("clock", OK, f"its clock and this machine's differ by {abs(ahead) * 1000:.0f} ms")
    side = "ahead of" if ahead > 0 else "behind"
    message = f"its clock is {rounded(abs(ahead))} s {side} this machine's"
    advice = "set both by NTP. Locks do not depend on it; times in listings do, and fences after a failover"
    return Finding("clock", WARNING, message, advice)


_UNKNOWN: Final = "unknown"


def _setting(server: Server, name: str) -> tuple[str, str]:
    """A setting, and the line that makes it known. Callers assume the worse value if it is unknown, so an unknown
    setting is no check that could not be made; most hosted servers do not tell their settings."""
    try:
        return server.setting(name) or _UNKNOWN, ""
    except Refused as refused:
        return _UNKNOWN, acl_line(server.user, [f"+{refused.command}"]) if refused.is_forbidden else ""


def _not_said(check: str, what: str) -> Finding:
    return Finding(check, UNCHECKED, f"not checked: INFO does not say {what}", "look it up where the server is set up")


def _int(info: dict[str, str], name: str) -> int:
    text = info.get(name, "0")
    return int(text) if text.isdecimal() else 0


CHECKS: Final[dict[str, Callable[[Server], Findings]]] = {
    "version": version,
    "eviction": eviction,
    "persistence": persistence,
    "replication": replication,
}
