"""Locks on etcd, searched: three clients, two faults, on a model of etcd; and mistakes planted to see that it looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import pytest

from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.servers.etcd import Etcd
from holdfast.lab.subjects.etcd import RWLOCK, SEMAPHORE, etcd_config
from holdfast.lab.subjects.primitives import DAILY_KINDS, PRIMITIVES
from holdfast.protocol.intents import permits, queue
from holdfast.protocol.intents.requests import Created

THREE: Final = ("etcd:semaphore", "etcd:rwlock")
ON_ETCD: Final = {name: row for name, row in PRIMITIVES.items() if name.startswith("etcd")}
# Those of ``holdfast lab primitives``, and with three clients what has two of them there.
ROWS: Final = {
    **ON_ETCD,
    **{f"{name}, three": ON_ETCD[name]._replace(config=partial(ON_ETCD[name].config, clients=3)) for name in THREE},
}


def explorer_of(row: str) -> Explorer:
    make, invariants = ROWS[row][:2]
    return Explorer(make(kinds=DAILY_KINDS), invariants=invariants, stop_at=invariants)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_nothing_breaks(row: str) -> None:
    explorer = explorer_of(row)
    for most_faults, states in enumerate((1_000, 5_000, 10_000)):
        explorer.search(most_faults, DAILY_KINDS, states=states)
    for seed in range(30):
        explorer.walk(seed, most_faults=2)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*ROWS[row].invariants}


@pytest.mark.long
def test_nothing_breaks_in_a_queue_that_is_longer_than_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_SHORT_QUEUE", 1)
    test_nothing_breaks("etcd")


class _Any(Created):
    """A compare that always holds."""


def a_create_that_ignores_tombstones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue.Ask, "tombstone", property(lambda ask: "nothing is ever here"))


def a_lease_taken_for_longer_than_it_lasts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.protocol.intents.session.EtcdLease.covers", lambda lease, ttl, now: True)


def a_slot_that_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(permits, "Created", lambda key, revision=0: (_Any if ":slot:" in key else Created)(key, revision))
    compared = Etcd._holds
    patch.setattr(Etcd, "_holds", lambda store, compare: isinstance(compare, _Any) or compared(store, compare))


# The lock, what finds it, and the mistake.
MISTAKES: Final[dict[str, tuple[Callable[..., Config], str, Callable[[pytest.MonkeyPatch], None]]]] = {
    "a create that ignores tombstones": (
        partial(etcd_config, clients=2),
        "AcquireTotality",
        a_create_that_ignores_tombstones,
    ),
    "a lease taken for longer than it lasts": (
        partial(etcd_config, clients=2, stay_us=2_900_000),
        "MutualExclusion",
        a_lease_taken_for_longer_than_it_lasts,
    ),
    "a slot that is not checked": (SEMAPHORE, "PermitCount", a_slot_that_is_not_checked),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, invariant, plant = MISTAKES[mistake]
    plant(monkeypatch)
    explorer = Explorer(make(kinds=DAILY_KINDS), invariants=(invariant,), stop_at=(invariant,))
    for most_faults in range(3):
        for kinds in (("cancel",), DAILY_KINDS):
            explorer.search(most_faults, kinds, states=20_000)
            if explorer.broken:
                return
    for seed in range(300):
        if explorer.broken:
            break
        explorer.walk(seed, most_faults=2)
    assert invariant in explorer.broken


def test_readers_and_writers_are_rows() -> None:
    assert {RWLOCK, SEMAPHORE} <= {row.config for row in ROWS.values()}
