"""The replicas to which a failover can go: their addresses, and clients of them.

A replica has its own ACL. If a user lacks a permission there, locks work until the failover.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from holdfast.cli.doctor.findings import Refused, Server
from holdfast.url import Location

Address = tuple[str, int]


def replicas_of(servers: list[Server], location: Location) -> list[Address]:
    """The replicas that may take over; none of a single server, because its clients do not follow a failover."""
    try:
        if location.engine == "cluster":
            return sorted(set(_in_map(servers[0].ask("CLUSTER", "SLOTS"))))
        if location.engine == "sentinel":
            return sorted(_in_info(servers[0].info("replication")))
    except Refused:
        pass  # the checks of the permissions and of the replication say so
    return []


def url_of(address: Address, location: Location) -> str:
    """The URL of a replica, with the credentials and options of its primary's URL."""
    parts = urlsplit(location.redis_url)
    user = parts.netloc.rpartition("@")[0]
    host, port = address
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{parts.scheme}://{user}{'@' if user else ''}{place}/0?{parts.query}"


def _in_map(ranges: Iterable[list[list[bytes | int | None]]]) -> Iterable[Address]:
    """From a reply to CLUSTER SLOTS: after the first and the last slot come the primary and its replicas."""
    for _, _, primary, *replicas in ranges:
        for host, port, *_ in replicas:
            known = host or primary[0]  # without a host, a node has that of the node that was asked
            if isinstance(known, bytes) and isinstance(port, int):
                yield known.decode(errors="replace"), port


def _in_info(info: dict[str, str]) -> Iterable[Address]:
    for name, text in info.items():
        if re.fullmatch(r"slave\d+", name):
            fields = dict(pair.partition("=")[::2] for pair in text.split(","))
            if fields.get("ip") and fields.get("port", "").isdecimal():
                yield fields["ip"], int(fields["port"])
