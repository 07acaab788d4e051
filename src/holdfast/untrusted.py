"""Reads what other clients wrote: tokens, entries of queues and histories, notifications, intents, failures.

Every program that may write to the server may write anything there, by mistake or on purpose. A lock must go on
working then, its holder must be told of a loss, and what is shown must not act on a terminal or forge a line of a log.

Invariant. Each function takes any bytes or text, never raises, and returns bounded values. A number consists of a few
ASCII digits. A text that is shown is cut off after some characters, and whatever is not printable in it is escaped:
control characters, line breaks, marks of direction, lone surrogates. No other module of Holdfast decodes such a value
(tests/test_architecture.py).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from holdfast.lease import MAX_FENCE

MOST_CHARACTERS: Final = 64  # of a host or a label
MOST_REASON: Final = 500  # characters of the reason of a break
MOST_MESSAGE: Final = 1000  # characters of the message of a failed computation
MOST_DIGITS: Final = 16  # of a fence, and of a time in microseconds
MAX_NAME_BYTES: Final = 512
MOST_NAMES: Final = 32  # of one lock
MOST_TOKEN: Final = 2048  # characters: more than a host, a label and their encoding can need
MOST_SLOT: Final = 10_000_000

_MOST_KIND: Final = 64  # characters of a kind of lock
_MOST_ENCODED: Final = 12 * MOST_CHARACTERS  # four bytes, each percent-encoded
_PID_DIGITS: Final = 10
_MOST_LAST: Final = 9  # digits of a slot, or of a pause in ms

_FENCES: Final = re.compile(rb"(\d{1,16}) \d\d? (\S+)(?: (\d{1,16}))?")  # etcd adds when it was granted
_QUEUED: Final = re.compile(rb"(\d{1,16}) \d+ \d+ (\S+) (\d{1,9}) .+", re.DOTALL)
_LATCH: Final = re.compile(r"([0-9]{1,15}) ([0-9]{1,15})")
_BREAK: Final = re.compile(rb"(?:broken )?(\d{1,16}) (\d{1,16}) (\d{1,16}) (\S+) (\S+) (.*)", re.DOTALL)
_ATOL: Final = re.compile(rb"\s*([+-]?)0*(\d*)")
_LARGEST: Final = 2**63 - 1


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped, so that a terminal shows them and does not act on them."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def shown(raw: bytes | str, most: int) -> str:
    """At most that many characters of it, and then escaped: to be shown."""
    text = raw[: 4 * most].decode(errors="replace") if isinstance(raw, bytes) else raw
    return printable(text[:most])


def kind(raw: bytes | str) -> str:
    """The kind of lock that a name is marked as."""
    return shown(raw, _MOST_KIND)


def number(raw: object, digits: int = MOST_DIGITS) -> int | None:
    """The number that this text is; None if it is none, is negative, or has too many digits."""
    if not isinstance(raw, bytes | str) or not 0 < len(raw) <= digits or not raw.isascii() or not raw.isdigit():
        return None
    return int(raw)


def score(raw: object) -> int | None:
    """A score of a sorted set that is a whole number; None for any other."""
    if isinstance(raw, bytes) and raw[:1] == b"-":
        found = number(raw[1:])
        return None if found is None else -found
    return number(raw)


def atol(raw: bytes | None) -> int:
    """The number at the beginning, as the function of that name in C reads it: 0 if there is none."""
    found = _ATOL.match(raw or b"")
    sign, digits = (b"", b"") if found is None else found.groups()
    value = min(int(digits or b"0"), _LARGEST) if len(digits) < 20 else _LARGEST
    return -value if sign == b"-" else value


class Named(NamedTuple):
    """The process that a token names, and the label of its lock."""

    label: str = ""
    host: str = ""
    pid: int | None = None


def named(readable: bytes | str) -> Named:
    """What a token says without its secret: ``host-pid-label``; empty if another library made it."""
    text = shown(readable, MOST_TOKEN)
    if text == "-":
        return Named()
    host, _, rest = text.partition("-")
    digits, _, label = rest.partition("-")
    pid = number(digits, _PID_DIGITS)
    return Named(_unquoted(label if pid is not None else rest), _unquoted(host), pid)


def _unquoted(text: str) -> str:
    return shown(unquote(text[:_MOST_ENCODED]), MOST_CHARACTERS)


class Fences(NamedTuple):
    """The last fences of a name: the first of them, the end of its holder's token, and when it was granted."""

    first: int
    mark: bytes
    since_us: int | None


def fences(raw: bytes | None) -> Fences | None:
    found = _FENCES.fullmatch(raw or b"")
    return None if found is None else Fences(int(found[1]), found[2], number(found[3]))


class Place(NamedTuple):
    """A waiter's entry: when it was last seen, what it asks for, and how many more wait behind it in its process."""

    seen_us: int
    request: bytes
    local: int


def place(raw: bytes | None) -> Place | None:
    found = _QUEUED.fullmatch(raw or b"")
    return None if found is None else Place(int(found[1]), found[2], int(found[3]))


def latch(raw: bytes | str) -> tuple[int, int] | None:
    """What is left of a latch, and its initial count."""
    found = _LATCH.fullmatch(raw.decode(errors="replace") if isinstance(raw, bytes) else raw)
    return None if found is None else (int(found[1]), int(found[2]))


class Break(NamedTuple):
    """An entry of a history. A fence of 0: there was none."""

    at_us: int
    fence: int
    raised: int  # the fence after the break
    holder: Named
    operator: Named
    reason: str


def broken(raw: bytes) -> Break | None:
    found = _BREAK.fullmatch(raw)
    if found is None:
        return None
    at_us, fence, raised = (int(each) for each in found.groups()[:3])
    return Break(at_us, fence, raised, named(found[4]), named(found[5]), shown(found[6], MOST_REASON))


class Message(NamedTuple):
    """A notification. ``fence`` 0: nothing was granted, and ``last`` is a pause in ms; else ``last`` is a slot."""

    fence: int
    at_us: int
    last: int


def notification(words: list[str]) -> Message | None:
    """A notification without its first word."""
    if len(words) != 3:
        return None
    granted = words[0] != "ask"
    fence, at_us = number(words[0]) if granted else 0, number(words[1])
    last = -1 if words[2] == "-1" else number(words[2], _MOST_LAST)
    if fence is None or at_us is None or last is None or (granted and not 0 < fence <= MAX_FENCE):
        return None
    return Message(fence, at_us, last)


def failure(raw: bytes) -> tuple[str, str]:
    """The type and the message of the exception with which a computation failed."""
    exception, _, message = raw[: 8 * MOST_MESSAGE].decode(errors="replace").partition("\n")
    return shown(exception, MOST_MESSAGE), shown(message, MOST_MESSAGE)


def intent(raw: str) -> dict[str, Any]:
    """What the value of an intent says: those of its fields that have a value as Holdfast writes it."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {field: value for field, accepts in _INTENT.items() if accepts(value := content.get(field))}


def _is_token(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_TOKEN and _is_text(value)


def _is_text(value: str) -> bool:
    """Whether it can be sent: it has no lone surrogate."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _is_whole(most: int) -> Any:
    return lambda value: type(value) is int and 0 <= value <= most


def _are_names(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MOST_NAMES
        and all(isinstance(each, str) and 0 < len(each) <= MAX_NAME_BYTES and _is_text(each) for each in value)
    )


_INTENT: Final = {
    "token": _is_token,
    "at": _is_whole(10**MOST_DIGITS - 1),
    "since": _is_whole(10**MOST_DIGITS - 1),
    "names": _are_names,
    "fence": _is_whole(MAX_FENCE),
    "slot": _is_whole(MOST_SLOT),
    "shared": lambda value: value is True,
}
