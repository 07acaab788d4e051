"""In the lab's world: who holds a place in a room learns soon that it was taken away; what that costs has a bound."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.lab.simulation.world import Message
from holdfast.protocol.effects import Command, Step
from holdfast.protocol.kinds.membership import AT_ONCE
from tests.pools.harness import MODES, RoomPlay

TTL = 30.0  # so the next renewal comes after 10 s
ROOM = "a:hf1:holders:{a}"
THEFTS = {
    "deleted": ("DEL", ROOM),
    "overwritten": ("SET", ROOM, "another's"),
    "flushed": ("FLUSHALL",),
}


def foreign(play: RoomPlay, *words: Any) -> None:
    if words == ("FLUSHALL",):  # the server tells every client that tracks, and names no key
        play.world.store.values.clear()
        play.world.store.deadlines.clear()
        for machine in play.machines:
            play.world.soon(lambda machine=machine: machine.do(machine.router.look_again))  # type: ignore[misc]
        return
    play.world.execute(Command(tuple(map(str, words))))


def looks(play: RoomPlay, name: str = "") -> list[Message]:
    """The requests by which a client has looked after its holds."""
    return [
        message
        for message in play.world.sent
        if any(isinstance(op, Step) and op.script == "pool_find" for op in message.ops)
        and message.machine.name.startswith(name)
    ]


class Holder:
    """Holds for as long as it is let, and notes when it was told that it does not."""

    def __init__(self, play: RoomPlay, client: holdfast.aio.Client, mode: str, **options: Any) -> None:
        self.play = play
        self.lost_at = 0.0
        self.token = ""
        options = {"ttl": TTL, "on_lost": "ignore", **options}
        self.process = play.start(client, self._hold(play.lock(client, mode, **options)))

    async def _hold(self, lock: Any) -> None:
        lease = await lock.acquire()
        self.token = lease.token
        if await lease.lost.wait(60.0):
            self.lost_at = self.play.world.now_us / 1e6
            with pytest.raises(holdfast.LeaseLost):
                await lease.release()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("theft", THEFTS)
@pytest.mark.parametrize("held_for", [0.15, 0.5, 2.9, 11.0, 25.0])
def test_a_holder_whose_room_is_taken_away_is_told_at_once(mode: str, theft: str, held_for: float) -> None:
    play = RoomPlay(seed=1)
    holder = Holder(play, play.client("robbed"), mode)
    play.run(held_for)
    assert not holder.lost_at
    foreign(play, *THEFTS[theft])
    play.run(0.05)
    assert holder.lost_at


@pytest.mark.parametrize("mode", MODES)
def test_a_theft_right_after_the_grant_is_noticed_too(mode: str) -> None:
    play = RoomPlay(seed=1)
    holder = Holder(play, play.client("robbed"), mode)
    play.run(0.02)
    foreign(play, "DEL", ROOM)
    play.run(0.2)
    assert holder.lost_at


def test_whose_place_alone_was_taken_is_told_and_its_neighbours_are_not() -> None:
    play = RoomPlay(seed=1)
    client, other = play.client("one"), play.client("two")
    ours = [Holder(play, client, "read") for _ in range(3)]
    theirs = Holder(play, other, "read")
    play.run(2.0)
    foreign(play, "ZREM", ROOM, ours[1].token)
    play.run(0.05)
    assert [bool(holder.lost_at) for holder in ours] == [False, True, False]
    foreign(play, "ZREM", ROOM, theirs.token)
    play.run(0.05)
    assert theirs.lost_at
    assert [bool(holder.lost_at) for holder in ours] == [False, True, False]


def test_one_look_serves_all_the_holds_of_a_client() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")
    holders = [Holder(play, client, "read") for _ in range(50)]
    play.run(2.0)
    before = len(play.world.sent)
    foreign(play, "DEL", ROOM)
    play.run(0.05)
    assert all(holder.lost_at for holder in holders)
    asked = [message for message in play.world.sent[before:] if message in looks(play)]
    assert len(asked) == 1
    assert len(asked[0].ops) == 1


def test_short_holds_pay_nothing() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")

    async def visits() -> None:
        for _ in range(50):
            await play.visit(client, "permit", hold=0.09, ttl=TTL)

    play.run(0.01)
    process = play.start(client, visits())
    play.run(10)
    process.outcome()
    assert len(play.world.sent) == 100, "one to acquire, one to release"


def test_a_quiet_room_costs_one_look_for_each_renewal() -> None:
    play = RoomPlay(seed=1)
    Holder(play, play.client("one"), "write")
    play.run(29.0)
    assert len(looks(play)) <= 3 + 1
    assert len(play.world.sent) <= 2 * 3 + 2


def busy(play: RoomPlay, client: holdfast.aio.Client, mode: str) -> Any:
    async def visits() -> None:
        for _ in range(1000):
            await play.visit(client, mode, hold=0.03, ttl=TTL)

    return play.start(client, visits())


@pytest.mark.parametrize("own", [False, True], ids=["of others", "of the same client"])
@pytest.mark.parametrize("mode", ["read", "permit"])
def test_in_a_busy_room_looks_are_rationed_and_the_loss_is_told(mode: str, own: bool) -> None:
    """Visits of the same client end the watch without a word of the server's."""
    play = RoomPlay(seed=1)
    client = play.client("holder")
    holder = Holder(play, client, mode)
    visiting = busy(play, client if own else play.client("visitor"), mode)
    play.run(8.0)
    assert not visiting.done
    assert len(looks(play)) <= 8 + AT_ONCE
    assert len(looks(play)) >= 6, "there was reason for them"
    assert not holder.lost_at
    stolen_at = play.world.now_us / 1e6
    foreign(play, "ZREM", ROOM, holder.token)
    play.run(1.2)
    assert holder.lost_at - stolen_at <= 1.15
    assert not visiting.done


@pytest.mark.parametrize(("stays", "stolen_after"), [(0.01, 3.0), (9.0, 3.0), (2.0, 5.0)], ids=["short", "in", "out"])
def test_visits_of_the_same_client_leave_the_room_watched(stays: float, stolen_after: float) -> None:
    """Its own comings and goings are not pushed to it. After a short visit, one that is not over, and a longer one."""
    play = RoomPlay(seed=1)
    client = play.client("one")
    holder = Holder(play, client, "read")
    play.run(1.0)
    play.start(client, play.visit(client, "read", hold=stays, ttl=TTL, on_lost="ignore"))
    play.run(stolen_after)
    foreign(play, "DEL", ROOM)
    play.run(0.01)
    assert holder.lost_at


def test_an_extension_leaves_the_room_watched() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")
    lost: list[bool] = []

    async def hold() -> None:
        lease = await client.semaphore("a", 2, ttl=TTL, on_lost="ignore").acquire()
        assert lease is not None
        await play.sleep(client, 1.0)
        await lease.extend(60)
        lost.append(await lease.lost.wait(2.1))
        lost.append(await lease.lost.wait(0.01))
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    process = play.start(client, hold())
    play.run(3.101)
    foreign(play, "DEL", ROOM)
    play.run(1.0)
    process.outcome()
    assert lost == [False, True]


def test_a_place_that_came_by_a_bell_is_watched_as_well() -> None:
    play = RoomPlay(seed=1)
    one, two = play.client("one"), play.client("two")
    first = play.start(one, play.visit(one, "write", hold=0.3, ttl=TTL))
    play.run(0.1)
    second = Holder(play, two, "write")
    play.run(2.0)
    first.outcome()
    assert second.token
    foreign(play, "DEL", ROOM)
    play.run(0.01)
    assert second.lost_at


def test_a_downgraded_writer_is_told() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")
    lost: list[bool] = []

    async def hold() -> None:
        lease = await client.rwlock("a", ttl=TTL, on_lost="ignore").write.acquire()
        assert lease is not None
        await lease.downgrade()
        lost.append(await lease.lost.wait(2.0))
        lost.append(await lease.lost.wait(0.05))
        with pytest.raises(holdfast.LeaseLost):
            await lease.release()

    process = play.start(client, hold())
    play.run(1.99)
    assert lost == []
    play.run(0.03)
    foreign(play, "DEL", ROOM)
    play.run(1.0)
    process.outcome()
    assert lost == [False, True]


def test_nothing_is_told_to_whom_nothing_was_taken() -> None:
    """Others come and go, leases end beside it, somebody touches the key and changes nothing."""
    play = RoomPlay(seed=1)
    holder = Holder(play, play.client("one"), "read")
    neighbour = play.client("two")
    Holder(play, neighbour, "read", ttl=1.0)
    busy(play, play.client("three"), "read")
    play.run(1.0)
    neighbour._driver.crash()  # type: ignore[attr-defined]
    for _ in range(30):
        play.run(0.5)
        foreign(play, "PEXPIRE", ROOM, 60_000)
    assert not holder.lost_at
    assert not holder.process.done


def test_a_failed_look_is_had_again() -> None:
    play = RoomPlay(seed=1)
    holder = Holder(play, play.client("one"), "permit")
    play.run(1.0)
    play.world.hang()
    foreign(play, "DEL", ROOM)
    play.run(1.5)
    assert not holder.lost_at
    play.world.resume()
    play.run(3.0)
    assert holder.lost_at


def test_when_listeners_were_cut_off_everybody_looks() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")
    holder = Holder(play, client, "permit")
    play.run(0.5)
    play.world.subscribe(client._driver)  # type: ignore[arg-type]
    play.run(0.5)
    play.world.cut_listeners()
    foreign(play, "DEL", ROOM)
    play.run(0.3)
    assert holder.lost_at


def test_without_tracking_the_next_renewal_finds_out() -> None:
    play = RoomPlay(seed=1)
    play.world.tracking = False
    holder = Holder(play, play.client("one"), "permit")
    play.run(1.0)
    foreign(play, "DEL", ROOM)
    play.run(8.0)
    assert not holder.lost_at
    play.run(1.5)
    assert holder.lost_at


def test_rooms_in_which_nobody_is_left_are_forgotten() -> None:
    play = RoomPlay(seed=1)
    client = play.client("one")

    async def visits() -> None:
        for number in range(20):
            async with client.semaphore(f"s{number}", 1, ttl=TTL):
                await play.sleep(client, 0.2)

    play.start(client, visits())
    play.run(5.0)
    assert len(play.machines[0].registry.monitors.monitored) <= 6
    play.run(70.0)
    assert not play.machines[0].registry.is_watching()


class Rooms(RoomPlay):
    """Many of them, so whoever is inside is not all in the same."""

    def look(self) -> None:
        pass


def test_looks_at_many_rooms_go_together() -> None:
    play = Rooms(seed=1)
    client, others = play.client("guard"), play.client("others")
    names = [f"room-{number}" for number in range(40)]

    async def stay(name: str) -> None:
        async with client.semaphore(name, 2, ttl=TTL):
            await play.sleep(client, 60.0)

    async def come_and_go() -> None:
        while True:
            for name in names:
                async with others.semaphore(name, 2, ttl=TTL):
                    await play.sleep(others, 0.001)

    for name in names:
        play.start(client, stay(name))
    play.start(others, come_and_go())
    play.run(4.0)
    assert sum(len(message.ops) for message in looks(play, "guard")) > 4 * len(names), "each is looked at"
    assert len(looks(play, "guard")) < len(names) / 2


def test_a_look_in_silence_does_not_hold_up_the_word_of_another_lease() -> None:
    play = RoomPlay(seed=1)
    client = play.client("robbed")
    told: list[float] = []
    Holder(play, client, "read")
    Holder(play, client, "read", ttl=2.0, renew=False, on_lost=lambda _: told.append(play.world.now_us / 1e6))
    play.run(1.5)
    foreign(play, "ZADD", ROOM, 1, "somebody")
    play.world.hang()
    play.run(1.0)
    assert told
    assert told[0] < 2.15
