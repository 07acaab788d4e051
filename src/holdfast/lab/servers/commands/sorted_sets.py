"""Sorted sets, which implement queues in the order of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lab.servers.commands.arguments import SYNTAX, between, integer, number, span
from holdfast.lab.servers.commands.table import command
from holdfast.lab.servers.replies import Reply, ReplyError, format_number
from holdfast.lab.servers.values import SortedSet

if TYPE_CHECKING:
    from holdfast.lab.servers.store import Store


@command(deny_oom=True)
def zadd(store: Store, key: bytes, score: bytes, member: bytes, *rest: bytes) -> Reply:
    words = [score, member, *rest]
    only_new = False
    while words and words[0].upper() == b"NX":
        only_new = bool(words.pop(0))
    if not words or len(words) % 2:
        raise ReplyError(SYNTAX)
    scores = [(name, number(each)) for each, name in zip(words[::2], words[1::2], strict=True)]
    old = store.collection(key, SortedSet)
    new = SortedSet(old)
    for name, value in scores:
        if not only_new or name not in new:
            new[name] = value
    if new != old:
        store.write(key, new)
    return len(new) - len(old)


@command(write=True)
def zrem(store: Store, key: bytes, member: bytes, *members: bytes) -> Reply:
    old = store.collection(key, SortedSet)
    new = SortedSet((each, score) for each, score in old.items() if each not in (member, *members))
    if len(new) < len(old):
        store.write(key, new)
    return len(old) - len(new)


@command()
def zscore(store: Store, key: bytes, member: bytes) -> Reply:
    score = store.collection(key, SortedSet).get(member)
    return None if score is None else format_number(score)


@command()
def zcard(store: Store, key: bytes) -> Reply:
    return len(store.collection(key, SortedSet))


@command()
def zcount(store: Store, key: bytes, low: bytes, high: bytes) -> Reply:
    return sum(map(between(low, high), store.collection(key, SortedSet).values()))


@command()
def zrange(store: Store, key: bytes, start: bytes, stop: bytes, *options: bytes) -> Reply:
    if any(option.upper() != b"WITHSCORES" for option in options):
        raise ReplyError(SYNTAX)
    integer(start), integer(stop)  # The server checks the numbers before it reads the key.
    ranked = store.collection(key, SortedSet).ranked()
    pairs = ranked[span(start, stop, len(ranked))]
    if options:
        return [word for member, score in pairs for word in (member, format_number(score))]
    return [member for member, _ in pairs]
