"""Keys under the names of locks that no lock has written: of another type, or without an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from holdfast.cli.doctor.findings import OK, WARNING, Finding
from holdfast.errors import printable
from holdfast.names import WIRE
from holdfast.protocol.effects import SCANNED, Command, Effects, StepFailed, call_each, scan

MOST_SHOWN: Final = 5
TYPES: Final = {
    "fence": b"string",
    "queue": b"zset",
    "waiters": b"hash",
    "gone": b"string",
    "holders": b"zset",
    "latch": b"string",
    "latch:waiters": b"zset",
    "cache:value": b"hash",
    "cache:claim": b"string",
    "cache:waiters": b"hash",
    "cache:failure": b"string",
    "guard": b"string",
    "history": b"list",
}
_MARK: Final = f":{WIRE}:"
_WITHOUT_END: Final = ("guard",)


class Keys:
    """What was seen of the keys of locks."""

    def __init__(self) -> None:
        self.scanned = 0
        self.names: set[str] = set()
        self.foreign: list[str] = []  # of another type than a lock writes
        self.endless: list[str] = []  # without a ttl

    def findings(self) -> Iterable[Finding]:
        if not self.foreign and not self.endless:
            yield Finding("keys", OK, f"all keys of {len(self.names):,} names are as locks write them")
        if self.foreign:
            advice = "rename what the other program writes, or choose a namespace for locks"
            yield Finding("keys", WARNING, f"keys of a foreign type: {_shown(self.foreign)}", advice)
        if self.endless:
            advice = "see holdfast who NAME; if its holder is gone, free it by holdfast break NAME"
            yield Finding("keys", WARNING, f"keys without a ttl, which never end: {_shown(self.endless)}", advice)


def look_through(found: Keys, pattern: str, timeout: float) -> Effects[None]:
    """Look at all side keys, and at the main key of each name. Each part of the work is bounded."""
    cursor, begun = "", False
    while cursor or not begun:
        begun = True
        cursor, raw = yield from scan(cursor, f"{pattern}{_MARK}*", timeout)
        keys = [key.decode(errors="replace") for key in raw]
        mains = {key.partition(_MARK)[0] for key in keys} - found.names
        found.names |= mains
        found.scanned += SCANNED
        yield from _check(found, [*sorted(mains), *keys], timeout)


def _check(found: Keys, keys: list[str], timeout: float) -> Effects[None]:
    for start in range(0, len(keys), 200):
        some = keys[start : start + 200]
        replies: list[Any] = yield from call_each(
            [Command((word, key)) for key in some for word in ("TYPE", "PTTL")], timeout
        )
        for key, kind, left_ms in zip(some, replies[::2], replies[1::2], strict=True):
            if isinstance(kind, StepFailed) or isinstance(left_ms, StepFailed) or kind == b"none":
                continue
            part = _part(key)
            if kind != TYPES.get(part, b"string"):
                found.foreign.append(f"{printable(key)} is a {kind.decode()}")
            elif left_ms == -1 and part not in _WITHOUT_END:
                found.endless.append(printable(key))


def _part(key: str) -> str:
    """Which part of a lock this key is; empty for the main key."""
    _, _, part = key.partition(_MARK)
    part = part.partition(":{")[0]
    return "gone" if part.startswith("gone:") else part


def _shown(keys: list[str]) -> str:
    more = f" and {len(keys) - MOST_SHOWN} more" if len(keys) > MOST_SHOWN else ""
    return ", ".join(keys[:MOST_SHOWN]) + more
