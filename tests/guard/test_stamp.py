"""What a write carries, and of whom."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import holdfast
from holdfast import guard
from tests.guard.resources import Resource
from tests.support import asyncio_test


def test_a_stamp_names_lock_fence_and_holder_and_never_the_token(client: holdfast.Client) -> None:
    with client.lock("x", label="nightly") as lease:
        stamp = guard.stamp(lease)
        assert (stamp.name, stamp.fence) == ("x", lease.fence)
        assert guard.stamp(lease) == stamp
        readable, secret = lease.token.rsplit(".", 1)
        assert stamp.holder.startswith(f"{readable}.")
        assert "nightly" in stamp.holder
        assert secret not in repr(stamp)
    with client.lock("x") as other:
        assert guard.stamp(other).holder != stamp.holder


def test_no_resource_keeps_the_token(client: holdfast.Client, resource: Resource) -> None:
    with client.lock("x") as lease:
        resource.write("one", lease)
        record = resource.record()
        assert record == (lease.fence, guard.stamp(lease).holder)
        assert lease.token.rsplit(".", 1)[1] not in str(record)


def test_a_stamp_can_be_sent_to_whoever_writes(resource: Resource, client: holdfast.Client) -> None:
    with client.lock("x") as lease:
        sent = pickle.loads(pickle.dumps(guard.stamp(lease)))
    with client.lock("x") as lease:
        resource.write("fresh", lease)
    with pytest.raises(holdfast.StaleFence):
        resource.write("stale", sent)


def test_what_is_no_lease_is_refused(client: holdfast.Client, resource: Resource) -> None:
    wrong: Any
    for wrong in (5, None, "token", client.lock("x")):
        with pytest.raises(
            holdfast.InvalidConfig, match=f"a lease of type {type(wrong).__name__}: give the lease of acquire"
        ):
            resource.write("one", wrong)
    assert resource.text() is None


def test_a_lease_that_is_over_does_not_get_as_far_as_the_resource(client: holdfast.Client, resource: Resource) -> None:
    lease = client.lock("x").acquire()
    assert lease
    lease.release()
    with pytest.raises(holdfast.NotHeld):
        resource.write("late", lease)
    lease = client.lock("x", ttl=0.05, renew=False).acquire()
    assert lease
    assert lease.lost.wait(5)
    with pytest.raises(holdfast.LeaseLost):
        resource.write("late", lease)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()
    assert resource.text() is None


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_a_lock_of_history_has_no_fence_to_write_under(client: holdfast.Client, resource: Resource) -> None:
    with client.recipe("set_nx", "old") as lease:
        assert lease.fence is None
        with pytest.raises(holdfast.Unsupported, match=r"no fence; use client\.lock"):
            resource.write("one", lease)
    assert resource.text() is None


class LeaseOnTwo:
    """A lease on several names, as far as a stamp looks at it."""

    name = "a"
    fence = 9
    token = "host-1.0123"

    def __init__(self) -> None:
        self.fences = {"a": 5, "b": 9}

    def check(self) -> None:
        pass


def test_of_several_names_the_one_that_guards_must_be_said() -> None:
    lease: Any = LeaseOnTwo()
    with pytest.raises(holdfast.InvalidConfig, match="name="):
        guard.stamp(lease)
    assert guard.stamp(lease, name="a").fence == 5
    with pytest.raises(holdfast.InvalidConfig, match="'a', 'b'"):
        guard.stamp(lease, name="c")


def test_a_name_that_the_lease_is_not_on_is_refused(client: holdfast.Client) -> None:
    with client.lock("x") as lease:
        assert guard.stamp(lease, name="x").name == "x"
        with pytest.raises(holdfast.InvalidConfig, match="the lease is on 'x'"):
            guard.stamp(lease, name="y")


@pytest.mark.parametrize("fence", [0, -1, 2**53, 1.5, True, "7", None])
def test_what_is_no_fence_is_refused(fence: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig):
        guard.Stamp("x", fence, "a")


@pytest.mark.parametrize("holder", ["", "a\nb", "a b", "ä", "a" * 129, b"a", None])
def test_what_is_no_holder_is_refused(holder: Any) -> None:
    with pytest.raises(holdfast.InvalidConfig):
        guard.Stamp("x", 7, holder)


@asyncio_test
async def test_leases_of_the_asyncio_face_have_stamps_too(url: str) -> None:
    async with holdfast.aio.connect(url) as client, client.lock("x") as lease:
        assert guard.stamp(lease).fence == lease.fence


def test_leases_of_every_kind_have_stamps(client: holdfast.Client, resource: Resource) -> None:
    """And each later one is taken after the one before."""
    election = client.election("x")
    with client.lock("x") as lease:
        resource.write("lock", lease)
        stale = guard.stamp(lease)
    with client.rlock("x") as outer, client.rlock("x") as lease:
        resource.write("rlock", lease)
        assert guard.stamp(outer) == guard.stamp(lease)
    with election.lead() as lease:
        resource.write("leader", lease)
        ticket = lease.hand_over()
        with pytest.raises(holdfast.NotHeld):
            resource.write("handed over", lease)
    adopted = client.adopt(ticket)
    resource.write("adopted", adopted)
    adopted.release()
    for lease in election.terms():
        resource.write("term", lease)
        break
    with client.lock("x", "y") as lease:
        ours = guard.stamp(lease, name="x")
        assert ours.fence == lease.fences["x"]
        resource.write("both", ours)
    with pytest.raises(holdfast.StaleFence):
        resource.write("stale", stale)
    assert resource.text() == "both"


def test_those_who_hold_side_by_side_have_fences_that_rise(client: holdfast.Client, resource: Resource) -> None:
    """So each slot needs a resource of its own, and only writers should write."""
    for lock in (client.semaphore("s", 2), client.rwlock("rw").read):
        resource.clear()
        with lock as one, lock as other:
            resource.write("one", one)
            resource.write("other", other)
            with pytest.raises(holdfast.StaleFence):
                resource.write("one", one)
