"""The invariants as functions of histories: made by hand, made at random, recorded from clients of a real server."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Event, Report, Verdict
from holdfast.lab.invariants.locks import CHECKS, INVARIANTS, MEANING, check
from tests.proxy import LOSE_REPLY, Proxy

A, B, C = range(3)
ALL = -1  # a fault of the server, or a newcomer


def at(us: int, client: int, kind: str, fence: int | None = None, **facts: Any) -> Event:
    return Event(us, client, kind, fence, **facts)


class Case(NamedTuple):
    name: str
    history: list[Event]
    verdict: Verdict
    clients: tuple[int, ...] = ()  # whom it names


def assert_judged(invariant: str, case: Case) -> None:
    report = CHECKS[invariant].judge(case.history)
    assert (report.verdict, report.clients) == (case.verdict, case.clients)
    assert bool(report.why) == (case.verdict == BROKEN)
    said = report.why.format(*("ABC"[client] for client in report.clients))
    assert all("ABC"[client] in said for client in case.clients)
    assert_noticed_in_time(invariant, case.history)


def assert_noticed_in_time(invariant: str, history: list[Event]) -> None:
    """A search judges a history when an event has come that can break something, and never asks again."""
    judge, ends_with, _ = CHECKS[invariant]
    verdicts = [judge(history[:length]).verdict for length in range(len(history) + 1)]
    if BROKEN in verdicts:
        first = verdicts.index(BROKEN)
        assert history[first - 1].kind in ends_with, invariant
        # What is broken stays broken, but for fences whose order the server tells later on.
        if not any(event.kind == "minted" for event in history):
            assert set(verdicts[first:]) == {BROKEN}, invariant


def named(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@named(
    Case("one after the other", [at(0, A, "granted"), at(5, A, "leaves"), at(5, B, "granted")], HOLDS),
    Case("two at a time", [at(0, A, "granted"), at(5, B, "granted")], BROKEN, (B, A)),
    Case("three, and the second has left", [
        at(0, A, "granted"), at(1, A, "leaves"), at(2, B, "granted"), at(3, B, "leaves"), at(4, A, "granted"),
        at(5, C, "granted"),
    ], BROKEN, (C, A)),
    Case("granted in the very moment of the deadline", [
        at(0, A, "granted", until_us=10), at(10, B, "granted", until_us=20),
    ], HOLDS),
    Case("granted a microsecond before it", [
        at(0, A, "granted", until_us=10), at(9, B, "granted", until_us=20),
    ], BROKEN, (B, A)),
    Case("no deadline of its own", [at(0, A, "granted"), at(10**9, B, "granted", until_us=10**10)], BROKEN, (B, A)),
    Case("extended", [
        at(0, A, "granted", until_us=10), at(5, A, "extended", until_us=15), at(14, B, "granted", until_us=30),
    ], BROKEN, (B, A)),
    Case("extended, and that is over too", [
        at(0, A, "granted", until_us=10), at(5, A, "extended", until_us=15), at(15, B, "granted", until_us=30),
    ], HOLDS),
    Case("extended when it was over, and is another's", [
        at(0, A, "granted", until_us=10), at(10, B, "granted", until_us=30), at(11, A, "extended", until_us=20),
    ], BROKEN, (A, B)),
    Case("extended when it was over, and both are", [
        at(0, A, "granted", until_us=10), at(10, B, "granted", until_us=30), at(30, A, "extended", until_us=40),
    ], HOLDS),
    Case("extended by somebody who has nothing", [at(0, A, "extended", until_us=15), at(1, B, "granted")], HOLDS),
    Case("told of its loss", [at(0, A, "granted"), at(5, A, "lost"), at(6, B, "granted")], HOLDS),
    Case("another is told of its loss", [at(0, A, "granted"), at(5, C, "lost"), at(6, B, "granted")], BROKEN, (B, A)),
    Case("dead", [at(0, A, "granted"), at(5, A, "crashed"), at(6, B, "granted")], HOLDS),
    Case("a release that failed ends it when it was called", [
        at(0, A, "granted"), at(5, A, "leaves"), at(6, B, "granted"), at(9, A, "unreleased", what="Unavailable"),
    ], HOLDS),
    Case("a fault alone ends nothing", [
        at(0, A, "granted"), at(5, A, "touched", what="pause"), at(6, B, "granted"),
    ], BROKEN, (B, A)),
    Case("the same one again", [at(0, A, "granted"), at(1, A, "granted")], HOLDS),
    Case("refused", [at(0, A, "granted"), at(1, B, "wants"), at(2, B, "refused")], HOLDS),
)  # fmt: skip
def test_mutual_exclusion(case: Case) -> None:
    assert_judged("MutualExclusion", case)


@named(
    Case("nobody else", [at(0, A, "granted", 5), at(0, A, "writes", 5), at(9, A, "writes", 5)], HOLDS),
    Case("a lower fence is refused", [
        at(0, A, "granted", 5), at(0, A, "writes", 5), at(3, B, "granted", 6), at(3, B, "writes", 6),
        at(9, A, "writes", 5),
    ], HOLDS),
    Case("an equal fence is not", [
        at(0, A, "granted", 5), at(3, B, "granted", 5), at(3, B, "writes", 5), at(9, A, "writes", 5),
    ], BROKEN, (A, B)),
    Case("the later one has the lower fence", [
        at(0, A, "granted", 5), at(3, B, "granted", 4), at(3, B, "writes", 4), at(9, A, "writes", 5),
    ], BROKEN, (A, B)),
    Case("without fences", [
        at(0, A, "granted"), at(0, A, "writes"), at(3, B, "granted"), at(3, B, "writes"), at(9, A, "writes"),
    ], BROKEN, (A, B)),
    Case("without fences, one after the other", [
        at(0, A, "granted"), at(1, A, "writes"), at(2, A, "leaves"), at(3, B, "granted"), at(3, B, "writes"),
    ], HOLDS),
    Case("what was refused does not count as seen", [
        at(0, A, "granted", 5), at(3, B, "granted", 7), at(3, B, "writes", 7), at(4, A, "writes", 5),
        at(5, C, "granted", 6), at(5, C, "writes", 6), at(6, B, "writes", 7),
    ], BROKEN, (B, C)),
    Case("nobody has the lock", [at(0, A, "writes", 5)], HOLDS),
    Case("granted before, and told after", [
        at(0, A, "wants"), at(1, B, "wants"), at(2, B, "granted", 2), at(2, B, "writes", 2),
        at(3, A, "granted", 1), at(3, A, "writes", 1), at(4, B, "writes", 2),
    ], HOLDS),
    Case("but not who asks later", [
        at(1, B, "wants"), at(2, B, "granted", 2), at(2, B, "writes", 2), at(3, A, "wants"), at(4, A, "granted", 1),
        at(5, B, "writes", 2),
    ], BROKEN, (B, A)),
)  # fmt: skip
def test_fenced_safety(case: Case) -> None:
    assert_judged("FencedSafety", case)


def test_fenced_safety_says_whether_there_was_a_fence_at_all() -> None:
    taken_over = [at(0, A, "granted"), at(1, B, "granted"), at(1, B, "writes")]
    assert "without a fence" in CHECKS["FencedSafety"].judge([*taken_over, at(2, A, "writes")]).why
    assert "accepts its fence" in CHECKS["FencedSafety"].judge([*taken_over, at(2, A, "writes", 5)]).why


@named(
    Case("its own", [at(0, A, "granted"), at(1, A, "leaves"), at(2, A, "released")], HOLDS),
    Case("another's", [at(0, A, "granted"), at(1, B, "removed", other=A)], BROKEN, (B, A)),
    Case("stretched is another matter", [at(0, B, "stretched", other=A, what="stretches")], HOLDS),
)
def test_owner_only_release(case: Case) -> None:
    assert_judged("OwnerOnlyRelease", case)


@named(
    Case("its own", [at(0, A, "granted", until_us=5), at(1, A, "extended", until_us=9)], HOLDS),
    Case("longer", [at(0, A, "granted"), at(1, B, "stretched", other=A, what="stretches")], BROKEN, (B, A)),
    Case("shorter", [at(0, A, "granted"), at(1, B, "stretched", other=A, what="cuts short")], BROKEN, (B, A)),
    Case("removed is another matter", [at(0, B, "removed", other=A)], HOLDS),
)
def test_owner_only_stretch(case: Case) -> None:
    assert_judged("OwnerOnlyStretch", case)
    if case.verdict == BROKEN:
        assert case.history[-1].what in CHECKS["OwnerOnlyStretch"].judge(case.history).why


@named(
    Case("before its deadline", [at(9, A, "believes", until_us=10)], HOLDS),
    Case("in the moment of it", [at(10, A, "believes", until_us=10)], BROKEN, (A,)),
    Case("after it", [at(1, A, "believes", until_us=10), at(11, B, "believes", until_us=10)], BROKEN, (B,)),
    Case("nobody was asked", [at(0, A, "granted", until_us=10), at(20, A, "leaves")], UNKNOWN),
    Case("no deadline", [at(9, A, "believes")], UNKNOWN),
)
def test_no_false_hold(case: Case) -> None:
    assert_judged("NoFalseHold", case)


@named(
    Case("in", [at(9, ALL, "newcomer", what="in")], HOLDS),
    Case("out", [at(0, A, "granted"), at(1, A, "crashed"), at(9, ALL, "newcomer", what="out")], BROKEN),
    Case("in at first", [at(3, ALL, "newcomer", what="in"), at(9, ALL, "newcomer", what="out")], BROKEN),
    Case("nobody new", [at(0, A, "granted"), at(1, A, "crashed")], UNKNOWN),
)
def test_no_orphan(case: Case) -> None:
    assert_judged("NoOrphan", case)


@named(
    Case("served", [at(0, A, "arrived"), at(5, A, "granted")], HOLDS),
    Case("served at once", [at(5, A, "granted")], HOLDS),
    Case("waits in vain", [at(0, A, "arrived"), at(0, B, "arrived"), at(5, B, "idle")], BROKEN, (B,)),
    Case("nobody waited", [at(0, A, "wants"), at(5, A, "refused")], UNKNOWN),
)
def test_no_lost_wakeup(case: Case) -> None:
    assert_judged("NoLostWakeup", case)


@named(
    Case("greater each time", [at(0, A, "granted", 5), at(1, B, "granted", 6), at(2, A, "granted", 9)], HOLDS),
    Case("lower", [at(0, A, "granted", 5), at(1, B, "granted", 4)], BROKEN, (B, A)),
    Case("the same", [at(0, A, "granted", 5), at(1, B, "granted", 5)], BROKEN, (B, A)),
    Case("the same one's own", [at(0, A, "granted", 5), at(1, A, "granted", 5)], BROKEN, (A, A)),
    Case("lower than the one before the last", [
        at(0, A, "granted", 5), at(1, B, "granted", 7), at(2, C, "granted", 6),
    ], BROKEN, (C, B)),
    Case("between two without a fence", [
        at(0, A, "granted", 5), at(1, B, "granted"), at(2, C, "granted", 5),
    ], BROKEN, (C, A)),
    Case("without fences", [at(0, A, "granted"), at(1, B, "granted")], UNKNOWN),
    Case("nothing was granted", [at(0, A, "wants"), at(1, A, "refused")], UNKNOWN),
    # What two learn at about the same time, they may learn in either order.
    Case("asked before the other knew", [
        at(0, A, "wants"), at(1, B, "wants"), at(2, A, "granted", 5), at(3, B, "granted", 4),
    ], HOLDS),
    Case("asked when the other knew", [
        at(0, A, "wants"), at(2, A, "granted", 5), at(3, B, "wants"), at(4, B, "granted", 4),
    ], BROKEN, (B, A)),
    Case("asked before, and yet the same", [
        at(0, A, "wants"), at(1, B, "wants"), at(2, A, "granted", 5), at(3, B, "granted", 5),
    ], BROKEN, (B, A)),
    # The server knows in which order it gave them out.
    Case("minted in order, learnt out of it", [
        at(0, B, "minted", 4), at(1, A, "minted", 5), at(2, A, "granted", 5), at(3, B, "granted", 4),
    ], HOLDS),
    Case("minted out of order, learnt in it", [
        at(0, A, "minted", 5), at(1, B, "minted", 4), at(2, B, "granted", 4), at(3, A, "granted", 5),
    ], BROKEN, (B, A)),
    Case("has what was given to another", [
        at(0, A, "minted", 5), at(1, B, "minted", 900), at(2, A, "granted", 900),
    ], BROKEN, (A,)),
    Case("has the last of its block", [at(0, A, "minted", 5), at(1, A, "granted", 68)], HOLDS),
    Case("has one beyond its block", [at(0, A, "minted", 5), at(1, A, "granted", 69)], BROKEN, (A,)),
    Case("has one before its block", [at(0, A, "minted", 5), at(1, A, "granted", 4)], BROKEN, (A,)),
    Case("minted, and never learnt of", [at(0, A, "minted", 5), at(1, B, "minted", 5)], BROKEN, (B, A)),
)  # fmt: skip
def test_fence_monotone(case: Case) -> None:
    assert_judged("FenceMonotone", case)


@named(
    Case("granted", [at(0, A, "wants"), at(1, A, "granted")], HOLDS),
    Case("refused", [at(0, A, "wants"), at(1, A, "refused", what="AcquireTimeout")], HOLDS),
    Case("refused, and its name is in the key", [at(1, A, "refused"), at(1, A, "left_behind")], BROKEN, (A,)),
    Case("still trying", [at(0, A, "wants"), at(1, A, "arrived")], UNKNOWN),
)
def test_acquire_totality(case: Case) -> None:
    assert_judged("AcquireTotality", case)


@named(
    Case("in order", [at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "granted"), at(3, B, "granted")], HOLDS),
    Case("out of order", [at(0, A, "arrived"), at(1, B, "arrived"), at(2, B, "granted")], BROKEN, (B, A)),
    Case("past everybody who waits", [at(0, A, "arrived"), at(1, B, "granted")], BROKEN, (B, A)),
    Case("a place is kept", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "arrived"), at(3, A, "granted"),
    ], HOLDS),
    Case("and is one", [
        at(0, A, "arrived"), at(1, A, "arrived"), at(2, B, "arrived"), at(3, A, "granted"), at(4, B, "granted"),
    ], HOLDS),
    Case("whom a fault befell may be passed over", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "touched", what="pause"), at(3, B, "granted"),
    ], HOLDS),
    Case("and may pass others", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, B, "touched", what="pause"), at(3, B, "granted"),
    ], HOLDS),
    Case("but nobody else may", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, C, "arrived"), at(3, A, "touched", what="pause"),
        at(4, C, "granted"),
    ], BROKEN, (C, B)),
    Case("the server may forget the order", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, ALL, "touched", what="restart"), at(3, B, "granted"),
    ], HOLDS),
    Case("but its scripts do not keep it", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, ALL, "touched", what="script_flush"), at(3, B, "granted"),
    ], BROKEN, (B, A)),
    Case("but not by forgetting scripts", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, ALL, "touched", what="script_flush"), at(3, B, "granted"),
    ], BROKEN, (B, A)),
    Case("nor before the fault", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, B, "granted"), at(3, ALL, "touched", what="restart"),
    ], BROKEN, (B, A)),
    Case("who gave up is not waited for", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "refused"), at(3, B, "granted"),
    ], HOLDS),
    Case("nor who is dead", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "crashed"), at(3, B, "granted"),
    ], HOLDS),
    Case("who comes again stands behind", [
        at(0, A, "arrived"), at(1, B, "arrived"), at(2, A, "granted"), at(3, A, "leaves"), at(4, A, "arrived"),
        at(5, A, "granted"),
    ], BROKEN, (A, B)),
    Case("nobody waited", [at(0, A, "granted"), at(1, A, "leaves"), at(2, B, "granted")], UNKNOWN),
    Case("nobody had come when the server failed", [
        at(0, ALL, "touched", what="restart"), at(1, A, "arrived"), at(2, B, "granted"),
    ], UNKNOWN),
)  # fmt: skip
def test_fifo(case: Case) -> None:
    assert_judged("Fifo", case)


def test_every_invariant_is_judged_and_explained() -> None:
    reports = check([at(0, A, "granted", 5, until_us=10), at(3, B, "granted", 6, until_us=20)])
    assert tuple(reports) == INVARIANTS == tuple(MEANING)
    assert len(INVARIANTS) == 10
    assert {name for name, report in reports.items() if report.verdict == BROKEN} == {"MutualExclusion"}


# At random.

KINDS = [
    *("wants", "arrived", "minted", "granted", "extended", "refused", "believes", "writes", "lost", "leaves"),
    *("released", "unreleased", "crashed", "touched", "removed", "stretched", "left_behind", "newcomer", "idle"),
]
COMMON = [*["granted"] * 5, *["leaves", "writes", "arrived", "minted"] * 3]
EVENTS = st.builds(
    at,
    st.just(0),
    st.sampled_from([A, B, C]),
    st.sampled_from(KINDS + COMMON),
    st.none() | st.integers(1, 4),
    until_us=st.none() | st.integers(1, 12),
    what=st.sampled_from(["in", "out", "stretches"]),
    other=st.sampled_from([A, B, C]),
)
HISTORIES = st.lists(EVENTS, max_size=12).map(
    lambda events: [event._replace(at_us=place) for place, event in enumerate(events)]
)


@given(HISTORIES)
def test_a_search_that_looks_only_at_the_last_event_misses_nothing(history: list[Event]) -> None:
    for invariant in INVARIANTS:
        assert_noticed_in_time(invariant, history)


@given(HISTORIES)
def test_holds_overlap_if_their_times_do(history: list[Event]) -> None:
    """The same by the book: every hold as an interval, each pair compared."""
    history = [event for event in history if event.kind != "extended"]
    holds = []
    for place, event in enumerate(history):
        if event.kind == "granted":
            ends = [len(history)] if event.until_us is None else [len(history), max(event.until_us, place)]
            ends += [
                later.at_us
                for later in history[place + 1 :]
                if later.client == event.client and later.kind in ("granted", "leaves", "crashed", "lost")
            ]
            holds.append((event.client, event.at_us, min(ends)))
    at_once = any(
        one[0] != other[0] and one[1] < other[1] < one[2]
        for one in holds
        for other in holds
    )  # fmt: skip
    assert (CHECKS["MutualExclusion"].judge(history).verdict == BROKEN) == at_once


# Of real clients. A recorder is all it takes: the times of one machine's clock are in order.


class Recorder:
    def __init__(self) -> None:
        self.history: list[Event] = []
        self._mutex = threading.Lock()

    def note(self, client: int, kind: str, lease: Any = None, **facts: Any) -> None:
        """By FAULTS: what timed out, broke or was cancelled is not known to have failed, and is never noted as such."""
        with self._mutex:
            now_us = time.monotonic_ns() // 1000
            if lease is not None:
                facts["fence"] = lease.fence
                if lease.fence is not None:  # a recipe keeps no deadline, whatever its lease says
                    facts["until_us"] = now_us + round(lease.remaining() * 1e6)
            self.history.append(Event(now_us, client, kind, **facts))

    def acquire(self, client: int, lock: Any, timeout: float = 20.0) -> Any:
        self.note(client, "wants")
        lease = lock.acquire(timeout=timeout)
        if lease is None:
            self.note(client, "refused")
        else:
            self.note(client, "granted", lease)
            self.write(client, lease)
        return lease

    def write(self, client: int, lease: Any) -> None:
        """To what the lock guards."""
        self.note(client, "writes", fence=lease.fence)

    def release(self, client: int, lease: Any) -> None:
        if lease.held:
            self.note(client, "believes", lease)
        self.note(client, "leaves")
        try:
            lease.release()
        except HoldfastError as error:
            self.note(client, "unreleased", what=type(error).__name__)
        else:
            self.note(client, "released")

    def ask_for_newcomer(self, lock: Any) -> None:
        lease = lock.acquire(timeout=20.0)
        self.note(ALL, "newcomer", what="in" if lease else "out")
        if lease:
            lease.release()

    def judge(self) -> dict[str, Report]:
        return check(self.history)


def broken(reports: dict[str, Report]) -> dict[str, tuple[int, ...]]:
    return {name: report.clients for name, report in reports.items() if report.verdict == BROKEN}


def test_what_two_threads_did_on_a_real_server_holds(url: str) -> None:
    recorder = Recorder()

    def work(client: int) -> None:
        with holdfast.connect(url) as own:
            for _ in range(25):
                lease = recorder.acquire(client, own.lock("counter", ttl=10))
                recorder.write(client, lease)
                recorder.release(client, lease)

    threads = [threading.Thread(target=work, args=(client,)) for client in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with holdfast.connect(url) as client:
        recorder.ask_for_newcomer(client.lock("counter"))
    assert sum(event.kind == "granted" for event in recorder.history) == 50
    verdicts = {name: report.verdict for name, report in recorder.judge().items()}
    # Who stood in the queue, only the server knows.
    assert verdicts == {**dict.fromkeys(INVARIANTS, HOLDS), "Fifo": UNKNOWN}


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_a_holder_that_outsleeps_its_ttl_is_found_in_what_was_recorded(url: str) -> None:
    recorder = Recorder()
    with holdfast.connect(url) as one, holdfast.connect(url) as other:
        asleep = recorder.acquire(A, one.recipe("set_nx", "foo", ttl=0.2))
        next_one = recorder.acquire(B, other.recipe("set_nx", "foo", ttl=10.0))  # as soon as the ttl is over
        recorder.write(A, asleep)
        recorder.release(B, next_one)
        recorder.release(A, asleep)
    reports = recorder.judge()
    assert broken(reports) == {"MutualExclusion": (B, A), "FencedSafety": (A, B)}
    assert reports["FenceMonotone"].verdict == UNKNOWN
    assert recorder.history[-1].kind == "unreleased"


def test_the_same_sleeper_breaks_nothing_with_a_fence(url: str) -> None:
    recorder = Recorder()
    with holdfast.connect(url) as one, holdfast.connect(url) as other:
        asleep = recorder.acquire(A, one.lock("foo", ttl=0.2, renew=False))
        next_one = recorder.acquire(B, other.lock("foo", ttl=10.0))
        recorder.write(A, asleep)
        recorder.release(B, next_one)
        recorder.release(A, asleep)
    reports = recorder.judge()
    assert not broken(reports)
    assert reports["FenceMonotone"].verdict == HOLDS
    # The deadline and the fence are what saves it: without them the same history is broken.
    naked = [event._replace(fence=None, until_us=None) for event in recorder.history]
    assert broken(check(naked)) == {"MutualExclusion": (B, A), "FencedSafety": (A, B)}


@pytest.mark.filterwarnings("ignore::holdfast.UnsafeRecipeWarning")
def test_belief_ends_when_a_release_is_called_even_if_it_fails(url: str, proxy: Proxy) -> None:
    """The reply to its DEL was lost: the next one may have the lock before the first learns anything."""
    recorder = Recorder()
    with holdfast.connect(proxy.url) as one, holdfast.connect(url) as other:
        lease = recorder.acquire(A, one.recipe("setnx", "foo"))
        proxy.on("del", LOSE_REPLY)
        recorder.release(A, lease)
        recorder.release(B, recorder.acquire(B, other.recipe("setnx", "foo")))
    assert [event.kind for event in recorder.history if event.client == A][-2:] == ["leaves", "unreleased"]
    assert not broken(recorder.judge())
