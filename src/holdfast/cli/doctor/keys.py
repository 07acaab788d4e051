"""Keys under the names of locks that no lock has written: of another type, or without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from holdfast.cli.doctor.findings import OK, WARNING, Finding, Refused, Server, refused_by
from holdfast.names import WIRE
from holdfast.protocol.effects import SCANNED, Command, Effects, StepFailed, call_each
from holdfast.protocol.inspection.locks import escaped
from holdfast.untrusted import printable

Run = Callable[[Effects[Any]], Any]  # runs a protocol on all servers of the client

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
        self.unchecked: dict[Finding, int] = {}  # why keys could not be looked at, and how many keys

    def findings(self) -> Iterable[Finding]:
        if not self.foreign and not self.endless and not self.unchecked:
            yield Finding("keys", OK, f"all keys of {len(self.names):,} names are as locks write them")
        if self.foreign:
            advice = "rename what the other program writes, or choose a namespace for locks"
            yield Finding("keys", WARNING, f"keys of a foreign type: {_shown(self.foreign)}", advice)
        if self.endless:
            advice = "see holdfast who NAME; if its holder is gone, free it by holdfast break NAME"
            yield Finding("keys", WARNING, f"keys without a ttl, which never end: {_shown(self.endless)}", advice)
        for why, count in self.unchecked.items():
            yield (
                replace(why, message=why.message.replace("not checked", f"{count:,} keys not checked"))
                if count
                else why
            )

    def note_unchecked(self, server: Server, refused: Refused, count: int) -> None:
        why = replace(server.unchecked("keys", refused), server=server.address)
        self.unchecked[why] = self.unchecked.get(why, 0) + count


def look_through(found: Keys, server: Server, run: Run, timeout: float) -> None:
    """Look at all side keys of a server, and at the main key of each name. Each part of the work is bounded."""
    cursor, pattern = "0", f"{escaped(server.prefix)}*{_MARK}*"
    while True:
        try:
            after, raw = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED)
        except Refused as refused:
            found.note_unchecked(server, refused, 0)
            return
        keys = [key.decode(errors="replace") for key in raw]
        mains = {key.partition(_MARK)[0] for key in keys if _part(key) != "guard"} - found.names  # that guards data
        found.names |= mains
        found.scanned += SCANNED
        _check(found, server, [*sorted(mains), *keys], run, timeout)
        cursor = after.decode()
        if cursor == "0":
            return


def _check(found: Keys, server: Server, keys: list[str], run: Run, timeout: float) -> None:
    for start in range(0, len(keys), 200):
        some = keys[start : start + 200]
        asked = [Command((word, key)) for key in some for word in ("TYPE", "PTTL")]
        replies: list[Any] = run(call_each(asked, timeout))
        for key, kind, left_ms in zip(some, replies[::2], replies[1::2], strict=True):
            failed = next((reply for reply in (kind, left_ms) if isinstance(reply, StepFailed)), None)
            if failed is not None:
                refused = refused_by(failed, "TYPE" if failed is kind else "PTTL")
                if refused is None:  # no reply: the server is down, or hangs
                    raise failed
                found.note_unchecked(server, refused, 1)
            elif kind != b"none":
                _judge(found, key, kind, left_ms)


def _judge(found: Keys, key: str, kind: bytes, left_ms: int) -> None:
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
