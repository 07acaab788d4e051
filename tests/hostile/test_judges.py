"""Each judge finds a history that is wrong, and accepts the nearest one that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.history import Event, Recorder, read_history
from tests.hostile.judges import (
    JUDGES,
    Verdict,
    facts_of,
    judge_bounds,
    judge_cache,
    judge_exceptions,
    judge_exclusion,
    judge_fences,
    judge_latches,
    judge_leaks,
    judge_loss,
    judge_orphans,
    judge_recovery,
    judge_wakeups,
    overlaps_in,
)


def hold(
    actor: str,
    start: float,
    end: float,
    fence: int,
    *,
    kind: str = "lock",
    name: str = "a",
    slot: int = -1,
    ttl: float = 1.0,
    asked: float | None = None,
) -> list[Event]:
    data = {"kind": kind, "fences": {name: fence}, "slot": slot, "ttl": ttl}
    asked = start - 0.01 if asked is None else asked
    return [
        Event(start, actor, "held", {"id": fence, "asked": asked, **data}),
        Event(end, actor, "believes", {"id": fence}),
    ]


def call(
    actor: str, begun: float, ended: float | None, *, op: str = "acquire", wait: float = 5.0, error: str = ""
) -> list[Event]:
    key = round(begun * 1000)
    events = [Event(begun, actor, "call", {"id": key, "op": op, "bound": wait, "names": ["a"], "wait": wait})]
    if ended is not None:
        events.append(Event(ended, actor, "return", {"id": key, "error": error}))
    return events


def fault(name: str, begun: float, ended: float, **data: Any) -> Event:
    return Event(ended, "harness", "fault", {"name": name, "begun": begun, "target": "", **data})


def samples(begin: float, end: float, *taken: str) -> list[Event]:
    return [
        Event(begin + step / 10, "harness", "sample", {"taken": list(taken)}) for step in range(int((end - begin) * 10))
    ]


def history(*parts: Event | list[Event]) -> list[Event]:
    flat = [event for part in parts for event in (part if isinstance(part, list) else [part])]
    return sorted(flat, key=lambda event: event.at)


ONE_AFTER_THE_OTHER = history(hold("x", 1, 2, 10), hold("y", 2.1, 3, 11))
TOGETHER = history(hold("x", 1, 2, 10), hold("y", 1.9, 3, 11))
PERMITS = Event(0, "harness", "permits", {"a": 2})
WAITING = call("x", 20.0, 27.0, wait=10.0)

DOWNGRADED = {"kind": "read", "fences": {"a": 12}, "slot": -1, "ttl": 1.0, "asked": 2.0, "granted": False}

Case = tuple[Any, list[Event], bool | None]
CASES: dict[str, Case] = {
    "holders one after the other": (judge_exclusion, ONE_AFTER_THE_OTHER, True),
    "two holders": (judge_exclusion, TOGETHER, False),
    "two holders of two names": (judge_exclusion, history(hold("x", 1, 2, 1), hold("y", 1, 2, 2, name="b")), True),
    "no holder": (judge_exclusion, [], None),
    "two holders just after the key was deleted": (
        judge_exclusion,
        history(TOGETHER, fault("delete key", 1.8, 1.85, displaces=["a"])),
        True,
    ),
    "two holders after another key was deleted": (
        judge_exclusion,
        history(TOGETHER, fault("delete key", 1.8, 1.85, displaces=["b"])),
        False,
    ),
    "two holders before the key was deleted": (
        judge_exclusion,
        history(TOGETHER, fault("delete key", 2.5, 2.55, displaces=["a"])),
        False,
    ),
    "two holders a ttl after the data was lost": (
        judge_exclusion,
        history(hold("x", 1, 5, 10), hold("y", 2, 5, 11), fault("restart", 1.5, 1.6, displaces=["*"])),
        False,
    ),
    "two holders after a failover that lost a grant": (
        judge_exclusion,
        history(TOGETHER, fault("kill primary", 0.5, 9, displaces=["*"], until=1.5)),
        True,
    ),
    "two holders more than a ttl after the new primary was known": (
        judge_exclusion,
        history(hold("x", 1, 3, 10), hold("y", 2, 3, 11), fault("kill primary", 0.5, 9, displaces=["*"], until=1.5)),
        False,
    ),
    "a holder on the side of a primary that is cut off, and one on the other side": (
        judge_exclusion,
        history(
            hold("b0.0/1", 1, 2, 10),
            hold("a1.0/1", 1, 2, 11),
            fault("cut off primary", 0.5, 9, displaces=["*"], places=["b0"]),
        ),
        True,
    ),
    "two holders on the other side": (
        judge_exclusion,
        history(
            hold("a0.0/1", 1, 2, 10),
            hold("a1.0/1", 1, 2, 11),
            fault("cut off primary", 0.5, 9, displaces=["*"], places=["b0"]),
        ),
        False,
    ),
    "two readers": (
        judge_exclusion,
        history(hold("x", 1, 2, 10, kind="read"), hold("y", 1, 2, 11, kind="read")),
        True,
    ),
    "a reader beside a writer": (
        judge_exclusion,
        history(hold("x", 1, 2, 10, kind="read"), hold("y", 1, 2, 11, kind="write")),
        False,
    ),
    "one permit too many, while a holder with a long ttl cannot know of its loss": (
        judge_exclusion,
        history(
            PERMITS,
            hold("x", 1, 4, 10, kind="semaphore", slot=0, ttl=4.0),
            hold("y", 3, 4, 11, kind="semaphore", slot=0),
            hold("z", 3.2, 4, 12, kind="semaphore", slot=1),
            fault("restart without data", 1.5, 1.6, displaces=["*"]),
        ),
        True,
    ),
    "two permits": (
        judge_exclusion,
        history(
            PERMITS,
            hold("x", 1, 2, 10, kind="semaphore", slot=0),
            hold("y", 1, 2, 11, kind="semaphore", slot=1),
        ),
        True,
    ),
    "one permit for two": (
        judge_exclusion,
        history(
            PERMITS,
            hold("x", 1, 2, 10, kind="semaphore", slot=1),
            hold("y", 1, 2, 11, kind="semaphore", slot=1),
        ),
        False,
    ),
    "a permit too many": (
        judge_exclusion,
        history(PERMITS, *(hold("x", 1, 2, 10 + slot, kind="semaphore", slot=slot) for slot in range(3))),
        False,
    ),
    "fences rise": (judge_fences, ONE_AFTER_THE_OTHER, True),
    "a fence goes back": (judge_fences, history(hold("x", 1, 2, 12), hold("y", 2.1, 3, 11)), False),
    "a fence goes back between two that overlap": (
        judge_fences,
        history(hold("x", 1, 2, 12), hold("y", 2.1, 3, 11, asked=0.5)),
        True,
    ),
    "a writer that has become a reader keeps its fence": (
        judge_fences,
        history(hold("x", 1, 2, 12), Event(2, "x", "held", {**DOWNGRADED, "id": 13}), hold("y", 3, 4, 14)),
        True,
    ),
    "one fence twice": (judge_fences, history(hold("x", 1, 2, 12), hold("y", 1, 2, 12, asked=0.5)), False),
    "told of a deleted key": (
        judge_loss,
        history(hold("x", 1, 2, 10), fault("delete key", 1.5, 1.6, displaces=["a"], certain=True)),
        True,
    ),
    "never told of a deleted key": (
        judge_loss,
        history(hold("x", 1, 3, 10), fault("delete key", 1.5, 1.6, displaces=["a"], certain=True)),
        False,
    ),
    "granted after the deletion": (
        judge_loss,
        history(hold("x", 2, 9, 10), fault("delete key", 1.5, 1.6, displaces=["a"], certain=True)),
        None,
    ),
    "a call in time": (judge_bounds, call("x", 1, 8), True),
    "a call that takes too long": (judge_bounds, call("x", 1, 12), False),
    "a call that never ends": (judge_bounds, history(call("x", 1, None), call("y", 11, 12)), False),
    "a call of a worker that was killed": (
        judge_bounds,
        history(call("x/1", 1, None), Event(2, "harness", "killed", {"target": "x"}), call("y", 11, 12)),
        True,
    ),
    "a call of a worker that was stopped": (
        judge_bounds,
        history(call("x/1", 1, 12), fault("stop worker", 2, 10, target="x")),
        True,
    ),
    "a waiter of a lock that is taken": (judge_wakeups, history(WAITING, samples(20, 27, "a")), True),
    "a waiter of a lock that is free": (judge_wakeups, history(WAITING, samples(20, 27, "b")), False),
    "a waiter of a lock that is free now and then": (
        judge_wakeups,
        history(WAITING, *(samples(second, second + 0.9, *"a" * (second % 2)) for second in range(20, 27))),
        True,
    ),
    "a waiter of a free lock near a fault": (
        judge_wakeups,
        history(WAITING, samples(20, 27), fault("kill listeners", 19, 20.1)),
        True,
    ),
    "a waiter of a free lock while the server is away": (
        judge_wakeups,
        history(WAITING, samples(20, 21.5), samples(25.5, 27)),
        True,
    ),
    "a lock after the faults": (judge_recovery, history(fault("cut", 1, 2), call("x", 9, 10, op="own")), True),
    "no lock after the faults": (
        judge_recovery,
        history(fault("cut", 1, 2), call("x", 9, 10, op="own", error="Unavailable")),
        False,
    ),
    "no lock during the faults": (
        judge_recovery,
        history(fault("cut", 1, 2), call("x", 3, 4, op="own", error="Unavailable")),
        None,
    ),
    "a key of a dead process": (
        judge_orphans,
        [Event(9, "harness", "left", {"tokens": [["a", 7]], "alive": [8], "after": 3.1})],
        True,
    ),
    "a key of a living process": (
        judge_orphans,
        [Event(9, "harness", "left", {"tokens": [["a", 8]], "alive": [8], "after": 3.1})],
        False,
    ),
    "closed": (judge_leaks, [Event(9, "x", "closed", {"left": []})], True),
    "closed with a thread": (judge_leaks, [Event(9, "x", "closed", {"left": ["Thread-1"]})], False),
    "closed with a connection": (
        judge_leaks,
        history(
            Event(9, "x", "closed", {"left": []}), Event(9, "harness", "connections", {"count": 1, "list": ["one"]})
        ),
        False,
    ),
    "errors of ours": (judge_exceptions, call("x", 1, 2, error="LeaseLost"), True),
    "errors of others": (
        judge_exceptions,
        history(call("x", 1, 2), Event(2, "x", "foreign", {"text": "builtins.TypeError: no"})),
        False,
    ),
    "a latch that was counted down": (
        judge_latches,
        history(
            *(Event(1 + each, "x", "count down", {"latch": "l"}) for each in range(2)),
            Event(3, "y", "passed", {"latch": "l", "count": 2}),
        ),
        True,
    ),
    "a latch that was not": (
        judge_latches,
        history(Event(1, "x", "count down", {"latch": "l"}), Event(3, "y", "passed", {"latch": "l", "count": 2})),
        False,
    ),
    "a fresh value": (
        judge_cache,
        history(
            Event(1, "x", "computed", {"key": "k", "value": "1"}),
            Event(2, "y", "got", {"key": "k", "value": "1", "asked": 1.5, "ttl": 1}),
        ),
        True,
    ),
    "an old value": (
        judge_cache,
        history(
            Event(1, "x", "computed", {"key": "k", "value": "1"}),
            Event(9, "y", "got", {"key": "k", "value": "1", "asked": 8.5, "ttl": 1}),
        ),
        False,
    ),
    "a value of another key": (
        judge_cache,
        history(
            Event(1, "x", "computed", {"key": "k", "value": "1"}),
            Event(2, "y", "got", {"key": "j", "value": "1", "asked": 1.5, "ttl": 1}),
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    judge, events, expected = CASES[name]
    verdict: Verdict = judge(events)
    assert verdict.valid is expected, verdict


def test_overlaps_that_are_declared_are_counted_apart() -> None:
    events = history(
        TOGETHER, hold("z", 7, 8, 12), hold("x", 7, 8, 13), fault("delete key", 1.8, 1.85, displaces=["a"])
    )
    found = overlaps_in(events, facts_of(events))
    assert (len(found.declared), len(found.beyond)) == (1, 1)


def test_every_judge_has_a_history_that_it_finds_wrong_and_one_that_it_finds_right() -> None:
    for expected in (False, True):
        assert {judge for judge, _, found in CASES.values() if found is expected} == set(JUDGES)


def test_every_judge_says_unknown_of_an_empty_history() -> None:
    assert {each([]).valid for each in JUDGES} == {None}


def test_a_line_that_was_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "x")
    recorder.note("call", lane=1, id=3)
    recorder.close()
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('[1.0, "x/1", "ret')
    (event,) = read_history(tmp_path)
    assert (event.actor, event.what, event.data) == ("x/1", "call", {"id": 3})
