"""What steps answer: each reply is checked and parsed once, here, into a value with a type.

Invariant. A protocol never sees a raw reply. What does not have the shape that its step declares is ``Malformed``: a
proxy that garbles, a connection out of step, a server that is none. It grants nothing, and the step may have taken
effect. ``effects.call`` and ``effects.call_each`` turn it into a StepFailed, so it is handled like a lost reply: the
step is sent again, or cleaned up after.

Atomic: nothing; no effect is asked for here. A fence is a whole number from 1 to 2**53 - 1, and no bool. Script replies
have it as text. Up to there the doubles of Lua and JSON are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.errors import Unsupported
from holdfast.lease import MAX_FENCE

__all__ = [
    "FREED",
    "GONE",
    "REPLIES",
    "TAKEN",
    "Abandoned",
    "Claimed",
    "Cleaned",
    "Computing",
    "Failed",
    "Found",
    "Granted",
    "Leading",
    "Malformed",
    "NotAdopted",
    "OtherCount",
    "Refused",
    "Remaining",
    "WrongKind",
    "fence_error",
]

FREED: Final = 1  # by a release; by a renewal: it is still ours
GONE: Final = 0  # the key expired, or was deleted
TAKEN: Final = -1  # the key is another holder's

_make: Final[Any] = tuple.__new__  # as in effects
_MOST_DIGITS: Final = 16
_FENCE_ERRORS: Final = {  # see lua/fence.lua
    "FENCELIMIT": "is so large that the next one would not be exact",
    "FENCETYPE": "is no string",
}


class Malformed(Exception):
    """This is no reply to that step."""


class Granted(NamedTuple):
    """The lock is ours, for the whole ttl."""

    fence: int
    slot: Any = -1  # which permit it is, if they are numbered; or the fence of each of several names


class Refused(NamedTuple):
    """Another holder has the lock, or other waiters come first."""

    left_ms: int  # until the holder's lease ends, or the yield window; negative: not known
    now_us: int  # the server's time
    first: bool  # no other waiter comes before us
    holder: bytes  # the token of the holder, or of the waiter that it is reserved for; empty in a yield window
    key: str = ""  # of several names, the one that refused
    reserved: bool = False  # it is kept for a waiter that wants other names as well


class Abandoned(NamedTuple):
    """This token was given up before the request arrived."""


# What the kind of a permit pool ends in, on the wire. Earlier versions wrote the kind without it, and kept holders in
# other keys. So each version refuses a name that the other one uses.
POOL: Final = "pool"


class WrongKind(NamedTuple):
    """The name is in use as another kind of lock."""

    kind: str
    key: str = ""  # of several names, the one that is


class Cleaned(NamedTuple):
    """What an abandon found, and whether its tombstone stands (or none was needed)."""

    freed: int
    buried: bool


class NotAdopted(NamedTuple):
    """The ticket is worth nothing any more: 0 gone, -1 another's, -2 given up before, -3 no such permit."""

    code: int


class Remaining(NamedTuple):
    """A latch: how often it is still to be counted down."""

    left: int


class OtherCount(NamedTuple):
    """The latch began with another count."""

    total: int


class Leading(NamedTuple):
    """The token and the last fence of an election's lock; and its kind, if it is none."""

    token: bytes | None
    fence: int | None
    kind: str


class Found(NamedTuple):
    """A cached value."""

    value: bytes


class Claimed(NamedTuple):
    """It is for us to compute; ``stale`` may be served meanwhile."""

    now_us: int
    stale: bytes | None


class Computing(NamedTuple):
    """Another caller computes it; its claim ends in that time unless it is renewed."""

    left_ms: int
    now_us: int


class Failed(NamedTuple):
    """The computation failed that long ago (-1: that is remembered, whenever it was)."""

    why: bytes
    ago_us: int


def _fence(value: object) -> int:
    if type(value) is bytes and value.isdigit() and len(value) <= _MOST_DIGITS:
        number = int(value)
    elif type(value) is int:
        number = value
    else:
        raise Malformed
    if not 0 < number <= MAX_FENCE:
        raise Malformed
    return number


def fence_error(message: str) -> Unsupported | None:
    """The error for a step that was refused because no fence can be given out; None for any other message."""
    code, _, key = message.partition(" ")
    if code not in _FENCE_ERRORS:
        return None
    return Unsupported(
        f"its last fence, in the key {key!r}, {_FENCE_ERRORS[code]}",
        "delete that key, and the larger fences that guards have stored, when no holder is left",
    )


def _whole(value: object, least: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise Malformed
    return value


def _text(value: object) -> str:
    if type(value) is not bytes:
        raise Malformed
    return value.decode(errors="replace")


def _kind(value: object) -> str:
    kind = _text(value)
    earlier = " of an earlier version of Holdfast" if kind in ("semaphore", "rwlock") else ""
    return kind.removesuffix(POOL) + earlier


def _bytes_or_none(value: object) -> bytes | None:
    if value is not None and type(value) is not bytes:
        raise Malformed
    return value


def _parts(reply: object, *lengths: int) -> list[Any]:
    if type(reply) is not list or len(reply) not in lengths:
        raise Malformed
    return reply


def _parts_from(reply: object, least: int) -> list[Any]:
    if type(reply) is not list or len(reply) < least:
        raise Malformed
    return reply


def _acquire(reply: object) -> Granted | Refused | Abandoned | WrongKind:
    if type(reply) is bytes:
        granted: Granted = _make(Granted, (_fence(reply), -1))
        return granted
    parts = _parts(reply, 2, 3, 5, 6)
    code = _whole(parts[0])
    match code, len(parts):
        case 1, 3:
            return Granted(_fence(parts[1]), _slot(parts[2]))
        case 0, 5 | 6:
            key = _text(parts[5]) if len(parts) > 5 else ""
            place = parts[3]
            if type(parts[4]) is not bytes or type(place) is not int or place not in (0, 1, 2):
                raise Malformed
            return Refused(_whole(parts[1]), _whole(parts[2], 0), place == 1, parts[4], key, place == 2)
        case -1, 2:
            return Abandoned()
        case -2, 2 | 3:
            return WrongKind(_kind(parts[1]), _text(parts[2]) if len(parts) > 2 else "")
    raise Malformed


def _slot(value: object) -> Any:
    """A permit's number, -1 for none; or, made by parts.py, the fence of each name."""
    return [_fence(each) for each in value] if type(value) is list else _whole(value, -1)


def _adopt(reply: object) -> Granted | NotAdopted:
    if type(reply) is bytes:
        return Granted(_fence(reply))
    if type(reply) is int and reply in (0, -1, -2, -3):
        return NotAdopted(reply)
    code, fence, slot = _parts(reply, 3)
    if _whole(code) != 1:
        raise Malformed
    return Granted(_fence(fence), _slot(slot))


def _one_of(*codes: int) -> Callable[[object], int]:
    def parse(reply: object) -> int:
        if type(reply) is int and reply in codes:
            return reply
        raise Malformed

    return parse


def _cleaned(reply: object) -> Cleaned:
    freed, buried = _parts(reply, 2)
    return Cleaned(_found(freed), _yes_or_no(buried) == 1)


def _all_yes_or_no(reply: object) -> list[int]:
    if type(reply) is not list:
        raise Malformed
    return [_yes_or_no(each) for each in reply]


def _count(reply: object) -> int:
    return _whole(reply, 0)


def _inside(reply: object) -> tuple[int, bool]:
    inside, alone = _parts(reply, 2)
    return _whole(inside, 0), _yes_or_no(alone) == 1


def _latch(reply: object) -> Remaining | OtherCount | WrongKind:
    left, more = _parts(reply, 2)
    if _whole(left, -2) == -2:
        return WrongKind(_kind(more))
    return Remaining(left) if left >= 0 else OtherCount(_whole(more, 0))


def _present(reply: object) -> list[int]:
    """The server's time, and for each waiter whether it should ask."""
    now_us, *codes = _parts_from(reply, 1)
    return [_whole(now_us, 1), *map(_yes_or_no, codes)]


def _leading(reply: object) -> Leading:
    token, fence, kind = _parts(reply, 3)
    return Leading(_bytes_or_none(token), None if fence is None else _fence(fence), "" if kind is None else _kind(kind))


def _cache_look(reply: object) -> Found | Claimed | Computing | Failed | Abandoned:
    parts = _parts(reply, 1, 2, 3)
    match _whole(parts[0]), len(parts):
        case 1, 2 if type(parts[1]) is bytes:
            return Found(parts[1])
        case 2, 3:
            return Claimed(_whole(parts[1], 1), _bytes_or_none(parts[2]))
        case 0, 3:
            return Computing(_whole(parts[1], -1), _whole(parts[2], 0))
        case 3, 3 if type(parts[1]) is bytes:
            return Failed(parts[1], _whole(parts[2], -1))
        case -1, 1:
            return Abandoned()
    raise Malformed


_found: Final = _one_of(FREED, GONE, TAKEN)
_yes_or_no: Final = _one_of(1, 0)

Reply: TypeAlias = Callable[[object], Any]

# By script, or by plain command. What is not listed is a recipe's own affair.
REPLIES: Final[dict[str, Reply]] = {
    **dict.fromkeys(("acquire", "room_acquire", "multi_acquire"), _acquire),
    **dict.fromkeys(("adopt", "room_adopt", "multi_adopt"), _adopt),
    **dict.fromkeys(("release", "room_release", "multi_release"), _found),
    **dict.fromkeys(("renew", "room_renew", "multi_renew", "room_share"), _found),
    **dict.fromkeys(("hand_over", "room_hand_over", "multi_hand_over"), _found),
    **dict.fromkeys(("abandon", "room_abandon", "multi_abandon"), _cleaned),
    **dict.fromkeys(("latch_look", "latch_count_down"), _latch),
    "present": _present,
    "room_find": _all_yes_or_no,
    "room_look": _inside,
    "election_leader": _leading,
    "cache_look": _cache_look,
    "cache_store": _found,
    "cache_drop": _yes_or_no,
    "free": _yes_or_no,
    **dict.fromkeys(("EXISTS", "DEL"), _count),
    **dict.fromkeys(("SETNX", "EXPIRE"), _yes_or_no),
    **dict.fromkeys(("GET", "GETSET"), _bytes_or_none),
}
