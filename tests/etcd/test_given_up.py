"""Programs that go on after their attempt was given up, interleaved request by request on the model of etcd.

Under asyncio a step goes on when its caller is cancelled, and the abandon of the attempt runs beside it. Whatever the
order of their requests: afterwards nothing of the attempt is left on etcd, except a tombstone.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.lab.servers.etcd import LEASE_UNKNOWN, Etcd
from holdfast.protocol.effects import Step
from holdfast.protocol.intents import queue
from holdfast.protocol.intents.programs import program_of
from holdfast.protocol.intents.requests import Answer, LeaseGone, Unwatch, Watch
from holdfast.protocol.intents.session import Session

TTL_MS: Final = "30000"


class Running:
    """A step under way: ``send`` lets etcd execute its next request, and ``receive`` gives it the answer."""

    def __init__(self, etcd: Etcd, session: Session, step: Step) -> None:
        self._etcd = etcd
        self._program = program_of(session, step, 0.0)
        self._answer: Any = None
        self.is_over = False
        self.reply: Any = None
        self._advance(None)

    def _advance(self, value: Any) -> None:
        try:
            self._request = self._program.throw(value) if isinstance(value, LeaseGone) else self._program.send(value)
        except StopIteration as done:
            self.is_over, self.reply = True, done.value

    def send(self) -> None:
        self._answer = self._etcd.execute("etcd", self._request, "channel")

    def receive(self) -> None:
        if type(self._request) is Watch or type(self._request) is Unwatch:
            self._advance(None)
        else:
            self._advance(LeaseGone() if self._answer == LEASE_UNKNOWN else Answer(0.0, self._answer.result))

    def finish(self) -> Any:
        while not self.is_over:
            self.send()
            self.receive()
        return self.reply


def lock_step(token: str, name: str = "k") -> Step:
    keys = tuple(f"{name}:hf1:{part}" for part in ("x", "fence", "queue", "waiters", "gone"))
    return Step("acquire", (name, *keys[1:]), (token, TTL_MS, "0", "1", "0 channel", ""))


def permit_step(token: str, permits: int = 1) -> Step:
    return Step("pool_acquire", ("k:hf1:holders",), (token, TTL_MS, "0", "semaphore", "0 channel", f"n{permits}"))


def adopt_step(token: str, giver: str) -> Step:
    return Step("adopt", ("k",), (token, TTL_MS, "0", giver))


def abandon_step(token: str, script: str = "abandon") -> Step:
    return Step(script, ("k",), (token, "60000"))


def left_of(etcd: Etcd, token: str) -> list[str]:
    return [key for key, item in etcd.items.items() if token in key + item.value and ":gone:" not in key]


def give_up(etcd: Etcd, session: Session, step: Step, requests: int, *, answered: bool, late: bool) -> Any:
    """Abandon the attempt after that many requests of its step, and let the step go on. Returns its reply.

    ``late``: etcd executes the requests of the abandon after those that the step sends after it.
    """
    running = Running(etcd, session, step)
    for number in range(requests):
        if running.is_over:
            break
        running.send()
        if answered or number < requests - 1:
            running.receive()
    script = "pool_abandon" if step.script == "pool_acquire" else "abandon"
    abandon = Running(etcd, session, abandon_step(step.args[0], script))
    while not abandon.is_over and type(abandon._request) is Unwatch:
        abandon.receive()  # the client itself does that
    if not late:
        abandon.finish()
    if not answered and requests and not running.is_over:
        running.receive()
    reply = running.finish()
    abandon.finish()
    return reply


@pytest.mark.parametrize("late", [False, True], ids=["abandon first", "abandon late"])
@pytest.mark.parametrize("answered", [True, False], ids=["answered", "answer under way"])
@pytest.mark.parametrize("requests", range(6))
@pytest.mark.parametrize("kind", ["lock", "permit", "adopt"])
def test_an_attempt_that_was_given_up_leaves_nothing(kind: str, requests: int, answered: bool, late: bool) -> None:
    etcd, session = Etcd(), Session()
    step = {"lock": lock_step("mine"), "permit": permit_step("mine"), "adopt": adopt_step("mine", "giver")}[kind]
    if kind == "adopt":
        Running(etcd, Session(), lock_step("giver")).finish()
    give_up(etcd, session, step, requests, answered=answered, late=late)
    assert left_of(etcd, "mine") == []
    assert session.intents == {}


@pytest.mark.parametrize("requests", range(5))
@pytest.mark.parametrize("kind", ["lock", "permit"])
def test_an_abandon_without_an_answer_can_be_repeated(kind: str, requests: int) -> None:
    """The first abandon is lost, and the step goes on before the second one: it must not forget what it has created."""
    etcd, session = Etcd(), Session()
    step, script = (permit_step("mine"), "pool_abandon") if kind == "permit" else (lock_step("mine"), "abandon")
    running = Running(etcd, session, step)
    for _ in range(requests):
        if not running.is_over:
            running.send()
            running.receive()
    lost = Running(etcd, session, abandon_step("mine", script))
    while not lost.is_over and type(lost._request) is Unwatch:
        lost.receive()
    running.finish()
    Running(etcd, session, abandon_step("mine", script)).finish()
    assert left_of(etcd, "mine") == []
    assert session.intents == {}


def test_a_permit_whose_create_got_no_answer_is_granted_by_the_next_try() -> None:
    etcd, session = Etcd(), Session()
    lost = Running(etcd, session, permit_step("mine"))
    lost.send()
    while not left_of(etcd, "mine"):
        lost.receive()
        lost.send()
    granted, _, slot = Running(etcd, session, permit_step("mine")).finish()
    assert (granted, slot) == (1, 0)
    assert Running(etcd, Session(), permit_step("theirs")).finish()[0] == 0, "it is taken, and only once"


def test_a_hand_over_is_forgotten_once_its_keys_have_ended() -> None:
    etcd, session = Etcd(), Session()
    for number in range(5):
        Running(etcd, session, lock_step(f"t{number}", f"name{number}")).finish()
        step = Step("hand_over", (f"name{number}",), (f"t{number}", TTL_MS, "0"))
        program = program_of(session, step, 100.0 * number)
        running = Running.__new__(Running)
        running._etcd, running._program, running.is_over = etcd, program, False
        running._advance(None)
        running.finish()
    assert len(session.intents) == 1, "only the last one may still be abandoned"


def test_a_waiter_with_fewer_permits_than_holders_behind_it_waits() -> None:
    """A fleet that is changed from two permits to four: a client with four takes slot 0 while one with one waits."""
    etcd = Etcd()
    sessions = {name: Session() for name in ("a", "b", "one", "four")}
    held_a = Running(etcd, sessions["a"], permit_step("a", 2)).finish()
    Running(etcd, sessions["b"], permit_step("b", 2)).finish()
    assert Running(etcd, sessions["one"], permit_step("one", 1)).finish()[0] == 0
    assert held_a[0] == 1
    Running(etcd, sessions["a"], Step("pool_release", ("k:hf1:holders",), ("a",))).finish()
    assert Running(etcd, sessions["four"], permit_step("four", 4)).finish()[0] == 1
    Running(etcd, sessions["b"], Step("pool_release", ("k:hf1:holders",), ("b",))).finish()
    assert Running(etcd, sessions["one"], permit_step("one", 1)).finish()[0] == 0, "slot 0 is taken"
    Running(etcd, sessions["four"], Step("pool_release", ("k:hf1:holders",), ("four",))).finish()
    assert Running(etcd, sessions["one"], permit_step("one", 1)).finish()[0] == 1


@pytest.mark.parametrize("others", [1, 2])
def test_a_join_of_a_long_queue_is_never_granted_by_a_read(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two requests of a join, all that were before it have held the lock and released it."""
    monkeypatch.setattr(queue, "_SHORT_QUEUE", 1)
    etcd = Etcd()
    before = {f"before{number}": Session() for number in range(others + 1)}
    for token, session in before.items():
        Running(etcd, session, lock_step(token)).finish()
    mine = Session()
    running = Running(etcd, mine, lock_step("mine"))
    for _ in range(2):  # the lease, and the create
        running.send()
        running.receive()
    fences: list[int] = []
    for token, session in before.items():
        if fences:
            fences.append(int(Running(etcd, session, lock_step(token)).finish()))
        else:
            fences.append(0)
        Running(etcd, session, Step("release", ("k",), (token,))).finish()
    granted = int(running.finish())
    assert granted > max(fences)


def test_a_join_of_a_long_queue_whose_intent_has_gone_is_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_SHORT_QUEUE", 1)
    etcd, first, mine = Etcd(), Session(), Session()
    Running(etcd, first, lock_step("first")).finish()
    running = Running(etcd, mine, lock_step("mine"))
    for _ in range(2):
        running.send()
        running.receive()
    (own,) = left_of(etcd, "mine")
    del etcd.items[own]  # a nested lock has sent it to the end of the queue, or an operator has broken it
    Running(etcd, first, Step("release", ("k",), ("first",))).finish()
    other = int(Running(etcd, Session(), lock_step("other")).finish())
    reply = running.finish()
    assert isinstance(reply, list), f"refused: the other has it, with fence {other}"
    assert reply[0] == 0
