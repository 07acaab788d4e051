"""Lock names, and the keys that stand for them on the server.

The main key is exactly the user's name (with the client's namespace in front), because that is what every other
library that locks by SET NX PX uses, so that Holdfast and they exclude each other. Whatever else Holdfast needs
lives in side keys, which share the name's prefix, so that an ACL such as ``~app:*`` covers them, and its hash tag,
so that a cluster keeps them on one node. They carry the version of the wire: ``hf1``.
"""

from __future__ import annotations

import re
import unicodedata
from binascii import crc_hqx
from functools import lru_cache
from typing import Final, NamedTuple

from holdfast.errors import InvalidConfig, InvalidName

__all__ = ["MAX_NAME_BYTES", "Keys", "check_namespace", "keys_of", "not_a_name", "slot_of"]

MAX_NAME_BYTES: Final = 512
WIRE: Final = "hf1"

_SIDE_KEY = re.compile(r":hf[0-9]:")


class Keys(NamedTuple):
    """The keys of one lock. Side keys are ``head``, what they are for, and ``tail``."""

    name: str
    main: str
    shared: tuple[str, str, str, str]  # main, fence, queue, waiters: what every step that knows of the queue wants
    head: str
    tail: str

    def tombstone(self, token: str) -> str:
        return f"{self.head}gone:{token}{self.tail}"


@lru_cache(maxsize=4096)
def keys_of(name: str, namespace: str = "") -> Keys:
    """The keys of a lock; InvalidName if the name cannot have any."""
    if not isinstance(name, str):
        raise InvalidName(name, not_a_name(name))
    if not name:
        raise InvalidName(name, "it is empty")
    main = namespace + name
    _refuse_unprintable(name, main)
    if len(main.encode()) > MAX_NAME_BYTES:
        raise InvalidName(name, f"it is longer than {MAX_NAME_BYTES} bytes; use a digest of it")
    if _SIDE_KEY.search(main):
        raise InvalidName(name, "':hf<digit>:' is how Holdfast marks keys of its own; leave it out")
    tagged = _has_hash_tag(main)
    if not tagged and ("{" in main or "}" in main):
        raise InvalidName(name, "its braces form no hash tag; use '{tag}' with something inside, or no braces")
    head = f"{main}:{WIRE}:"
    tail = "" if tagged else f":{{{main}}}"
    shared = main, f"{head}fence{tail}", f"{head}queue{tail}", f"{head}waiters{tail}"
    return Keys(name, main, shared, head, tail)


def not_a_name(value: object) -> str:
    """What is wrong with a value that is no str."""
    kind = type(value).__name__
    several = "; pass several names as arguments: lock(*names)" if isinstance(value, list | tuple | set) else ""
    return f"a name is a str, not {kind}{several}"


def check_namespace(namespace: str) -> str:
    """A namespace is the beginning of a name, and has a name's limits."""
    if not isinstance(namespace, str):
        raise InvalidConfig(f"namespace of type {type(namespace).__name__}", "give a str")
    if namespace:
        keys_of(namespace.replace("{", "").replace("}", "") or "x")
    return namespace


def _refuse_unprintable(name: str, main: str) -> None:
    if main.isprintable():
        return
    for char in main:
        category = unicodedata.category(char)
        if category in ("Cc", "Cs"):
            kind = "control character" if category == "Cc" else "lone surrogate"
            raise InvalidName(name, f"it contains the {kind} {char!r}; leave it out")


def slot_of(key: str) -> int:
    """In which of the 16384 slots of a cluster that key lives."""
    if _has_hash_tag(key):
        opening = key.index("{")
        key = key[opening + 1 : key.index("}", opening)]
    return crc_hqx(key.encode(), 0) % 16384


def _has_hash_tag(key: str) -> bool:
    """Whether a cluster hashes only a part of this key: what stands in its first braces, if anything does."""
    opening = key.find("{")
    return opening >= 0 and key.find("}", opening) > opening + 1
