"""Semaphores and readers-writer locks, searched: three clients, two faults, and mistakes planted to see that it looks.

The searches here are cut off after some thousand states, breadth first, and go on as walks of chance; ``python -m
benchmarks.lab`` is for those with more time.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Event
from holdfast.lab.invariants.locks import POOL_CHECKS
from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from tests.lab.mutations import Mistake, in_step, plant

JUDGED: Final = (
    *("PermitCount", "ModeExclusion", "NoFalseHold", "NoOrphan"),
    *("NoLostWakeup", "FenceMonotone", "AcquireTotality"),
)
# What can befall a client or a message. A server that loses what it has acknowledged is another matter.
KINDS: Final = ("crash", "stall", "pause", "lost_request", "lost_reply", "delay", "cancel")
CASTS: Final[dict[str, Config]] = {
    "semaphore of 2": semaphore_config(2, kinds=KINDS),
    "RWR": rwlock_config("RWR", kinds=KINDS),
    "WRW": rwlock_config("WRW", kinds=KINDS),
    "WRR": rwlock_config("WRR", kinds=KINDS),
    # The same, with less patience: who could come in does so at once, or at its next refresh.
    "RWR, prompt": rwlock_config("RWR", kinds=KINDS, idle_us_per_fault=0),
    "RW, soon": rwlock_config("RW", kinds=KINDS, idle_us_per_fault=500_000),
}
MOST_STATES: Final = 15_000
LET_IN: Final = "pool_acquire pool_release pool_abandon pool_renew pool_share"  # with include/pool.lua


def about(cast: str) -> str:
    return "PermitCount" if cast.startswith("semaphore") else "ModeExclusion"


@pytest.mark.long
@pytest.mark.parametrize("cast", [cast for cast in CASTS if "," not in cast])
def test_nothing_breaks(cast: str) -> None:
    explorer = Explorer(CASTS[cast], invariants=JUDGED)
    assert explorer.search(0, KINDS), "without faults all of it is searched"
    explorer.search(1, KINDS, states=4_000)
    explorer.search(2, KINDS, states=10_000)
    for seed in range(40):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*JUDGED} - {"PermitCount", "ModeExclusion"} | {about(cast)}
    assert explorer.states > 10_000


MISTAKES: Final[dict[str, tuple[str, str, tuple[str, ...], Mistake]]] = {
    "one_permit_too_many": (
        "semaphore of 2",
        "PermitCount",
        (),
        in_step(LET_IN, "holders >= tonumber(string.sub(mode, 2))", "holders > tonumber(string.sub(mode, 2))"),
    ),
    "the_same_slot_for_all": (
        "semaphore of 2",
        "PermitCount",
        (),
        in_step(LET_IN, "mode == 'any' and READER or lowest_free_slot()", "0"),
    ),
    "a_reader_that_does_not_look_for_a_writer": (
        "WRR",
        "ModeExclusion",
        (),
        in_step(LET_IN, "return lowest_slot(holders) ~= WRITER", "return true"),
    ),
    "a_writer_that_does_not_look_for_readers": (
        "RWR",
        "ModeExclusion",
        (),
        in_step(LET_IN, "if mode == 'all' or (mode ~= 'any' and holders", "if (#mode < 3 and holders"),
    ),
    "a_release_that_lets_nobody_in": (
        "WRR",
        "NoLostWakeup",
        (),
        in_step("pool_release", "remove_ended()\nadmit_waiters()\n", "remove_ended()\n"),
    ),
    "a_writer_that_gives_up_and_lets_nobody_in": (
        "RWR, prompt",
        "NoLostWakeup",
        ("cancel",),
        in_step("pool_abandon", "  admit_waiters()\n", ""),
    ),
    "leases_that_never_end": (
        "RW, soon",
        "NoLostWakeup",
        ("crash",),
        in_step(LET_IN, "elseif ends > now then", "elseif true then"),
    ),
    "a_tombstone_that_is_ignored": (
        "RWR",
        "AcquireTotality",
        ("delay", "cancel"),
        in_step("pool_acquire", "if redis.call('EXISTS', KEYS[5]) == 1 then", "if false then"),
    ),
    "a_grant_with_the_last_fence": (
        "WRR",
        "FenceMonotone",
        (),
        in_step(
            LET_IN,
            "          local fence = mint(token, last, '1', retention_ms)",
            "          local fence = last and string.format('%.0f', last) or now_us",
        ),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cast, invariant, kinds, mistake = MISTAKES[name]
    plant(mistake, monkeypatch)
    explorer = Explorer(CASTS[cast], invariants=JUDGED, stop_at=(invariant,))
    explorer.search(min(2, len(kinds)), kinds, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    assert tell(found.config, found.choices, invariant)[-1].violation, "and it can be told"


@pytest.mark.long
@pytest.mark.parametrize(("cast", "kinds"), sorted({(cast, kinds) for cast, _, kinds, _ in MISTAKES.values()}), ids=str)
def test_without_a_mistake_the_same_search_finds_nothing(cast: str, kinds: tuple[str, ...]) -> None:
    explorer = Explorer(CASTS[cast], invariants=JUDGED)
    explorer.search(min(2, len(kinds)), kinds, states=MOST_STATES)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}


def grant(at_us: int, client: int, what: str, until_us: int | None = None) -> Event:
    return Event(at_us, client, "granted", what=what, until_us=until_us)


def leaves(at_us: int, client: int) -> Event:
    return Event(at_us, client, "leaves")


@pytest.mark.parametrize(
    ("invariant", "history", "verdict"),
    [
        ("PermitCount", [], UNKNOWN),
        ("PermitCount", [grant(1, 0, "read")], UNKNOWN),
        ("PermitCount", [grant(1, 0, "permit 0 of 2"), grant(2, 1, "permit 1 of 2")], HOLDS),
        ("PermitCount", [grant(1, 0, "permit 0 of 2"), grant(2, 1, "permit 0 of 2")], BROKEN),
        ("PermitCount", [grant(1, 0, "permit 0 of 1"), grant(2, 1, "permit 1 of 1")], BROKEN),
        ("PermitCount", [grant(1, 0, "permit 0 of 1"), leaves(2, 0), grant(3, 1, "permit 0 of 1")], HOLDS),
        ("PermitCount", [grant(1, 0, "permit 0 of 1", until_us=2), grant(2, 1, "permit 0 of 1")], HOLDS),
        ("PermitCount", [grant(1, 0, "permit 0 of 1", until_us=3), grant(2, 1, "permit 0 of 1")], BROKEN),
        ("ModeExclusion", [grant(1, 0, "permit 0 of 1")], UNKNOWN),
        ("ModeExclusion", [grant(1, 0, "read"), grant(2, 1, "read")], HOLDS),
        ("ModeExclusion", [grant(1, 0, "read"), grant(2, 1, "write")], BROKEN),
        ("ModeExclusion", [grant(1, 0, "write"), grant(2, 1, "read")], BROKEN),
        ("ModeExclusion", [grant(1, 0, "write"), leaves(2, 0), grant(3, 1, "read")], HOLDS),
        (
            "ModeExclusion",
            [grant(1, 0, "write", 2), grant(3, 1, "read", 9), Event(4, 0, "extended", until_us=8)],
            BROKEN,
        ),
    ],
    ids=str,
)
def test_the_invariants_on_histories_made_by_hand(invariant: str, history: list[Any], verdict: str) -> None:
    assert POOL_CHECKS[invariant].judge(history).verdict == verdict
