"""Locks whose keys end in a name: for an operator who typed a name without its namespace, and found nothing.

Invariant. To search changes nothing. The search ends at a limit of keys, of locks that are read, or of time; it sends
nothing again, and says whether it saw all keys. So it delays neither the operator nor the server.

Atomic: each part of the scan, and each read of a lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from holdfast.holder import LockInfo
from holdfast.names import keys_of
from holdfast.protocol.effects import SCANNED, Effects, StepFailed, call_each, clock, scan
from holdfast.protocol.inspection.locks import BATCH, escaped, inspect_step, pattern_of, shows_use, side_key
from holdfast.protocol.inspection.reading import seen_in

MOST_KEYS: Final = 500_000
MOST_READ: Final = 4 * BATCH
LONGEST: Final = 1.0  # seconds
_HISTORY: Final = "history"


@dataclass(slots=True)
class Endings:
    """What was found. Its names are whole keys."""

    in_use: list[LockInfo] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # keys of locks with a history; none on etcd
    scanned: int = 0
    complete: bool = False
    allowed: bool = True  # this user may look for keys


def find_endings(name: str, most_keys: int = MOST_KEYS, longest: float = LONGEST) -> Effects[Endings]:
    """The locks whose keys end in that name, the likeliest first: the name alone, or after a separator."""
    found = Endings()
    until = (yield from clock()) + longest
    used: set[str] = set()
    broken: set[str] = set()
    try:
        cursor = ""
        while found.scanned < most_keys and (left := until - (yield from clock())) > 0:
            cursor, keys = yield from scan(cursor, pattern_of(f"*{escaped(name)}"), left)
            found.scanned += SCANNED
            for key, part in filter(None, map(side_key, keys)):
                if part.startswith(_HISTORY):
                    broken.add(key)
                elif shows_use(part):
                    used.add(key)
            if not cursor:
                found.complete = True
                break
        found.broken = _sorted(broken, name)
        yield from _read(found, _sorted(used, name), until)
    except StepFailed as failed:
        found.complete = False
        found.allowed = not failed.answered
    return found


def _sorted(keys: set[str], name: str) -> list[str]:
    def rank(key: str) -> tuple[bool, int, str]:
        before = key.removesuffix(name)
        return before[-1:].isalnum(), len(key), key

    return sorted(keys, key=rank)


def _read(found: Endings, keys: list[str], until: float) -> Effects[None]:
    """Read which of these locks are in use: a fence is remembered after its lock was released."""
    for first in range(0, len(keys), BATCH):
        left = until - (yield from clock())
        if first >= MOST_READ or left <= 0:
            found.complete = False
            return
        locks = [keys_of(key) for key in keys[first : first + BATCH]]
        replies = yield from call_each([inspect_step(lock) for lock in locks], left)
        for lock, reply in zip(locks, replies, strict=True):
            if isinstance(reply, StepFailed):
                if not reply.answered:
                    raise reply
                continue  # this user may not read that lock
            found.in_use += [seen.info() for seen in seen_in(lock, reply)]
