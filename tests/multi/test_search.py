"""The search: three clients that want several names or one, and up to two faults.

Where all of them share the name b, what holds for one lock must hold as it is.
"""

from __future__ import annotations

import pytest

from holdfast.lab.invariants.locks import CHECKS
from holdfast.lab.invariants.several import SEVERAL_CHECKS as SEVERAL_PROMISES
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.subjects.several import several_config
from holdfast.protocol.wait.notifications import NotificationRouter
from tests.lab.mutations import in_python, in_step, plant

FAULTS = ("crash", "pause", "lost_request", "lost_reply", "delay", "cancel")
INVARIANTS = [name for name in CHECKS if name != "Fifo"]  # ArrivalOrder in its place: a waiter changes its queue
BESIDE = (*SEVERAL_PROMISES, "NoFalseHold", "NoOrphan", "NoLostWakeup", "AcquireTotality")


def invariants_of(wants: tuple[str, ...]) -> tuple[str, ...]:
    return (*INVARIANTS, *SEVERAL_PROMISES) if all("b" in names for names in wants) else BESIDE


def search(wants: tuple[str, ...], most_faults: int, states: int) -> Explorer:
    """With ever more faults, until so many states were met."""
    judged = invariants_of(wants)
    explorer = Explorer(several_config(*wants, kinds=FAULTS), invariants=judged, stop_at=judged)
    for faults in range(most_faults + 1):
        explorer.search(faults, FAULTS, states=states * (faults + 1) // (most_faults + 1))
    return explorer


CROWDS = [("ab", "ba"), ("b", "ab"), ("ab", "bc"), ("ab", "ba", "b"), ("b", "ab", "bc"), ("abc", "b", "ba")]
SIDE_BY_SIDE = [("ab", "a", "b"), ("abc", "ba", "c"), ("ab", "bc", "ca")]


@pytest.mark.long
@pytest.mark.parametrize("wants", [*CROWDS, *SIDE_BY_SIDE], ids="-".join)
def test_nothing_is_broken(wants: tuple[str, ...]) -> None:
    explorer = search(wants, 2, 9_000)
    assert not explorer.broken, explorer.broken
    assert {*invariants_of(wants)} == explorer.known
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
        in_step("multi_acquire", "if redis.call('EXISTS', all_keys(5)) > 0 then", "if false then"),
    ),
    "only the first name counts": (
        "MutualExclusion",
        in_step("multi_acquire", "may[name] = may_have(name, not", "may[name] = name > 1 or may_have(name, not"),
    ),
    "nobody is woken": (
        "NoLostWakeup",
        # Neither by a bell nor by having the name watched.
        in_step("multi_release", "free_or_grant(first_waiter())", "")
        + in_python(NotificationRouter, "touched", "if waiter is not None:", "if False:"),
    ),
    "the fences of the names are not looked at": (
        "FenceMonotone",
        in_step("multi_acquire", "last > (greatest or 0)", "false"),
    ),
    "an abandoned place stays in the queue": (
        "AcquireTotality",
        in_step("multi_abandon", "    remove_waiter(ARGV[1])\n", ""),
    ),
}


@pytest.mark.long
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


MUTEX_STEPS = "acquire release abandon present multi_acquire multi_release multi_abandon"  # with grant.lua in them
NEVER_GIVES_WAY = in_step(
    MUTEX_STEPS,
    "local function gives_way(owner, front, token)\n  if owner == front then",
    """
local function gives_way(owner, front, token)
  if true then
    return false
  elseif owner == front then""",
) + in_step("multi_acquire", "return mine > 0 and (mine < score", "return false and (mine < score")

# Mistakes about names that are kept: what finds each of them, and who has to be there.
MISTAKES_IN_KEEPING = {
    "struck off in one queue, it keeps its place in the others": (
        ("NoLostWakeup", "ArrivalOrder"),
        ("ab", "ab", "ab"),
        in_step("multi_acquire", "if in_all and not stands_in_all then", "if false then")
        + in_step("multi_acquire", "mine > 0 and string.format('%.0f', mine) or arrival(), token)", "arrival(), token)")
        + in_step(
            "multi_acquire",
            "  return mine > 0 and",
            """
  local mine = tonumber(redis.call('ZSCORE', KEYS[3], token) or mine)
  return mine > 0 and""",
        ),
    ),
    "a kept name never gives way": (("AllOrNone", "NoLostWakeup"), ("ab", "ba", "a"), NEVER_GIVES_WAY),
    "a kept name outlasts its waiter": (
        ("NoOrphan", "NoLostWakeup"),
        ("ab", "ba"),
        NEVER_GIVES_WAY + in_step(MUTEX_STEPS, "KEPT_MS = 1500", "KEPT_MS = 60000"),
    ),
    "what is kept counts as all": (
        ("NameExclusion",),
        ("ab", "ba"),
        in_step(
            "multi_acquire",
            "if not refused_at then\n  return take_all()",
            "if not refused_at or in_all then\n  return take_all()",
        ),
    ),
    "one name is granted without the others": (
        ("AllOrNone",),
        ("ab", "ba", "b"),
        in_step("acquire release abandon", "elseif fences == '0' or fences == '00' then", "elseif false then"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES_IN_KEEPING)
def test_a_mistake_about_kept_names_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariants, wants, text = MISTAKES_IN_KEEPING[mistake]
    plant(text, monkeypatch)
    kinds = (*FAULTS, "stall")
    explorer = Explorer(several_config(*wants, kinds=kinds), invariants=invariants, stop_at=invariants)
    for faults in (0, 1, 2):
        explorer.search(faults, kinds, states=40_000)
        if explorer.broken:
            return
    for seed in range(400):
        explorer.walk(seed, most_faults=2)
        if explorer.broken:
            return
    raise AssertionError(f"{' and '.join(invariants)} hold all the same")
