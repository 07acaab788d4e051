"""Steps that look, and change nothing: is it locked, which token leads, which permits are taken, which waiters should
ask.

Invariant. A look changes nothing on the server, except that it renews the leases of waiters.

Atomic: each request. A look is one linearizable read; a look at many waiters or holders is several.
"""

from __future__ import annotations

from typing import Any

from holdfast.protocol.effects import Command, Step
from holdfast.protocol.intents.layout import is_writer, kind_of, name_of, queue_of, slots_of, token_of
from holdfast.protocol.intents.requests import MOST_OPERATIONS, Get, Program, Txn, Watch, begin_watch, perform
from holdfast.protocol.intents.session import Session, kept


def exists(session: Session, command: Command, now: float) -> Program:
    """How many of these names are locked."""
    done = yield from perform(Txn((), tuple(Get(*queue_of(str(name)), count_only=True) for name in command.args[1:])))
    return sum(found.total > 0 for found in done.results)


def leader(session: Session, step: Step, now: float) -> Program:
    """The token and fence of the first intent; its kind, unless it is a lock."""
    done = yield from perform(Txn((), (Get(*queue_of(step.keys[0]), limit=1),)))
    if not done.results[0].items:
        return [None, None, None, 0]
    first = done.results[0].items[0]
    kind = kind_of(first.key)
    if kind != "lock":
        return [None, None, kind.encode(), 0]
    return [token_of(first).encode(), session.fence_of(first), None, 0]


def look_at_pool(session: Session, step: Step, now: float) -> Program:
    """How many holders are inside, and whether one of them is a writer."""
    name = name_of(step.keys[0])
    done = yield from perform(Txn((), (Get(*queue_of(name)), Get(*slots_of(name), count_only=True))))
    found, slots = done.results
    if not found.items or kind_of(found.items[0].key) != "rwlock":
        return [slots.total, 0]
    if is_writer(found.items[0]):
        return [1, 1]
    readers = 0
    for item in found.items:
        if is_writer(item):
            break
        readers += 1
    return [readers, 0]


def find_in_pool(session: Session, step: Step, now: float) -> Program:
    """For each token whether it still has its permit."""
    known = [session.intents.get(token) for token in step.args]
    gets = [Get(key) for intent in known if intent is not None for key in intent.keys[:1]]
    there: set[tuple[str, int, str]] = set()
    revision = 0
    for start in range(0, len(gets), MOST_OPERATIONS):
        done = yield from perform(Txn((), tuple(gets[start : start + MOST_OPERATIONS])))
        revision = revision or done.revision
        there |= {(item.key, item.created, token_of(item)) for found in done.results for item in found.items}
    if step.watch and gets:
        for token, intent in zip(step.args, known, strict=True):
            if intent is not None:
                yield from begin_watch(Watch(token, intent.keys[0], revision + 1, holder=step.keys[0]))
    return [
        int(intent is not None and (intent.keys[0], intent.created, token) in there)
        for token, intent in zip(step.args, known, strict=True)
    ]


def present(session: Session, step: Step, now: float) -> Program:
    """Keep the leases of these waiters; for each, whether it should ask because what it waits for has changed."""
    known = [session.intents.get(token) for token in step.args[::2]]
    for lease in {intent.lease for intent in known if intent is not None and intent.lease is not None}:
        yield from kept(session, lease, lease.lasts / 2, now)
    keys = list(dict.fromkeys(intent.behind for intent in known if intent is not None and intent.behind))
    there: set[str] = set()
    for start in range(0, len(keys), MOST_OPERATIONS):
        batch = keys[start : start + MOST_OPERATIONS]
        done = yield from perform(Txn((), tuple(Get(key, count_only=True) for key in batch)))
        there |= {key for key, found in zip(batch, done.results, strict=True) if found.total}
    reply: list[Any] = [max(1, round(now * 1e6))]
    for intent in known:
        asks = intent is None or intent.called or intent.behind not in there
        if intent is not None and asks:
            intent.called = True
        reply.append(int(asks))
    return reply
