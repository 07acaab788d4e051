"""add with an expiry, on memcached: the lock of those who have that and no Redis.

Invariant. ``add`` stores only what is not there, so whoever it has stored for holds the lock, until the item is
deleted, expires, or is evicted. It is given back by ``gets``, and a delete (``md``) that names the cas of what was
seen: if the item has changed since, it is another's and stays.

Pits. Eviction frees it, for memcached forgets what it pleases when it is full. Its clock ticks once a second, so an
item may live almost a second less than it was given. There is no fence.

As words: ``add key flags exptime data``, answered STORED or NOT_STORED; ``gets key``, answered with data and cas, or
with nothing; ``md key C<cas>``, answered HD (done), EX (another cas) or NF (not found).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call, new_token
from holdfast.protocol.recipes.scheme import LOST, WON, Leased, Outcome, Turn

__all__ = ["MemcachedAdd"]


@dataclass(frozen=True, kw_only=True)
class MemcachedAdd(Leased):
    pit: ClassVar[str] = "eviction frees it, and it has no fence"
    server: ClassVar[str] = "memcached"
    compares: ClassVar[bool] = True

    @property
    def lasts(self) -> float:
        return self.whole_seconds

    def attempt(self, turn: Turn, timeout: float) -> Effects[Outcome]:
        if not turn.token:
            turn.token = yield from new_token("")
        stored = yield from call(Command(("add", turn.key, 0, self.whole_seconds, turn.token)), timeout)
        return WON if stored == b"STORED" else LOST

    def free(self, turn: Turn, timeout: float) -> Effects[bool]:
        found = yield from call(Command(("gets", turn.key)), timeout, shielded=True)
        if found is None or found[0] != turn.token.encode():
            return False
        return bool((yield from call(Command(("md", turn.key, f"C{found[1]}")), timeout, shielded=True)) == b"HD")

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        return (yield from call(Command(("gets", key)), timeout)) is not None
