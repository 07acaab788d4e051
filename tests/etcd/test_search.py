"""Locks on etcd, searched: three clients, two faults, on a model of etcd; and mistakes planted to see that it looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import pytest

from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.state import Config
from holdfast.lab.servers.etcd import Etcd
from holdfast.lab.subjects.etcd import AGAIN, FAILS, READER, RWLOCK, SEMAPHORE, TRIES, etcd_config
from holdfast.lab.subjects.primitives import DAILY_KINDS, ETCD_KINDS, PRIMITIVES
from holdfast.protocol.intents import changing, holding, permits, programs, queue, refusals
from holdfast.protocol.intents.requests import Created
from holdfast.protocol.intents.session import Intent, Session
from tests.lab.mutations import in_python, plant

THREE: Final = ("etcd:semaphore", "etcd:rwlock")
ON_ETCD: Final = {name: row for name, row in PRIMITIVES.items() if name.startswith("etcd")}
# Those of ``holdfast lab primitives``, and with three clients what has two of them there.
ROWS: Final = {
    **ON_ETCD,
    **{f"{name}, three": ON_ETCD[name]._replace(config=partial(ON_ETCD[name].config, clients=3)) for name in THREE},
}


def explorer_of(row: str) -> Explorer:
    make, invariants = ROWS[row][:2]
    return Explorer(make(kinds=ETCD_KINDS), invariants=invariants, stop_at=invariants)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_nothing_breaks(row: str) -> None:
    explorer = explorer_of(row)
    for most_faults, states in enumerate((1_000, 5_000, 10_000)):
        explorer.search(most_faults, ETCD_KINDS, states=states)
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


def in_renewals(old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    plant(in_python(holding, "renew_part", old, new), patch)
    for step in ("renew", "pool_renew", "multi_renew"):
        patch.setitem(programs._PARTS, step, holding.renew_part)


def a_rewrite_that_compares_the_creation(patch: pytest.MonkeyPatch) -> None:
    """As an adoption keeps it, a late request of the giver undoes the adoption; and no renewal looks at the token."""

    def unchanged(intent: Intent) -> tuple[Created, ...]:
        return tuple(Created(key, intent.created) for key in intent.keys)

    for module in (changing, queue, permits):
        patch.setattr(module, "unchanged", unchanged)
    in_renewals("token not in (item.value, token_of(item))", "False", patch)


def an_adoption_that_compares_the_creation(patch: pytest.MonkeyPatch) -> None:
    plant(
        in_python(
            holding,
            "_swap",
            "Modified(item.key, item.modified) for item in theirs",
            "Created(item.key, item.created) for item in theirs",
        ),
        patch,
    )


def a_renewal_of_one_lease_only(patch: pytest.MonkeyPatch) -> None:
    """After a hand_over without an answer, the keys may be bound to another lease than the one that is renewed."""
    patch.setattr(Intent, "bind", lambda intent, lease: None)
    in_renewals("return DONE if lasts else GONE", "return DONE", patch)


def a_reader_that_queues_although_it_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    plant(
        (
            *in_python(
                queue, "_try", "_try(session, ask, intent, lease, done.revision)", "_join(session, ask, intent, lease)"
            ),
            *in_python(queue, "_judge", "conflict is not None and not ask.waits", "False"),
        ),
        patch,
    )


def a_full_etcd_taken_for_one_that_did_nothing(patch: pytest.MonkeyPatch) -> None:
    wrong = tuple(
        known._replace(unknown=False) if known.part == refusals.SPACE_EXCEEDED else known for known in refusals.REFUSALS
    )
    patch.setattr(refusals, "REFUSALS", wrong)


def a_refused_attempt_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Its first create has no answer, and is late: the abandon must know of it."""
    patch.setattr(Session, "forget_refused", lambda session, token: session.intents.pop(token, None))


class Planted(NamedTuple):
    row: Callable[..., Config]
    invariant: str  # that finds it
    plant: Callable[[pytest.MonkeyPatch], None]
    kinds: tuple[str, ...] = ()  # of the faults that show it; () if the daily kinds are searched
    faults: int = 2


MISTAKES: Final = {
    "a create that ignores tombstones": Planted(
        partial(etcd_config, clients=2), "AcquireTotality", a_create_that_ignores_tombstones, ("cancel",)
    ),
    "a lease taken for longer than it lasts": Planted(
        partial(etcd_config, clients=2, stay_us=2_900_000), "MutualExclusion", a_lease_taken_for_longer_than_it_lasts
    ),
    "a slot that is not checked": Planted(SEMAPHORE, "PermitCount", a_slot_that_is_not_checked),
    "a rewrite that compares the creation": Planted(
        AGAIN, "MutualExclusion", a_rewrite_that_compares_the_creation, ("delay",), 1
    ),
    "an adoption that compares the creation": Planted(
        AGAIN, "MutualExclusion", an_adoption_that_compares_the_creation, faults=0
    ),
    "a renewal of one lease only": Planted(FAILS, "MutualExclusion", a_renewal_of_one_lease_only, ("cancel",), 1),
    "a reader that queues although it does not wait": Planted(
        READER, "AcquireTotality", a_reader_that_queues_although_it_does_not_wait, faults=0
    ),
    "a full etcd taken for one that did nothing": Planted(
        partial(etcd_config, clients=2),
        "AcquireTotality",
        a_full_etcd_taken_for_one_that_did_nothing,
        ("refused", "cancel"),
    ),
    "a refused attempt that is forgotten": Planted(
        TRIES, "AcquireTotality", a_refused_attempt_that_is_forgotten, ("delay",), 1
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, invariant, plant_it, kinds, faults = MISTAKES[mistake]
    plant_it(monkeypatch)
    explorer = Explorer(row(kinds=kinds or DAILY_KINDS), invariants=(invariant,), stop_at=(invariant,))
    for most_faults in range(faults + 1):
        explorer.search(most_faults, kinds or DAILY_KINDS, states=(most_faults + 1) * (100_000 if kinds else 20_000))
        if explorer.broken:
            return
    for seed in range(0 if kinds else 300):
        explorer.walk(seed, most_faults=2)
        if explorer.broken:
            break
    assert invariant in explorer.broken


@pytest.mark.parametrize("row", ["etcd:hand_over:fails", "etcd:downgrade", "etcd:try"])
def test_nothing_breaks_without_a_fault(row: str) -> None:
    explorer = explorer_of(row)
    assert explorer.search(0), "all its states"
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}


def test_readers_and_writers_are_rows() -> None:
    assert {RWLOCK, SEMAPHORE} <= {row.config for row in ROWS.values()}
