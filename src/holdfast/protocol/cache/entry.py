"""Entries of the cache: their keys, and how values and failures become bytes.

Invariant. What is read back is data and never code: every program that may write to the server could run code in each
process that unpickles a value from there. So the default is JSON, with bytes as they are. A failure is read back as a
type's name and a message, in an exception of ours, and no class is looked up by that name. Another serializer, and its
risk, is the user's choice.

All keys of an entry are side keys of its name. So an entry and a lock of the same name are independent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from holdfast.errors import ComputeFailed, InvalidConfig
from holdfast.names import Keys, keys_of
from holdfast.options import LockOptions
from holdfast.untrusted import MOST_MESSAGE, failure

LARGEST: Final = 64 * 1024 * 1024  # bytes of a value

_RAW: Final = b"\x00"  # no JSON begins with this


class Serializer(Protocol):
    """Turns values into text or bytes, and back, as the modules json, pickle, marshal, orjson and msgpack do."""

    def dumps(self, value: Any, /) -> str | bytes: ...
    def loads(self, data: bytes, /) -> Any: ...


class Json:
    """JSON; bytes are stored as they are."""

    def dumps(self, value: Any, /) -> bytes:
        if isinstance(value, bytes):
            return _RAW + value
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")

    def loads(self, data: bytes, /) -> Any:
        return data[1:] if data[:1] == _RAW else json.loads(data)


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of a cached value."""

    ttl_ms: int
    stale_ms: int  # after the ttl: the old value is served while one caller refreshes it
    errors_ms: int
    early: float
    options: LockOptions  # of the claim
    serializer: Serializer


class Entry(NamedTuple):
    """The keys of one value."""

    name: str
    shared: tuple[str, str, str, str]  # value, claim, waiters, failure: the keys of every step
    claim: Keys  # as those of a lock, so that the keeper can renew and release it

    @property
    def key(self) -> str:
        return self.claim.key


@lru_cache(maxsize=4096)
def entry_of(name: str, namespace: str = "") -> Entry:
    keys = keys_of(name, namespace)
    value, claim, waiters, failure = (
        f"{keys.head}cache:{part}{keys.tail}" for part in ("value", "claim", "waiters", "failure")
    )
    # No queue forms for a claim, so the side keys of a lock never exist.
    fence, queue, line = (f"{keys.head}cache:claim:{part}{keys.tail}" for part in ("fence", "queue", "waiters"))
    claimed = Keys(name, keys.key, claim, (claim, fence, queue, line), keys.head, keys.tail)
    return Entry(name, (value, claim, waiters, failure), claimed)


def pack(key: str, value: Any, serializer: Serializer) -> bytes:
    try:
        data = serializer.dumps(value)
    except Exception as error:
        error.add_note(
            f"This serializer cannot write the value of {key!r}, which is of type {type(value).__name__}. Return "
            "another type, or give another serializer="
        )
        raise
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    if not isinstance(data, bytes):
        kind = type(data).__name__
        raise InvalidConfig(f"serializer={serializer!r:.60}", f"its dumps returned {kind}, not str or bytes")
    if len(data) > LARGEST:
        raise InvalidConfig(f"the value of {key!r:.60}", f"it is larger than {LARGEST >> 20} MiB; store it elsewhere")
    return data


class ComputeFailure(NamedTuple):
    """Why a value could not be computed."""

    kind: str
    message: str
    cause: BaseException | None = None  # only in the process where it happened

    def text(self) -> str:
        return f"{self.kind}\n{self.message}"

    def as_error(self, entry: Entry) -> ComputeFailed:
        error = ComputeFailed(entry.name, self.kind, self.message, key=entry.key)
        error.__cause__ = self.cause
        return error

    @classmethod
    def read(cls, text: bytes) -> ComputeFailure:
        return cls(*failure(text))


def compute_failure_of(error: Exception) -> ComputeFailure:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # a broken __str__ must not hide the error itself
        message = ""
    message = message.encode(errors="replace").decode()  # a lone surrogate cannot be sent
    short = message if len(message) <= MOST_MESSAGE else message[: MOST_MESSAGE - 3] + "..."
    return ComputeFailure(name, short, error)
