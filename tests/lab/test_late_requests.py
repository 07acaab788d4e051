"""Late requests: a request whose sender has given it up arrives at any later time, once, and does no harm."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import pytest

from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.model import Model
from holdfast.lab.search.state import under_way
from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.subjects.late import LATE_REQUESTS, missing
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.lab.subjects.rows import fenced_config
from holdfast.lab.surveys.primitives import Tried
from tests.lab.mutations import MISTAKES as OF_LOCKS
from tests.lab.mutations import Mistake, in_step, plant

MOST_STATES: Final = 60_000
# Rows that have every step between them.
COVERING: Final = (
    *("lock:give_up", "several:give_up", "semaphore:give_up", "lock:to_and_fro", "several:to_and_fro"),
    *("semaphore:to_and_fro", "leave", "leave:semaphore", "fences", "downgrade:read", "crowd", "cache", "latch"),
    *("break", "break:semaphore", "break:cache", "slots", "etcd:lock:give_up", "etcd:several:give_up"),
    *("etcd:semaphore:give_up", "etcd:lock:hand_over", "etcd:several:hand_over", "etcd:semaphore:hand_over"),
    *("etcd:downgrade:read", "etcd:crowd", "etcd:latch", "etcd:break", "etcd:break:semaphore"),
    "memcached",
)


def explorer_of(row: str, *invariants: str) -> Explorer:
    primitive = LATE_REQUESTS[row]
    return Explorer(
        primitive.config(kinds=primitive.kinds), invariants=invariants or primitive.invariants, stop_at=invariants
    )


def test_every_row_of_the_primitives_has_one_with_late_requests() -> None:
    assert {f"late:{row}" for row in PRIMITIVES} < {*LATE_REQUESTS}
    for row in LATE_REQUESTS.values():
        config = row.config(kinds=row.kinds)
        assert (config.clients, config.first) == (2, "delay")


def test_the_first_fault_is_a_late_request_and_the_second_of_any_kind() -> None:
    row = LATE_REQUESTS["late:lock"]
    model = Model(row.config(kinds=row.kinds))
    state, _ = model.after(model.first(), ("come", 0))
    faults = [choice for choice in model.moves(state) if choice[0] == "fault"]
    assert {choice[1] for choice in faults} == {"delay"}
    state, _ = model.after(state, faults[0])
    assert {"crash", "pause", "cancel"} <= {choice[1] for choice in model.moves(state) if choice[0] == "fault"}
    assert model.delayed == {"acquire": 1}


def test_a_late_request_arrives_only_if_it_changes_anything() -> None:
    model = Model(fenced_config(clients=1, kinds=("delay",), most_faults=1))
    state, _ = model.after(model.first(), ("come", 0))
    acquire = next(choice for choice in model.moves(state) if choice[:2] == ("fault", "delay"))
    state, _ = model.after(state, acquire)
    arrives = ("deliver", "ghost", 0, 0)
    assert arrives in model.moves(state), "the lock is free"
    while model.locals[state.locals[0]].stage != "leaves":  # it sends the same again, is granted the lock, and leaves
        choices = [choice for choice in model.moves(state) if choice != arrives]
        state, _ = model.after(state, next((choice for choice in choices if choice[0] == "leave"), choices[0]))
    while model.locals[state.locals[0]].stage == "leaves":
        state, _ = model.after(state, model.moves(state)[0])
    assert [item.kind for _, item in under_way(state)] == ["ghost"]
    after, events = model.after(state, arrives)
    assert after.store == state.store, "its token was abandoned"
    assert [event.kind for event in events] == ["newcomer"], "which is the reason why it arrives after all"


def test_nothing_is_missed_by_leaving_out_what_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(OF_LOCKS["renew_without_compare"], monkeypatch)
    config = fenced_config(clients=2, kinds=("delay",), leaves_us=AT_ONCE, horizon_us=3_000_000)
    fewer = Explorer(config)
    assert fewer.search(1)
    monkeypatch.setattr(Model, "_matters", lambda model, state, ghost: True)
    more = Explorer(config)
    assert more.search(1)
    assert fewer.hashes < more.hashes
    assert fewer.broken.keys() == more.broken.keys() != set()
    assert fewer.known == more.known


def late_in(row: str, most_states: int = 1_500) -> Counter[str]:
    """The steps that can be late in runs of that row without another fault."""
    primitive = LATE_REQUESTS[row]
    model = Model(primitive.config(kinds=primitive.kinds, most_faults=1))
    seen = {model.first()}
    todo = deque(seen)
    while todo and len(seen) < most_states:
        state = todo.popleft()
        for choice in model.moves(state):
            after, _ = model.after(state, choice)
            if choice[0] != "fault" and after not in seen:
                seen.add(after)
                todo.append(after)
    return model.delayed


def test_every_step_that_changes_anything_is_late_in_some_row() -> None:
    was_late: Counter[str] = Counter()
    for row in COVERING:
        was_late.update(late_in(f"late:{row}"))
    lacking = {engine: steps for engine, (_, steps) in missing(was_late).items()}
    assert not any(lacking.values()), lacking


@pytest.mark.parametrize(
    ("explored", "verdict", "passed", "said"),
    [
        (0, "holds", False, "complete without faults, one more fault in part"),
        (1, "unknown", True, "complete with a late request, one more fault in part"),
        (2, "holds", True, "complete with a late request and one more fault"),
        (2, "broken", False, "complete with a late request and one more fault"),
    ],
)
def test_how_far_it_came(explored: int, verdict: str, passed: bool, said: str) -> None:
    tried = Tried("late:lock", 2, 1234, explored, {"NoOrphan": verdict}, (), delayed={"renew": 2, "acquire": 3})  # type: ignore[dict-item]
    assert tried.heading == f"late:lock, 2 clients: 1,234 states; {said}"
    assert "  late: acquire 3, renew 2" in tried.details
    assert tried.is_passed == passed


@pytest.mark.long
@pytest.mark.parametrize("row", LATE_REQUESTS)
def test_nothing_breaks(row: str) -> None:
    explorer = explorer_of(row)
    for most_faults, states in enumerate((1_000, 4_000, 5_000)):
        explorer.search(most_faults, states=states)
    for seed in range(10):
        explorer.walk(seed, most_faults=2)
    broken = {name: broken.why for name, broken in explorer.broken.items()}
    assert not broken.keys() - {*LATE_REQUESTS[row].limits}, broken


_COMPARED: Final = "if owner ~= ARGV[1] then\n  return owner and -1 or 0\nend\n"
_IS_THERE: Final = "if not owner then\n  return 0\nend\n"

# The row, what finds it, and the mistake. One late request is enough for each.
MISTAKES: Final[dict[str, tuple[str, str, Mistake]]] = {
    "a late release of an earlier hold": ("lock:again", "OwnerOnlyRelease", OF_LOCKS["release_without_compare"]),
    "a late renewal of an earlier hold": ("lock", "OwnerOnlyStretch", OF_LOCKS["renew_without_compare"]),
    "a late clean-up": ("lock:give_up", "OwnerOnlyRelease", OF_LOCKS["abandon_without_compare"]),
    "a late hand-over of what was adopted": (
        "lock:to_and_fro",
        "OwnerOnlyStretch",
        in_step("hand_over", _COMPARED, _IS_THERE),
    ),
    "a late step back into a free time": (
        "leave",
        "OwnerOnlyStretch",
        in_step("multi_leave", "if owner ~= ARGV[1] then", "if not owner then"),
    ),
    "a late roll-back that frees what a later try was granted": (
        "slots",
        "NameExclusion",
        in_step("multi_roll_back", "or fence == ARGV[2]", "or ARGV[2] ~= ''"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, invariant, texts = MISTAKES[mistake]
    plant(texts, monkeypatch)
    explorer = explorer_of(f"late:{row}", invariant)
    explorer.search(1, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    assert "delay" in {choice[1] for choice in found.choices if choice[0] == "fault"}
    assert tell(found.config, found.choices, invariant)[-1].violation
