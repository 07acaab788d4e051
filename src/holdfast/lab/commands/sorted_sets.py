"""Sorted sets: what a queue by time is made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.lab.commands.table import command
from holdfast.lab.commands.words import SYNTAX, between, integer, natural, number, span
from holdfast.lab.replies import Reply, ReplyError, format_number
from holdfast.lab.values import SortedSet

if TYPE_CHECKING:
    from holdfast.lab.store import Store

Pairs = list[tuple[bytes, float]]

_ZADD_FLAGS = frozenset({"NX", "XX", "GT", "LT", "CH", "INCR"})


@command(deny_oom=True)
def zadd(store: Store, key: bytes, score: bytes, member: bytes, *rest: bytes) -> Reply:
    words = [score, member, *rest]
    flags: set[str] = set()
    while words and (flag := words[0].decode(errors="replace").upper()) in _ZADD_FLAGS:
        flags.add(flag)
        words.pop(0)
    if not words or len(words) % 2:
        raise ReplyError(SYNTAX)
    if {"NX", "XX"} <= flags:
        raise ReplyError("ERR XX and NX options at the same time are not compatible")
    if len({"GT", "LT", "NX"} & flags) > 1:
        raise ReplyError("ERR GT, LT, and/or NX options at the same time are not compatible")
    if "INCR" in flags and len(words) > 2:
        raise ReplyError("ERR INCR option supports a single increment-element pair")
    scores = [(number(each), name) for each, name in zip(words[::2], words[1::2], strict=True)]
    return _add(store, key, scores, flags)


@command(deny_oom=True)
def zincrby(store: Store, key: bytes, increment: bytes, member: bytes) -> Reply:
    return _add(store, key, [(number(increment), member)], {"INCR"})


def _add(store: Store, key: bytes, scores: list[tuple[float, bytes]], flags: set[str]) -> Reply:
    old = store.collection(key, SortedSet)
    new = SortedSet(old)
    changed = 0
    written: float | None = None  # What INCR answers, which is nothing when a condition kept it from writing.
    for score, member in scores:
        current = new.get(member)
        if "INCR" in flags:
            score += current or 0.0  # noqa: PLW2901  (the increment becomes the score)
        if math.isnan(score):
            raise ReplyError("ERR resulting score is not a number (NaN)")
        if _may_write(current, score, flags):
            new[member] = written = score
            changed += current != score
    if changed:
        store.write(key, new)
    if "INCR" in flags:
        return None if written is None else format_number(written)
    return changed if "CH" in flags else len(new) - len(old)


def _may_write(current: float | None, score: float, flags: set[str]) -> bool:
    if current is None:
        return "XX" not in flags
    return not ("NX" in flags or ("GT" in flags and score <= current) or ("LT" in flags and score >= current))


@command(write=True)
def zrem(store: Store, key: bytes, member: bytes, *members: bytes) -> Reply:
    return _discard(store, key, (member, *members))


def _discard(store: Store, key: bytes, members: tuple[bytes, ...] | list[bytes]) -> int:
    old = store.collection(key, SortedSet)
    new = SortedSet((member, score) for member, score in old.items() if member not in members)
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
def zrank(store: Store, key: bytes, member: bytes, option: bytes | None = None) -> Reply:
    if option is not None and option.upper() != b"WITHSCORE":
        raise ReplyError(SYNTAX)
    for rank, (each, score) in enumerate(store.collection(key, SortedSet).ranked()):
        if each == member:
            return rank if option is None else [rank, format_number(score)]
    return None


@command()
def zcount(store: Store, key: bytes, low: bytes, high: bytes) -> Reply:
    return len(_with_scores_between(store, key, low, high))


@command()
def zrange(store: Store, key: bytes, start: bytes, stop: bytes, *options: bytes) -> Reply:
    flags, limit = _read_range_options(options, {"BYSCORE", "REV", "WITHSCORES"})
    if limit and "BYSCORE" not in flags:
        raise ReplyError(f"{SYNTAX}, LIMIT is only supported in combination with either BYSCORE or BYLEX")
    if "BYSCORE" in flags:
        low, high = (stop, start) if "REV" in flags else (start, stop)
        pairs = _with_scores_between(store, key, low, high)
        pairs = _cut(pairs[::-1] if "REV" in flags else pairs, limit)
    else:
        integer(start), integer(stop)  # The server reads its numbers before it looks at the key.
        ranked = store.collection(key, SortedSet).ranked()
        pairs = (ranked[::-1] if "REV" in flags else ranked)[span(start, stop, len(ranked))]
    return _reply(pairs, with_scores="WITHSCORES" in flags)


@command()
def zrangebyscore(store: Store, key: bytes, low: bytes, high: bytes, *options: bytes) -> Reply:
    flags, limit = _read_range_options(options, {"WITHSCORES"})
    pairs = _cut(_with_scores_between(store, key, low, high), limit)
    return _reply(pairs, with_scores="WITHSCORES" in flags)


def _read_range_options(options: tuple[bytes, ...], known: set[str]) -> tuple[set[str], tuple[int, int] | None]:
    flags: set[str] = set()
    limit: tuple[int, int] | None = None
    words = list(options)
    while words:
        option = words.pop(0).decode(errors="replace").upper()
        if option in known and (option == "WITHSCORES" or option not in flags):
            flags.add(option)
        elif option == "LIMIT" and len(words) >= 2:
            limit = integer(words.pop(0)), integer(words.pop(0))
        else:
            raise ReplyError(SYNTAX)
    return flags, limit


def _with_scores_between(store: Store, key: bytes, low: bytes, high: bytes) -> Pairs:
    wanted = between(low, high)
    return [pair for pair in store.collection(key, SortedSet).ranked() if wanted(pair[1])]


def _cut(pairs: Pairs, limit: tuple[int, int] | None) -> Pairs:
    if limit is None:
        return pairs
    offset, count = limit
    if offset < 0:
        return []
    return pairs[offset:] if count < 0 else pairs[offset : offset + count]


def _reply(pairs: Pairs, *, with_scores: bool) -> Reply:
    if with_scores:
        return [word for member, score in pairs for word in (member, format_number(score))]
    return [member for member, _ in pairs]


@command(write=True)
def zremrangebyscore(store: Store, key: bytes, low: bytes, high: bytes) -> Reply:
    return _discard(store, key, [member for member, _ in _with_scores_between(store, key, low, high)])


@command(write=True)
def zremrangebyrank(store: Store, key: bytes, start: bytes, stop: bytes) -> Reply:
    integer(start), integer(stop)
    ranked = store.collection(key, SortedSet).ranked()
    return _discard(store, key, [member for member, _ in ranked[span(start, stop, len(ranked))]])


@command(write=True)
def zpopmin(store: Store, key: bytes, count: bytes | None = None) -> Reply:
    wanted = 1 if count is None else natural(count)
    taken = store.collection(key, SortedSet).ranked()[:wanted]
    _discard(store, key, [member for member, _ in taken])
    return _reply(taken, with_scores=True)
