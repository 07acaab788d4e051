"""Handing over, searched: three clients, two faults, and mistakes planted to see that it looks.

The searches here are cut off after some thousand states, breadth first, and go on as walks of chance; ``python -m
benchmarks.lab`` is for those with more time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.subjects.handover import handover_config
from holdfast.lab.subjects.pools import rwlock_config, semaphore_config
from holdfast.lab.subjects.primitives import DAILY_KINDS, PRIMITIVES
from holdfast.lab.subjects.several import several_config
from holdfast.protocol.kinds import handover
from tests.lab.mutations import Mistake, in_python, in_step, plant

LOCK: Final = PRIMITIVES["hand_over"].invariants
PERMIT: Final = PRIMITIVES["hand_over:semaphore"].invariants
WRITE: Final = PRIMITIVES["hand_over:write"].invariants
MOST_STATES: Final = 60_000
# Those of ``python -m benchmarks.lab``, and some in which a mistake is found sooner.
ROWS: Final[dict[str, tuple[Callable[..., Config], tuple[str, ...]]]] = {
    **{name: row[:2] for name, row in PRIMITIVES.items() if name.startswith("hand_over")},
    "short ttl": (partial(handover_config, ttl=1.0, leaves_us=((0, 0),)), LOCK),
    "hand to hand": (partial(handover_config, roles="bbb", cohort=0), LOCK),
    "race for several": (partial(handover_config, partial(several_config, "ab", "ba", "ab"), "gtt"), LOCK),
    "race for a permit": (partial(handover_config, partial(semaphore_config, 1), "gtt"), PERMIT),
    "race of writers": (partial(handover_config, partial(rwlock_config, "WWW"), "gtt"), WRITE),
}


def explorer_of(row: str, stop_at: str = "") -> Explorer:
    make, invariants = ROWS[row]
    config = make(kinds=DAILY_KINDS)
    return Explorer(config, invariants=invariants, stop_at=[stop_at] if stop_at else invariants)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_nothing_breaks(row: str) -> None:
    explorer = explorer_of(row)
    for most_faults, states in enumerate((800, 2_000, 3_500)):
        explorer.search(most_faults, DAILY_KINDS, states=states)
    for seed in range(15):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*ROWS[row][1]}


# Where it is planted, what finds it, by which faults, and the mistake.
MISTAKES: Final[dict[str, tuple[str, str, tuple[str, ...], Mistake]]] = {
    "taken_from_whoever_has_it": (
        "hand_over:race",
        "OwnerOnlyRelease",
        (),
        (
            *in_step("adopt", "if owner ~= ARGV[1] and owner ~= ARGV[4] then", "if not owner then"),
            *in_step("adopt", "if owner == ARGV[4] then", "if owner ~= ARGV[1] then"),
        ),
    ),
    "the_last_fence_once_more": (
        "hand to hand",
        "FenceMonotone",
        (),
        in_step("adopt", "return mint(ARGV[1], last, '1', ARGV[3])", "return string.format('%.0f', last)"),
    ),
    "adopted_without_a_ttl": (
        "hand_over",
        "NoOrphan",
        ("crash",),
        in_step("adopt", "redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])", "redis.call('SET', KEYS[1], ARGV[1])"),
    ),
    "an_adoption_given_up_that_arrives_late": (
        "hand_over",
        "AcquireTotality",
        ("delay", "cancel"),
        in_step("adopt", "if redis.call('EXISTS', KEYS[3]) == 1 then", "if false then"),
    ),
    "an_adoption_that_is_not_cleaned_up": (
        "hand_over",
        "AcquireTotality",
        ("delay", "cancel"),
        in_python(handover, "_adopt", "if not mutex.is_settled(hold):", "if False:"),
    ),
    "validity_counted_from_the_reply": (
        "short ttl",
        "MutualExclusion",
        ("pause",),
        in_python(
            handover,
            "_swap",
            "hold.grant(reply.fence, asked_at, reply.slot)",
            "hold.grant(reply.fence, (yield from clock()))",
        ),
    ),
    "several_taken_from_whoever_has_them": (
        "race for several",
        "OwnerOnlyRelease",
        (),
        (
            *in_step("multi_adopt", "if found ~= 1 then", "if found == 0 then"),
            *in_step("multi_adopt", "redis.call('GET', KEYS[1]) == ARGV[4]", "redis.call('GET', KEYS[1]) ~= ARGV[1]"),
        ),
    ),
    "the_fences_of_the_names_are_not_looked_at": (
        "hand_over:several",
        "FenceMonotone",
        (),
        in_step("multi_adopt", "last > (greatest or 0)", "false"),
    ),
    "several_given_up_that_arrive_late": (
        "hand_over:several",
        "AcquireTotality",
        ("delay", "cancel"),
        in_step("multi_adopt", "if redis.call('EXISTS', all_keys(5)) > 0 then", "if false then"),
    ),
    "another_slot": (
        "hand_over:semaphore",
        "PermitCount",
        (),
        in_step("pool_adopt", "  slot = theirs", "  slot = theirs and 0"),
    ),
    "a_permit_that_nobody_has_given": (
        "race for a permit",
        "PermitCount",
        (),
        in_step("pool_adopt", "if slot then\n  if", "slot = slot or 0\nif slot then\n  if"),
    ),
    "a_writing_that_nobody_has_given": (
        "race of writers",
        "ModeExclusion",
        (),
        in_step("pool_adopt", "if slot then\n  if", "slot = slot or WRITER\nif slot then\n  if"),
    ),
    "others_are_let_in_beside_a_writer": (
        "hand_over:write",
        "ModeExclusion",
        (),
        in_step("pool_adopt", "slot == WRITER and ARGV[5] ~= 'all'", "slot == WRITER"),
    ),
    "the_fence_of_the_room_once_more": (
        "hand_over:read",
        "FenceMonotone",
        (),
        in_step("pool_adopt", "renew_fence(ARGV[1], ARGV[3])", "string.format('%.0f', last)"),
    ),
    "a_place_given_up_that_arrives_late": (
        "hand_over:read",
        "AcquireTotality",
        ("delay", "cancel"),
        in_step("pool_adopt", "if redis.call('EXISTS', KEYS[5]) == 1 then", "if false then"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, invariant, kinds, mistake = MISTAKES[name]
    plant(mistake, monkeypatch)
    explorer = explorer_of(row, invariant)
    explorer.search(len(kinds), kinds, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    assert tell(found.config, found.choices, invariant)[-1].violation, "and it can be told"


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "kinds"), sorted({(row, kinds) for row, _, kinds, _ in MISTAKES.values() if kinds}), ids=str
)
def test_without_a_mistake_the_same_search_finds_nothing(row: str, kinds: tuple[str, ...]) -> None:
    explorer = explorer_of(row)
    explorer.search(len(kinds), kinds, states=5_000)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
