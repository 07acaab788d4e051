"""Whether a round trip is short beside the ttls of the leases on a server.

A server tells what is left of a lease, and not its ttl. What is left of a lease that is about to end says nothing: the
holder may be done, or dead. So a lease counts only if it was renewed between two looks at it. Its ttl is then at most
what is left at the second look and the time between both. Only a lease whose ttl is certainly too short is reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.blocking import Client
from holdfast.cli.doctor.findings import OK, UNCHECKED, WARNING, Finding, Refused, Server
from holdfast.errors import rounded
from holdfast.holder import LockInfo

SLOW: Final = 0.1  # of a ttl, for one round trip
LONGEST_WATCH: Final = 10.0  # seconds
_MOST_WATCHED: Final = 10  # leases
_ROUNDING: Final = 0.01  # seconds


class Look(NamedTuple):
    """One lease at one moment of the server's clock."""

    left: float
    at: float
    name: str
    holder: str


def looks_at(infos: Iterable[LockInfo]) -> list[Look]:
    """All leases of these locks, except reservations, which are short and are not renewed."""
    return [
        Look(holder.remaining, info.at, info.name, holder.id)
        for info in infos
        for holder in info.holders
        if holder.remaining is not None and holder.mode != "reserved"
    ]


def longest_ttl(earlier: Look, later: Look) -> float | None:
    """The longest ttl that the lease can have; None if it was not renewed between the looks."""
    if later.at + later.left <= earlier.at + earlier.left + _ROUNDING:
        return None
    return later.left + (later.at - earlier.at)


def find_short(client: Client, server: Server, trip: float, looks: Iterable[Look]) -> tuple[str, float] | None:
    """A lock of this server whose ttl is too short for this round trip, and its longest possible ttl."""
    enough = trip / SLOW
    watched = sorted(look for look in looks if look.left < enough)[:_MOST_WATCHED]
    watched = [look for look in watched if server.serves(server.prefix + look.name)]
    # A lease with such a ttl is renewed after a third of it, so half of that time is enough to see a renewal.
    until = time.monotonic() + min(LONGEST_WATCH, enough / 2)
    while watched and time.monotonic() < until:
        time.sleep(enough / 20)
        still: list[Look] = []
        for look in watched:
            info = client.inspect(look.name)
            later = next((one for one in looks_at([info] if info else []) if one.holder == look.holder), None)
            ttl = longest_ttl(look, later) if later is not None else None
            if ttl is not None and ttl < enough:
                return look.name, ttl
            if later is not None and later.left < enough:
                still.append(later)
        watched = still
    return None


def round_trip(trip: float, short: tuple[str, float] | None) -> Finding:
    """``short``: a lock and its ttl, which is too short for this round trip."""
    message = f"a round trip takes {rounded(trip * 1000)} ms"
    if short is None:
        return Finding("round trip", OK, message)
    name, ttl = short
    advice = "give longer ttls, or find out what is slow: a renewal must be in time"
    return Finding("round trip", WARNING, f"{message}, and the ttl of {name!r} is {rounded(ttl)} s at most", advice)


def not_compared(server: Server, trip: float, refused: Refused) -> Finding:
    why = server.unchecked("round trip", refused)
    message = f"a round trip takes {rounded(trip * 1000)} ms; whether leases are too short for it is {why.message}"
    return Finding("round trip", UNCHECKED, message, why.advice)
