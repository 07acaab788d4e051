"""The lock on memcached, searched: two clients, two faults, on a model of memcached; and planted mistakes."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.subjects.memcached import Resumed, memcached_config
from holdfast.lab.subjects.primitives import PRIMITIVES
from holdfast.protocol import memcached
from tests.lab.mutations import Mistake, in_python, plant

ROWS: Final = tuple(row for row in PRIMITIVES if row.startswith("memcached"))
_TOKEN_COMPARED: Final = "        if found[0] != token.encode():\n            return TAKEN\n"
_RESUMED: Final = partial(memcached_config, Resumed, renew=False, stay_us=2_900_000, leaves_us=AT_ONCE)
_BRIEF: Final = partial(memcached_config, leaves_us=AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_nothing_breaks(row: str) -> None:
    primitive = PRIMITIVES[row]
    explorer = Explorer(primitive.config(kinds=primitive.kinds), invariants=primitive.invariants)
    for most_faults, states in enumerate((1_500, 10_000, 20_000)):
        explorer.search(most_faults, primitive.kinds, states=states)
    for seed in range(30):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*primitive.invariants}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["delay", "lost_reply", "late_reply", "duplicate"])
def test_each_message_fault_strikes_each_request_that_writes(kind: str) -> None:
    """No fault lets two in. A duplicate may leave an item behind; but a connection delivers a request once."""
    judged = ("MutualExclusion", "OwnerOnlyRelease", "OwnerOnlyStretch", "NoFalseHold")
    explorer = Explorer(_BRIEF(kinds=(kind,), stay_us=2_900_000), invariants=judged)
    struck: set[str] = set()
    model = explorer.model
    after = model.after

    def note(state: object, choice: tuple[object, ...]) -> object:
        if choice[:2] == ("fault", kind):
            _, _, client, number = choice
            requests = model.locals[state.locals[client]].requests  # type: ignore[attr-defined]
            struck.update(str(op.args[0]) for request in requests if request.number == number for op in request.ops)
        return after(state, choice)  # type: ignore[arg-type]

    model.after = note  # type: ignore[method-assign,assignment]
    explorer.search(1, (kind,), states=6_000)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert struck >= {"add", "cas", "md"}


# The lock and the faults that show it, what finds it, and the mistake.
MISTAKES: Final[dict[str, tuple[Config, str, Mistake]]] = {
    "an end that counts from the clock of a server that was stopped": (
        _RESUMED(kinds=()),
        "MutualExclusion",
        in_python(memcached, "end_of", "    reading = items.reading\n", "    return ceil(ttl) + 1\n"),
    ),
    "a clock that is read over a connection of old": (
        _RESUMED(kinds=()),
        "MutualExclusion",
        in_python(memcached, "end_of", '("clock",)', '("stats",)'),
    ),
    "a renewal of an item that is another holder's": (
        memcached_config(kinds=(), stay_us=2_900_000),
        "OwnerOnlyRelease",
        in_python(memcached, "renew", _TOKEN_COMPARED, ""),
    ),
    "a release of an item that is another holder's": (
        _BRIEF(kinds=("pause",)),
        "OwnerOnlyRelease",
        in_python(memcached, "release", _TOKEN_COMPARED, ""),
    ),
    "a release without the cas": (
        _BRIEF(kinds=("delay",)),
        "OwnerOnlyRelease",
        in_python(memcached, "release", '("md", key, f"C{found[1]}")', '("md", key)'),
    ),
    "a late add that is not cleaned up after": (
        _BRIEF(kinds=("delay",)),
        "AcquireTotality",
        in_python(memcached, "abandon", "return [freed, 0]", "pass"),
    ),
    "a late add that is forgotten": (
        _BRIEF(kinds=("delay",)),
        "AcquireTotality",
        in_python(memcached, "_add", "items.late_adds[token] = end", "pass"),
    ),
    "an acquire that does not know its own token": (
        _BRIEF(kinds=("lost_reply",), patience=4.0, idle_us_per_fault=500_000),
        "NoLostWakeup",
        in_python(memcached, "acquire", "if found[0] != token.encode():", "if True:"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, invariant, texts = MISTAKES[mistake]
    plant(texts, monkeypatch)
    for name in ("acquire", "release", "abandon", "renew"):
        monkeypatch.setitem(memcached._PROGRAMS, name, getattr(memcached, name))
    explorer = Explorer(config, invariants=(invariant,), stop_at=(invariant,))
    explorer.search(1 if config.kinds else 0, config.kinds, states=20_000)
    assert invariant in explorer.broken
