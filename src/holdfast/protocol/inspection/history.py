"""What is recorded of a broken hold, as text on the server: for its holder, and for people.

Invariant. An entry contains no secret: only the readable part of each token. lua/include/broken.lua writes the times
and fences; the client adds the holder, the operator and the reason.
"""

from __future__ import annotations

import re
from typing import Final

from holdfast.errors import printable
from holdfast.holder import Broken, Holder, parts_of, readable_of

MOST_REASON: Final = 500  # characters

_ENTRY: Final = re.compile(r"(?:broken )?(\d{1,16}) (\d{1,16}) (\d{1,16}) (\S+) (\S+) (.*)", re.DOTALL)


def who_and_why(holder: bytes, operator: str, reason: str) -> str:
    """The part of an entry that the client knows: both tokens without their secrets, and the reason."""
    return f"{readable_of(holder)} {readable_of(operator.encode())} {reason}"


def read_entry(entry: bytes, name: str = "") -> Broken | None:
    """An entry of the history; None if another program wrote it."""
    found = _ENTRY.fullmatch(entry.decode(errors="replace"))
    if found is None:
        return None
    at_us, fence, raised, holder, operator, reason = found.groups()
    return Broken(
        name=name,
        at=int(at_us) / 1e6,
        holder=_named(holder, int(fence) or None),
        by=_named(operator, None),
        reason=printable(reason),
        fence=int(raised) or None,
    )


def read_notice(tombstone: bytes) -> Broken | None:
    """The entry in a tombstone; None if its token was not broken."""
    return read_entry(tombstone) if tombstone.startswith(b"broken ") else None


def _named(readable: str, fence: int | None) -> Holder:
    return Holder(fence=fence) if readable == "-" else Holder(*parts_of(readable), fence=fence)
