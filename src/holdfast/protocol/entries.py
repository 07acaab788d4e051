"""Entries of the cache: under which keys they are kept, and how values and failures become bytes.

Invariant. What is read back is data and never code. The default is JSON, with bytes as they are, because a cache is a
place that others can write to: whoever may write to the server could run anything in every process that unpickles what
it finds there. For the same reason a failure comes back as its type's name and its message, in an exception of ours,
and no class is looked up by that name. Another serializer is the user's choice, and so is its risk.

All keys of an entry are side keys of its name, so a lock of that name is another thing, and neither minds the other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from holdfast.errors import ComputeFailed, InvalidConfig
from holdfast.lease import Terms
from holdfast.names import Keys, keys_of

__all__ = ["Entry", "Failure", "Json", "Policy", "Serializer", "entry_of", "failure_of", "pack"]

LARGEST: Final = 64 * 1024 * 1024  # bytes of a value; the server is there for others, too
LONGEST_MESSAGE: Final = 1000

_RAW: Final = b"\x00"  # no JSON begins with this


class Serializer(Protocol):
    """What turns values into text or bytes, and back. The modules json, pickle, marshal, orjson and msgpack all fit."""

    def dumps(self, value: Any, /) -> str | bytes: ...
    def loads(self, data: bytes, /) -> Any: ...


class Json:
    """JSON; and bytes as they are, for those are what is cached most often after it."""

    def dumps(self, value: Any, /) -> bytes:
        if isinstance(value, bytes):
            return _RAW + value
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")

    def loads(self, data: bytes, /) -> Any:
        return data[1:] if data[:1] == _RAW else json.loads(data)


@dataclass(frozen=True, slots=True)
class Policy:
    """On what terms a value is kept, and computed."""

    ttl_ms: int
    stale_ms: int  # for so long after that it is served while somebody refreshes it
    errors_ms: int
    early: float
    terms: Terms  # of the claim
    serializer: Serializer


class Entry(NamedTuple):
    """The keys of one value."""

    name: str
    shared: tuple[str, str, str, str]  # value, claim, waiters, failure: what every step wants
    claim: Keys  # as if it were a lock, which the keeper can renew and give up


@lru_cache(maxsize=4096)
def entry_of(name: str, namespace: str = "") -> Entry:
    keys = keys_of(name, namespace)
    value, claim, waiters, failure = (
        f"{keys.head}cache:{part}{keys.tail}" for part in ("value", "claim", "waiters", "failure")
    )
    # Nobody queues for a claim, so what a lock would keep beside itself is never there.
    fence, queue, line = (f"{keys.head}cache:claim:{part}{keys.tail}" for part in ("fence", "queue", "waiters"))
    claimed = Keys(name, claim, (claim, fence, queue, line), keys.head, keys.tail)
    return Entry(name, (value, claim, waiters, failure), claimed)


def pack(name: str, value: Any, serializer: Serializer) -> bytes:
    try:
        data = serializer.dumps(value)
    except Exception as error:
        error.add_note(
            f"The value of {name!r} is of type {type(value).__name__}, and this serializer cannot write it. Return "
            "what it can, or give serializer="
        )
        raise
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    if not isinstance(data, bytes):
        kind = type(data).__name__
        raise InvalidConfig(f"serializer={serializer!r:.60}", f"its dumps returned {kind}, not str or bytes")
    if len(data) > LARGEST:
        raise InvalidConfig(f"the value of {name!r:.60}", f"it is larger than {LARGEST >> 20} MiB; keep it elsewhere")
    return data


class Failure(NamedTuple):
    """Why there is no value."""

    kind: str
    message: str
    cause: BaseException | None = None  # where it happened in this process

    def text(self) -> str:
        return f"{self.kind}\n{self.message}"

    def as_error(self, name: str) -> ComputeFailed:
        error = ComputeFailed(name, self.kind, self.message)
        error.__cause__ = self.cause
        return error

    @classmethod
    def read(cls, text: bytes) -> Failure:
        kind, _, message = text.decode(errors="replace").partition("\n")
        return cls(kind, message)


def failure_of(error: Exception) -> Failure:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # its own __str__ fails, and that is not the news
        message = ""
    message = message.encode(errors="replace").decode()  # a lone surrogate would not travel
    return Failure(name, message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "...", error)
