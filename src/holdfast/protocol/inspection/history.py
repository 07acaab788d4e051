"""What is recorded of a broken hold, as text on the server: for its holder, and for people.

Invariant. An entry contains no secret: only the readable part of each token. lua/include/broken.lua writes the times
and fences; the client adds the holder, the operator and the reason.
"""

from __future__ import annotations

from holdfast.holder import Broken, Holder, readable_of
from holdfast.untrusted import broken


def who_and_why(holder: bytes, operator: str, reason: str) -> str:
    """The part of an entry that the client knows: both tokens without their secrets, and the reason."""
    return f"{readable_of(holder)} {readable_of(operator.encode())} {reason}"


def read_entry(entry: bytes, name: str = "", key: str = "") -> Broken | None:
    """An entry of the history; None if another program wrote it."""
    found = broken(entry)
    if found is None:
        return None
    return Broken(
        name=name,
        at=found.at_us / 1e6,
        holder=Holder(*found.holder, fence=found.fence or None),
        by=Holder(*found.operator),
        reason=found.reason,
        fence=found.raised or None,
        key=key,
    )


def read_notice(tombstone: bytes) -> Broken | None:
    """The entry in a tombstone; None if its token was not broken."""
    return read_entry(tombstone) if tombstone.startswith(b"broken ") else None
