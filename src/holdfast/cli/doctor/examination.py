"""All checks, on all servers of a client: which server is asked what, and what is said once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.blocking import Client, connect
from holdfast.cli.doctor.checks import CHECKS, clock, findings_of
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING, Finding, Refused, Server, refused_by, why
from holdfast.cli.doctor.keys import Keys, look_through
from holdfast.cli.doctor.leases import Look, find_short, looks_at, not_compared, round_trip
from holdfast.cli.doctor.permissions import Use, permissions
from holdfast.cli.doctor.replicas import Address, replicas_of, url_of
from holdfast.cli.operate.listing import progress
from holdfast.cli.place import cluster_of, embedded
from holdfast.errors import HoldfastError
from holdfast.protocol.effects import StepFailed
from holdfast.url import Location

TIMEOUT: Final = 5.0
REPLICA_TIMEOUT: Final = 1.0


def findings_on(client: Client, prefix: str, location: Location) -> Iterator[Finding]:
    """What all checks have found. StepFailed if a server does not answer."""
    user, use = user_in(location), Use.of(location)
    named = client._driver.servers(TIMEOUT)
    watched = location.engine == "sentinel"
    servers = [
        Server(address, engine, TIMEOUT, user=user, prefix=prefix, is_watched=watched)
        for address, engine in named.items()
    ]
    leases = _leases(client)
    allowed: list[Finding] = []
    for server in servers:
        found = findings_of("address", server, lambda server: _place(server, location))
        found += [finding for name, check in CHECKS.items() for finding in findings_of(name, server, check)]
        found += findings_of("clock", server, lambda server: _clock_and_network(client, server, leases))
        yield from _of(server, found)
        allowed += _of(server, findings_of("permissions", server, _permissions(client, use)))
    of_replicas = [
        found for address in replicas_of(servers, location) for found in _replica(address, location, user, prefix)
    ]
    yield from _merged([*allowed, *of_replicas], [finding.server for finding in of_replicas])
    yield from _keys(client, servers).findings()


def user_in(location: Location) -> str:
    """The user's name in a URL."""
    parts = urlsplit(location.redis_url)
    options = parse_qs(parts.query).get("username", [])
    return options[-1] if options else unquote(parts.username or "") or "default"


def _of(server: Server, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, server=server.address) for finding in findings]


def _leases(client: Client) -> list[Look] | Refused:
    """All leases; Refused if this user may not list them."""
    try:
        return looks_at(client.locks())
    except HoldfastError as error:
        refused = refused_by(error)
        if refused is None:
            raise
        return refused


def _place(server: Server, location: Location) -> Iterable[Finding]:
    """What the URL leads to, if that is not what it seems to name."""
    if location.engine == "local":
        yield Finding("address", OK, f"{location.address} is {embedded(server.ask)}")
    if location.engine != "redis":
        return
    try:
        url = cluster_of(server.address, server.ask)
    except Refused:
        return  # a proxy, for example
    if url:
        message = "it is one node of a cluster: it refuses locks of the other nodes, which are not checked here"
        yield Finding("address", WARNING, message, f"use {url}, here and in programs")


def _clock_and_network(client: Client, server: Server, leases: list[Look] | Refused) -> Iterable[Finding]:
    trip, ahead = server.round_trip()
    yield clock(trip, ahead)
    if isinstance(leases, Refused):
        yield not_compared(server, trip, leases)
    else:
        yield round_trip(trip, find_short(client, server, trip, leases))


def _permissions(client: Client, use: Use) -> Callable[[Server], Iterable[Finding]]:
    def may_subscribe(key: str) -> bool:
        """Whether this client can be notified, tried as a waiter does."""
        try:
            return bool(client._driver.shared.listen(TIMEOUT, (key,)))
        except StepFailed:
            return False

    return lambda server: permissions(server, use, may_subscribe)


def _replica(address: Address, location: Location, user: str, prefix: str) -> list[Finding]:
    """What this user may not do on a replica."""
    place, use = f"{address[0]}:{address[1]}", Use.of(location)
    with connect(url_of(address, location)) as client:
        ((_, engine),) = client._driver.servers(REPLICA_TIMEOUT).items()
        server = Server(place, engine, REPLICA_TIMEOUT, user=user, prefix=prefix)
        try:
            found = findings_of("permissions", server, lambda server: permissions(server, use, None))
        except StepFailed as failed:
            found = [_unreachable(failed, user)]
    return _of(server, found)


def _unreachable(failed: StepFailed, user: str) -> Finding:
    """That a replica does not accept this user, or does not answer."""
    if type(failed.__cause__).__name__ == "AuthenticationError":  # of redis-py
        advice = f"create user {user!r} there: holdfast doctor --acl prints its rules"
        return Finding("permissions", DANGER, f"no lock works, because {why(failed)}", advice)
    advice = "run holdfast doctor where this replica can be reached"
    return Finding("permissions", UNCHECKED, f"not checked: {why(failed)}", advice)


def _merged(findings: list[Finding], replicas: list[str]) -> Iterator[Finding]:
    """What is the same on all servers, once; and the rest. A replica is a problem only at the next failover."""
    asked = {check: {one.server for one in findings if one.check == check} for check in {one.check for one in findings}}
    seen = Counter(replace(finding, server="") for finding in findings)
    for finding in findings:
        same, everywhere = replace(finding, server=""), asked[finding.check]
        if len(everywhere) > 1 and seen[same] == len(everywhere):
            if finding.server == min(everywhere):
                where = "" if finding.level == OK else f"on each of {len(everywhere)} servers: "
                yield replace(same, message=f"{where}{finding.message}")
        elif finding.server in replicas and finding.level in (DANGER, WARNING, NOTE):
            level = WARNING if finding.level == DANGER else finding.level
            yield replace(finding, level=level, message=f"after a failover to this replica: {finding.message}")
        else:
            yield finding


def _keys(client: Client, servers: list[Server]) -> Keys:
    keys = Keys()
    with progress(lambda: f"looked at {keys.scanned:,} keys ..."):
        for server in servers:
            look_through(keys, server, client._driver.run, TIMEOUT)
    return keys
