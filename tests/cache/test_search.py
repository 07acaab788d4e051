"""The cache, searched: three clients, two faults, and mistakes planted to see that it looks.

The searches here are cut off after some thousand states, breadth first, and go on as walks of chance; ``python -m
benchmarks.lab`` is for those with more time.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.lab.invariants.cache import CACHE_CHECKS
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Event
from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import NOBODY, Config
from holdfast.lab.subjects.cache import cache_config
from holdfast.lab.subjects.primitives import DAILY_KINDS, PRIMITIVES
from holdfast.protocol.cache.computation import Computation
from holdfast.protocol.cache.lookup import Search
from holdfast.protocol.cache.singleflight import CompleteOnLoss
from tests.lab.mutations import Mistake, in_python, in_step, plant

JUDGED: Final = PRIMITIVES["cache:failing"].invariants
CASTS: Final[dict[str, Config]] = {
    "RVI": cache_config("RVI", kinds=DAILY_KINDS),
    "VFI": cache_config("VFI", kinds=DAILY_KINDS),
    "VVI, stale": cache_config("VVI", ttl=0.05, stale=60.0, kinds=DAILY_KINDS),
}
# Smaller ones, in which a mistake is soon found. Who is slow always takes as long as it can.
SMALL: Final[dict[str, Config]] = {
    "RR": cache_config("RR"),
    "RR, slow": cache_config("RR", stay_us=2_000_000, leaves_us=()),
    "RI": cache_config("RI"),
    "RI, slow": cache_config("RI", leaves_us=()),
    "VI": cache_config("VI", leaves_us=((0, 0),)),
    "VI, at odd times": cache_config("VI", leaves_us=((100_000, 100_000), (200_000, 200_000))),
    "VF": cache_config("VF"),
    "RFL": cache_config("RFL", leaves_us=((0, 0),)),
    "RRD": cache_config("RRD", leaves_us=((0, 0),)),
    "RVD": cache_config("RVD", leaves_us=((0, 0),)),
    "VD": cache_config("VD", leaves_us=((0, 0),)),
}
MOST_STATES: Final = 6_000


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
def test_nothing_breaks(cast: str) -> None:
    explorer = Explorer(CASTS[cast], invariants=JUDGED)
    for faults in range(3):
        explorer.search(faults, DAILY_KINDS, states=(faults + 1) * 1_500)
    for seed in range(20):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known >= {*JUDGED} - {"FailureShared"}, "of which so few histories need not speak"
    assert explorer.states > 4_000


@pytest.mark.long
def test_all_that_some_can_do_without_a_fault_is_searched() -> None:
    for cast in ("VFR", "RRD"):
        explorer = Explorer(cache_config(cast), invariants=JUDGED)
        assert explorer.search(0)
        assert not explorer.broken


_NUMBERED: Final = "    self.served = self._leader.shared_call.next_number()\n"
_SERVED: Final = "        served = participant.shared_call.next_number() if participant is not None else 0\n"
_STORED: Final = "        stored = yield from self._send(step)\n"

# The cast in which it shows, what it breaks, by which faults, and what was written wrong.
MISTAKES: Final[dict[str, tuple[str, str, tuple[str, ...], Mistake]]] = {
    "a_claim_over_anothers": (
        "RR",
        "OneComputes",
        (),
        in_step("cache_look", "local owner = redis.call('GET', KEYS[2])", "local owner = false"),
    ),
    "a_claim_believed_when_its_time_is_up": (
        "RR, slow",
        "OneComputes",
        ("pause",),
        in_python(
            Search, "look", "if (began := (yield from clock())) < hold.deadline:", "if began := (yield from clock()):"
        ),
    ),
    "a_store_without_a_look_at_the_claim": (
        "RR, slow",
        "NewerStays",
        ("pause",),
        in_step("cache_store", "if redis.call('GET', KEYS[2]) ~= ARGV[1] then", "if false then"),
    ),
    "an_invalidation_that_leaves_the_claim": (
        "RI",
        "InvalidationWins",
        (),
        in_step("cache_drop", "redis.call('DEL', KEYS[2], KEYS[4])", "redis.call('DEL', KEYS[4])"),
    ),
    "a_token_that_claims_again_by_a_late_request": (
        "RI, slow",
        "InvalidationWins",
        ("delay",),
        in_step("cache_look", "ARGV[6] ~= '0' and redis.pcall", "false and redis.pcall"),
    ),
    "a_refused_value_that_is_shared_all_the_same": (
        "VI, at odd times",
        "InvalidationWins",
        ("lost_reply",),
        in_python(Computation, "_finish", "elif stored:", "else:"),
    ),
    "a_value_for_a_task_that_asks_after_it_was_read": (
        "RVD",
        "InvalidationWins",
        ("late_reply",),
        (
            *in_python(Search, "_send", _NUMBERED, ""),
            *in_python(Search, "_send", "    return reply\n", f"{_NUMBERED}    return reply\n"),
        ),
    ),
    "a_value_for_a_task_that_asks_after_it_was_stored": (
        "VD",
        "InvalidationWins",
        ("late_reply",),
        (
            *in_python(Computation, "_finish", _SERVED, ""),
            *in_python(Computation, "_finish", _STORED, f"{_STORED}{_SERVED}"),
        ),
    ),
    "a_failure_for_whoever_waits_whenever_it_was": (
        "RFL",
        "FailureShared",
        (),
        in_step("cache_look", "tonumber(ARGV[5]) > 0 and tonumber(at) > tonumber(ARGV[5])", "tonumber(ARGV[5]) > 0"),
    ),
    "a_failure_for_all_of_a_process": (
        "VF",
        "FailureShared",
        ("lost_reply",),
        in_python(Search, "look", "now - ago_us / 1e6", "_NEVER"),
    ),
    "a_store_that_wakes_nobody": (
        "RR",
        "NoLostWakeup",
        (),
        in_step("cache_store", "redis.call('DEL', KEYS[2])\nnotify_all()", "redis.call('DEL', KEYS[2])"),
    ),
    "an_invalidation_that_wakes_nobody": (
        "RRD",
        "NoLostWakeup",
        (),
        in_step("cache_drop", "notify_all()\nreturn", "return"),
    ),
    "a_waiter_that_trusts_its_bell": (
        "RR",
        "NoLostWakeup",
        ("lost_reply",),
        in_python(Search, "look", "Pause(pause_for(hold.token, channel, waiter.attempt, left_ms))", "Pause(5.0)"),
    ),
    "a_lost_turn_that_is_waited_for": (
        "VI",
        "NoLostWakeup",
        (),
        in_python(CompleteOnLoss, "wake", "if not self._shared_call.completed:", "if False:"),
    ),
    "a_claim_without_an_end": (
        "RR",
        "NoOrphan",
        ("crash",),
        in_step(
            "cache_look", "redis.pcall('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])", "redis.pcall('SET', KEYS[2], ARGV[1])"
        ),
    ),
    "a_value_without_an_end": (
        "RR",
        "NoOrphan",
        (),
        in_step("cache_store", "    redis.call('PEXPIRE', KEYS[1], ARGV[5])\n", ""),
    ),
    "waiters_without_an_end": (
        "RR",
        "NoOrphan",
        ("crash", "cancel"),
        in_step("cache_look", "  redis.call('PEXPIRE', KEYS[3], 5000)\n", ""),
    ),
    "a_cancelled_computation_that_keeps_its_claim": (
        "RR",
        "AcquireTotality",
        ("cancel",),
        in_step(
            "cache_store",
            "redis.call('DEL', KEYS[2])\n",
            "if ARGV[2] ~= 'nothing' then redis.call('DEL', KEYS[2]) end\n",
        ),
    ),
    "a_tombstone_that_is_ignored": (
        "RR",
        "AcquireTotality",
        ("delay", "cancel"),
        in_step("cache_look", "if not owner and redis.call('EXISTS', KEYS[5]) == 1 then", "if false then"),
    ),
    "a_request_in_doubt_that_is_forgotten_once_there_is_a_value": (
        "RRD",
        "AcquireTotality",
        ("delay",),
        in_python(Search, "_end", "if hold.outcome_unknown:  #", "if False:  #"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cast, invariant, kinds, mistake = MISTAKES[name]
    plant(mistake, monkeypatch)
    explorer = Explorer(SMALL[cast], invariants=[invariant], stop_at=[invariant])
    explorer.search(len(kinds), kinds, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    assert tell(found.config, found.choices, invariant)[-1].violation, "and it can be told"


@pytest.mark.long
@pytest.mark.parametrize(("cast", "kinds"), sorted({(cast, kinds) for cast, _, kinds, _ in MISTAKES.values()}), ids=str)
def test_without_a_mistake_the_same_search_finds_nothing(cast: str, kinds: tuple[str, ...]) -> None:
    explorer = Explorer(SMALL[cast], invariants=JUDGED)
    explorer.search(len(kinds), kinds, states=MOST_STATES)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    searched_for = {invariant for where, invariant, by, _ in MISTAKES.values() if (where, by) == (cast, kinds)}
    assert searched_for <= explorer.known, "it holds, and not only because nothing was said about it"


def test_every_invariant_catches_something() -> None:
    assert {invariant for _, invariant, _, _ in MISTAKES.values()} == {*JUDGED}
    assert all(check.meaning for check in CACHE_CHECKS.values())
    assert CACHE_CHECKS.keys() < {*JUDGED}


def made(*events: tuple[int, str, str]) -> list[Event]:
    return [Event(place, client, kind, what=what) for place, (client, kind, what) in enumerate(events)]


CHANGED: Final = [(2, "changes", ""), (2, "executed", "cache_drop"), (2, "invalidated", "")]
A1: Final = (0, "computes", "A1")
B1: Final = (1, "computes", "B1")


@pytest.mark.parametrize(
    ("invariant", "history", "verdict"),
    [
        ("OneComputes", [], UNKNOWN),
        ("OneComputes", made((0, "granted", "")), HOLDS),
        ("OneComputes", made((0, "granted", ""), (1, "granted", "")), BROKEN),
        ("OneComputes", made((0, "granted", ""), (0, "leaves", ""), (1, "granted", "")), HOLDS),
        ("OneComputes", made((0, "granted", ""), *CHANGED, (1, "granted", "")), HOLDS),
        ("NewerStays", [], UNKNOWN),
        ("NewerStays", made(A1, (NOBODY, "stored", "A1"), B1, (NOBODY, "stored", "B1")), HOLDS),
        ("NewerStays", made(A1, B1, (NOBODY, "stored", "B1"), (NOBODY, "stored", "A1")), BROKEN),
        ("InvalidationWins", made(A1), UNKNOWN),
        ("InvalidationWins", made(A1, (0, "asks", "1"), *CHANGED, (0, "gets", "1 A1")), HOLDS),
        ("InvalidationWins", made(A1, *CHANGED, (1, "asks", "1"), (1, "gets", "1 A1")), BROKEN),
        ("InvalidationWins", made(A1, *CHANGED, (1, "asks", "1"), (1, "fails", "1 A1")), BROKEN),
        ("InvalidationWins", made(A1, *CHANGED, (NOBODY, "stored", "A1")), BROKEN),
        ("InvalidationWins", made(CHANGED[0], A1, *CHANGED[1:], (1, "asks", "1"), (1, "gets", "1 A1")), HOLDS),
        ("FailureShared", made(A1), UNKNOWN),
        (
            "FailureShared",
            made(A1, (1, "asks", "1"), (0, "executed", "cache_store t failure x"), (1, "fails", "1 A1")),
            HOLDS,
        ),
        (
            "FailureShared",
            made(A1, (0, "executed", "cache_store t failure x"), (1, "asks", "1"), (1, "fails", "1 A1")),
            BROKEN,
        ),
    ],
    ids=str,
)
def test_the_invariants_on_histories_made_by_hand(invariant: str, history: list[Any], verdict: str) -> None:
    assert CACHE_CHECKS[invariant].judge(history).verdict == verdict
