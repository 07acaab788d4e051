"""What a semaphore and a readers-writer lock are, in the simulated world, under asyncio and with threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.conformance.stages import until

pytestmark = pytest.mark.needs("semaphore", "rwlock")

TTL = 5


async def inside(api: Any, name: str) -> int:
    return int(await api.raw("ZCARD", f"{name}:hf1:holders:{{{name}}}")) // 3


async def waiting(api: Any, name: str) -> list[bytes]:
    """The tokens in the queue."""
    return [token for token in await api.raw("ZRANGE", f"{name}:hf1:queue:{{{name}}}", "0", "-1") if token]


async def assert_forgotten(api: Any, name: str = "a") -> None:
    """Nothing is left but the fence."""
    for key in ("holders", "queue", "waiters"):
        assert await api.raw("EXISTS", f"{name}:hf1:{key}:{{{name}}}") == 0, key
    assert await api.raw("EXISTS", name) == 0


class Scribe:
    """Tasks or threads that say when they are in, in order."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.log: list[str] = []
        self.handles: list[Any] = []
        self._go: set[str] = set()
        self._gone: set[str] = set()

    async def start(self, name: str, lock: Any) -> None:
        """It acquires, says so, and leaves when it is told to."""

        async def visit() -> None:
            async with lock:
                self.log.append(name)
                while name not in self._go:
                    await self.api.sleep(0.01)
            self._gone.add(name)

        self.handles.append(self.api.spawn(visit))
        await self._settle()

    async def leave(self, *names: str) -> None:
        self._go.update(names)
        await self._settle(set(names).intersection(self.log))

    async def _settle(self, leaving: set[str] | frozenset[str] = frozenset()) -> None:
        """Until they have left, everybody is in or in the queue, and nothing more comes of that."""
        for _ in range(1000):
            queue = await waiting(self.api, "a")
            if leaving <= self._gone and len(self.log) + len(queue) >= len(self.handles):
                break
            await self.api.sleep(0.01)
        await self.api.sleep(0.1)

    async def join(self) -> None:
        for handle in self.handles:
            await handle.join()


# The semaphore.


def test_no_more_hold_than_there_are_permits(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        first = await one.semaphore("a", 2).acquire()
        second = await two.semaphore("a", 2).acquire()
        assert {first.slot, second.slot} == {0, 1}
        assert second.fence > first.fence
        assert await one.semaphore("a", 2).acquire(blocking=False) is None
        with pytest.raises(holdfast.AcquireTimeout, match=r"all of its 2 permits are taken\. .*\. One holder is \w"):
            async with two.semaphore("a", 2, wait=1):
                raise AssertionError("entered")
        assert await two.semaphore("a", 2).locked() is True
        await first.release()
        assert await two.semaphore("a", 2).locked() is False
        async with two.semaphore("a", 2, wait=0) as third:
            assert third.slot == first.slot, "the lowest that is free"
            assert third.fence > second.fence
        await second.release()
        await assert_forgotten(api)

    play(scenario)


def test_one_object_holds_many_permits(play: Any) -> None:
    async def scenario(api: Any) -> None:
        semaphore = api.client().semaphore("a", 3)
        leases = [await semaphore.acquire() for _ in range(3)]
        assert [lease.slot for lease in leases] == [0, 1, 2]
        assert "3 held" in repr(semaphore)
        await leases[0].release()
        await semaphore.release()
        assert [lease.held for lease in leases] == [False, True, False], "its latest"
        await semaphore.release()
        for _ in range(2):
            with pytest.raises(holdfast.OverRelease) as caught:
                await semaphore.release()
            assert isinstance(caught.value, holdfast.NotHeld)
            assert isinstance(caught.value, ValueError)
        with pytest.raises(ValueError):
            await leases[1].release()
        await assert_forgotten(api)

    play(scenario)


def test_release_of_several_permits_is_all_or_none(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        semaphore = client.semaphore("a", 5)
        leases = [await semaphore.acquire() for _ in range(4)]
        with pytest.raises(
            holdfast.OverRelease, match="5 permits of 'a' cannot be released, because this object holds 4"
        ):
            await semaphore.release(5)
        assert [lease.held for lease in leases] == [True] * 4
        await semaphore.release(n=3)
        assert [lease.held for lease in leases] == [True, False, False, False]
        taken = [await client.semaphore("a", 5).acquire(blocking=False) for _ in range(5)]
        assert [lease is not None for lease in taken] == [True] * 4 + [False]
        for n in (0, -1, 1.5, True, "1"):
            with pytest.raises(ValueError, match="n="):
                await semaphore.release(n)
        await semaphore.release()
        with pytest.raises(holdfast.OverRelease, match="no permit"):
            await semaphore.release(2)
        for lease in taken[:4]:
            await lease.release()

    play(scenario)


def test_release_of_several_permits_goes_on_after_one_that_was_lost(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        semaphore = client.semaphore("a", 3)
        kept, lost = await semaphore.acquire(), await semaphore.acquire()
        await api.raw("ZREM", "a:hf1:holders:{a}", lost.token)
        with pytest.raises(holdfast.LeaseLost):
            await semaphore.release(2)
        assert [kept.held, lost.held] == [False, False]
        again = [await client.semaphore("a", 3).acquire(blocking=False) for _ in range(3)]
        assert all(again)
        for lease in again:
            await lease.release()

    play(scenario)


def test_release_gives_back_the_callers_own_or_else_the_oldest(play: Any) -> None:
    async def scenario(api: Any) -> None:
        semaphore = api.client().semaphore("a", 4)
        mine = await semaphore.acquire()
        theirs: list[Any] = []

        async def other() -> None:
            theirs.append(await semaphore.acquire())
            theirs.append(await semaphore.acquire())
            await semaphore.release()

        await api.spawn(other).join()
        assert mine.held
        assert [lease.held for lease in theirs] == [True, False]
        await semaphore.release()
        assert [mine.held, theirs[0].held] == [False, True]
        await api.spawn(semaphore.release).join()
        assert not theirs[0].held

    play(scenario)


def test_many_leases_given_back_by_themselves_are_not_kept(play: Any) -> None:
    async def scenario(api: Any) -> int:
        semaphore = api.client().semaphore("a", 4)
        held = await semaphore.acquire()
        for _ in range(50):
            lease = await semaphore.acquire()
            await lease.release()
        await held.release()
        return len(semaphore._leases)

    assert play(scenario) < 20


def test_another_number_of_permits_holds_for_those_who_ask_with_it(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        three = [await client.semaphore("a", 3).acquire() for _ in range(3)]
        assert await client.semaphore("a", 2).acquire(blocking=False) is None
        four = await client.semaphore("a", 4).acquire(blocking=False)
        assert four.slot == 3
        assert all(lease.held for lease in three), "a smaller number takes nothing back"
        await three[0].release()
        await three[1].release()
        assert await client.semaphore("a", 2).acquire(blocking=False) is None
        await four.release()
        less = await client.semaphore("a", 2).acquire(blocking=False)
        assert less.slot == 0
        for lease in (less, three[2]):
            await lease.release()
        await assert_forgotten(api)

    play(scenario)


@pytest.mark.parametrize("permits", [0, -1, 1.5, "2", None, True, 10**7])
def test_bad_permits_are_refused(play: Any, permits: Any) -> None:
    async def scenario(api: Any) -> None:
        with pytest.raises(holdfast.InvalidConfig, match="permits") as caught:
            api.client().semaphore("a", permits)
        assert isinstance(caught.value, ValueError)

    play(scenario)


def test_permits_are_given_in_the_order_of_arrival(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        scribe = Scribe(api)
        for name in ("A", "B", "C", "D", "E"):
            await scribe.start(name, api.client().semaphore("a", 2, ttl=TTL, wait=30))
        assert scribe.log == ["A", "B"]
        await scribe.leave("B")
        await scribe.leave("A", "C", "D", "E")
        await scribe.join()
        await assert_forgotten(api)
        return scribe.log

    log = play(scenario)
    assert log[:3] == ["A", "B", "C"]
    assert sorted(log) == ["A", "B", "C", "D", "E"]


def test_the_place_of_a_dead_holder_is_free_after_its_ttl(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        dead = await one.semaphore("a", 2, ttl=1.5, renew=False).acquire()
        alive = await one.semaphore("a", 2, ttl=TTL).acquire()
        async with two.semaphore("a", 2, wait=5) as lease:
            assert lease.slot == dead.slot
            assert not dead.held
            assert alive.held
        with pytest.raises(holdfast.LeaseLost):
            await dead.release()
        await alive.release()
        await assert_forgotten(api)

    play(scenario)


def test_a_place_that_was_taken_away_is_missed_by_the_next_renewal(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        told: list[Any] = []
        lost = await client.semaphore("a", 2, ttl=3, on_lost=told.append).acquire()
        kept = await client.semaphore("a", 2, ttl=TTL).acquire()
        await api.raw("ZREM", "a:hf1:holders:{a}", lost.token)
        assert await lost.lost.wait(5) is True
        with pytest.raises(holdfast.LeaseLost, match="expired or was deleted"):
            lost.check()
        assert kept.held
        await until(api, lambda: told)
        await api.sleep(0.05)
        assert [lease.fence for lease in told] == [lost.fence]
        with pytest.raises(holdfast.LeaseLost):
            await lost.release()
        await kept.release()

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_nothing_stays_for_ever(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client(fence_retention=1)
        lease = await client.semaphore("a", 2, ttl=0.3, renew=False).acquire()
        for key in ("holders", "queue", "waiters", "fence"):
            assert 0 < await api.raw("PTTL", f"a:hf1:{key}:{{a}}") <= 5001, key
        await api.sleep(6)
        assert await api.raw("DBSIZE") == 0
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    play(scenario)


# The readers-writer lock.


def test_many_read_or_one_writes(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two, three = (api.client().rwlock("a", ttl=TTL) for _ in range(3))
        reading = [await one.read.acquire(), await two.read.acquire()]
        assert reading[1].fence > reading[0].fence
        assert await three.write.acquire(blocking=False) is None
        assert [await three.read.locked(), await three.write.locked()] == [True, False]
        for lease in reading:
            await lease.release()
        writing = await three.write.acquire(blocking=False)
        assert writing.fence > reading[1].fence
        assert await one.read.acquire(blocking=False) is None
        assert await one.write.acquire(blocking=False) is None
        assert [await two.read.locked(), await two.write.locked()] == [False, True]
        with pytest.raises(holdfast.AcquireTimeout, match=r"a writer holds it, .*\. One holder is \w"):
            async with two.read:
                raise AssertionError("entered")
        await three.write.release()
        assert [await two.read.locked(), await two.write.locked()] == [False, False]
        await assert_forgotten(api)

    def with_patience(api: Any) -> Any:
        return scenario(_Impatient(api))

    play(with_patience)


class _Impatient:
    """Its locks do not wait."""

    def __init__(self, api: Any) -> None:
        self.client = lambda: _ImpatientClient(api.client())
        self.raw = api.raw


class _ImpatientClient:
    def __init__(self, client: Any) -> None:
        self.rwlock = lambda name, **options: client.rwlock(name, wait=1, **options)


def test_readers_that_stand_together_come_in_together_and_pass_no_writer(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        scribe = Scribe(api)

        async def start(name: str) -> None:
            rw = api.client().rwlock("a", ttl=TTL, wait=30)
            await scribe.start(name, rw.read if name[0] == "R" else rw.write)

        for name in ("R1", "W1", "R2", "R3", "W2", "R4"):
            await start(name)
        assert scribe.log == ["R1"], "who comes after a waiting writer waits behind it"
        await scribe.leave("R1")
        assert scribe.log[1:] == ["W1"]
        await scribe.leave("W1")
        assert sorted(scribe.log[2:]) == ["R2", "R3"], "a batch"
        await scribe.leave("R2")
        assert len(scribe.log) == 4
        await scribe.leave("R3")
        assert scribe.log[4:] == ["W2"]
        await scribe.leave("W2", "R4")
        await scribe.join()
        await assert_forgotten(api)
        return scribe.log

    assert play(scenario)[-1] == "R4"


def test_a_writer_that_gives_up_lets_those_behind_it_in(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        scribe = Scribe(api)
        reading = await api.client().rwlock("a", ttl=TTL).read.acquire()

        async def give_up() -> Any:
            return await api.client().rwlock("a", ttl=TTL).write.acquire(timeout=2.0)

        writer = api.spawn(give_up)
        await until(api, lambda: waiting(api, "a"))
        await scribe.start("R", api.client().rwlock("a", ttl=TTL, wait=30).read)
        assert scribe.log == []
        assert await writer.join() is None
        await until(api, lambda: scribe.log)
        assert scribe.log == ["R"]
        await scribe.leave("R")
        await scribe.join()
        await reading.release()
        await assert_forgotten(api)
        return scribe.log

    play(scenario)


def test_from_writing_to_reading_nobody_gets_in_between(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        scribe = Scribe(api)
        mine = api.client().rwlock("a", ttl=TTL)
        lease = await mine.write.acquire()
        await scribe.start("R1", api.client().rwlock("a", ttl=TTL, wait=30).read)
        await scribe.start("W", api.client().rwlock("a", ttl=TTL, wait=30).write)
        await scribe.start("R2", api.client().rwlock("a", ttl=TTL, wait=30).read)
        assert scribe.log == []
        fence = lease.fence
        await lease.downgrade()
        await lease.downgrade()
        await until(api, lambda: scribe.log)
        await api.sleep(0.2)
        assert scribe.log == ["R1"], "who is before the next writer"
        assert lease.held
        assert lease.fence == fence
        assert [await mine.read.locked(), await mine.write.locked()] == [True, False]
        await scribe.leave("R1")
        assert scribe.log == ["R1"], "it still reads"
        with pytest.raises(holdfast.WouldDeadlock):
            await mine.write.acquire()
        await lease.release()
        await until(api, lambda: len(scribe.log) > 1)
        await api.sleep(0.2)
        assert scribe.log == ["R1", "W"]
        await scribe.leave("W", "R2")
        await scribe.join()
        with pytest.raises(holdfast.NotHeld):
            await lease.downgrade()
        await assert_forgotten(api)
        return scribe.log

    assert play(scenario) == ["R1", "W", "R2"]


def test_a_downgraded_lease_is_kept_and_left_like_any_other(play: Any) -> None:
    async def scenario(api: Any) -> None:
        rw = api.client().rwlock("a", ttl=3)
        async with rw.write as lease:
            await lease.downgrade()
            await api.sleep(4.0)
            assert lease.held
            async with api.client().rwlock("a", wait=0).read:
                pass
        await assert_forgotten(api)

    play(scenario)


def test_a_lost_writer_cannot_be_downgraded(play: Any) -> None:
    async def scenario(api: Any) -> None:
        lease = await api.client().rwlock("a", ttl=TTL).write.acquire()
        await api.raw("DEL", "a:hf1:holders:{a}")
        with pytest.raises(holdfast.LeaseLost):
            await lease.downgrade()
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    play(scenario)


def test_who_reads_cannot_ask_to_write(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        rw = client.rwlock("a", ttl=TTL)
        async with rw.read:
            async with client.rwlock("a", ttl=TTL).read:
                pass
            for write in (rw.write, client.rwlock("a").write):
                for how in ({}, {"blocking": False}, {"timeout": 1}):
                    with pytest.raises(holdfast.WouldDeadlock, match="Release the read side") as caught:
                        await write.acquire(**how)
                    assert isinstance(caught.value, holdfast.NotAcquired)
            with pytest.raises(holdfast.WouldDeadlock):
                async with rw.write:
                    raise AssertionError("entered")
            async with client.rwlock("b").write:
                pass  # another name is another matter
        async with rw.write:
            pass
        lease = await rw.read.acquire()
        await rw.read.release()
        async with rw.write:
            assert not lease.held

    play(scenario)


def test_who_waits_in_vain_for_its_own_writing_is_told_so(play: Any) -> None:
    async def scenario(api: Any) -> None:
        rw = api.client().rwlock("a", ttl=TTL, wait=0.7)
        async with rw.write as lease:
            with pytest.raises(holdfast.AcquireTimeout, match=r"this thread or task writes it, .* downgrade\(\)"):
                async with rw.read:
                    raise AssertionError("entered")
            with pytest.raises(holdfast.AcquireTimeout, match="this thread or task writes it already"):
                async with rw.write:
                    raise AssertionError("entered")

            async def read() -> None:
                with pytest.raises(holdfast.AcquireTimeout, match="a writer holds it"):
                    async with rw.read:
                        raise AssertionError("entered")

            await api.spawn(read).join()
            await lease.downgrade()
            async with rw.read:
                pass

    play(scenario)


def test_another_thread_or_task_may_wait_to_write(play: Any) -> None:
    async def scenario(api: Any) -> list[str]:
        scribe = Scribe(api)
        rw = api.client().rwlock("a", ttl=TTL, wait=30)
        async with rw.read:
            await scribe.start("W", rw.write)
            assert scribe.log == []
        await scribe.leave("W")
        await scribe.join()
        return scribe.log

    assert play(scenario) == ["W"]


# Both.


def test_a_lease_shows_what_it_is_of(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.semaphore("a", 3), client.semaphore("a", 3) as permit:
            assert ".Permit on 'a' (permit 1 of 3), fence" in repr(permit)
            assert permit.token not in repr(permit)
        assert repr(permit).startswith("<ended ")
        async with client.rwlock("b").read as lease:
            assert ".Lease on 'b' (read), fence" in repr(lease)
        async with client.rwlock("b").write as lease:
            assert ".WriteLease on 'b' (write), fence" in repr(lease)
            await lease.downgrade()
            assert ".WriteLease on 'b' (read), fence" in repr(lease)
        async with client.lock("c") as lease:
            assert repr(lease).endswith(f".Lease on 'c', fence {lease.fence}>")

    play(scenario)


def test_a_name_is_one_kind_at_a_time(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        makers: dict[str, Callable[[Any], Any]] = {
            "lock": lambda client: client.lock("a", ttl=TTL),
            "rwlock": lambda client: client.rwlock("a", ttl=TTL).read,
            "semaphore": lambda client: client.semaphore("a", 2, ttl=TTL),
        }
        for kind, make in makers.items():
            async with make(one):
                for other, make_other in makers.items():
                    if other != kind:
                        for how in ({"blocking": False}, {"timeout": 5}):
                            with pytest.raises(holdfast.Unsupported, match=f"'a': it is in use as a {kind}"):
                                await make_other(two).acquire(**how)
        for make in makers.values():
            async with make(two):
                pass
        await assert_forgotten(api)

    play(scenario)


def test_a_name_with_waiters_is_one_kind_too(play: Any) -> None:
    async def scenario(api: Any) -> None:
        one, two = api.client(), api.client()
        scribe = Scribe(api)
        async with one.rwlock("a", ttl=TTL).write:
            await scribe.start("R", api.client().rwlock("a", ttl=TTL, wait=30).read)
            with pytest.raises(holdfast.Unsupported, match="rwlock"):
                await two.lock("a").acquire(timeout=1)
        await scribe.leave("R")
        await scribe.join()
        async with two.lock("a", ttl=TTL):
            await scribe.start("L", api.client().lock("a", ttl=TTL, wait=30))
            with pytest.raises(holdfast.Unsupported, match="in use as a lock"):
                await two.semaphore("a", 2).acquire(timeout=1)
        await scribe.leave("L")
        await scribe.join()
        async with two.semaphore("a", 2, wait=1):
            pass

    play(scenario)


@pytest.mark.needs("the keys of Redis")
def test_cohort_is_accepted_and_does_not_apply(play: Any) -> None:
    async def scenario(api: Any) -> None:
        client = api.client()
        async with client.semaphore("a", 1, cohort=8) as lease:
            first = lease.fence
        async with client.rwlock("b", cohort=0).write:
            pass
        with pytest.raises(holdfast.InvalidConfig):
            client.semaphore("a", 1, cohort=-1)
        fences = (await api.raw("GET", "a:hf1:fence:{a}")).split()
        assert fences[:2] == [b"%d" % first, b"1"], "no fences are set aside"

    play(scenario)


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
                assert await read.acquire(timeout=1) is None
            await lease.downgrade()
            async with rw.read:
                pass
            with pytest.raises(holdfast.WouldDeadlock, match="Release the read side"):
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


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one name", "several"])
@pytest.mark.needs("the keys of Redis")
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
