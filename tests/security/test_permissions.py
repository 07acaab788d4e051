"""The permissions that docs/guarantees.md asks for are enough for everything, and none of them is for nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import holdfast
from holdfast.cli.doctor.permissions import needed
from holdfast.lua import SCRIPTS
from tests.contention.test_acl import user
from tests.servers import Server
from tests.support import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
SECTION = PAGE.partition("## What the server must allow")[2]
BLOCKS = [block.split() for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)]
LOCKS, ROOMS, CACHES, BELLS, TRACKING, OPERATORS = BLOCKS
NEEDED = [*LOCKS, *ROOMS, *CACHES]
OPTIONAL = [*BELLS, *TRACKING]

Make = Callable[[holdfast.Client], Any]

CONTENDED: dict[str, Make] = {
    "lock": lambda client: client.lock("app:x"),
    "rlock": lambda client: client.rlock("app:x"),
    "several": lambda client: client.lock("app:x", "app:y"),
    "places": lambda client: client.lock("app:x", "app:{tag}"),
    "semaphore": lambda client: client.semaphore("app:x", 1),
    "write": lambda client: client.rwlock("app:x").write,
    "election": lambda client: client.election("app:x").lead(),
}


def contend(make: Make, one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    """One has it, the other waits for it and gets it."""
    came: list[int] = []

    def visit() -> None:
        with make(other) as lease:
            came.append(lease.fence)

    with make(one) as lease:
        lease.extend(60)
        assert make(other).acquire(blocking=False) is None
        assert make(other).locked()
        waiter = threading.Thread(target=visit)
        waiter.start()
        eventually(lambda: set(admin.zrange("app:x:hf1:queue:{app:x}", 0, -1)) - {b""})
    waiter.join(20)
    assert len(came) == 1


def readers(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    with one.rwlock("app:x").write as lease:
        lease.downgrade()
        with other.rwlock("app:x").read as beside:
            beside.check()
            assert one.rwlock("app:x").read.locked()


def hand_over(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    for lock in (one.lock("app:a"), one.lock("app:b", "app:c"), one.semaphore("app:d", 1), one.rwlock("app:e").read):
        lease = lock.acquire()
        assert lease
        other.adopt(lease.hand_over()).release()


def latch(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    opened: list[bool] = []
    waiter = threading.Thread(target=lambda: opened.append(other.latch("app:x", 2).wait(20)))
    waiter.start()
    one.latch("app:x", 2).count_down()
    assert one.latch("app:x", 2).count() == 1
    one.latch("app:x", 2).count_down()
    waiter.join()
    assert opened == [True]


def election(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    mine = one.election("app:x")
    for lease in mine.terms():
        leader = other.election("app:x").leader()
        assert leader is not None
        assert leader.fence == lease.fence
        mine.resign()
        break


def cache(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    asked, answer = threading.Event(), threading.Event()

    def compute() -> str:
        asked.set()
        answer.wait(20)
        return "value"

    found: list[Any] = []

    def ask(client: holdfast.Client) -> None:
        found.append(client.get_or_compute("app:x", compute, stale=60, early=1, errors=1))

    askers = [threading.Thread(target=ask, args=(client,)) for client in (one, one, other)]
    for asker in askers:
        asker.start()
    assert asked.wait(20)
    answer.set()
    for asker in askers:
        asker.join()
    assert found == ["value"] * 3
    assert other.invalidate("app:x") is True

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one.get_or_compute("app:y", fail, errors=60)
    with pytest.raises(holdfast.ComputeFailed):
        other.get_or_compute("app:y", fail, errors=60)


def exclusive(one: holdfast.Client, other: holdfast.Client, admin: redis.Redis) -> None:
    assert one.exclusive("app:x", busy="skip")(lambda: 7)() == 7


USES: dict[str, Callable[[holdfast.Client, holdfast.Client, redis.Redis], None]] = {
    **{
        name: lambda one, other, admin, make=make: contend(make, one, other, admin)  # type: ignore[misc]
        for name, make in CONTENDED.items()
    },
    **{use.__name__: use for use in (readers, hand_over, latch, election, cache, exclusive)},
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("optional", [True, False], ids=["all of them", "without the optional ones"])
def test_they_are_enough(server: Server, admin: redis.Redis, use: str, optional: bool) -> None:
    admin.script_flush()
    rules = [*NEEDED, *(rule.replace("your-prefix*", "") for rule in OPTIONAL if optional)]
    with (
        user(server, admin, *rules) as url,
        holdfast.connect(url) as one,
        holdfast.connect(url) as other,
    ):
        USES[use](one, other, admin)
        done_without = {rule.lstrip("+").partition("|")[0] for rule in OPTIONAL} if not optional else set()
        refused = {str(entry["object"]).partition("|")[0] for entry in admin.acl_log()}
        assert refused <= done_without


def commands_of(source: bytes) -> set[str]:
    return {f"+{word.lower()}" for word in re.findall(r"redis\.p?call\('([A-Z]+)'", source.decode())}


def test_none_of_them_is_for_nothing() -> None:
    """They are the commands of the scripts, and those that send a script."""
    used = set().union(*(commands_of(script.source) for name, script in SCRIPTS.items() if name != "guard_write"))
    by_commands = {"+scan", "+lrange"}  # of operators, which are sent as they are
    assert {*NEEDED, *OPERATORS, "+publish", "+pubsub"} == used | {"+eval", "+evalsha"} | by_commands
    assert {"+publish", "+pubsub|numsub"} <= set(BELLS)


def test_what_only_some_kinds_need_is_used_by_no_other() -> None:
    for name, script in SCRIPTS.items():
        used = commands_of(script.source)
        assert name.startswith(("pool", "break_permit")) or not used & set(ROOMS), name
        assert name.startswith(("cache", "break_claim")) or not used & set(CACHES), name
        assert name.startswith("break") or not used & set(OPERATORS), name


@pytest.mark.parametrize("operate", [False, True])
def test_the_doctor_prints_the_same_permissions(operate: bool) -> None:
    on_page = {*NEEDED, *OPTIONAL, *(OPERATORS if operate else ())}
    assert {rule for rule in needed("", cluster=False, operate=operate) if rule[0] == "+"} == {
        rule for rule in on_page if rule[0] == "+"
    }
