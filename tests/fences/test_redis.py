"""Damaged keys of fences on a real server, for every kind of lock that gives fences out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

import holdfast
from tests.support import as_bytes

KINDS: dict[str, Callable[[holdfast.Client], Any]] = {
    "lock": lambda client: client.lock("x"),
    "without a cohort": lambda client: client.lock("x", cohort=0),
    "rlock": lambda client: client.rlock("x"),
    "several": lambda client: client.lock("x", "y"),
    "semaphore": lambda client: client.semaphore("x", 2),
    "read": lambda client: client.rwlock("x").read,
    "write": lambda client: client.rwlock("x").write,
    "election": lambda client: client.election("x").lead(),
}
KEY = "x:hf1:fence:{x}"
NOT_OURS = ["", "text", "inf", "nan", "1e18", "1e308", "-5", "0x7fffffffffffff", "1e18 1 ab", f"7 {10**15} ab"]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_was_never_given_out_is_replaced(client: holdfast.Client, admin: redis.Redis, make: Any) -> None:
    fences = []
    for value in [str(2**50), f"{2**50 + 99} 64 ab", *NOT_OURS]:
        admin.set(KEY, value)
        with make(client) as lease:
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert int(as_bytes(admin.get(KEY)).split()[0]) < 2**53
    assert 0 < admin.pttl(KEY) <= 400 * 86_400_000


@pytest.mark.parametrize("value", [2**53 - 1, 2**53, 10**18, f"{2**53 - 127} 64 ab", "list"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_number_that_is_too_large_and_another_type_are_refused(
    client: holdfast.Client, admin: redis.Redis, make: Any, value: int | str
) -> None:
    if value == "list":
        admin.rpush(KEY, "a list")
    else:
        admin.set(KEY, value)
    before = admin.dump(KEY)
    with pytest.raises(holdfast.Unsupported, match=r"'x:hf1:fence:\{x\}'.*delete that key"):
        with make(client):
            pass
    assert admin.exists("x", "x:hf1:holders:{x}") == 0
    assert admin.dump(KEY) == before
    admin.delete(KEY)
    with make(client):
        pass


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_adoption_is_refused_and_repaired_in_the_same_way(
    client: holdfast.Client, admin: redis.Redis, make: Any
) -> None:
    lease = make(client).acquire()
    admin.set(KEY, "text")
    lease = client.adopt(lease.hand_over())
    admin.set(KEY, 10**18)
    ticket = lease.hand_over()
    with pytest.raises(holdfast.Unsupported, match="delete that key"):
        client.adopt(ticket)
    admin.delete(KEY)
    client.adopt(ticket).release()


def test_a_leader_is_shown_without_a_fence_that_is_none(client: holdfast.Client, admin: redis.Redis) -> None:
    with client.election("x").lead() as lease:
        end = lease.token[-8:]
        for value in ["text", f"{10**18} 1 {end}", f"0 1 {end}", f"-5 1 {end}", f"{lease.fence} 1 00000000"]:
            admin.set(KEY, value)
            leader = client.election("x").leader()
            assert leader is not None
            assert leader.fence is None
