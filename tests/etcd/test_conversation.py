"""A conversation with etcd, driven by hand and by a clock: the time of an answer, and what a refusal means."""

from __future__ import annotations

import gc
from typing import Any

import httpx
import pytest

from holdfast.engines.etcd.conversation import Members, converse
from holdfast.engines.etcd.target import resolve_etcd
from holdfast.protocol.effects import Step, StepFailed
from holdfast.protocol.intents.programs import program_of
from holdfast.protocol.intents.requests import (
    Created,
    Found,
    Get,
    Item,
    LeaseLife,
    NoSpace,
    Program,
    Put,
    Txn,
    TxnResult,
    grant_lease,
    perform,
)
from holdfast.protocol.intents.session import EtcdLease, Session
from holdfast.url import locate

FULL = "etcdserver: mvcc: database space exceeded"


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Talk:
    """A program under way. ``answer`` gives it the reply of etcd, after that many seconds."""

    def __init__(self, program: Program, timeout: float = 9.0) -> None:
        self.clock = Clock()
        members = Members(resolve_etcd(locate("etcd://h1,h2,h3")))
        self._conversation = converse(program, members, timeout, self.clock)
        self.result: Any = None
        self.asked: Any = next(self._conversation)

    def answer(self, content: Any, status: int = 200, *, after: float = 0.0) -> None:
        self.clock.seconds += after
        try:
            self.asked = self._conversation.send((status, content))
        except StopIteration as done:
            self.asked, self.result = None, done.value

    def refuse(self, error: Exception) -> None:
        """The member cannot be reached."""
        self.asked = self._conversation.throw(error)


def test_the_time_of_an_answer_is_that_before_its_request() -> None:
    def program() -> Program:
        first = yield from grant_lease(5)
        second = yield from grant_lease(6)
        return first.asked_at, second.asked_at

    talk = Talk(program())
    talk.answer(LeaseLife(7, 5), after=2.0)
    talk.answer(LeaseLife(8, 6), after=1.5)
    assert talk.result == (100.0, 102.0)


def test_a_lease_lasts_from_before_its_request_however_late_the_reply_is() -> None:
    """Two seconds for a reply: that much less is left of the lease, so it no longer covers the ttl."""
    session = Session()
    step = Step("acquire", ("k",), ("token", "5000", "0", "1", "0 channel", ""))
    talk = Talk(program_of(session, step, 100.0))
    talk.answer(LeaseLife(7, 7), after=2.0)
    (lease,) = session.leases.values()
    assert lease.renewed_at == 100.0
    assert lease.covers(4.8, 102.0)
    assert not lease.covers(5.0, 102.0)


def write_and_read() -> Program:
    try:
        yield from perform(Txn((Created("k"),), (Put("k", "v", 1),)))
    except NoSpace:
        done = yield from perform(Txn((), (Get("k"),)))
        return done.results[0].total
    return None


def test_a_program_is_told_that_etcd_is_full_and_goes_on() -> None:
    talk = Talk(write_and_read())
    talk.answer(FULL, 429)
    talk.answer(TxnResult(True, 5, (Found((), 1),)))
    assert talk.result == 1, "etcd has executed it, and then said that it is full"


def test_a_step_that_etcd_was_too_full_for_may_have_taken_effect() -> None:
    def program() -> Program:
        return (yield from perform(Txn((Created("k"),), (Put("k", "v", 1),))))

    talk = Talk(program())
    with pytest.raises(StepFailed, match="its database is full") as caught:
        talk.answer(FULL, 429)
    assert caught.value.sent
    assert caught.value.retry


def holder(value: str = '{"token":"mine"}', lease: int = 7) -> tuple[Session, Found]:
    session = Session()
    intent = session.intent("mine", ("k:hf1:intent:lock:mine",))
    intent.created = intent.modified = 3
    intent.lease = EtcdLease(7, 7, 7, 95.0)
    intent.bound = (intent.lease,)
    return session, Found((Item("k:hf1:intent:lock:mine", value, 3, 3, lease),), 1)


@pytest.mark.parametrize(
    ("found", "reply"),
    [
        pytest.param(lambda there: there, 1, id="ours"),
        pytest.param(lambda there: Found((), 0), 0, id="gone, although its lease was renewed"),
        pytest.param(lambda there: holder('{"token":"other"}')[1], -1, id="another's"),
        pytest.param(lambda there: holder(lease=8)[1], 0, id="bound to a lease that is not renewed"),
    ],
)
def test_a_renewal_counts_only_if_the_key_is_there_with_our_token_and_lease(found: Any, reply: int) -> None:
    """etcd 3.7 may renew a lease whose revocation is decided and not yet done: the read that follows decides."""
    session, there = holder()
    talk = Talk(program_of(session, Step("renew", ("k",), ("mine", "5000")), 100.0))
    assert talk.asked.url.endswith("/v3/lease/keepalive")
    talk.answer(LeaseLife(7, 7))
    talk.answer(TxnResult(True, 9, (found(there),)))
    assert talk.result == reply


def test_a_step_that_reaches_no_member_leaves_no_garbage() -> None:
    """In an outage there are many of them."""
    session = Session()

    def fail() -> None:
        talk = Talk(program_of(session, Step("acquire", ("k",), ("t", "30000", "0", "1", "0 channel", "")), 0.0))
        with pytest.raises(StepFailed):
            while True:
                talk.refuse(httpx.ConnectError("nothing listens there"))

    fail()
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            fail()
        assert gc.collect() < 50
    finally:
        gc.enable()
    assert session.intents == {}
