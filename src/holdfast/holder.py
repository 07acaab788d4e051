"""What people see of a lock: its holders and waiters, as read from their tokens, and how it was broken.

A token is ``host-pid-label.secret``, where host and label are percent-encoded. The secret permits a release, so it is
never shown; ``Holder.id`` is a digest of the whole token. A token of another library has no readable part: its Holder
has empty fields. All records are frozen values. ``as_json`` is what ``--json`` prints of them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from hashlib import sha1
from typing import Any, Final

from holdfast.untrusted import MOST_CHARACTERS, Named, named

_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.~")
_OURS: Final = re.compile(rb".+\.[0-9a-f]{22,32}", re.DOTALL)  # ends in the random part; as in lua/include/grant.lua


@dataclass(frozen=True, slots=True)
class Holder:
    """One holder of a lock. An unknown field is empty or None."""

    label: str = ""
    host: str = ""
    pid: int | None = None
    fence: int | None = None
    since: float | None = None  # seconds since 1970, by the server's clock; on etcd by the holder's
    remaining: float | None = None  # seconds until its lease ends unless it is renewed
    mode: str = ""  # of a rwlock: "read" or "write"; "reserved" for a waiter that also needs other names
    slot: int | None = None  # of a semaphore
    id: str = field(default="", compare=False)  # tells two holds apart that have no fence

    def __str__(self) -> str:
        if not self.host:
            return "a client of another library"
        process = self.host if self.pid is None else f"{self.host} (pid {self.pid})"
        return f"{process}, label {self.label!r}" if self.label else process

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Waiter:
    """One place in the queue of a lock: a process, or a single caller if the lock is not passed on within a process.

    An unknown field is empty or None.
    """

    label: str = ""
    host: str = ""
    pid: int | None = None
    waiting: float | None = None  # seconds since it joined the queue, by the server's clock; on etcd by its own
    mode: str = ""  # of a rwlock: "read" or "write"
    local: int = 0  # how many more callers of its process wait behind it

    __str__ = Holder.__str__


@dataclass(frozen=True, slots=True)
class LockInfo:
    """One lock at one moment: its holders and its waiters."""

    name: str
    kind: str  # "lock" (also rlock, election, several names), "semaphore", "rwlock", "latch" or "cache"
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()  # first come, first served; of a long queue its beginning
    holder_count: int = 0  # of all holders; if there are many, ``holders`` has only the first ones
    waiter_count: int = 0  # of all waiters; if there are many, ``waiters`` has only the first ones
    left: int | None = None  # of a latch: how many counts are left until it opens
    at: float = 0.0  # when it was seen: seconds since 1970, by the server's clock; on etcd by ours
    key: str = ""  # the name with its namespace, as messages show it

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Broken:
    """A hold that an operator has ended: one entry of a lock's history."""

    name: str
    at: float  # seconds since 1970, by the server's clock; on etcd by ours
    holder: Holder  # the holder that lost it; its fence is None if it had none
    by: Holder  # the operator
    reason: str
    fence: int | None  # after the break: greater than the holder's, lower than that of all later holders
    key: str = ""  # the name with its namespace

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def encoded(text: str) -> str:
    """Host or label as in a token: percent-encoded, also the ``-``, which separates the parts of a token."""
    raw = text[:MOST_CHARACTERS].encode(errors="replace")
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)


def is_foreign(token: bytes) -> bool:
    """Whether another library made this token."""
    return not _OURS.fullmatch(token)


def id_of(token: bytes) -> str:
    """A digest that identifies a hold, but cannot be used to release it."""
    return sha1(token, usedforsecurity=False).hexdigest()[:16]


def readable_of(token: bytes) -> str:
    """The token without its secret, as Holdfast writes it; ``-`` if another library made it."""
    label, host, pid = _named(token)
    return "-".join(encoded(part) for part in (host, str(pid or ""), label) if part) or "-"


def holder_of(token: bytes, remaining: float | None = None, mode: str = "") -> Holder:
    """The holder that this token names, without the secret."""
    return Holder(*_named(token), remaining=remaining, mode=mode, id=id_of(token))


def _named(token: bytes) -> Named:
    return Named() if is_foreign(token) else named(token.rpartition(b".")[0])
