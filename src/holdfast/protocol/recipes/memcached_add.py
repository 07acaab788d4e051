"""add with an expiry, on memcached.

Invariant. ``add`` stores only a missing item, so the client that stored it holds the lock, until the item is deleted,
expires, or is evicted. It is released by ``gets`` and a delete (``md``) with the cas that was seen: if the item has
changed since, it is another holder's and stays.

Pitfalls. Eviction frees it: a full memcached evicts items. Its clock ticks once a second, so an item may live almost a
second less than its expiry. There is no fence.

The commands: ``add key flags exptime data``, answered STORED or NOT_STORED; ``gets key``, answered with data and cas,
or with nothing; ``md key C<cas>``, answered HD (done), EX (another cas) or NF (not found).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.protocol.effects import Command, Effects, call, new_token
from holdfast.protocol.recipes.algorithm import LOST, WON, LeasedInSeconds, Outcome, RecipeHold


@dataclass(frozen=True, kw_only=True)
class MemcachedAdd(LeasedInSeconds):
    pitfall: ClassVar[str] = "eviction frees it, and it has no fence"
    server: ClassVar[str] = "memcached"
    checks_owner: ClassVar[bool] = True

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        if not hold.token:
            hold.token = yield from new_token("")
        stored = yield from call(Command(("add", hold.key, 0, self.whole_seconds, hold.token)), timeout)
        return WON if stored == b"STORED" else LOST

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        found = yield from call(Command(("gets", hold.key)), timeout, shielded=True)
        if found is None or found[0] != hold.token.encode():
            return False
        return bool((yield from call(Command(("md", hold.key, f"C{found[1]}")), timeout, shielded=True)) == b"HD")

    def locked(self, key: str, timeout: float) -> Effects[bool]:
        return (yield from call(Command(("gets", key)), timeout)) is not None
