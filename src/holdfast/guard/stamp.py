"""What a guarded write carries, so that the resource can tell a stale holder from the present one.

A lock alone cannot keep a stopped holder from writing after it wakes. No check in the holder helps, because the holder
can be stopped between the check and the write. So the resource decides, by one rule, in one step with the write:

    it keeps the fence and the holder of the last write, and accepts the next write if its fence is greater,
    or if its fence is equal and its holder is the same.

Fences rise from grant to grant. So if a lower fence comes after a greater one, its holder is no longer the present one.
Two holders have equal fences only if a server lost its data while its clock was behind; then the first to write wins
and the other is refused.

The holder is not the token, a capability that must not appear in a record. It is the readable part of the token and a
digest of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from holdfast.errors import InvalidConfig, StaleFence, Unsupported
from holdfast.lease import MAX_FENCE, BaseLease

__all__ = ["Stamp", "stamp"]

MAX_HOLDER: Final = 128
_HOLDER: Final = re.compile(f"[!-~]{{1,{MAX_HOLDER}}}")
_CUT_OFF: Final = re.compile("%.?$")  # a percent-encoded byte of which a part is missing


@dataclass(frozen=True, slots=True)
class Stamp:
    """Lock, fence and holder of a write. A plain value: send it to the process that does the writing."""

    name: str
    fence: int
    holder: str
    key: str = field(default="", compare=False, kw_only=True)  # the name with its namespace, as messages show it

    def __post_init__(self) -> None:
        if type(self.fence) is not int or not 0 < self.fence <= MAX_FENCE:
            raise InvalidConfig(f"fence {self.fence!r}", "a fence is an int above 0 and below 2**53, as lease.fence is")
        if not isinstance(self.holder, str) or not _HOLDER.fullmatch(self.holder):
            raise InvalidConfig(
                f"holder {self.holder!r:.60}",
                f"a holder is at most {MAX_HOLDER} printable characters of ASCII, no spaces",
            )

    def check(self, resource: str, stored: tuple[int, str] | None) -> None:
        """Raise StaleFence if the last write was a later holder's. The caller must exclude concurrent writes."""
        if stored and (stored[0] > self.fence or (stored[0] == self.fence and stored[1] != self.holder)):
            raise self.refusal(resource, stored[0])

    def refusal(self, resource: str, stored: int | None) -> StaleFence:
        return StaleFence(self.name, self.fence, stored, resource, key=self.key)


def stamp(lease: BaseLease | Stamp, *, name: str | None = None) -> Stamp:
    """The stamp of a lease that is still held, as far as this process knows (LeaseLost, NotHeld if it is not).

    A lease on several names has a fence for each: ``name`` says which of them guards the resource. A stamp is returned
    unchanged: it was true when it was made.
    """
    if isinstance(lease, Stamp):
        return lease
    if not hasattr(lease, "token"):
        raise InvalidConfig(
            f"a lease of type {type(lease).__name__}",
            "give the lease of acquire() or `with client.lock(...) as lease`, or guard.stamp() of it",
        )
    fences: Mapping[str, int] = getattr(lease, "fences", None) or {lease.name: lease.fence}
    if name is None:
        if len(fences) > 1:
            raise InvalidConfig(
                f"a lease on {len(fences)} names",
                "each has its own fence: say which name guards the resource (name=)",
            )
        (name,) = fences
    if name not in fences:
        raise InvalidConfig(f"name={name!r}", f"the lease is on {', '.join(map(repr, fences))}")
    fence: int | None = fences[name]
    if fence is None:
        if lease._hold.kind == "recipe":
            advice = "a recipe has no fence; use client.lock instead"
            raise Unsupported(f"a guarded write under the recipe {name!r}", advice)
        raise Unsupported(
            f"a guarded write under the lock {name!r}", "memcached has no fences; use redis:// or etcd://"
        )
    lease.check()
    names = {keys.name: keys.key for keys in lease._hold.all_keys()} if isinstance(lease, BaseLease) else {}
    return Stamp(name, fence, _holder_of(lease.token), key=names.get(name, name))


def _holder_of(token: str) -> str:
    readable = _CUT_OFF.sub("", token.rpartition(".")[0][: MAX_HOLDER - 33])
    digest = sha256(token.encode()).hexdigest()[:32]
    return f"{readable}.{digest}" if readable else digest
