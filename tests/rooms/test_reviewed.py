"""What a review of rooms has found."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import holdfast
from holdfast.lease import ENDED
from tests.rooms.harness import RoomPlay


class _Interleaving:
    """What an object remembers, and while it is looked at another thread acquires."""

    def __init__(self, semaphore: Any) -> None:
        self._semaphore = semaphore
        self._seen = False
        self.acquired: list[Any] = []

    @property
    def phase(self) -> str:
        if not self._seen:
            self._seen = True
            other = threading.Thread(target=lambda: self.acquired.append(self._semaphore.acquire()))
            other.start()
            other.join()
        return ENDED


def test_what_others_acquire_meanwhile_is_not_forgotten_with_what_has_ended(client: holdfast.Client) -> None:
    semaphore = client.semaphore("a", 1000)
    meanwhile: Any = _Interleaving(semaphore)
    semaphore._leases[meanwhile] = meanwhile
    leases = [semaphore.acquire() for _ in range(20)]
    assert len(meanwhile.acquired) == 1, "so it was looked through"
    for _ in leases + meanwhile.acquired:
        semaphore.release()
    assert not any(lease.held for lease in leases + meanwhile.acquired)


def test_more_permits_than_python_is_willing_to_print_are_refused_like_any(client: holdfast.Client) -> None:
    with pytest.raises(holdfast.InvalidConfig, match="permits=.*give a whole number from 1 to 1000000"):
        client.semaphore("a", 10**5000)


def test_from_writing_to_reading_on_a_full_server() -> None:
    play = RoomPlay()
    one, two = play.client("one"), play.client("two")

    async def writer() -> None:
        async with one.rwlock("a", ttl=30).write as lease:
            play.world.store.oom = True
            await lease.downgrade()
            play.world.store.oom = False
            await play.sleep(one, 1)

    writing = play.start(one, writer())
    play.run(0.1)
    reading = play.start(two, play.visit(two, "read", ttl=30, wait=0))
    play.run(5)
    writing.outcome()
    reading.outcome()
    assert play.left() == []


def test_who_writes_and_asks_to_read_would_wait_for_itself(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        rw = client.rwlock("a", ttl=30)
        async with rw.write as lease:
            for read in (rw.read, client.rwlock("a").read):
                with pytest.raises(holdfast.WouldDeadlock, match=r"'a'.* writes it, .*downgrade") as caught:
                    await read.acquire()
                assert isinstance(caught.value, holdfast.NotAcquired)
                with pytest.raises(holdfast.WouldDeadlock):
                    async with read:
                        raise AssertionError("entered")
                # What does not wait for ever ends like any other wait.
                assert await read.acquire(blocking=False) is None
                assert await read.acquire(timeout=0.01) is None
            await lease.downgrade()
            async with rw.read:
                pass
            with pytest.raises(holdfast.WouldDeadlock, match="Release the read first"):
                await rw.write.acquire()
        async with rw.read:
            pass

    play(scenario)


def test_another_thread_or_task_may_wait_to_read(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        rw = api.client().rwlock("a", ttl=30)
        read: list[str] = []

        async def reader() -> None:
            async with rw.read:
                read.append("read")

        async with rw.write:
            handle = api.spawn(reader)
            await api.sleep(0.1)
            read.append("written")
        await handle.join()
        return read

    assert play(scenario) == ["written", "read"]


def test_a_block_may_be_left_in_another_thread_if_its_object_is_its_own(client: holdfast.Client) -> None:
    """A framework may enter and leave in different threads. Which block it leaves is known by the object alone."""
    mine, theirs = client.semaphore("a", 3), client.semaphore("a", 3)
    lease = mine.__enter__()

    def leave() -> None:
        with theirs as other:
            mine.__exit__(None, None, None)
            assert other.held

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert not lease.held


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one name", "several"])
def test_a_room_stays_a_room_while_a_stranger_holds_a_key_of_that_name(play: Any, names: tuple[str, ...]) -> None:
    """A lock that queued behind the stranger would have taken the room's mark away, and come in beside the others."""

    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        async with one.semaphore("a", 2, ttl=30):
            await api.raw("SET", "a", "a stranger's, without a ttl")
            for how in ({"blocking": False}, {"timeout": 0.3}):
                with pytest.raises(holdfast.Unsupported, match="in use as a semaphore"):
                    await two.lock(*names, ttl=30).acquire(**how)
            await api.raw("DEL", "a")
            with pytest.raises(holdfast.Unsupported, match="in use as a semaphore"):
                await two.lock(*names).acquire(blocking=False)
            async with two.semaphore("a", 2, wait=0):
                pass

    play(scenario)
