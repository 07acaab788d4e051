"""Taking a place in the queue of intents, and learning whether it is a grant.

Invariant. The intents of a name are ordered by the revision of their creation. An intent holds the lock if no intent
before it is in conflict with it: for a lock and a writer any other, for a reader a writer. (A semaphore counts them
instead: see permits.py.) Earlier intents only go away, so a grant stays one until its own key is gone. A lock on
several names has an intent at each, created in one transaction, hence at one revision: that order is the same at all
names, so no cycle of waiters can form. A holder that waits for another lock could be part of a cycle, as on any engine.
If a waiter for several names would be part of the same cycle, that waiter gives way (``_overtake``).

Atomic: each transaction. The one that creates an intent reads what is before it, so that an uncontended acquire is one
request. After a wait, the transaction that confirms a grant writes our own key, if it is as we know it (changing.py),
and reads what is before it. It is a write because etcd has answered reads from stale data after its process was paused
(etcd 20418), and a waiter whose lease has expired would otherwise rely on a place that it has lost (etcd 11456). A
watch or a read never decides.

Fences. The fence is the revision of the transaction that found the grant. The holder before had a lower one: its key
was deleted after its own grant and before ours. An intent keeps its place when another process adopts it, so the
revision of its creation cannot be the fence.

Waiting. A waiter has one key watched: the last intent before it that is in conflict with it. When that key is deleted,
the waiter asks. A watch is a hint: a waiter asks every half second anyway, by a request that writes nothing.

Given up. A create that was sent and not answered may still arrive, and its key would live as long as the lease that it
shares with other locks. So an attempt that is given up leaves a tombstone, and a create does nothing if it finds one.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from holdfast.protocol.effects import Step
from holdfast.protocol.intents.changing import change, leave, still_ours, unchanged
from holdfast.protocol.intents.layout import (
    Range,
    id_of,
    intent_key,
    is_writer,
    kind_of,
    name_of,
    queue_of,
    read_value,
    token_of,
    tombstone_key,
    write_value,
    writers_of,
)
from holdfast.protocol.intents.requests import (
    Answer,
    Compare,
    Created,
    Delete,
    Found,
    Get,
    Item,
    LeaseGone,
    Modified,
    Older,
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
from holdfast.protocol.intents.session import EtcdLease, Intent, Session, lease_of_attempt

READ: Final = "any"

_TRIES: Final = 3  # if a lease, or a place in the queue, is gone between two requests
ABANDONED: Final = [-1, 0]  # the reply to an attempt that was given up
_SHORT_QUEUE: Final = 16  # intents that are read with the create


class Ask:
    """What one acquire step asks for."""

    def __init__(
        self, step: Step, now: float, *, kind: str, names: tuple[str, ...], mode: str = "", nested: str = ""
    ) -> None:
        self.token, self.ttl_ms, self.waits = step.args[0], int(step.args[1]), step.args[4] != ""
        self.kind, self.mode, self.names = kind, mode, names
        self.nested = tuple(filter(None, nested.split(";")))  # the tokens that the caller holds
        self.now = now

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(intent_key(name, self.kind, self.mode, self.token) for name in self.names)

    @property
    def tombstone(self) -> str:
        return tombstone_key(self.names[0], self.token)

    def conflicts(self, name: str) -> Range:
        """Where the intents are that may be in conflict with this one."""
        return writers_of(name) if self.mode == READ else queue_of(name)

    def is_conflict(self, item: Item) -> bool:
        return self.mode != READ or is_writer(item)


def lock_ask(step: Step, now: float) -> Ask:
    return Ask(step, now, kind="lock", names=(step.keys[0],), nested=step.args[5])


def multi_ask(step: Step, now: float) -> Ask:
    return Ask(step, now, kind="lock", names=tuple(dict.fromkeys(map(name_of, step.keys))), nested=step.args[6])


def rwlock_ask(step: Step, now: float) -> Ask:
    return Ask(step, now, kind="rwlock", names=(name_of(step.keys[0]),), mode=step.args[5])


def acquire(session: Session, ask: Ask) -> Program:
    """Take the lock, or (if it waits) a place in its queue."""
    return session.attempt(ask.token, ask.keys, _acquire(session, ask), ABANDONED)


def _acquire(session: Session, ask: Ask) -> Program:
    for _ in range(_TRIES):
        intent = session.intent(ask.token, ask.keys)
        lease = yield from lease_of_attempt(session, intent, ask.ttl_ms, ask.now)
        try:
            if intent.created:
                reply = yield from _confirm(session, ask, intent, lease)
            elif ask.waits:
                reply = yield from _join(session, ask, intent, lease)
            else:
                reply = yield from _try(session, ask, intent, lease)
        except LeaseGone:
            session.drop(lease)
            intent.lease = None
            continue
        if reply is not None:
            return reply
    if not ask.waits:
        session.forget_refused(ask.token)
    return refused(ask, None)  # its place has gone each time: it asks again soon


def _join(session: Session, ask: Ask, intent: Intent, lease: EtcdLease) -> Generator[Request, Answer, Any]:
    """Create the intents, and see what is before them. None: they exist already."""
    keys, value = ask.keys, write_value(ask.token, names=ask.names, times=intent.times)
    if ask.mode == READ:
        looks = [look for name in ask.names for look in (_newest(ask, name, 2), Get(*queue_of(name), limit=1))]
    else:  # one read tells both, unless the queue is long (benchmarks.etcd)
        looks = [Get(*queue_of(name), limit=_SHORT_QUEUE) for name in ask.names]
    done = yield from change(
        intent,
        Txn(
            (*map(Created, keys), Created(ask.tombstone)),
            (*(Put(key, value, lease.id) for key in keys), *looks),
            (*map(Get, keys), Get(ask.tombstone)),
        ),
    )
    if not done.succeeded:
        return found_own(session, ask, intent, done)
    intent.created, intent.bound = done.revision, (lease,)
    seen = done.results[len(keys) :]
    if ask.mode != READ:
        if any(queue.total > len(queue.items) for queue in seen):
            return (yield from _confirm(session, ask, intent, lease))
        seen = tuple(look for queue in seen for look in (Found(queue.items[::-1], queue.total), queue))
    return (yield from _judge(session, ask, intent, lease, seen, done.revision))


def _try(
    session: Session, ask: Ask, intent: Intent, lease: EtcdLease, seen: int = 0
) -> Generator[Request, Answer, Any]:
    """Create the intents only if nothing is in conflict with them, since a caller that does not wait wants no place.

    ``seen``: no intent that was created up to this revision is in conflict with them.
    """
    keys, value = ask.keys, write_value(ask.token, names=ask.names, times=intent.times)
    done = yield from change(
        intent,
        Txn(
            (
                *(Older(where.key, seen + 1, where.end) for where in map(ask.conflicts, ask.names)),
                *map(Created, (*keys, ask.tombstone)),
            ),
            (*(Put(key, value, lease.id) for key in keys), *(Get(*queue_of(name), limit=1) for name in ask.names)),
            (
                *map(Get, keys),
                Get(ask.tombstone),
                *(Get(*ask.conflicts(name)) for name in ask.names),
                *(Get(*queue_of(name), limit=1) for name in ask.names),
            ),
        ),
    )
    if done.succeeded:
        intent.created, intent.bound = done.revision, (lease,)
        first = done.results[-1].items[0]
        if reply := wrong_kind(ask, ask.names[-1], first):  # only of a reader: for other modes the queue was empty
            yield from leave(session, ask.token, intent)
            return reply
        return (yield from granted(session, ask.token, intent, done.revision))
    if (own := found_own(session, ask, intent, done)) is not None or intent.created:
        return own
    looks = done.results[len(keys) + 1 :]
    before = [
        next((item for item in reversed(found.items) if ask.is_conflict(item)), None)
        for found in looks[: len(ask.names)]
    ]
    if not any(before):  # only writers that have become readers are there
        return (yield from _try(session, ask, intent, lease, done.revision))
    session.forget_refused(ask.token)
    place = next(place for place, item in enumerate(before) if item is not None)
    first = looks[len(ask.names) + place].items[0]
    return wrong_kind(ask, ask.names[place], first) or refused(ask, first, place)


def found_own(session: Session, ask: Ask, intent: Intent, done: TxnResult) -> Any:
    """After a create that was not done: the reply if the attempt was given up; else note the intents that exist."""
    *own, tombstone = done.results[: len(intent.keys) + 1]
    if tombstone.items:
        session.intents.pop(ask.token, None)
        return ABANDONED
    if all(found.items for found in own):
        first = own[0].items[0]
        intent.created, intent.modified, intent.unsure = first.created, first.modified, False
    return None


def _confirm(session: Session, ask: Ask, intent: Intent, lease: EtcdLease) -> Generator[Request, Answer, Any]:
    """See whether our intents are first by now. None: they are gone."""
    keys, created = intent.keys, intent.created
    looks = [
        look for name in ask.names for look in (_newest(ask, name, 1, intent.created), Get(*queue_of(name), limit=1))
    ]
    writes: list[Put] = []
    while True:
        if intent.called:
            intent.granted_us = session.wall_us()  # if it is a grant; of a waiter, this is not shown
            value = write_value(ask.token, names=ask.names, times=intent.times)
            writes = [Put(key, value, lease.id) for key in keys]
            intent.bind(lease)
        intent.called = False
        txn = Txn(unchanged(intent), (*writes, *looks), tuple(map(Get, keys)))
        done = yield from (change(intent, txn) if writes else perform(txn))
        if not done.succeeded:
            if still_ours(ask.token, intent, done.results):
                continue
            intent.lose_place(created)
            return None
        if writes:
            intent.bound = (lease,)
        seen = done.results[len(writes) :]
        reply = yield from _judge(session, ask, intent, lease, seen, done.revision, written=bool(writes))
        if reply is not None:
            return reply
        intent.called = True  # nothing is before us: confirm that by a write


def _newest(ask: Ask, name: str, limit: int, created: int = 0) -> Get:
    """The last intents before ours that may be in conflict with it. Writers are few; some may have become readers."""
    where = ask.conflicts(name)
    return Get(*where, limit=0 if ask.mode == READ else limit, newest_first=True, created_before=created)


def _judge(  # noqa: PLR0917
    session: Session,
    ask: Ask,
    intent: Intent,
    lease: EtcdLease,
    seen: tuple[Found, ...],
    revision: int,
    *,
    written: bool = True,
) -> Generator[Request, Answer, Any]:
    """What the intents before ours mean. None: it is a grant, but nothing was written.

    ``seen``: for each name the newest intents before ours, newest first, and the queue from its beginning.
    """
    for place, name in enumerate(ask.names):
        before, first = seen[2 * place], seen[2 * place + 1]
        if reply := wrong_kind(ask, name, first.items[0]):
            yield from leave(session, ask.token, intent)
            return reply
        conflict = _last_conflict(ask, intent, before)
        if conflict is not None and ask.nested and (yield from _overtake(session, ask, intent, name)):
            return (yield from _confirm(session, ask, intent, lease))
        if conflict is not None and not ask.waits:
            yield from leave(session, ask.token, intent)
            return refused(ask, first.items[0], place)
        if conflict is not None:
            intent.behind = conflict.key
            yield from begin_watch(Watch(ask.token, conflict.key, revision + 1, puts=ask.mode == READ))
            return refused(ask, first.items[0], place)
    return (yield from granted(session, ask.token, intent, revision)) if written else None


def _overtake(session: Session, ask: Ask, intent: Intent, name: str) -> Generator[Request, Answer, bool]:
    """Send waiters for several names to the end of their queues, if they wait for what our caller holds.

    Otherwise they and we would wait for each other. Such a waiter holds nothing, because the intent of our caller is
    before its own; the compares make sure of that. It finds its intents gone when it asks next, and creates new ones.
    """
    held = {
        name_of(key): (key, nested.created)
        for nested in map(session.intents.get, ask.nested)
        if nested is not None and nested.created
        for key in nested.keys
    }
    if not held:
        return False
    done = yield from perform(Txn((), (Get(*queue_of(name), created_before=intent.created),)))
    overtaken = False
    for item in done.results[0].items:
        several = read_value(item).get("names", ())
        ours = [held[other] for other in several if other in held and held[other][1] < item.created]
        if ours:
            compares: tuple[Compare, ...] = (Modified(item.key, item.modified), *(Created(*known) for known in ours))
            theirs = tuple(Delete(intent_key(other, "lock", "", id_of(item.key))) for other in several)
            overtaken = (yield from perform(Txn(compares, theirs))).succeeded or overtaken
    return overtaken


def _last_conflict(ask: Ask, intent: Intent, before: Found) -> Item | None:
    return next((item for item in before.items if item.key not in intent.keys and ask.is_conflict(item)), None)


def wrong_kind(ask: Ask, name: str, first: Item) -> list[Any] | None:
    kind = kind_of(first.key)
    if kind == ask.kind:
        return None
    return [-2, kind.encode()] if len(ask.names) == 1 else [-2, kind.encode(), name.encode()]


def granted(session: Session, token: str, intent: Intent, revision: int) -> Generator[Request, Answer, Any]:
    """The reply of a grant by the transaction of that revision."""
    yield from end_watch(token)
    intent.fence = session.fence_floor + revision
    return [1, intent.fence, intent.slot] if intent.slot >= 0 else b"%d" % intent.fence


def refused(ask: Ask, first: Item | None, place: int = 0) -> list[Any]:
    """The reply of a refusal. It never says that a waiter is the first: on etcd that makes no difference."""
    holder = token_of(first).encode() if first is not None else b""
    reply: list[Any] = [0, -1, max(1, round(ask.now * 1e6)), 0, holder]
    return [*reply, ask.names[place].encode()] if len(ask.names) > 1 else reply
