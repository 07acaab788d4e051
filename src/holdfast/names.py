"""Lock names, and their keys on the server.

The main key is exactly the user's name, with the client's namespace in front. Every library that locks by SET NX PX
uses the same key, so Holdfast and these libraries exclude each other. All other state is in side keys. A side key has
the name's prefix, so an ACL such as ``~app:*`` covers it, and the name's hash tag, so a cluster keeps it on one node.
It also has the version of the wire format: ``hf1``.
"""

from __future__ import annotations

import re
import unicodedata
from binascii import crc_hqx
from functools import lru_cache
from typing import Final, NamedTuple

from holdfast.errors import InvalidConfig, InvalidName
from holdfast.untrusted import MAX_NAME_BYTES

WIRE: Final = "hf1"
SLOTS: Final = 16384  # of a cluster

_SIDE_KEY = re.compile(r":hf[0-9]:")


class Keys(NamedTuple):
    """The keys of one lock. A side key is ``head``, its purpose, and ``tail``."""

    name: str
    key: str  # for texts and `.key`: the name with its namespace; several are joined by ", "
    main: str
    shared: tuple[str, str, str, str]  # main, fence, queue, waiters: the keys of every step on the queue
    head: str
    tail: str

    def tombstone(self, token: str) -> str:
        return f"{self.head}gone:{token}{self.tail}"


@lru_cache(maxsize=4096)
def keys_of(name: str, namespace: str = "") -> Keys:
    """The keys of a lock; raises InvalidName if the name is not allowed."""
    if not isinstance(name, str):
        raise InvalidName(name, not_a_name(name))
    if not name:
        raise InvalidName(name, "it is empty")
    main = namespace + name
    if why := unprintable_in(main):
        raise InvalidName(name, why)
    if len(main.encode()) > MAX_NAME_BYTES:
        raise InvalidName(name, f"it is longer than {MAX_NAME_BYTES} bytes; use a digest of it")
    if _SIDE_KEY.search(main):
        raise InvalidName(name, "it contains ':hf<digit>:', which marks Holdfast's own keys; leave it out")
    tagged = _has_hash_tag(main)
    if not tagged and ("{" in main or "}" in main):
        raise InvalidName(name, "its braces do not form a hash tag; use '{tag}' with text inside, or no braces")
    head = f"{main}:{WIRE}:"
    tail = "" if tagged else f":{{{main}}}"
    shared = main, f"{head}fence{tail}", f"{head}queue{tail}", f"{head}waiters{tail}"
    return Keys(name, main, main, shared, head, tail)


def not_a_name(value: object) -> str:
    """Why this value, which is not a str, is not a name."""
    kind = type(value).__name__
    several = "; pass several names as arguments: lock(*names)" if isinstance(value, list | tuple | set) else ""
    option = "; for a ttl or a wait write ttl= or wait=" if isinstance(value, int | float) else ""
    return f"a name is a str, not {kind}{several}{option}"


def check_namespace(namespace: str) -> str:
    """The namespace, checked: it is the start of every name, so it has the limits of a name."""
    if not isinstance(namespace, str):
        raise InvalidConfig(f"namespace of type {type(namespace).__name__}", "give a str")
    if namespace:
        keys_of(namespace.replace("{", "").replace("}", "") or "x")
    return namespace


def unprintable_in(text: str) -> str:
    """What is wrong with a text that has a control character or a lone surrogate (a byte of no text); else empty."""
    if not text.isprintable():
        for char in text:
            category = unicodedata.category(char)
            if category in ("Cc", "Cs"):
                kind = "control character" if category == "Cc" else "lone surrogate"
                return f"it contains the {kind} {char!r}; leave it out"
    return ""


@lru_cache(maxsize=4096)
def slot_of(key: str) -> int:
    """The slot of this key among the slots of a cluster."""
    return crc_hqx(tag_of(key).encode(), 0) % SLOTS


def tag_of(key: str) -> str:
    """The part of this key that decides on its slot."""
    if not _has_hash_tag(key):
        return key
    opening = key.index("{")
    return key[opening + 1 : key.index("}", opening)]


def _has_hash_tag(key: str) -> bool:
    """Whether a cluster hashes only the text in the first braces of this key, because it is not empty."""
    opening = key.find("{")
    return opening >= 0 and key.find("}", opening) > opening + 1
