"""``holdfast doctor`` on memcached: what can make it lose locks. It has no users, so nothing is forbidden there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from holdfast.blocking import Client
from holdfast.cli.doctor.checks import LARGEST_SKEW
from holdfast.cli.doctor.findings import DANGER, NOTE, OK, UNCHECKED, WARNING, Finding, own_key
from holdfast.cli.doctor.trips import fastest, judged
from holdfast.errors import HoldfastError, Unavailable, rounded
from holdfast.protocol.effects import Command
from holdfast.untrusted import shown

TIMEOUT: Final = 5.0
OLDEST: Final = (1, 6)
NEARLY_FULL: Final = 0.9
_COARSE: Final = 2.0  # seconds: its clock shows whole seconds, and is read once in a second
_LONGEST: Final = 64  # characters of what it says
_TTL: Final = 5.0  # seconds of the doctor's own lock, which ends even if the doctor is killed

Stats = dict[str, str]
Findings = Iterable[Finding]


def findings_on_memcached(client: Client) -> Iterator[Finding]:
    """What all checks have found. StepFailed if it does not answer."""
    ((address, engine),) = client._driver.servers(TIMEOUT).items()
    for finding in _findings(client, engine):
        yield replace(finding, server=address)


def _findings(client: Client, engine: Any) -> Findings:
    def stats(*what: str) -> Stats:
        found: Stats = engine.call(Command(("stats", *what)), TIMEOUT)
        return found

    began = time.time()
    found = stats()
    ended = time.time()
    found |= {f"settings.{name}": value for name, value in stats("settings").items()}
    for check in (version, eviction, memory, restart, connections, cas):
        yield from check(found)
    yield from clock(found, began, ended)
    yield judged(fastest(lambda: engine.call(Command(("gets", own_key(""))), TIMEOUT)))
    if _has_cas(found):
        yield _lock(client)


def version(found: Stats) -> Findings:
    text = found.get("version", "")
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", text)
    if numbers is None:
        yield _not_said("version", "its version")
    elif (int(numbers[1]), int(numbers[2])) < OLDEST:
        message = f"it is memcached {shown(text, _LONGEST)}"
        yield Finding("version", DANGER, message, "Holdfast needs memcached 1.6 or newer, for the meta command md")
    else:
        yield Finding("version", OK, f"it is memcached {shown(text, _LONGEST)}")


def cas(found: Stats) -> Findings:
    if not _has_cas(found):
        message = "no lock can be renewed or released: its compare-and-swap is off (option -C)"
        yield Finding("lock", DANGER, message, "start it without -C")


def _has_cas(found: Stats) -> bool:
    return found.get("settings.cas_enabled") != "no"


def eviction(found: Stats) -> Findings:
    """Whether it drops items, locks among them, when its memory is full."""
    evicted, evicts = _int(found, "evictions"), found.get("settings.evictions")
    if evicted:
        message = f"it has evicted {evicted:,} items since its start {_age(found)} ago, and locks can be among them"
        yield Finding("eviction", WARNING, message, _OWN)
    elif evicts is None or "evictions" not in found:
        yield _not_said("eviction", "whether it evicts items")
    elif evicts == "off":
        yield Finding("eviction", OK, "it evicts no item (-M): when its memory is full, it grants no lock")
    else:
        message = "it has evicted nothing so far; when its memory is full, it evicts items, and locks among them"
        yield Finding("eviction", NOTE, message, _OWN)


_OWN: Final = "keep locks on a memcached of their own, with enough memory (-m), or start it with -M"


def memory(found: Stats) -> Findings:
    used, limit = _int(found, "bytes"), _int(found, "limit_maxbytes")
    if not limit:
        yield _not_said("memory", "its memory")
        return
    message = f"items use {used:,} of {limit:,} bytes"
    if used <= NEARLY_FULL * limit:
        yield Finding("memory", OK, message)
        return
    then = "grants no lock" if found.get("settings.evictions") == "off" else "evicts items"
    advice = "give it more (-m): a full one " + then
    yield Finding("memory", WARNING, f"its memory is nearly full: {message}", advice)


def restart(found: Stats) -> Findings:
    message = f"it was started {_age(found)} ago. A restart, or flush_all, ends each lock, and there are no fences"
    advice = "use it for work that is merely wasteful if done twice; else redis:// or etcd://"
    yield Finding("persistence", NOTE, message, advice)


def connections(found: Stats) -> Findings:
    used, limit = _int(found, "curr_connections"), _int(found, "max_connections")
    refused = _int(found, "rejected_connections")
    advice = "raise -c: a holder that cannot connect cannot renew its lock"
    if not limit:
        yield _not_said("connections", "how many connections it allows")
    elif used > NEARLY_FULL * limit:
        message = f"its connections are nearly used up: {used:,} of {limit:,}"
        yield Finding("connections", WARNING, message, advice)
    elif refused:
        message = (
            f"it has refused {refused:,} connections since its start {_age(found)} ago; {used:,} of {limit:,} are open"
        )
        yield Finding("connections", WARNING, message, advice)
    else:
        yield Finding("connections", OK, f"{used:,} of {limit:,} connections are open")


def clock(found: Stats, began: float, ended: float) -> Findings:
    """Holdfast counts the end of an item on the server's clock, so its difference from ours does no harm."""
    told = _int(found, "time")
    if not told:
        yield _not_said("clock", "its time")
        return
    ahead = max(0.0, told - ended) or min(0.0, told + _COARSE - began)
    if abs(ahead) <= LARGEST_SKEW:
        yield Finding("clock", OK, "its clock and this machine's differ by less than 3 s")
        return
    side = "ahead of" if ahead > 0 else "behind"
    message = f"its clock is {rounded(abs(ahead))} s {side} this machine's"
    advice = "this does no harm, because the ends of locks are set on the server's clock. A restart corrects that clock"
    yield Finding("clock", NOTE, message, advice)


def _lock(client: Client) -> Finding:
    """Whether a lock can be taken, renewed and released, tried on a name of the doctor's own."""
    try:
        with client.lock(own_key(""), ttl=_TTL, wait=0, renew=False) as lease:
            lease.extend(_TTL)
    except HoldfastError as error:
        advice = error.advice if isinstance(error, Unavailable) else "see the log of memcached"
        what = "; ".join(error.causes.values()) if isinstance(error, Unavailable) else str(error)
        return Finding("lock", DANGER, f"a lock could not be taken, renewed and released: {what}", advice)
    return Finding("lock", OK, "a lock can be taken, renewed and released")


def _not_said(check: str, what: str) -> Finding:
    return Finding(check, UNCHECKED, f"not checked: stats does not say {what}", "look it up where the server is set up")


def _int(found: Stats, name: str) -> int:
    text = found.get(name, "")
    return int(text) if re.fullmatch(r"\d{1,19}", text) else 0


def _age(found: Stats) -> str:
    seconds = _int(found, "uptime")
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"
