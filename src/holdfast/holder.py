"""The holder of a lock, as far as its token tells: what people may be shown of it.

A token is ``host-pid-label.secret``. The secret is a capability, so nothing here shows it. Tokens of other libraries
have no readable part: their holder is a Holder about whom nothing is known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Holder", "holder_of", "is_foreign"]

_OURS: Final = re.compile(rb".+\.[0-9a-f]{22,32}", re.DOTALL)  # ends in the random part; lua/grant.lua knows that, too


@dataclass(frozen=True, slots=True)
class Holder:
    """One holder of a lock. What is not known is empty or None."""

    label: str = ""
    host: str = ""
    pid: int | None = None
    fence: int | None = None
    since: float | None = None  # seconds since 1970, by the server's clock
    remaining: float | None = None  # seconds until its lease ends unless it is renewed
    mode: str = ""  # of a rwlock: "read" or "write"; "reserved" for a waiter that wants other names as well
    slot: int | None = None  # of a semaphore

    def __str__(self) -> str:
        if not self.host:
            return "a client of another library"
        process = self.host if self.pid is None else f"{self.host} (pid {self.pid})"
        return f"{process}, label {self.label!r}" if self.label else process


def is_foreign(token: bytes) -> bool:
    """Whether that token is of another library."""
    return not _OURS.fullmatch(token)


def holder_of(token: bytes, remaining: float | None = None, mode: str = "") -> Holder:
    """What may be shown of the holder of that token."""
    if is_foreign(token):
        return Holder(remaining=remaining, mode=mode)
    readable = token.decode(errors="replace").rpartition(".")[0]
    host, _, rest = readable.partition("-")
    pid, _, label = rest.partition("-")
    if not pid.isdecimal():
        pid, label = "", rest
    return Holder(label, host, int(pid) if pid else None, remaining=remaining, mode=mode)
