"""Latches, reentrant locks and elections, searched: three clients, two faults, and mistakes to see that it looks.

As in tests/pools/test_search.py, the searches here are cut off after some thousand states; ``python -m benchmarks.lab``
is for those with more time.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Event
from holdfast.lab.invariants.locks import CHECKS, MEANING
from holdfast.lab.invariants.primitives import PRIMITIVE_CHECKS
from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.subjects.election import election_config
from holdfast.lab.subjects.latch import latch_config
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.lab.subjects.rlock import rlock_config
from holdfast.protocol import keepalive
from holdfast.protocol.kinds import election, latch, rlock
from tests.lab.mutations import MISTAKES as OF_LOCKS
from tests.lab.mutations import Mistake, in_python, in_step, new_step, plant

MOST_STATES: Final = 15_000


@pytest.mark.long
@pytest.mark.parametrize("row", ["latch", "latch:barrier", "rlock", "election", "election:terms"])
def test_nothing_breaks(row: str) -> None:
    primitive = PRIMITIVES[row]
    explorer = Explorer(primitive.config(kinds=primitive.kinds), invariants=primitive.invariants)
    explorer.search(0, (), states=3_000)
    explorer.search(1, primitive.kinds, states=explorer.states + 1_500)
    explorer.search(2, primitive.kinds, states=explorer.states + 1_500)
    for seed in range(10):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*primitive.invariants}
    assert explorer.states > 3_000


CASTS: Final[dict[str, Config]] = {
    "latch": latch_config("VDD"),
    "latch, prompt": latch_config("VDD", idle_us_per_fault=0),
    "rlock": rlock_config("111"),
    "election": election_config("RRO"),
    "terms": election_config("TRR"),
    "candidates": election_config("RRR"),
    "a long term": election_config("RR", stay_us=4_000_000),
}
_LOOK: Final = """token, fence, kind, is_time = yield from self._lock._ask_server(
        Step("election_leader", (main, last, waiters), ())
    )"""
_LOOK_TWICE: Final = """kind, is_time = None, True
    token = yield from self._lock._ask_server(Step("look_token", (main, last), ()))
    fence = yield from self._lock._ask_server(Step("look_fence", (main, last), ()))
    fence = None if fence is None else int(fence)"""
_WRITES_IT_DOWN: Final = "redis.pcall('SET', KEYS[1], latch, 'PX', ms)"

MISTAKES: Final[dict[str, tuple[str, str, tuple[str, ...], Mistake]]] = {
    "a_count_down_that_counts_again_when_it_is_sent_again": (
        "latch",
        "CountedOnce",
        ("lost_reply",),
        in_step("latch_count_down", "if counted then", "if false then"),
    ),
    "a_count_down_that_counts_again_and_opens_the_latch": (
        "latch",
        "ShutUntilZero",
        ("lost_reply",),
        in_step("latch_count_down", "if counted then", "if false then"),
    ),
    "a_count_down_that_counts_again_when_it_comes_twice": (
        "latch",
        "CountedOnce",
        ("duplicate",),
        in_step("latch_count_down", "'PX', ARGV[5])", "'PX', 1)"),
    ),
    "a_latch_that_opens_one_too_early": (
        "latch",
        "CountedOnce",
        (),
        in_step("latch_count_down", "left - ARGV[3]", "left - ARGV[3] - 1"),
    ),
    "a_latch_that_is_never_counted_down": (
        "latch",
        "CountedOnce",
        (),
        in_step("latch_count_down", "math.max(0, left - ARGV[3])", "left"),
    ),
    "a_waiter_that_does_not_wait_for_the_last": (
        "latch",
        "ShutUntilZero",
        (),
        in_python(latch.BaseLatch, "_watch", "if left:", "if left > 1:"),
    ),
    "a_latch_that_opens_without_a_sound": (
        "latch",
        "NoLostWakeup",
        (),
        in_step("latch_count_down", "redis.pcall('PUBLISH', channel, token .. message)", ""),
    ),
    "a_waiter_that_does_not_look_again_when_it_can_hear": (
        "latch",
        "NoLostWakeup",
        (),
        OF_LOCKS["no_retry_after_arming_the_bell"],
    ),
    "a_waiter_who_looks_for_others_and_leaves_without_a_word": (
        "latch, prompt",
        "NoLostWakeup",
        ("cancel",),
        in_python(latch.LatchWaiters, "leave", "other.wakeup.wake()", "pass"),
    ),
    "a_latch_that_is_remembered_for_ever": (
        "latch",
        "NoOrphan",
        (),
        in_step("latch_count_down latch_look", _WRITES_IT_DOWN, _WRITES_IT_DOWN.replace(", 'PX', ms", "")),
    ),
    "a_lock_that_is_free_after_the_inner_release": (
        "rlock",
        "LevelCount",
        (),
        in_python(rlock.BaseRLock, "_leave_level", "if depth <= 1:", "if True:"),
    ),
    "a_lock_that_two_have_after_the_inner_release": (
        "rlock",
        "MutualExclusion",
        (),
        in_python(rlock.BaseRLock, "_leave_level", "if depth <= 1:", "if True:"),
    ),
    "a_lock_that_is_kept_after_the_last_release": (
        "rlock",
        "LevelCount",
        (),
        in_python(rlock, "_give_back", "if depth > 1:", "if depth > 0:"),
    ),
    "an_inner_block_that_counts_twice": (
        "rlock",
        "AcquireTotality",
        (),
        in_python(rlock.BaseRLock, "_obtain", "mine._depth = depth + 1", "mine._depth = depth + 2"),
    ),
    "a_release_by_whoever_has_the_lease": (
        "rlock",
        "LevelCount",
        (),
        in_python(rlock, "release_level", "if lease._owner != me:", "if False:"),
    ),
    "one_task_taken_for_another": (
        "rlock",
        "LevelCount",
        (),
        in_python(
            rlock.BaseRLock, "_find", "self._owned.get((self._keys.main, me))", "next(iter(self._owned.values()), None)"
        ),
    ),
    "a_reentrant_lock_that_never_ends": ("rlock", "NoOrphan", ("crash",), OF_LOCKS["acquire_without_expiry"]),
    "a_leader_and_the_fence_of_another": (
        "election",
        "LeaderKnown",
        (),
        (
            *new_step("look_token", "return redis.call('GET', KEYS[1])"),
            *new_step("look_fence", "return string.match(redis.call('GET', KEYS[2]) or '', '^%d+')"),
            *in_python(election.BaseElection, "_leader", _LOOK, _LOOK_TWICE),
        ),
    ),
    "a_leader_of_whom_nobody_knows": (
        "election",
        "LeaderKnown",
        (),
        in_step("election_leader", "return {token, ", "return {false, "),
    ),
    "a_term_that_is_not_given_back": (
        "terms",
        "AcquireTotality",
        (),
        in_python(election.BaseTerms, "_end", "yield from release_lease(lease)", "yield from ()"),
    ),
    "a_leader_who_resigns_without_a_sound": (
        "candidates",
        "NoLostWakeup",
        (),
        OF_LOCKS["release_that_does_not_grant_to_the_next"],
    ),
    "a_term_counted_from_when_the_leader_hears_of_it": (
        "election",
        "StepsDown",
        ("stall",),
        OF_LOCKS["validity_counted_from_the_reply"],
    ),
    "a_leader_who_is_never_told": (
        "a long term",
        "StepsDown",
        ("lost_request", "lost_request"),
        in_python(keepalive, "plan", "            over.append(hold)\n", ""),
    ),
    "two_leaders": ("election", "MutualExclusion", (), OF_LOCKS["acquire_that_overwrites"]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cast, invariant, kinds, mistake = MISTAKES[name]
    plant(mistake, monkeypatch)
    explorer = Explorer(CASTS[cast], invariants=(invariant,), stop_at=(invariant,))
    explorer.search(len(kinds), kinds, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    assert tell(found.config, found.choices, invariant)[-1].violation, "and it can be told"


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
def test_without_a_mistake_the_same_searches_find_nothing(cast: str) -> None:
    asked = {invariant for other, invariant, _, _ in MISTAKES.values() if other == cast}
    kinds = tuple(sorted({kind for other, _, some, _ in MISTAKES.values() if other == cast for kind in some}))
    explorer = Explorer(CASTS[cast], invariants=asked)
    explorer.search(0, (), states=2_500)
    explorer.search(min(1, len(kinds)), kinds, states=3_500)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == asked


def test_everything_that_is_asked_has_a_meaning() -> None:
    assert all(check.meaning for check in PRIMITIVE_CHECKS.values())
    assert not {*PRIMITIVE_CHECKS} & {*CHECKS}
    assert {name for row in PRIMITIVES.values() for name in row.invariants} <= {*MEANING, *PRIMITIVE_CHECKS}


def event(kind: str, client: int = 0, what: str = "", at_us: int = 0, **more: Any) -> Event:
    return Event(at_us, client, kind, what=what, **more)


def counted(token: str, by: int = 1) -> Event:
    return event("executed", what=f"latch_count_down {token} 2 {by} 3600000 65000")


ELECTED: Final = [event("elected", 0, "7"), event("granted", 0, fence=7, until_us=9)]
NEXT: Final = [event("leaves", 0), event("released", 0), event("elected", 1, "8"), event("granted", 1, until_us=9)]
ASKS: Final = event("asks", 2)


def told(what: str, at_us: int = 0) -> Event:
    return event("told", 2, what, at_us)


@pytest.mark.parametrize(
    ("invariant", "history", "verdict"),
    [
        ("ShutUntilZero", [counted("A-1")], UNKNOWN),
        ("ShutUntilZero", [counted("A-1"), counted("B-1"), event("passed", 2, "2")], HOLDS),
        ("ShutUntilZero", [counted("A-1"), counted("A-1"), event("passed", 2, "2")], BROKEN),
        ("ShutUntilZero", [counted("A-1", 2), event("passed", 2, "2")], HOLDS),
        ("CountedOnce", [counted("A-1")], UNKNOWN),
        (
            "CountedOnce",
            [counted("A-1"), event("stands", -1, "1 2"), counted("A-1"), event("counted", 0, "1 2")],
            HOLDS,
        ),
        (
            "CountedOnce",
            [counted("A-1"), event("stands", -1, "1 2"), counted("A-1"), event("stands", -1, "0 2")],
            BROKEN,
        ),
        ("CountedOnce", [counted("A-1"), event("counted", 0, "0 2")], BROKEN),
        ("CountedOnce", [counted("A-1", 5), event("stands", -1, "0 2"), event("counted", 0, "0 2")], HOLDS),
        ("LevelCount", [event("granted")], UNKNOWN),
        ("LevelCount", [event("level", what="2 kept"), event("level", what="0 over")], HOLDS),
        ("LevelCount", [event("level", what="1 over")], BROKEN),
        ("LevelCount", [event("level", what="0 kept")], BROKEN),
        ("LevelCount", [event("trespass", what="refused"), event("trespass", what="let in")], BROKEN),
        ("LeaderKnown", ELECTED, UNKNOWN),
        ("LeaderKnown", [ASKS, told("nobody")], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, told("A 7")], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, told("A 8")], BROKEN),
        ("LeaderKnown", [*ELECTED, ASKS, told("nobody", 8)], BROKEN),
        ("LeaderKnown", [*ELECTED, ASKS, told("nobody", 9)], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, event("extended", until_us=20), told("nobody", 9)], BROKEN),
        ("LeaderKnown", [*ELECTED, ASKS, event("lost"), told("nobody")], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, *NEXT, told("A 7")], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, *NEXT, told("B 8")], HOLDS),
        ("LeaderKnown", [*ELECTED, ASKS, *NEXT, told("B 7")], BROKEN),
        ("LeaderKnown", [*ELECTED, *NEXT, ASKS, told("A 7")], BROKEN),
        ("LeaderKnown", [*ELECTED, *NEXT[:2], ASKS, told("A 7")], BROKEN),
        ("StepsDown", [event("wants")], UNKNOWN),
        ("StepsDown", [event("granted")], HOLDS),
        ("StepsDown", [event("granted"), event("outlives")], BROKEN),
        ("StepsDown", [event("granted"), event("overdue")], BROKEN),
    ],
)
def test_what_is_asked_on_histories_made_by_hand(invariant: str, history: list[Any], verdict: str) -> None:
    assert PRIMITIVE_CHECKS[invariant].judge(history).verdict == verdict
