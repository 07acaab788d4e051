"""The search: three clients who all want the name b, some of them with others, and up to two faults.

As all of them share one name, what holds for one lock must hold here as it is.
"""

from __future__ import annotations

import pytest

from holdfast.lab.check import CHECKS
from holdfast.lab.explorer import Explorer
from holdfast.lab.several import several_config
from holdfast.protocol.bells import Switchboard
from tests.lab.mutations import in_python, in_step, plant

FAULTS = ("crash", "pause", "lost_request", "lost_reply", "delay", "cancel")
INVARIANTS = [name for name in CHECKS if name != "Fifo"]  # who is refused by another name waits there instead


def search(wants: tuple[str, ...], most_faults: int, states: int) -> Explorer:
    """With ever more faults, until so many states were met."""
    explorer = Explorer(several_config(*wants, kinds=FAULTS), invariants=INVARIANTS, stop_at=INVARIANTS)
    for faults in range(most_faults + 1):
        explorer.search(faults, FAULTS, states=states * (faults + 1) // (most_faults + 1))
    return explorer


CROWDS = [("ab", "ba"), ("b", "ab"), ("ab", "bc"), ("ab", "ba", "b"), ("b", "ab", "bc"), ("abc", "b", "ba")]


@pytest.mark.parametrize("wants", CROWDS, ids="-".join)
def test_nothing_is_broken(wants: tuple[str, ...]) -> None:
    explorer = search(wants, 2, 9_000)
    assert not explorer.broken, explorer.broken
    assert {*INVARIANTS} == explorer.known
    assert len(explorer.hashes) > 6_000


# A mistake in a step, and one of the invariants that it breaks.
MISTAKES = {
    "release without compare": (
        "OwnerOnlyRelease",
        in_step("multi_release", "if owner == ARGV[1] then", "if owner then"),
    ),
    "renew without compare": ("OwnerOnlyStretch", in_step("multi_renew", "if found ~= 1 then", "if false then")),
    "acquire ignores tombstones": (
        "AcquireTotality",
        in_step("multi_acquire", "if redis.call('EXISTS', each(5)) > 0 then", "if false then"),
    ),
    "only the first name counts": (
        "MutualExclusion",
        in_step("multi_acquire", "if name ~= waits_at and not may_have() then", "if name == 1 and not may_have() then"),
    ),
    "nobody is woken": (
        "NoLostWakeup",
        # Neither by a bell nor by having the name watched.
        in_step("multi_release", "pass_on(true)", "")
        + in_python(Switchboard, "touched", "if waiter is not None and waiter.bell is not None:", "if False:"),
    ),
    "the fences of the names are not looked at": (
        "FenceMonotone",
        in_step("multi_acquire", "tonumber(last) > tonumber(greatest or 0)", "false"),
    ),
    "an abandoned place stays in the queue": (
        "AcquireTotality",
        in_step("multi_abandon", "    strike_off(ARGV[1])\n", ""),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, text = MISTAKES[mistake]
    plant(text, monkeypatch)
    for states in (16_000, 60_000):
        for wants in CROWDS[:2]:
            explorer = Explorer(several_config(*wants, kinds=FAULTS), invariants=[invariant], stop_at=[invariant])
            for faults in (0, 1):
                explorer.search(faults, FAULTS, states=states)
            if explorer.broken:
                return
    raise AssertionError(f"{invariant} holds all the same")
