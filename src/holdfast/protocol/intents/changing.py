"""How the keys of an intent are changed: each request names the exact state that it changes.

Invariant. A write or a delete compares the revision of the last write of each key that it changes, or that the key does
not exist. All keys of an intent are written together, so they share one such revision (``Intent.modified``), and an
intent that was adopted has another one than its giver knew.

So a request that arrives late, after its sender has given it up, does no harm. If a key was written or deleted since,
the compare fails. If not, the request does what its sender asked for, and its sender is prepared for that: until a
later write has succeeded, ``unsure`` says that the state of the keys is not known, ``bound`` has every lease to which
they may be bound, and all of these are renewed. If our own earlier request has written the keys and its answer was
lost, the next one finds that out (``still_ours``) and goes on from there. A create has no earlier state but "does not
exist"; it finds the tombstone of an attempt that was given up.

Atomic: each transaction.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from holdfast.protocol.intents.layout import is_slot, token_of, write_value
from holdfast.protocol.intents.requests import (
    Answer,
    Created,
    Delete,
    Found,
    Get,
    LeaseGone,
    Modified,
    NoSpace,
    NotExecuted,
    Operation,
    Put,
    Request,
    Txn,
    TxnResult,
    end_watch,
    perform,
)
from holdfast.protocol.intents.session import EtcdLease, Intent, Session
from holdfast.protocol.replies import DONE, GONE

_TRIES: Final = 5  # at keys that a late request of ours writes between our read and our delete


def change(intent: Intent, txn: Txn) -> Generator[Request, Answer, TxnResult]:
    """Perform a transaction that writes the keys of the intent if its compares hold."""
    before, intent.unsure = intent.unsure, True
    intent.was_unsure = intent.was_unsure or before
    try:
        done = yield from perform(txn)
    except (LeaseGone, NotExecuted):
        intent.unsure = before or intent.was_unsure  # another step of this token may have no answer
        raise
    intent.unsure = before and not done.succeeded  # what was sent before compares an earlier write
    if done.succeeded:
        intent.modified = max(intent.modified, done.revision)  # another thread may have written it since
    return done


def unchanged(intent: Intent) -> tuple[Modified, ...]:
    """Compares: the keys are as we know them."""
    return tuple(Modified(key, intent.modified) for key in intent.keys)


def still_ours(token: str, intent: Intent, found: Sequence[Found]) -> bool:
    """After compares have failed: whether the keys are ours, written by an earlier request of ours; then note that."""
    items = [each.items[0] for each in found if each.items]
    if len(items) < len(found) or any(item.created != intent.created or token_of(item) != token for item in items):
        return False
    intent.modified = max(intent.modified, items[0].modified)
    return True


def bind(
    token: str, intent: Intent, lease: EtcdLease, extra: tuple[Operation, ...] = (), *, giving: bool = False
) -> Generator[Request, Answer, bool]:
    """Write the keys of the intent again, bound to that lease; False if they are gone, or are about to be given away.

    LeaseGone if etcd does not know that lease, or one that ``extra`` names.
    """
    try:
        while not intent.given_up and (giving or not intent.giving):
            intent.bind(lease)
            value = write_value(
                token,
                names=intent.names,
                fence=intent.fence,
                slot=intent.slot,
                shared=intent.shared,
                times=intent.times,
            )
            puts = (
                *(Put(key, value, lease.id) for key in intent.keys),
                *(Put(key, token, lease.id) for key in intent.slot_keys),
            )
            done = yield from change(intent, Txn(unchanged(intent), (*puts, *extra), tuple(map(Get, intent.keys))))
            if done.succeeded:
                if intent.modified == done.revision:  # else another step of this token was later
                    intent.bound = (lease,)
                return True
            if not still_ours(token, intent, done.results):
                break
    except LeaseGone:
        intent.unbind(lease)
        raise
    return False


def perform_any(operations: tuple[Operation, ...]) -> Generator[Request, Answer, TxnResult]:
    """The results of operations that read and remove (see ``removals``), for holds that end; also of a full etcd.

    A full etcd (3.5.1 does so) refuses every transaction, but no plain read or delete. So they are sent one by one, and
    what is to be removed is read and then deleted. Nobody writes it in between, or later: its token, which is ours, is
    never used again, and has not been handed over. Not so a slot, whose key the next holder will use.
    """
    try:
        return (yield from perform(Txn((), operations)))
    except NoSpace:
        if any(is_slot(compare.key) for one in operations if type(one) is Txn for compare in one.compares):
            raise
    results: list[Found | TxnResult] = []
    revision = 0
    for one in operations:
        if type(one) is not Txn:
            done = yield from perform(Txn((), (one,)))
            results.append(done.results[0])
        else:
            (key,) = (compare.key for compare in one.compares)
            done = yield from perform(Txn((), (Get(key),)))
            # If it is gone, etcd has executed the transaction before it refused it.
            same = all(Modified(item.key, item.modified) in one.compares for item in done.results[0].items)
            if same and done.results[0].items:
                done = yield from perform(Txn((), (Delete(key),)))
            results.append(TxnResult(same, done.revision, ()))
        revision = revision or done.revision
    return TxnResult(True, revision, tuple(results))


def removals(intent: Intent) -> tuple[Txn, ...]:
    """Operations that delete each key that is as we know it. The result of each is a TxnResult."""
    if not intent.created:
        return ()
    return tuple(Txn((Modified(key, intent.modified),), (Delete(key),)) for key in intent.all_keys)


def all_removed(intent: Intent, results: Sequence[TxnResult]) -> int:
    """The reply of a step that has performed ``removals``."""
    return DONE if intent.created and all(done.succeeded for done in results) else GONE


def with_tombstone(
    buried: tuple[Operation, ...], operations: tuple[Operation, ...]
) -> Generator[Request, Answer, tuple[TxnResult, bool]]:
    """The results of these operations, in one transaction with those that leave a tombstone; whether it is there.

    If the lease of the tombstone is gone, none is needed: the late request names the same lease, and fails. If etcd is
    full, the operations are done without the tombstone: they only read and delete, which a full etcd allows.
    """
    is_buried = True
    if buried:
        try:
            done = yield from perform(Txn((), (*buried, *operations)))
            return done._replace(results=done.results[len(buried) :]), True
        except LeaseGone:
            pass
        except NoSpace:
            is_buried = False
    return (yield from perform_any(operations)), is_buried


def may_write(key: str) -> Generator[Request, Answer, bool]:
    """Whether etcd takes writes. A full etcd refuses a transaction that could write, even if it would not.

    A client whose calls fail asks so whether etcd is back: see ``let_keeper_ask``.
    """
    try:
        yield from perform(Txn((Created(key, 1),), (Put(key, ""),)))  # no key is ever created at the first revision
    except NoSpace:
        return False
    return True


def remove_own(
    session: Session, token: str, intent: Intent, buried: tuple[Operation, ...] = ()
) -> Generator[Request, Answer, tuple[int, bool]]:
    """Read the keys of the intent, and delete those with this token; others may belong to a giver, or another holder.

    Returns the reply of a release, and whether a tombstone is there, if one is wanted.
    """
    freed = GONE
    is_buried = True
    for _ in range(_TRIES):
        found, is_buried = yield from with_tombstone(buried, tuple(map(Get, intent.all_keys)))
        items = [each.items[0] for each in found.results if each.items]
        ours = [item for item in items if token in (item.value, token_of(item))]
        if not ours:
            break
        if {*intent.keys} <= {item.key for item in ours}:
            freed = DONE
        removed = tuple(Txn((Modified(item.key, item.modified),), (Delete(item.key),)) for item in ours)
        done = yield from perform_any(removed)
        if all(each.succeeded for each in done.results):
            break
    if is_buried:
        session.intents.pop(token, None)
    return freed, is_buried


def leave(session: Session, token: str, intent: Intent) -> Generator[Request, Answer, None]:
    """Give up a place in the queue, which has no slot yet. Until that is answered, it can be abandoned."""
    yield from end_watch(token)
    created = intent.created
    done = yield from perform(Txn((), removals(intent)))
    if intent.unsure and not all(each.succeeded for each in done.results):
        return  # a late request of ours has written it, so it must be abandoned
    intent.lose_place(created)
    session.forget_refused(token)
