"""What operators ask of etcd: list names, holders and waiters, end a hold, read the history of breaks.

Invariant. A look changes nothing. A break ends exactly the hold that was inspected: its transaction compares the last
write of the intent that was read, whose token and fence are those asked for. The transaction deletes the intent and its
slot, or the intents at all its names. It writes a tombstone, which stops a late create and tells the holder, and an
entry of the history. The next waiter has the deleted key watched. Every later grant has a later revision, hence a
greater fence than the break.

Atomic: each transaction. The remaining time of the leases is read after the queue.

Clocks: etcd keeps revisions and not times. So each client writes the time of day, by its own clock, into its intents
and into the history. These times are shown to people, and nothing is decided by them.

The client of the first intent may not know yet that it is the first. The intent is shown as the holder, with the
revision of its creation; its fence is greater once its client asks. An intent for several names that is not the first
at each name is shown as reserved.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final

from holdfast.errors import InvalidName
from holdfast.holder import id_of as digest_of
from holdfast.names import keys_of
from holdfast.protocol.effects import SCANNED, Command, Step
from holdfast.protocol.intents.layout import (
    history_of,
    id_of,
    intent_key,
    is_writer,
    kind_of,
    name_of,
    queue_of,
    read_value,
    slot_key,
    slots_of,
    times_of,
    token_of,
    tombstone_key,
)
from holdfast.protocol.intents.requests import (
    MOST_OPERATIONS,
    Answer,
    Delete,
    Get,
    Item,
    LeaseGone,
    Modified,
    Operation,
    Program,
    Put,
    Request,
    Txn,
    keep_lease,
    perform,
    read_lease,
)
from holdfast.protocol.intents.session import Session, lease_of_notes, new_lease
from holdfast.protocol.replies import DONE, GONE, Inspected, Pooled, Queued
from holdfast.untrusted import number

_MOST_LEASES: Final = 20  # leases whose remaining time one look reads
_MOST_ENTRIES: Final = 100  # as in lua/include/broken.lua
_HISTORY_LASTS: Final = 30 * 86_400  # seconds
_TRIES: Final = 5  # at an intent that its holder writes between our read and our break
LAST: Final = "\U0010ffff"
_READER, _WRITER = -1, -2  # instead of a slot; see reading.py


def inspect(session: Session, step: Step, now: float) -> Program:
    """One page of the holders and waiters of a name."""
    name, (first, count) = name_of(step.keys[0]), map(int, step.args)
    page = slice(first, first + count)
    looks = Get(*queue_of(name), limit=2 * page.stop), Get(*slots_of(name), count_only=True)
    queue, slots = (yield from perform(Txn((), looks))).results
    now_us = session.wall_us()
    nothing = Inspected(now_us, "", None, 0, [], 0, [], None, None)
    if not queue.items:
        return nothing
    kind = kind_of(queue.items[0].key)
    if kind == "latch":
        return nothing._replace(latch=(queue.items[0].value.encode(), 0, []))
    inside, outside = _parted(kind, [item for item in queue.items if kind_of(item.key) == kind])
    held = slots.total if kind == "semaphore" else len(inside) if outside else queue.total
    seen = nothing._replace(
        kind=kind,
        holder_count=held,
        waiter_count=max(0, queue.total - held),
        waiters=[_queued(item, now_us) for item in outside[page]],
    )
    shown = inside if kind == "lock" else inside[page]  # a lock has one holder, which is on each page
    left = yield from _left(shown)
    if kind != "lock":
        return seen._replace(holders=[_pooled(session, item, left, now_us) for item in shown])
    token, fence = _token(shown[0]), session.fence_of(shown[0])
    left_ms = left.get(shown[0].lease, -0.001) * 1000
    kept = yield from _is_reserved(shown[0])
    return seen._replace(lock=(token, round(left_ms), b"%d 1 %s %d" % (fence, token[-8:], times_of(shown[0])[1]), kept))


def _parted(kind: str, items: list[Item]) -> tuple[list[Item], list[Item]]:
    """The intents that hold, and those that wait."""
    if kind == "semaphore":
        return [item for item in items if _slot(item) >= 0], [item for item in items if _slot(item) < 0]
    inside = 1
    if kind == "rwlock":
        inside = max(1, next((place for place, item in enumerate(items) if is_writer(item)), len(items)))
    return items[:inside], items[inside:]


def _slot(item: Item) -> int:
    slot: int = read_value(item).get("slot", -1)
    return slot


def _token(item: Item) -> bytes:
    return (token_of(item) or id_of(item.key)).encode(errors="replace")


def _mode(item: Item) -> str:
    return ("all" if is_writer(item) else "any") if kind_of(item.key) == "rwlock" else "-"


def _queued(item: Item, now_us: int) -> Queued:
    return Queued(_token(item), times_of(item)[0], f"{now_us} 0 0 {_mode(item)} 0 -".encode())


def _pooled(session: Session, item: Item, left: dict[int, int], now_us: int) -> Pooled:
    slot = _slot(item) if kind_of(item.key) == "semaphore" else _WRITER if is_writer(item) else _READER
    ends_us = now_us + max(1, left[item.lease] * 1_000_000) if item.lease in left else None
    return Pooled(_token(item), ends_us, slot, session.fence_of(item), times_of(item)[1])


def _left(held: Iterable[Item]) -> Generator[Request, Answer, dict[int, int]]:
    """The seconds that are left of the leases of these intents; if there are many leases, only of the first ones."""
    left: dict[int, int] = {}
    for lease in list(dict.fromkeys(item.lease for item in held if item.lease))[:_MOST_LEASES]:
        left[lease] = yield from read_lease(lease)
    return left


def _names(item: Item) -> list[str]:
    """All names of a hold."""
    names: list[str] = read_value(item).get("names", [name_of(item.key)])
    return names


def _is_reserved(item: Item) -> Generator[Request, Answer, bool]:
    """Whether this intent, the first of its name, waits for another of its names."""
    others = [name for name in _names(item) if name != name_of(item.key)]
    if not others:
        return False
    looks = tuple(Get(*queue_of(name), limit=1) for name in others[:MOST_OPERATIONS])
    done = yield from perform(Txn((), looks))
    return any(not found.items or id_of(found.items[0].key) != id_of(item.key) for found in done.results)


def break_hold(session: Session, step: Step, now: float) -> Program:
    """End the hold of that token and fence; it may have been broken by an earlier try of this step."""
    wanted, fence, _, who_and_why = step.args
    name, alone = name_of(step.keys[0]), step.script == "break_lock"
    digest = wanted if alone else digest_of(wanted.encode())
    entry = f"{history_of(name).key}{digest}"
    for _ in range(_TRIES):
        looks = (
            Get(*queue_of(name), limit=1 if alone else 0),
            Get(*history_of(name), limit=MOST_OPERATIONS, newest_first=True),
        )
        queue, past = (yield from perform(Txn((), looks))).results
        held = next((item for item in queue.items if digest_of(_token(item)) == digest), None)
        if held is None or (fence and session.fence_of(held) != int(fence)):
            broken = next((item for item in past.items if item.key == entry), None)
            return _broken(session, broken.created, broken.value) if broken is not None else [GONE, b"0", b"0"]
        text = f"{session.wall_us()} {session.fence_of(held)} 0 {who_and_why}"
        noted = yield from lease_of_notes(session, now)
        recorded = yield from _history_lease(past.items)
        tombstones = _tombstones(name, held)
        operations: tuple[Operation, ...] = (
            *map(Delete, _keys_of(name, held)),
            *(Put(key, f"broken {text}", noted.id) for key in tombstones),
            Put(entry, text, recorded),
            *(Delete(item.key) for item in past.items[_MOST_ENTRIES - 1 :]),
        )
        try:
            done = yield from perform(Txn((Modified(held.key, held.modified),), operations))
        except LeaseGone:
            session.notes = None
            continue
        if done.succeeded:
            return _broken(session, done.revision, text)
    return [GONE, b"0", b"0"]


def _broken(session: Session, revision: int, entry: str) -> list[Any]:
    """The reply of a break at that revision, which is also the fence after it, with that entry of the history."""
    at_us = number(entry.partition(" ")[0]) or 0
    return [DONE, b"%d" % (session.fence_floor + revision), b"%d" % at_us]


def _keys_of(name: str, held: Item) -> list[str]:
    """All keys of a hold. Those of several names are always written together, so one of them is compared for all."""
    if kind_of(held.key) == "lock":
        return [intent_key(each, "lock", "", id_of(held.key)) for each in _names(held)]
    return [held.key] if _slot(held) < 0 else [held.key, slot_key(name, _slot(held))]


def _tombstones(name: str, held: Item) -> list[str]:
    """The tombstones to write: where a late create of this token looks for one, and where its holder does."""
    return [tombstone_key(each, _token(held).decode()) for each in dict.fromkeys((name, _names(held)[0]))]


def _history_lease(past: Sequence[Item]) -> Generator[Request, Answer, int]:
    """The lease of the entries so far, which begins again, or a new one."""
    if past and past[0].lease:
        answer = yield from keep_lease(past[0].lease)
        if answer.result.seconds:
            return past[0].lease
    return (yield from new_lease(_HISTORY_LASTS)).id


def history(session: Session, command: Command, now: float) -> Program:
    """The entries of a history, the latest first, each with the fence after it."""
    entries = Get(*history_of(name_of(str(command.args[1]))), limit=_MOST_ENTRIES, newest_first=True)
    done = yield from perform(Txn((), (entries,)))
    reply = []
    for item in done.results[0].items:
        at, fence, _, rest = (item.value.split(" ", 3) + [""] * 3)[:4]
        reply.append(f"{at} {fence} {session.fence_floor + item.created} {rest}".encode())
    return reply


def notice(session: Session, command: Command, now: float) -> Program:
    """The text of a token's tombstone. The command names the key as it is on Redis, where its end is different."""
    key = str(command.args[1])
    begins = tombstone_key(name_of(key), "")
    done = yield from perform(Txn((), (Get(begins + key.removeprefix(begins).partition(":")[0]),)))
    items = done.results[0].items
    return items[0].value.encode() if items else None


def scan(session: Session, command: Command, now: float) -> Program:
    """The next cursor; and for each name of this part whose keys match the pattern, the key of its queue on Redis."""
    cursor, pattern = str(command.args[1]), str(command.args[3])
    words = re.findall(r"\\.|\[\^?(?:\\.|[^\]])*\]|.", pattern, re.DOTALL)
    prefix = ""
    for word in words:
        if word in ("*", "?") or (word[0] == "[" and len(word) > 1):
            break
        prefix += word[-1]
    start = prefix or "\0" if cursor == "0" else cursor
    done = yield from perform(Txn((), (Get(start, prefix + LAST, limit=SCANNED, keys_only=True),)))
    keys, more = [item.key for item in done.results[0].items], done.results[0].total > len(done.results[0].items)
    matches = re.compile("".join(map(_as_regex, words)), re.DOTALL).fullmatch
    names = dict.fromkeys(name_of(key) for key in keys if kind_of(key) and matches(key))
    return f"{keys[-1]}\0" if more else "", [side.encode() for name in names if (side := _side_key(name))]


def _as_regex(word: str) -> str:
    """One word of a pattern of Redis."""
    if word[0] == "[" and len(word) > 1:
        within = re.findall(r"\\.|.", word.strip("[]").removeprefix("^"), re.DOTALL)
        chosen = "".join("-" if each == "-" else re.escape(each[-1]) for each in within)
        return f"[{'^' if word[1] == '^' else ''}{chosen}]" if chosen else "(?!)"
    return {"*": ".*", "?": "."}.get(word, re.escape(word[-1]))


def _side_key(name: str) -> str:
    """Empty if another program wrote a key that looks like an intent."""
    try:
        return keys_of(name).shared[2]
    except InvalidName:
        return ""
