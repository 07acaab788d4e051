"""Keys of a permit pool that are deleted by hand, on a real server, on either face.

tests/pools/test_damage_simulated.py does it at every moment, in virtual time.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

import holdfast
from tests.contention.support import SOON
from tests.pools.test_membership_redis import room
from tests.support import eventually

SIDE_KEYS = ("fence", "holders", "queue", "waiters")


def delete(admin: redis.Redis, *what: str) -> None:
    assert admin.delete(*(f"x:hf1:{each}:{{x}}" for each in what)) == len(what)


def lose(lease: Any) -> None:
    assert lease.lost.wait(SOON)
    with pytest.raises(holdfast.LeaseLost):
        lease.release()


def test_each_key_of_a_pool_is_known_here(face: Any, admin: redis.Redis) -> None:
    """So that the other tests delete all there are."""
    with room(face, "permit", ttl=60):
        assert sorted(admin.keys("*")) == [f"x:hf1:{each}:{{x}}".encode() for each in SIDE_KEYS]


@pytest.mark.parametrize("what", SIDE_KEYS)
def test_no_slot_has_two_holders(face: Any, admin: redis.Redis, what: str) -> None:
    """A holder either is told, or keeps a slot that nobody else gets."""
    leases = [room(face, "permit", ttl=60).acquire(timeout=5) for _ in range(2)]
    delete(admin, what)
    if what == "holders":
        for lease in leases:
            lose(lease)
        leases = []
    leases += [room(face, "permit", ttl=60).acquire(timeout=5) for _ in range(3 - len(leases))]
    assert {lease.slot for lease in leases} == {0, 1, 2}
    assert room(face, "permit", ttl=60).acquire(blocking=False) is None
    for lease in leases:
        assert lease.held
        lease.release()


@pytest.mark.parametrize("what", SIDE_KEYS)
def test_slots_stay_below_the_number_of_permits(face: Any, admin: redis.Redis, what: str) -> None:
    for _ in range(3):
        leases = [room(face, "permit", ttl=60).acquire(timeout=5) for _ in range(3)]
        assert [lease.slot for lease in leases] == [0, 1, 2]
        delete(admin, what)
        for lease in leases:
            if what == "holders":
                lose(lease)
            else:
                lease.release()


@pytest.mark.parametrize("what", SIDE_KEYS)
def test_no_reader_beside_a_writer(face: Any, admin: redis.Redis, what: str) -> None:
    writing = room(face, "write", ttl=60).acquire(timeout=5)
    delete(admin, what)
    if what == "holders":
        lose(writing)
        room(face, "read", ttl=60).acquire(blocking=False).release()
    else:
        assert threaded(lambda: room(face, "read", ttl=60).acquire(blocking=False)) is None
        assert writing.held
        writing.release()


@pytest.mark.parametrize("what", SIDE_KEYS)
def test_readers_never_exclude_each_other(face: Any, admin: redis.Redis, what: str) -> None:
    """Not even after a writer lost its hold."""
    writing = room(face, "write", ttl=60).acquire(timeout=5)
    delete(admin, what)
    if what == "holders":
        lose(writing)
    else:
        writing.release()
    reading = [room(face, "read", ttl=60).acquire(blocking=False) for _ in range(3)]
    assert all(reading)
    for lease in reading:
        lease.release()


@pytest.mark.parametrize("what", SIDE_KEYS)
@pytest.mark.parametrize("mode", ["permit", "write"])
def test_a_waiter_goes_on(connect: Any, url: str, admin: redis.Redis, mode: str, what: str) -> None:
    holder, waiter = connect(url), connect(url)
    lease = room(holder, mode, permits=1, ttl=60).acquire(timeout=5)
    came: list[Any] = []

    def visit() -> None:
        with room(waiter, mode, permits=1, ttl=60, wait=20) as theirs:
            came.append(theirs.fence)

    visitor = threading.Thread(target=visit)
    visitor.start()
    eventually(lambda: admin.zcard("x:hf1:queue:{x}") == 2)
    delete(admin, what)
    if what == "holders":
        lose(lease)
    else:
        eventually(lambda: admin.zcard("x:hf1:queue:{x}") == 2 and admin.hlen("x:hf1:waiters:{x}") == 2)
        assert not came
        lease.release()
    visitor.join(1.0 + SOON)
    assert len(came) == 1
    eventually(lambda: not [key for key in admin.keys("*") if b":fence:" not in key and b":gone:" not in key])


def threaded(call: Any) -> Any:
    """What it returns in another thread, which is another owner."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]
