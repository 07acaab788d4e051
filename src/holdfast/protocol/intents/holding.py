"""What a holder asks of etcd: renew, release, abandon, hand over, adopt, share.

Invariant. A key is changed only if it is as we know it (changing.py). So neither a holder that comes too late, nor a
request that does, can change the key of a later holder.

Renewal. To renew a hold is to renew its etcd lease unless that lasts long enough, and then to see that its keys exist,
have our token and are bound to that lease; one request renews an etcd lease for all holds that share it. A hold that
must last longer than its etcd lease is bound to a longer one.

Hand-over. The intent keeps its place in the queue. Its key is bound to a lease of its own, which is not renewed once
the hold is given away; to adopt it is to write the new token into it, if it has not been written since it was read. The
fence is the revision of that write.

Atomic: each transaction. What can do without a compare for all of it can be sent together for many holds: see
``together``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.intents.changing import (
    all_removed,
    bind,
    change,
    may_write,
    perform_any,
    removals,
    remove_own,
    with_tombstone,
)
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
    Get,
    Item,
    LeaseGone,
    Modified,
    NoSpace,
    Operation,
    Program,
    Put,
    Request,
    Txn,
    Watch,
    begin_watch,
    end_watch,
    perform,
)
from holdfast.protocol.intents.session import (
    LONGER,
    EtcdLease,
    Intent,
    Session,
    kept,
    lease_for,
    lease_of_attempt,
    new_lease,
    seconds_for,
)
from holdfast.protocol.replies import DONE, GONE, TAKEN

_ABANDONED: Final = -2  # the reply to an adoption that was given up
_TRIES: Final = 5  # at a key that others write between our read and our write


class Part(NamedTuple):
    """A step that can share a transaction: its operations, and its reply from their results."""

    operations: tuple[Operation, ...]
    reply: Callable[[tuple[Any, ...]], Any]
    watch: Watch | None = None  # begins after the revision of the results


Parts = Generator[Request, Answer, Part]


def alone(making: Parts) -> Program:
    """The reply of one part."""
    part = yield from making
    (reply,) = yield from together([part])
    if isinstance(reply, StepFailed):
        raise reply
    return reply


def together(parts: list[Part]) -> Generator[Request, Answer, list[Any]]:
    """The reply of each part, or its StepFailed, in as few requests as etcd allows."""
    replies: list[Any] = []
    batch: list[Part] = []
    size = 0
    for place, part in enumerate(parts):
        batch.append(part)
        size += len(part.operations)
        if place + 1 < len(parts) and size + len(parts[place + 1].operations) <= MOST_OPERATIONS:
            continue
        try:
            replies += yield from _at_once(batch)
        except NoSpace as full:  # one of them cannot do without a transaction
            for one in batch:
                try:
                    replies += (yield from _at_once([one])) if len(batch) > 1 else [full.failed]
                except NoSpace as its_own:
                    replies.append(its_own.failed)
        batch, size = [], 0
    return replies


def _at_once(parts: list[Part]) -> Generator[Request, Answer, list[Any]]:
    """The reply of each part, in one request."""
    results: tuple[Any, ...] = ()
    revision = 0
    if operations := tuple(operation for one in parts for operation in one.operations):
        done = yield from perform_any(operations)
        results, revision = done.results, done.revision
    replies: list[Any] = []
    for one in parts:
        own, results = results[: len(one.operations)], results[len(one.operations) :]
        replies.append(one.reply(own))
        if one.watch is not None:
            yield from begin_watch(one.watch._replace(revision=revision + 1))
    return replies


def release_part(session: Session, step: Step, now: float) -> Parts:
    token = step.args[0]
    intent = session.intents.get(token)
    yield from end_watch(token)
    if intent is None:
        return Part((), lambda results: GONE)
    intent.given_up = True
    if intent.unsure:
        freed, _ = yield from remove_own(session, token, intent)
        return Part((), lambda results: freed)

    def reply(results: tuple[Any, ...]) -> int:
        session.intents.pop(token, None)
        return all_removed(intent, results)

    return Part(removals(intent), reply)


def abandon_part(session: Session, step: Step, now: float) -> Parts:
    """Delete what the token may have; if a request of it may still arrive, leave a tombstone.

    The reply says whether the tombstone is there; if not, the keeper tries again, and needs the intent for that.
    """
    token, tombstone_ms = step.args[0], int(step.args[1])
    intent = session.intents.get(token)
    yield from end_watch(token)
    tombstone = tombstone_key(name_of(step.keys[0]), token)
    if intent is None:  # no create was sent, or the intent is known to be gone
        takes_writes = 1 if not tombstone_ms else int((yield from may_write(tombstone)))
        return Part((), lambda results: [GONE, takes_writes])
    intent.given_up = True
    buried: tuple[Operation, ...] = ()
    if tombstone_ms:
        buried = session.bury(tombstone, intent)
    if intent.unsure:
        freed, is_buried = yield from remove_own(session, token, intent, buried)
        return Part((), lambda results: [freed, int(is_buried)])
    if buried:
        done, is_buried = yield from with_tombstone(buried, removals(intent))
        if is_buried:
            session.intents.pop(token, None)
        return Part((), lambda results: [all_removed(intent, done.results), int(is_buried)])

    def reply(results: tuple[Any, ...]) -> list[int]:
        session.intents.pop(token, None)
        return [all_removed(intent, results), 1]

    return Part(removals(intent), reply)


def renew_part(session: Session, step: Step, now: float) -> Parts:
    """See that the keys exist and are ours, on a lease that lasts for the ttl from now on.

    The lease alone says nothing about a key: etcd 3.7 can renew a lease whose revocation is decided and not yet done.
    """
    token, ttl_ms = step.args[0], int(step.args[1])
    intent = _held(session, token)
    if intent is None or not (yield from _is_kept(session, token, intent, ttl_ms, now)):
        return Part((), lambda results: GONE)
    name = name_of(intent.keys[0])
    watch = Watch(token, intent.keys[0], 0, holder=name) if step.watch else None

    # If one is gone, the session still knows the intent: if it has several names, the others must be released.
    def reply(results: tuple[Any, ...]) -> int:
        items = [found.items[0] for found in results if found.items]
        if len(items) < len(results) or items[0].created != intent.created:
            return GONE
        if any(token not in (item.value, token_of(item)) for item in items):
            return TAKEN
        lasts = any(lease.id == items[0].lease and lease.covers(ttl_ms / 1000, now) for lease in intent.bound)
        return DONE if lasts else GONE

    return Part(tuple(map(Get, intent.all_keys)), reply, watch)


def _is_kept(session: Session, token: str, intent: Intent, ttl_ms: int, now: float) -> Generator[Request, Answer, bool]:
    """Let each lease to which the keys may be bound last for the ttl; bind the keys to a longer one if needed.

    False: the lease or a key is gone.
    """
    for _ in range(_TRIES):
        if intent.giving or all(ttl_ms <= lease.lasts * 1000 / LONGER for lease in intent.bound):
            for lease in intent.bound:
                if not (yield from kept(session, lease, ttl_ms / 1000, now)):
                    intent.unbind(lease)
            return intent.bound != ()
        lease = yield from lease_for(session, ttl_ms, now)
        try:
            is_bound = yield from bind(token, intent, lease)
            if is_bound or not intent.giving:  # else it is being handed over, to a lease that lasts as long
                return is_bound
        except LeaseGone:
            session.drop(lease)
    return False


def _held(session: Session, token: str) -> Intent | None:
    """The intent of a holder that goes on. If it was handed over, its caller was cancelled and does not know it."""
    intent = session.intents.get(token)
    if intent is not None and intent.giving and not intent.unsure:
        intent.giving = False
    return intent


def share(session: Session, step: Step, now: float) -> Program:
    """A writer becomes a reader, and keeps its place in the queue."""
    token = step.args[0]
    intent = _held(session, token)
    if intent is None or not intent.bound:
        return GONE
    intent.shared = True
    try:
        return DONE if (yield from bind(token, intent, intent.bound[0])) else GONE
    except LeaseGone:
        return GONE


def hand_over(session: Session, step: Step, now: float) -> Program:
    """Let the keys last for the ttl from now on, or for as long as they were extended for, and not longer.

    If it has no answer, the holder goes on with leases that last as long, whether or not it was executed.
    """
    token, ttl_ms, tombstone_ms = step.args[0], int(step.args[1]), int(step.args[2])
    intent = session.intents.get(token)
    if intent is None:
        return GONE
    lease = yield from new_lease(max(seconds_for(ttl_ms), *(0, *(lease.seconds for lease in intent.bound))))
    buried: tuple[Operation, ...] = ()
    if tombstone_ms:
        buried = session.bury(tombstone_key(name_of(step.keys[0]), token), intent)
    intent.giving = True  # meanwhile, a renewal binds the keys to no other lease
    is_given = False
    try:
        is_given = yield from _give(token, intent, lease, buried)
    except LeaseGone:
        pass
    finally:
        intent.giving = is_given
    if is_given:
        session.hand_over(token, now + lease.lasts, now)
    return DONE if is_given else GONE


def _give(
    token: str, intent: Intent, lease: EtcdLease, buried: tuple[Operation, ...]
) -> Generator[Request, Answer, bool]:
    try:
        return (yield from bind(token, intent, lease, buried, giving=True))
    except LeaseGone:
        if not buried:
            raise
    # The lease of the create is gone, so the create cannot arrive any more.
    return (yield from bind(token, intent, lease, giving=True))


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
        lease = yield from lease_of_attempt(session, session.intent(token, ()), ttl_ms, now)
        try:
            reply = yield from _swap(session, token, [item for item in theirs if item], lease, tombstone)
        except LeaseGone:
            session.drop(lease)
            session.intent(token, ()).lease = None
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
    intent.created, intent.lease = theirs[0].created, lease
    intent.bind(lease)
    intent.slot, intent.shared = content.get("slot", -1), bool(content.get("shared"))
    if intent.slot >= 0:
        intent.slot_keys = (slot_key(name_of(theirs[0].key), intent.slot),)
    value = write_value(token, names=intent.names, slot=intent.slot, shared=intent.shared, times=intent.times)
    done = yield from change(
        intent,
        Txn(
            (*(Modified(item.key, item.modified) for item in theirs), Created(tombstone)),
            (
                *(Put(item.key, value, lease.id) for item in theirs),
                *(Put(key, token, lease.id) for key in intent.slot_keys),
            ),
        ),
    )
    if not done.succeeded:
        intent.keys = ()
        intent.lose_place(intent.created)
        return None
    intent.bound = (lease,)
    return (yield from granted(session, token, intent, done.revision))
