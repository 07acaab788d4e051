"""A break, searched: two clients, an operator, two faults; and mistakes planted to see that the search finds them."""

from __future__ import annotations

from typing import Final

import pytest

from holdfast.lab.search.explorer import Explorer
from holdfast.lab.subjects.breaking import breaking_config
from holdfast.lab.subjects.primitives import DAILY_KINDS, PRIMITIVES
from tests.lab.mutations import Mistake, in_step, plant

INVARIANTS: Final = PRIMITIVES["break"].invariants


@pytest.mark.long
def test_nothing_but_mutual_exclusion_is_given_up() -> None:
    explorer = Explorer(breaking_config(kinds=DAILY_KINDS), invariants=INVARIANTS, stop_at=INVARIANTS)
    for most_faults, states in enumerate((1_500, 4_000, 6_000)):
        explorer.search(most_faults, DAILY_KINDS, states=states)
    for seed in range(15):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*INVARIANTS}


def test_mutual_exclusion_is_given_up_for_a_holder_that_does_not_notice() -> None:
    """As the page says. If this changes, the page must, too."""
    explorer = Explorer(breaking_config(kinds=DAILY_KINDS), invariants=["MutualExclusion"], stop_at=["MutualExclusion"])
    explorer.search(0, DAILY_KINDS, states=2_000)
    assert set(explorer.broken) == {"MutualExclusion"}


MINTED: Final = "local raised = mint('00000000', last, '1', string.format('%.0f', retention_ms))"
MISTAKES: Final[dict[str, tuple[str, Mistake]]] = {
    "the_fences_are_forgotten": (
        "FenceMonotone",
        in_step("break_lock", MINTED, "local raised = '1' redis.call('DEL', KEYS[2])"),
    ),
    "the_fences_have_no_ttl": (
        "NoOrphan",
        in_step("break_lock", MINTED, "local raised = now_us redis.call('SET', KEYS[2], now_us .. ' 1 00000000')"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, mistake = MISTAKES[name]
    plant(mistake, monkeypatch)
    explorer = Explorer(breaking_config(kinds=()), invariants=INVARIANTS, stop_at=[invariant])
    explorer.search(0, (), states=30_000)
    assert invariant in explorer.broken
