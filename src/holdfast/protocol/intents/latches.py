"""Latches on etcd: one key that says what is left of a count.

Invariant. The key is written only if it was not written since it was read, so each count_down lowers the count once.
The same transaction leaves a tombstone with the new count, so a request that arrives twice is counted once. The key is
among the intents of its name, so that no other kind of lock can be made there, nor a latch where another kind is.

The latch lives on an etcd lease of its retention. Every client that writes the latch or waits for it renews that lease,
now and then. A waiter has the key watched.

Atomic: each transaction. Clocks: the server decides how long it remembers the latch.
"""

from __future__ import annotations

from collections.abc import Generator
from math import ceil
from typing import Any, Final, NamedTuple

from holdfast.protocol.effects import Step
from holdfast.protocol.intents.layout import kind_of, latch_key, name_of, queue_of, tombstone_key
from holdfast.protocol.intents.requests import (
    Answer,
    Created,
    Get,
    Item,
    LeaseGone,
    Modified,
    Program,
    Put,
    Request,
    Txn,
    TxnResult,
    Watch,
    begin_watch,
    keep_lease,
    perform,
)
from holdfast.protocol.intents.session import SHORTEST, Session, lease_of_notes, new_lease
from holdfast.untrusted import latch as read_counts
from holdfast.untrusted import number

_RENEW: Final = 0.25  # part of the retention after which a waiter renews a latch


class Latch(NamedTuple):
    """A latch as it was read; ``item`` is None if there is none yet."""

    left: int
    total: int
    item: Item | None
    revision: int


def look(session: Session, step: Step, now: float) -> Program:
    """What is left; a waiter creates the latch, keeps it alive and has it watched."""
    token, count, channel, retention_ms = step.args
    while True:
        done = yield from perform(Txn((), (Get(*queue_of(name_of(step.keys[0])), limit=1),)))
        latch = _read(done, int(count))
        if isinstance(latch, list):
            return latch
        if latch.left == 0 or not channel:
            return [latch.left, latch.total]
        key = latch_key(name_of(step.keys[0]))
        if latch.item is None or now > session.renewed.get(key, 0.0) + _RENEW * int(retention_ms) / 1000:
            try:
                if not (yield from _write(session, latch, latch.left, retention_ms, key, now=now)):
                    continue
            except LeaseGone:
                continue
        yield from begin_watch(Watch(token, key, latch.revision + 1, puts=True))
        return [latch.left, latch.total]


def count_down(session: Session, step: Step, now: float) -> Program:
    """Count down by n, once for this token; what is left then."""
    token, count, by, retention_ms, _ = step.args
    name = name_of(step.keys[0])
    key, tombstone = latch_key(name), tombstone_key(name, token)
    while True:
        done = yield from perform(Txn((), (Get(*queue_of(name), limit=1), Get(tombstone))))
        counted = done.results[1].items
        if counted and (left_then := number(counted[0].value)) is not None:
            return [left_then, int(count)]
        latch = _read(done, int(count))
        if isinstance(latch, list):
            return latch
        if latch.left == 0:
            return [0, latch.total]
        left = max(0, latch.left - int(by))
        try:
            buried = Put(tombstone, str(left), (yield from lease_of_notes(session, now)).id)
            if (yield from _write(session, latch, left, retention_ms, key, now=now, extra=(buried,))):
                return [left, latch.total]
        except LeaseGone:
            session.notes = None


def _read(done: TxnResult, count: int) -> Latch | list[Any]:
    """The latch; or the reply, if it cannot be used."""
    items = done.results[0].items
    if not items:
        return Latch(count, count, None, done.revision)
    first = items[0]
    if kind_of(first.key) != "latch":
        return [-2, kind_of(first.key).encode()]
    counts = read_counts(first.value)
    if counts is None or first.key != latch_key(name_of(first.key)):  # another key would never be written, only read
        return [-2, b"foreign value"]
    left, total = counts
    return [-1, total] if total != count else Latch(left, total, first, done.revision)


def _write(
    session: Session,
    latch: Latch,
    left: int,
    retention_ms: str,
    key: str,
    *,
    now: float,
    extra: tuple[Put, ...] = (),
) -> Generator[Request, Answer, bool]:
    """Write the latch, for its retention from now on; False if it was written since it was read."""
    seconds = max(SHORTEST, ceil(int(retention_ms) / 1000))
    lease = latch.item.lease if latch.item is not None else 0
    if lease:
        answer = yield from keep_lease(lease)
        lease = lease if answer.result.seconds >= seconds else 0
    if lease and left == latch.left and not extra:
        session.renewed[key] = now
        return True
    if not lease:
        lease = (yield from new_lease(seconds)).id
    same = Modified(key, latch.item.modified) if latch.item is not None else Created(*_first_key(key))
    done = yield from perform(Txn((same,), (Put(key, f"{left} {latch.total}", lease), *extra)))
    if done.succeeded:
        session.renewed[key] = now
    return done.succeeded


def _first_key(key: str) -> tuple[str, int, str]:
    """A compare for a new latch: no intent of any kind is there."""
    where = queue_of(name_of(key))
    return where.key, 0, where.end
