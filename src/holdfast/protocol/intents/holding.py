"""What a holder asks of etcd: renew, release, abandon, hand over, adopt, share.

Invariant. A key of ours is changed only if it is the one that we created (its creation is compared), or adopted. A
release deletes it. So a holder that comes too late cannot change the key of a later holder.

Renewal. To renew a hold is to see that its keys exist, and to renew its etcd lease unless that lasts long enough; one
request renews an etcd lease for all holds that share it. A hold that must last longer than its etcd lease is bound to a
longer one.

Hand-over. The intent keeps its place in the queue. Its key is bound to a lease of its own, which lasts one ttl and is
not renewed; to adopt it is to write the new token into it, if it has not been written since it was read. The fence is
the revision of that write.

Atomic: each transaction. What needs no compare can be sent together for many holds: see ``together``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import ceil
from typing import Any, Final, NamedTuple

from holdfast.protocol.effects import Step
from holdfast.protocol.intents.layout import (
    name_of,
    queue_of,
    read_value,
    slot_key,
    token_of,
    tombstone_key,
    write_value,
)
from holdfast.protocol.intents.queue import granted
from holdfast.protocol.intents.requests import (
    MOST_OPERATIONS,
    Answer,
    Created,
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
    TxnResult,
    Watch,
    begin_watch,
    end_watch,
    perform,
)
from holdfast.protocol.intents.session import LONGER, SHORTEST, EtcdLease, Intent, Session, kept, lease_for, new_lease
from holdfast.protocol.replies import DONE, GONE

_ABANDONED: Final = -2  # the reply to an adoption that was given up
_TRIES: Final = 5  # at a key that others write between our read and our write


class Part(NamedTuple):
    """A step that needs no compare: its operations, and its reply from their results."""

    operations: tuple[Operation, ...]
    reply: Callable[[tuple[Any, ...]], Any]
    watch: Watch | None = None  # begins after the revision of the results


Parts = Generator[Request, Answer, Part]


def alone(making: Parts) -> Program:
    """The reply of one part."""
    part = yield from making
    (reply,) = yield from together([part])
    return reply


def together(parts: list[Part]) -> Generator[Request, Answer, list[Any]]:
    """The reply of each part, in as few requests as etcd allows."""
    replies: list[Any] = []
    batch: list[Part] = []
    size = 0
    for place, part in enumerate(parts):
        batch.append(part)
        size += len(part.operations)
        if place + 1 < len(parts) and size + len(parts[place + 1].operations) <= MOST_OPERATIONS:
            continue
        results: tuple[Any, ...] = ()
        revision = 0
        if size:
            done = yield from perform(Txn((), tuple(operation for one in batch for operation in one.operations)))
            results, revision = done.results, done.revision
        for one in batch:
            own, results = results[: len(one.operations)], results[len(one.operations) :]
            replies.append(one.reply(own))
            if one.watch is not None:
                yield from begin_watch(one.watch._replace(revision=revision + 1))
        batch, size = [], 0
    return replies


def release_part(session: Session, step: Step, now: float) -> Parts:
    token = step.args[0]
    intent = session.intents.get(token)
    yield from end_watch(token)
    if intent is None:
        return Part((), lambda results: GONE)
    if intent.slot_keys:
        freed = yield from _free_permit(session, token, intent)
        return Part((), lambda results: freed)

    def reply(results: tuple[Any, ...]) -> int:
        session.intents.pop(token, None)
        return DONE if all(results) else GONE

    return Part(tuple(map(Delete, intent.keys)), reply)


def _free_permit(
    session: Session, token: str, intent: Intent, buried: tuple[Operation, ...] = ()
) -> Generator[Request, Answer, int]:
    """Delete an intent and its slot. If the intent has gone, another holder may have the slot by now."""
    ours = tuple(Created(key, intent.created) for key in intent.keys)
    done = yield from _perform_after(ours, buried, tuple(map(Delete, intent.all_keys)))
    if not done.succeeded:
        yield from _abandon_own(session, token, intent, buried)
    session.intents.pop(token, None)
    return DONE if done.succeeded else GONE


def abandon_part(session: Session, step: Step, now: float) -> Parts:
    """Delete what the token may have; if a request of it may still arrive, leave a tombstone."""
    token, tombstone_ms = step.args[0], int(step.args[1])
    intent = session.intents.get(token)
    yield from end_watch(token)
    if intent is None:  # no create was sent, or the intent is known to be gone
        return Part((), lambda results: [GONE, 1])
    intent.given_up = True
    buried: tuple[Operation, ...] = ()
    if tombstone_ms:
        buried = session.bury(tombstone_key(name_of(step.keys[0]), token), intent, now)
    if intent.unsure:
        yield from _abandon_own(session, token, intent, buried)
        return Part((), lambda results: [GONE, 1])
    if intent.slot_keys:
        freed = yield from _free_permit(session, token, intent, buried)
        return Part((), lambda results: [freed, 1])
    if buried:
        done = yield from _perform_after((), buried, tuple(map(Delete, intent.keys)))
        session.intents.pop(token, None)
        return Part((), lambda results: [DONE if all(done.results) else GONE, 1])

    def reply(results: tuple[Any, ...]) -> list[int]:
        session.intents.pop(token, None)
        return [DONE if all(results) else GONE, 1]

    return Part(tuple(map(Delete, intent.keys)), reply)


def _perform_after(
    compares: tuple[Created | Modified, ...], buried: tuple[Operation, ...], operations: tuple[Operation, ...]
) -> Generator[Request, Answer, TxnResult]:
    """A transaction that leaves a tombstone, too; its results are those of the operations.

    If the lease of the tombstone is gone, no tombstone is needed: the late request names the same lease, and fails.
    """
    if buried:
        try:
            done = yield from perform(Txn(compares, (*buried, *operations)))
            return done._replace(results=done.results[len(buried) :])
        except LeaseGone:
            pass
    return (yield from perform(Txn(compares, operations)))


def _abandon_own(
    session: Session, token: str, intent: Intent, buried: tuple[Operation, ...]
) -> Generator[Request, Answer, None]:
    """Delete those keys of the intent that are ours; its other keys may belong to a giver, or to another holder."""
    for _ in range(_TRIES):
        done = yield from _perform_after((), buried, tuple(map(Get, intent.all_keys)))
        found = [found.items[0] for found in done.results if found.items]
        ours = [item for item in found if token in (item.value, token_of(item))]
        compares = tuple(Modified(item.key, item.modified) for item in ours)
        done = yield from perform(Txn(compares, tuple(Delete(item.key) for item in ours)))
        if done.succeeded:
            break
    session.intents.pop(token, None)


def renew_part(session: Session, step: Step, now: float) -> Parts:
    """See that the keys exist, on a lease that lasts for the ttl from now on."""
    token, ttl_ms = step.args[0], int(step.args[1])
    intent = session.intents.get(token)
    if intent is None or not (yield from _is_kept(session, token, intent, ttl_ms, now)):
        return Part((), lambda results: GONE)
    name = name_of(intent.keys[0])
    watch = Watch(token, intent.keys[0], 0, holder=name) if step.watch else None

    def reply(results: tuple[Any, ...]) -> int:
        if all(found.items for found in results) and results[0].items[0].created == intent.created:
            return DONE
        return GONE  # the session still knows the intent: if it has several names, the others must be released

    return Part(tuple(map(Get, intent.all_keys)), reply, watch)


def _is_kept(session: Session, token: str, intent: Intent, ttl_ms: int, now: float) -> Generator[Request, Answer, bool]:
    """Let the lease last for the ttl; bind the keys to a longer one if needed. False: the lease or a key is gone."""
    lease = intent.lease
    if lease is None or ttl_ms <= lease.lasts * 1000 / LONGER:
        return lease is not None and (yield from kept(session, lease, ttl_ms / 1000, now))
    for _ in range(_TRIES):
        lease = yield from lease_for(session, ttl_ms, now)
        try:
            if not (yield from _bind(token, intent, lease)):
                return False
        except LeaseGone:
            session.drop(lease)
            continue
        intent.lease = lease
        return True
    return False


def _bind(
    token: str, intent: Intent, lease: EtcdLease, extra: tuple[Operation, ...] = ()
) -> Generator[Request, Answer, bool]:
    """Write the keys of the intent again, bound to that lease; False if they are gone."""
    value = write_value(
        token, names=intent.names, fence=intent.fence, slot=intent.slot, shared=intent.shared, times=intent.times
    )
    ours = tuple(Created(key, intent.created) for key in intent.keys)
    puts = (
        *(Put(key, value, lease.id) for key in intent.keys),
        *(Put(key, token, lease.id) for key in intent.slot_keys),
    )
    done = yield from perform(Txn(ours, (*puts, *extra)))
    return done.succeeded


def share(session: Session, step: Step, now: float) -> Program:
    """A writer becomes a reader, and keeps its place in the queue."""
    token = step.args[0]
    intent = session.intents.get(token)
    if intent is None or intent.lease is None:
        return GONE
    intent.shared = True
    try:
        return DONE if (yield from _bind(token, intent, intent.lease)) else GONE
    except LeaseGone:
        return GONE


def hand_over(session: Session, step: Step, now: float) -> Program:
    """Let the keys last one ttl from now on, and not longer."""
    token, ttl_ms, tombstone_ms = step.args[0], int(step.args[1]), int(step.args[2])
    intent = session.intents.get(token)
    if intent is None:
        return GONE
    lease = yield from new_lease(max(SHORTEST, ceil(ttl_ms / 1000)))
    buried: tuple[Operation, ...] = ()
    if tombstone_ms:
        buried = session.bury(tombstone_key(name_of(step.keys[0]), token), intent, now)
    try:
        if not (yield from _bind(token, intent, lease, buried)):
            return GONE
    except LeaseGone:
        return GONE
    intent.lease = lease
    session.hand_over(token, now + lease.lasts, now)
    return DONE


def adopt(session: Session, step: Step, now: float) -> Program:
    """Write our token in place of the giver's."""
    return session.attempt(step.args[0], (), _adopt(session, step, now), _ABANDONED)


def _adopt(session: Session, step: Step, now: float) -> Program:
    token, ttl_ms, giver = step.args[0], int(step.args[1]), step.args[3]
    names = tuple(dict.fromkeys(map(name_of, step.keys)))
    tombstone = tombstone_key(names[0], token)
    for _ in range(_TRIES):
        done = yield from perform(Txn((), (*(Get(*queue_of(name)) for name in names), Get(tombstone))))
        *queues, gone = done.results
        if gone.items:
            session.intents.pop(token, None)
            return _ABANDONED
        theirs = [_find(found.items, giver, token) for found in queues]
        if not all(theirs):
            session.intents.pop(token, None)
            return _why_not(step, [found.items for found in queues])
        lease = yield from lease_for(session, ttl_ms, now)
        try:
            reply = yield from _swap(session, token, [item for item in theirs if item], lease, tombstone)
        except LeaseGone:
            session.drop(lease)
            continue
        if reply is not None:
            return reply
    session.intents.pop(token, None)
    return -1


def _find(items: tuple[Item, ...], *tokens: str) -> Item | None:
    return next((item for item in items if token_of(item) in tokens), None)


def _why_not(step: Step, queues: list[tuple[Item, ...]]) -> int:
    if step.script == "pool_adopt":
        return -3 if any(queues) else 0
    return -1 if all(queues) else 0


def _swap(
    session: Session, token: str, theirs: list[Item], lease: EtcdLease, tombstone: str
) -> Generator[Request, Answer, Any]:
    """Take over these intents, unless one of them was written since; then None."""
    content = read_value(theirs[0])
    intent = session.intent(token, ())
    intent.keys = tuple(item.key for item in theirs)
    intent.unsure = True  # before the request: it may have no answer
    intent.created, intent.lease = theirs[0].created, lease
    intent.slot, intent.shared = content.get("slot", -1), bool(content.get("shared"))
    if intent.slot >= 0:
        intent.slot_keys = (slot_key(name_of(theirs[0].key), intent.slot),)
    value = write_value(token, names=intent.names, slot=intent.slot, shared=intent.shared, times=intent.times)
    done = yield from perform(
        Txn(
            (*(Modified(item.key, item.modified) for item in theirs), Created(tombstone)),
            (
                *(Put(item.key, value, lease.id) for item in theirs),
                *(Put(key, token, lease.id) for key in intent.slot_keys),
            ),
        )
    )
    if not done.succeeded:
        intent.keys = ()
        intent.lose_place()
        return None
    intent.unsure = False
    return (yield from granted(session, token, intent, done.revision))
