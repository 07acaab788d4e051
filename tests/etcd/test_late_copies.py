"""Each request that changes something, late: it is sent again, and its first copy arrives at any later time.

A history is a list of steps of several clients, on the model of etcd. Each of its requests is late once, and its first
copy is executed after each later step. Whatever the moment: the holders after it keep what they have, and at the end
nothing is left but tombstones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pytest

from holdfast.lab.servers.etcd import LEASE_UNKNOWN, Etcd
from holdfast.protocol.effects import Step
from holdfast.protocol.intents.programs import program_of
from holdfast.protocol.intents.requests import Answer, GrantLease, LeaseGone, Txn, Unwatch, Watch
from holdfast.protocol.intents.session import Session

TTL: Final = "3000"
LONGER: Final = "30000"


class Does(NamedTuple):
    """A step of a client, whose name is its token, too."""

    client: str
    script: str
    keys: tuple[str, ...] = ("k",)
    args: tuple[str, ...] = ()
    called: bool = False  # the client was told that what it waits for has changed


def lock(client: str, *, called: bool = False) -> Does:
    return Does(client, "acquire", ("k",), (TTL, "0", "1", "0 channel", ""), called)


def several(client: str, *, called: bool = False) -> Does:
    return Does(client, "multi_acquire", ("k", "l"), (TTL, "0", "1", "0 channel", "", ""), called)


def pool(client: str, kind: str, mode: str, *, called: bool = False) -> Does:
    return Does(client, "pool_acquire", ("k:hf1:holders",), (TTL, "0", kind, "0 channel", mode), called)


def give(client: str, script: str = "hand_over", keys: tuple[str, ...] = ("k",)) -> Does:
    return Does(client, script, keys, (TTL, "60000"))


def take(client: str, giver: str, script: str = "adopt", keys: tuple[str, ...] = ("k",)) -> Does:
    return Does(client, script, keys, (TTL, "0", giver))


def extend(client: str, script: str = "renew") -> Does:
    return Does(client, script, ("k",), (LONGER,))


def release(client: str) -> Does:
    return Does(client, "release")


HISTORIES: Final = {
    "extended and handed over": [
        *(lock("A"), extend("A"), give("A"), take("B", "A"), extend("B"), release("B"), lock("C"), release("C")),
    ],
    "granted after a wait": [
        *(lock("A"), lock("B"), release("A"), lock("B", called=True), give("B"), take("C", "B"), lock("D")),
        *(release("C"), lock("D", called=True), release("D")),
    ],
    "several names": [
        *(several("A"), several("B"), extend("A"), release("A"), several("B", called=True)),
        *(give("B", keys=("k", "l")), take("C", "B", keys=("k", "l")), release("C")),
    ],
    "a permit": [
        *(pool("A", "semaphore", "n1"), pool("B", "semaphore", "n1"), release("A")),
        *(pool("B", "semaphore", "n1", called=True), extend("B"), give("B"), take("C", "B", "pool_adopt")),
        *(release("C"), pool("D", "semaphore", "n1"), release("D")),
    ],
    "a writer that becomes a reader": [
        *(pool("A", "rwlock", "all"), Does("A", "pool_share"), pool("B", "rwlock", "any"), give("A")),
        *(take("C", "A", "pool_adopt"), release("B"), release("C")),
    ],
}  # fmt: skip


class World:
    def __init__(self) -> None:
        self.etcd = Etcd()
        self.sessions: dict[str, Session] = {}
        self.unknown: set[str] = set()  # clients with a request of unknown outcome: they abandon instead of releasing
        self.late: Any = None

    def do(self, does: Does, late: int = -1) -> Any:
        """Whether a step succeeds. ``late``: which of its changing requests is late; then it has no reply."""
        session = self.sessions.setdefault(does.client, Session())
        if does.called:
            session.call(does.client)
        script, args = does.script, (does.client, *does.args)
        if script == "release" and does.client in self.unknown:
            script, args = "abandon", (does.client, "60000")
        program = program_of(session, Step(script, does.keys, args), 0.0)
        value: Any = None
        try:
            while True:
                request = program.throw(value) if isinstance(value, LeaseGone) else program.send(value)
                changes = isinstance(request, GrantLease) or (isinstance(request, Txn) and request.changes)
                if changes and late == 0:
                    self.late = request
                    self.unknown.add(does.client)
                    program.close()
                    return None
                late -= changes
                reply = self.etcd.execute("etcd", request, "channel")
                if type(request) is Watch or type(request) is Unwatch:
                    value = None
                else:
                    value = LeaseGone() if reply == LEASE_UNKNOWN else Answer(0.0, reply.result)
        except StopIteration as done:
            return _is_success(done.value)

    def arrive(self) -> None:
        self.etcd.execute("etcd", self.late, "channel")

    def left(self) -> list[str]:
        return [key for key in self.etcd.items if ":gone:" not in key]


def _is_success(reply: Any) -> bool:
    return int(reply[0] if isinstance(reply, list) else reply) > 0


def test_each_history_ends_with_nothing() -> None:
    for steps in HISTORIES.values():
        world = World()
        for does in steps:
            world.do(does)
        assert world.left() == []


@pytest.mark.parametrize("history", HISTORIES)
def test_a_late_copy_does_no_harm(history: str) -> None:
    steps = HISTORIES[history]
    plain = World()
    replies = [plain.do(does) for does in steps]
    tried = 0
    for place, does in enumerate(steps):
        for number in range(4):
            for arrives in range(place, len(steps)):
                world = World()
                for before in steps[:place]:
                    world.do(before)
                world.do(does, late=number)
                if world.late is None:
                    break
                tried += 1
                world.do(does)
                for later in range(place + 1, arrives + 1):
                    world.do(steps[later])
                held = {key: item for key, item in world.etcd.items.items() if ":gone:" not in key}
                world.arrive()
                after = {key: item for key, item in world.etcd.items.items() if ":gone:" not in key}
                where = f"{does.client} {does.script} (request {number}) arrives after {steps[arrives][:2]}"
                assert after == held, where
                assert [world.do(rest) for rest in steps[arrives + 1 :]] == replies[arrives + 1 :], where
                assert world.left() == [], where
    assert tried > len(steps)
