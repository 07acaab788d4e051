"""Where the intents of a lock are on etcd, and what they say.

    name:hf1:intent:lock:<id>             an intent of a lock or reentrant lock
    name:hf1:intent:semaphore:<id>        of a semaphore
    name:hf1:intent:rwlock:any:<id>       of a reader
    name:hf1:intent:rwlock:all:<id>       of a writer
    name:hf1:intent:latch:state           what is left of a latch, and its count: "2 3"
    name:hf1:slot:<number>                which token has that permit
    name:hf1:gone:<token>                 a tombstone: this attempt was given up, or its hold was broken ("broken ...")
    name:hf1:history:<digest of a token>  how its hold was broken

An id is the token of the client that created the intent. The value is a JSON object: ``token``, the present holder or
waiter; ``fence``, if the key was written again after the grant; ``slot``; ``shared``, if a writer has become a reader;
``names``, if it is for several; ``at`` and ``since``: when it was created and granted, in microseconds by the clock of
its client. etcd keeps no times, so these two are for people, and nothing is decided by them.

Invariant. All intents of a name are in one range of keys, and so are those of its writers. No name contains ``:hf1:``,
so the range of one name has no key of another.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from holdfast.names import WIRE
from holdfast.protocol.intents.requests import Item
from holdfast.untrusted import intent

_MARK: Final = f":{WIRE}:"
_INTENT: Final = f"{_MARK}intent:"
_KINDS: Final = ("lock", "semaphore", "rwlock", "latch")
_FOREIGN: Final = "foreign value"  # as in lua/include/latch.lua: another program wrote a key that looks like an intent


class Range(NamedTuple):
    """All keys with this prefix."""

    key: str
    end: str


def _range(prefix: str) -> Range:
    return Range(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def name_of(key: str) -> str:
    """The lock's name, with its namespace, of any key of a step."""
    return key.partition(_MARK)[0]


def queue_of(name: str) -> Range:
    return _range(f"{name}{_INTENT}")


def writers_of(name: str) -> Range:
    return _range(f"{name}{_INTENT}rwlock:all:")


def slots_of(name: str) -> Range:
    return _range(f"{name}{_MARK}slot:")


def history_of(name: str) -> Range:
    return _range(f"{name}{_MARK}history:")


def slot_key(name: str, slot: int) -> str:
    return f"{name}{_MARK}slot:{slot}"


def is_slot(key: str) -> bool:
    return f"{_MARK}slot:" in key


def latch_key(name: str) -> str:
    return f"{name}{_INTENT}latch:state"


def tombstone_key(name: str, token: str) -> str:
    return f"{name}{_MARK}gone:{token}"


def intent_key(name: str, kind: str, mode: str, token: str) -> str:
    return f"{name}{_INTENT}{kind}:{f'{mode}:' if kind == 'rwlock' else ''}{token}"


def id_of(key: str) -> str:
    """The id of an intent. No token contains a colon."""
    return key.rpartition(":")[2]


def kind_of(key: str) -> str:
    """The kind of lock that an intent is for; empty if the key is none."""
    kind = key.partition(_INTENT)[2].partition(":")[0]
    return kind if kind in _KINDS or not kind else _FOREIGN


def is_writer(item: Item) -> bool:
    """Whether this intent is a writer's that has not become a reader."""
    return item.key.partition(_INTENT)[2].startswith("rwlock:all:") and not read_value(item).get("shared")


def write_value(
    token: str,
    *,
    names: tuple[str, ...] = (),
    fence: int = 0,
    slot: int = -1,
    shared: bool = False,
    times: tuple[int, int] = (0, 0),
) -> str:
    """The value of an intent. ``times``: when it was created and granted, in microseconds; 0: not known."""
    content: dict[str, Any] = {"token": token}
    created_at, granted_at = times
    if created_at:
        content["at"] = created_at
    if granted_at:
        content["since"] = granted_at
    if len(names) > 1:
        content["names"] = names
    if fence:
        content["fence"] = fence
    if slot >= 0:
        content["slot"] = slot
    if shared:
        content["shared"] = True
    return json.dumps(content, separators=(",", ":"))


def read_value(item: Item) -> dict[str, Any]:
    """What an intent says; nothing if it was not written by Holdfast. Each field has a value as ``write_value`` has."""
    return intent(item.value)


def times_of(item: Item) -> tuple[int, int]:
    """When its client created this intent, and when the intent was granted, in microseconds; 0: not known."""
    content = read_value(item)
    created_at: int = content.get("at", 0)
    return created_at, content.get("since", 0) or created_at


def token_of(item: Item) -> str:
    token: str = read_value(item).get("token", "")
    return token
