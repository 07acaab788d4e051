"""How the server reads the arguments of a command: integers, scores, ranges, points in time, patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.lab.servers.replies import ReplyError

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store

SMALLEST, LARGEST = -(2**63), 2**63 - 1
NOT_AN_INTEGER = "ERR value is not an integer or out of range"
SYNTAX = "ERR syntax error"

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_NUMBER = re.compile(rb"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?)", re.IGNORECASE)


def encode(word: bytes | str | int) -> bytes:
    """An argument as it is sent."""
    return word if isinstance(word, bytes) else str(word).encode()


def integer(word: bytes, complaint: str = NOT_AN_INTEGER) -> int:
    """A 64-bit integer in the only form that the server accepts: no plus sign, no leading zero, no blank."""
    if _INTEGER.fullmatch(word):
        value = int(word)
        if SMALLEST <= value <= LARGEST:
            return value
    raise ReplyError(complaint)


def number(word: bytes, complaint: str = "ERR value is not a valid float") -> float:
    """A score; infinities are scores too, NaN is not."""
    if not _NUMBER.fullmatch(word):
        raise ReplyError(complaint)
    return float(word)


def span(start: bytes, stop: bytes, length: int) -> slice:
    """The part of a sequence between two indexes, both included, negative ones counted from the end."""
    first, last = integer(start), integer(stop)
    first = max(first + length if first < 0 else first, 0)
    last = last + length if last < 0 else last
    return slice(first, max(last + 1, 0))


def deadline_ms(store: Store, name: str, amount: int, unit: str) -> int:
    """The deadline that an expiry option means, in milliseconds since 1970. Units are those of SET: EX, PX, PXAT."""
    amount_ms = amount * 1000 if unit.startswith("EX") else amount
    moment = amount_ms if unit.endswith("AT") else amount_ms + store.now_ms
    if not SMALLEST <= amount_ms <= LARGEST or moment > LARGEST:
        raise ReplyError(f"ERR invalid expire time in '{name}' command")
    return moment


def between(low: bytes, high: bytes) -> Callable[[float], bool]:
    """A function: whether a score is in the range. A parenthesis before an end excludes that end."""
    least, most = (number(end.removeprefix(b"("), "ERR min or max is not a float") for end in (low, high))
    above, below = low.startswith(b"("), high.startswith(b"(")
    return lambda score: (score > least if above else score >= least) and (score < most if below else score <= most)


def matcher(pattern: bytes) -> re.Pattern[bytes]:
    """A glob pattern, in the syntax of the server, as a regular expression."""
    parts = re.findall(rb"\\.|\[\^?(?:\\.|[^\]])*\]|.", pattern, re.DOTALL)
    return re.compile(b"".join(_translate(part) for part in parts), re.DOTALL)


def _translate(part: bytes) -> bytes:
    if part == b"*":
        return b".*"
    if part == b"?":
        return b"."
    if part.startswith(b"[") and len(part) > 1:
        return part
    return re.escape(part[-1:])
