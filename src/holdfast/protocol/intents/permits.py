"""Semaphores on etcd: an intent holds a permit if fewer than n intents are before it.

Invariant. If all clients ask for n permits, only the first n intents hold one. Each of them has a slot of its own: the
key of a slot is created, in the same transaction in which the holder writes its intent, only if it does not exist; and
it is deleted, or expires, together with the intent. So a permit costs two requests: the place, and the slot.

Atomic: each transaction. The slot is chosen from what the last one has read; if another holder takes it first, the
transaction does nothing, and says which slots are taken. The fence is the revision at which the slot was taken.

Waiting. Holders leave in any order, so the first waiter has all intents watched for one that goes. Each other waiter
has the intent of the waiter before it watched, which is written when that waiter takes a slot, and deleted when it
gives up. So a release wakes one waiter.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from holdfast.protocol.effects import Step
from holdfast.protocol.intents.changing import change, leave, still_ours, unchanged
from holdfast.protocol.intents.layout import name_of, queue_of, slot_key, slots_of, write_value
from holdfast.protocol.intents.queue import ABANDONED, Ask, found_own, granted, refused, wrong_kind
from holdfast.protocol.intents.requests import (
    Answer,
    Created,
    Found,
    Get,
    Item,
    LeaseGone,
    Program,
    Put,
    Request,
    Txn,
    Watch,
    begin_watch,
    perform,
)
from holdfast.protocol.intents.session import EtcdLease, Intent, Session, lease_of_attempt
from holdfast.untrusted import number

_TRIES: Final = 3


def semaphore_ask(step: Step, now: float) -> Ask:
    return Ask(step, now, kind="semaphore", names=(name_of(step.keys[0]),), mode=step.args[5])


def acquire_permit(session: Session, ask: Ask) -> Program:
    """Take a permit, or (if it waits) a place in the queue."""
    return session.attempt(ask.token, ask.keys, _acquire(session, ask), ABANDONED)


def _acquire(session: Session, ask: Ask) -> Program:
    name = ask.names[0]
    for _ in range(_TRIES):
        intent = session.intent(ask.token, ask.keys)
        if not ask.waits and not intent.created:  # do not create an intent if all permits are taken
            done = yield from perform(Txn((), (Get(*queue_of(name), limit=_permits(ask)),)))
            found: Found = done.results[0]
            if found.total >= _permits(ask):
                session.forget_refused(ask.token)
                return wrong_kind(ask, name, found.items[0]) or refused(ask, found.items[0])
        lease = yield from lease_of_attempt(session, intent, ask.ttl_ms, ask.now)
        try:
            reply = yield from _ask(session, ask, intent, lease)
        except LeaseGone:
            session.drop(lease)
            intent.lease = None
            continue
        if reply is not None:
            return reply
    if not ask.waits:
        session.forget_refused(ask.token)
    return refused(ask, None)


def _permits(ask: Ask) -> int:
    return int(ask.mode[1:])


def _ask(session: Session, ask: Ask, intent: Intent, lease: EtcdLease) -> Generator[Request, Answer, Any]:
    """Create the intent, or look where it is. None: it has gone."""
    if not intent.created:
        key = intent.keys[0]
        done = yield from change(
            intent,
            Txn(
                (Created(key), Created(ask.tombstone)),
                (Put(key, write_value(ask.token, times=intent.times), lease.id), *_looks(ask, 0)),
                (Get(key), Get(ask.tombstone)),
            ),
        )
        if not done.succeeded:
            return found_own(session, ask, intent, done)
        intent.created, intent.bound = done.revision, (lease,)
        looks = done.results[1:]
    else:
        intent.called, created = False, intent.created
        done = yield from perform(Txn((Created(intent.keys[0], created),), _looks(ask, created)))
        if not done.succeeded:
            intent.lose_place(created)
            return None
        looks = done.results
    return (yield from _judge(session, ask, intent, done.revision, looks, lease=lease))


def _looks(ask: Ask, created: int) -> tuple[Get, ...]:
    """Reads the intents before the one with that creation, as far as they matter; the last of them; the first of all
    intents; and the slots."""
    name = ask.names[0]
    # If our intent is new, all others are before it, and the read includes our own: so one more is read.
    before = Get(*queue_of(name), limit=_permits(ask) + (0 if created else 1), created_before=created)
    last = Get(*queue_of(name), limit=1 if created else 2, newest_first=True, created_before=created)
    return before, last, Get(*queue_of(name), limit=1), Get(*slots_of(name))


def _judge(
    session: Session, ask: Ask, intent: Intent, revision: int, looks: Any, *, lease: EtcdLease
) -> Generator[Request, Answer, Any]:
    before, last, first, slots = looks
    own, permits = intent.keys[0], _permits(ask)
    if reply := wrong_kind(ask, ask.names[0], first.items[0]):
        yield from leave(session, ask.token, intent)
        return reply
    if sum(item.key != own for item in before.items) < permits:
        reply = yield from _take_slot(session, ask, intent, lease, slots)
        if reply is not False:
            return reply
    predecessor = next((item for item in last.items if item.key != own), None)
    if not ask.waits:
        yield from leave(session, ask.token, intent)
    elif predecessor is None or any(item.key == predecessor.key for item in before.items):
        # All before us have permits, so we are next. If none is before us, holders behind us asked for more permits.
        intent.behind = ""
        yield from begin_watch(Watch(ask.token, *_all_of(ask, revision)))
    else:
        intent.behind = predecessor.key
        yield from begin_watch(Watch(ask.token, predecessor.key, revision + 1, puts=True))
    return refused(ask, first.items[0])


def _all_of(ask: Ask, revision: int) -> tuple[str, int, str]:
    where = queue_of(ask.names[0])
    return where.key, revision + 1, where.end


def _take_slot(
    session: Session, ask: Ask, intent: Intent, lease: EtcdLease, slots: Found
) -> Generator[Request, Answer, Any]:
    """Take the lowest free slot: the grant. None: the intent has gone. False: there is no free slot below n.

    False is possible only if some holders asked for more permits than we do.
    """
    name, own, created = ask.names[0], intent.keys[0], intent.created
    while True:
        taken = {item.key: item for item in slots.items}
        slot = _own_slot(ask, taken)
        if slot is None:
            slot = next((n for n in range(_permits(ask)) if slot_key(name, n) not in taken), None)
        if slot is None:
            return False
        key = slot_key(name, slot)
        known = taken.get(key)
        before = intent.slot_keys if intent.unsure else ()
        intent.slot_keys = (
            *(other for other in before if other != key),
            key,
        )  # before the request: it may have no answer
        intent.bind(lease)
        intent.granted_us = session.wall_us()
        value = write_value(ask.token, slot=slot, times=intent.times)
        done = yield from change(
            intent,
            Txn(
                (*unchanged(intent), Created(key, known.created if known else 0)),
                (Put(key, ask.token, lease.id), Put(own, value, lease.id)),
                (Get(own), Get(*slots_of(name))),
            ),
        )
        if done.succeeded:
            intent.slot, intent.slot_keys, intent.bound = slot, (key,), (lease,)
            return (yield from granted(session, ask.token, intent, done.revision))
        intent.slot_keys = before
        mine, slots = done.results
        if not still_ours(ask.token, intent, (mine,)):
            intent.lose_place(created)
            return None


def _own_slot(ask: Ask, taken: dict[str, Item]) -> int | None:
    """The slot that an earlier try has taken, whose answer was lost."""
    return next((number(key.rpartition(":")[2]) for key, item in taken.items() if item.value == ask.token), None)
