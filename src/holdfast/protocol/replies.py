"""The replies of steps: each is checked and parsed once, here, into a typed value.

Invariant. A protocol never sees a raw reply. A reply without the shape that its step declares is ``Malformed``: a proxy
garbled it, the connection is out of step, or the server is no Redis. It grants nothing, and the step may have taken
effect. ``effects.call`` and ``effects.call_each`` turn it into a StepFailed, which is handled like a lost reply: the
step is sent again, or cleaned up after.

Atomic: nothing; there are no effects here. A fence is an int from 1 to 2**53 - 1: up to there the doubles of Lua and
JSON are exact. Script replies have it as text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast import untrusted
from holdfast.errors import Unsupported
from holdfast.lease import MAX_FENCE

DONE: Final = 1  # released, or renewed
GONE: Final = 0  # the key expired, or was deleted
TAKEN: Final = -1  # the key is another holder's

NO_FENCE: Final = -(2**40)  # the score of a holder without a fence, as in lua/include/pool.lua
_FENCE_ERRORS: Final = {  # see lua/include/fence.lua
    "FENCELIMIT": "is so large that the next one would not be exact",
    "FENCETYPE": "is no string",
}


class Malformed(Exception):
    """The reply does not have the shape that its step declares."""


class Granted(NamedTuple):
    """The lock is ours, for the full ttl."""

    fence: int
    slot: Any = -1  # the number of the permit; or the fence of each of several names


class Refused(NamedTuple):
    """Another holder has the lock, or other waiters come first."""

    left_ms: int  # until the holder's lease ends, or the yield window; negative: not known
    now_us: int  # the server's time
    first: bool  # no other waiter comes before us
    holder: bytes  # the token of the holder, or of the waiter that the lock is kept for; empty in a yield window
    key: str = ""  # of several names, the one that refused
    reserved: bool = False  # the lock is kept for a waiter that wants other names too


class Abandoned(NamedTuple):
    """This token was abandoned before the request arrived."""


class WrongKind(NamedTuple):
    """The name is in use as another kind of lock."""

    kind: str
    key: str = ""  # of several names, the one in use


class Cleaned(NamedTuple):
    """The result of an abandon, and whether its tombstone was written (or not needed)."""

    freed: int
    buried: bool


class NotAdopted(NamedTuple):
    """The ticket is no longer valid: 0 gone, -1 another owner's, -2 abandoned before, -3 no such permit."""

    code: int


class Remaining(NamedTuple):
    """The remaining count of a latch."""

    left: int


class OtherCount(NamedTuple):
    """The latch began with another count."""

    total: int


class Leading(NamedTuple):
    """The token and the last fence of an election's lock; and the kind, if the name is in use as another kind."""

    token: bytes | None
    fence: int | None
    kind: str
    is_time: bool = True  # the fence is the server's time in microseconds


class Found(NamedTuple):
    """A cached value."""

    value: bytes


class Claimed(NamedTuple):
    """We compute the value; ``stale`` may be served meanwhile."""

    now_us: int
    stale: bytes | None


class Computing(NamedTuple):
    """Another caller computes the value; its claim ends in that time unless it is renewed."""

    left_ms: int
    now_us: int


class Failed(NamedTuple):
    """The computation failed that long ago (-1: an earlier failure is still remembered)."""

    why: bytes
    ago_us: int


class Pooled(NamedTuple):
    """One holder of a permit pool, as read by an inspector."""

    token: bytes
    ends_us: int | None  # None: it is not known
    slot: int | None
    fence: int | None
    since_us: int | None = None  # when it was granted; 0: not known; None: the fence is that time


class Queued(NamedTuple):
    """One entry of a queue, as read by an inspector."""

    token: bytes
    arrived_us: int
    entry: bytes | None


class Inspected(NamedTuple):
    """What a name is in use as: lua/inspect/lock.lua says what each field means. etcd answers with this as it is."""

    now_us: int  # 0: the time is not known
    kind: str
    lock: tuple[bytes, int, bytes | None, bool] | None
    holder_count: int
    holders: list[Pooled]
    waiter_count: int
    waiters: list[Queued]
    latch: tuple[bytes, int, list[bytes]] | None
    claim: tuple[bytes, int, int] | None


def _fence(value: object) -> int:
    number = untrusted.number(value) if type(value) is bytes else value
    if type(number) is not int or not 0 < number <= MAX_FENCE:
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


def _key(value: object) -> str:
    """One of our own keys."""
    return _bytes(value).decode(errors="replace")


def _kind(value: object) -> str:
    return untrusted.kind(_bytes(value))


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise Malformed
    return value


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
        return Granted(_fence(reply))
    parts = _parts(reply, 2, 3, 5, 6)
    code = _whole(parts[0])
    match code, len(parts):
        case 1, 3:
            return Granted(_fence(parts[1]), _slot(parts[2]))
        case 0, 5 | 6:
            key = _key(parts[5]) if len(parts) > 5 else ""
            place = parts[3]
            if type(parts[4]) is not bytes or type(place) is not int or place not in (0, 1, 2):
                raise Malformed
            return Refused(_whole(parts[1]), _whole(parts[2], 0), place == 1, parts[4], key, place == 2)
        case -1, 2:
            return Abandoned()
        case -2, 2 | 3:
            return WrongKind(_kind(parts[1]), _key(parts[2]) if len(parts) > 2 else "")
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


def _holders(reply: object) -> tuple[int, bool]:
    holders, alone = _parts(reply, 2)
    return _whole(holders, 0), _yes_or_no(alone) == 1


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
    token, fence, kind, *other = _parts(reply, 3, 4)
    return Leading(
        _bytes_or_none(token), None if fence is None else _fence(fence), "" if kind is None else _kind(kind), not other
    )


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


def _score(value: object) -> int | None:
    """A score of a sorted set, which the server sends as text. What is no number was written by hand."""
    return None if value is None else untrusted.score(_bytes(value))


def _records(values: list[Any], width: int) -> list[list[Any]]:
    if len(values) % width or not all(type(record) is bytes for record in values[::width]):
        raise Malformed
    return [values[start : start + width] for start in range(0, len(values), width)]


def _inspected(reply: object) -> Inspected:
    now_us, kind, lock, pool, queue, latch, claim = _parts(reply, 7)
    holder_count, *holders = _parts_from([0] if pool is None else pool, 1)
    waiter_count, *waiters = _parts_from([0] if queue is None else queue, 1)
    if lock is not None:
        token, left_ms, fences, kept = _parts(lock, 4)
        lock = _bytes(token), _whole(left_ms), _bytes_or_none(fences), _yes_or_no(kept) == 1
    if latch is not None:
        state, latch_count, *members = _parts_from(latch, 2)
        latch = _bytes(state), _whole(latch_count, 0), [member for member, _ in _records(members, 2)]
    if claim is not None:
        token, left_ms, waiting = _parts(claim, 3)
        claim = _bytes(token), _whole(left_ms), _whole(waiting, 0)
    return Inspected(
        _whole(now_us, 1),
        "" if kind is None else _kind(kind),
        lock,
        _whole(holder_count, 0),
        [_pooled(*record) for record in _records(holders, 4)],
        _whole(waiter_count, 0),
        [Queued(token, _score(at) or 0, _bytes_or_none(entry)) for token, at, entry in _records(waiters, 3)],
        latch,
        claim,
    )


def _pooled(token: bytes, ends: object, slot: object, fence: object) -> Pooled:
    known = -(_score(fence) or 0)
    return Pooled(token, _score(ends) or 0, _score(slot), known if -NO_FENCE < known <= MAX_FENCE else None)


def _broke(reply: object) -> tuple[int, int, int]:
    """1 broken, 0 nothing was changed, -1 kept for a waiter; the fence after the break, 0 if there is none; when."""
    code, fence, at_us = _parts(reply, 3)
    return _found(code), _whole(_score(fence), 0), _whole(_score(at_us), 0)


def _all_bytes(reply: object) -> list[bytes]:
    return [_bytes(each) for each in _parts_from(reply, 0)]


_found: Final = _one_of(DONE, GONE, TAKEN)
_yes_or_no: Final = _one_of(1, 0)

Reply: TypeAlias = Callable[[object], Any]

# By script, or by plain command. Recipes parse the replies that are not listed.
REPLIES: Final[dict[str, Reply]] = {
    **dict.fromkeys(("acquire", "pool_acquire", "multi_acquire"), _acquire),
    **dict.fromkeys(("adopt", "pool_adopt", "multi_adopt"), _adopt),
    **dict.fromkeys(("release", "pool_release", "multi_release"), _found),
    **dict.fromkeys(("renew", "pool_renew", "multi_renew", "pool_share", "multi_leave", "pool_leave"), _found),
    **dict.fromkeys(("hand_over", "pool_hand_over", "multi_hand_over"), _found),
    **dict.fromkeys(("abandon", "pool_abandon", "multi_abandon"), _cleaned),
    "multi_roll_back": lambda reply: _whole(_score(reply), 0),
    **dict.fromkeys(("latch_look", "latch_count_down"), _latch),
    "present": _present,
    "pool_find": _all_yes_or_no,
    "pool_look": _holders,
    "election_leader": _leading,
    "cache_look": _cache_look,
    "cache_store": _found,
    "inspect_lock": lambda reply: reply if isinstance(reply, Inspected) else _inspected(reply),
    **dict.fromkeys(("break_lock", "break_permit", "break_claim"), _broke),
    **dict.fromkeys(("EXISTS", "DEL"), _count),
    "LRANGE": _all_bytes,
    **dict.fromkeys(("SETNX", "EXPIRE", "cache_drop", "free", "keep_fence"), _yes_or_no),
    **dict.fromkeys(("GET", "GETSET"), _bytes_or_none),
}
