"""The mutation gate: each known mistake, planted into the fenced lock, is caught by an invariant, and found by search.

A search that finds nothing proves little until one knows what it would have found. So each mistake is searched for in
the smallest setting that shows it, and the lock as it is, in the same setting, breaks nothing: that is explored to the
end, or to twice as many states as any of the mistakes needs.

Not here, because no event of a search tells of it: clocks that run at different speeds (so a mistake in ``drift`` is
invisible), clients that know of no queue, and servers without pub/sub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from holdfast.lab.invariants.locks import INVARIANTS
from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.faults import UNRELIABLE_SERVER
from holdfast.lab.search.state import Config
from holdfast.lab.subjects.cohort import cohort_config
from holdfast.lab.subjects.rows import crowd_config, fenced_config
from holdfast.protocol.effects import Effects
from holdfast.protocol.leases import extend_lease
from tests.lab.mutations import MISTAKES, plant

MOST_STATES: Final = 100_000  # of a mistake, where the lock as it is is explored to the end
MOMENTS: Final = -2_500_000  # with that for newcomer_us they get in within half a second, as nobody has crashed

MakeLock = Callable[[Any], Any]


class Setting(NamedTuple):
    clients: int
    kinds: tuple[str, ...] = ()
    bounds: Mapping[str, Any] = MappingProxyType({})  # fields of Config or of Terms
    most_faults: int = 1
    states: int | None = None  # after so many the search of the lock as it is ends; None: when all is explored
    around: Callable[[MakeLock], MakeLock] = lambda make_lock: make_lock
    make: Callable[..., Config] = fenced_config
    judged: tuple[str, ...] = INVARIANTS

    def search(self, most_states: int | None, stop_at: tuple[str, ...] = ()) -> tuple[Explorer, bool]:
        config = self.make(clients=self.clients, **self.bounds)
        config = config._replace(make_lock=self.around(config.make_lock))
        explorer = Explorer(config, invariants=self.judged, stop_at=stop_at)
        limit = {} if most_states is None else {"states": most_states}
        return explorer, explorer.search(self.most_faults if self.kinds else 0, self.kinds, **limit)


class _Greedy:
    """A lock that is extended as soon as it is there, to twice its ttl. (So who has it looks as if it waited.)"""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def _acquire(self, patience: float | None) -> Effects[Any]:
        lease = yield from self._lock._acquire(patience)
        if lease is not None:
            yield from extend_lease(lease, 6.0)
        return lease

    def _release(self) -> Effects[None]:
        yield from self._lock._release()


def extended(make_lock: MakeLock) -> MakeLock:
    return lambda driver: _Greedy(make_lock(driver))


AT_ONCE: Final = ((0, 0),)  # a holder leaves at once, or stays to the end

SETTINGS: Final = {
    "one, cancelled": Setting(1, ("cancel",)),
    "one, crashed": Setting(1, ("crash",)),
    "one, paused": Setting(1, ("pause",)),
    # It gives up instead of sending the request once more, and the first one arrives after that.
    "one, delayed and impatient": Setting(1, ("delay",), {"patience": 0.1}),
    "one, delayed": Setting(1, ("delay",), {"newcomer_us": MOMENTS}),
    "one, cancelled and unheard": Setting(1, ("cancel", "lost_request"), {"newcomer_us": MOMENTS}, most_faults=2),
    "one, with a limit": Setting(1, (), {"max_hold": 1.0}),
    "one, with two tasks": Setting(1, ("cancel",), make=partial(cohort_config, "F")),
    "two": Setting(2, (), {"newcomer_us": MOMENTS}),
    "two, on their own": Setting(2, (), {"cohort": 0}),
    "two, unrenewed": Setting(2, (), {"renew": False}),
    "two, one with two tasks": Setting(2, make=partial(cohort_config, "F1")),
    "two, crashed": Setting(2, ("crash",)),
    "two, cancelled": Setting(2, ("cancel",)),
    "two, skewed": Setting(2, ("skew",)),
    "two, unheard": Setting(2, ("lost_reply",)),
    # Who waits gets in after a ttl, and stays until the one who was paused is back.
    "two, paused": Setting(2, ("pause",), {"stay_us": 2_900_000}),
    # Somebody comes when a holder who was paused has gone on.
    "two, paused, one late": Setting(
        2, ("pause",), {"late": True, "stay_us": 6_000_000, "leaves_us": ()}, states=2_000
    ),
    # Without renewal what a holder believes is not put right a tenth of a second later.
    "two, unrenewed and unheard": Setting(2, ("lost_reply",), {"renew": False, "stay_us": 2_900_000}),
    "two, unrenewed and stalled": Setting(2, ("stall",), {"renew": False, "stay_us": 2_900_000, "leaves_us": ()}),
    "two, extended": Setting(
        2,
        ("duplicate",),
        {"renew": False, "stay_us": 4_000_000, "leaves_us": ()},
        around=extended,
        judged=("MutualExclusion",),
    ),
    # Who waits gets in when the extension ends, and the holder stays beyond that.
    "two, extended, replies late": Setting(
        2,
        ("late_reply",),
        {"renew": False, "stay_us": 6_500_000, "leaves_us": (), "patience": 8.0, "horizon_us": 16_000_000},
        around=extended,
        judged=("MutualExclusion",),
    ),
    # A push says that the key is gone, before the reply to a renewal says that it was there.
    "one, evicted": Setting(1, ("eviction",), {"idle_us_per_fault": 0, "overtaking": True}, judged=("LossTold",)),
    "two, overtaken": Setting(2, (), {"overtaking": True}),
    # Whose listener is cut looks at once, also at a server that was away for a tenth of a second.
    "two, restarted": Setting(2, ("restart",), {"idle_us_per_fault": 100_000}, states=24_000),
    "two, evicted": Setting(2, ("eviction",), {"idle_us_per_fault": 0}),
    "three": Setting(3),
    # The keeper speaks for the waiters.
    "two, crowded and unheard": Setting(2, ("lost_reply",), make=crowd_config),
    "two, crowded and evicted": Setting(2, ("eviction",), {"idle_us_per_fault": 500_000}, make=crowd_config),
    "two, crowded and cancelled": Setting(2, ("cancel",), make=crowd_config),
    "three, crowded": Setting(3, (), {"stay_us": 1_700_000}, make=crowd_config),
    "three, cancelled": Setting(3, ("cancel",), {"idle_us_per_fault": 0, "leaves_us": AT_ONCE}, states=10_000),
    # A waiter is granted the lock while it is stalled. The next one gets in when that ttl ends.
    "three, unrenewed and stalled": Setting(
        3,
        ("stall",),
        {"renew": False, "leaves_us": AT_ONCE, "ttl": 1.2, "stay_us": 1_100_000, "horizon_us": 1_500_000},
        states=25_000,
    ),
    "three, crashed, some late": Setting(
        3, ("crash",), {"late": True, "ttl": 1.0, "stay_us": 700_000, "leaves_us": ()}, states=5_000
    ),
}

CAUGHT: Final = [
    ("release_without_compare", "OwnerOnlyRelease", "two, paused"),
    ("release_that_compares_one_step_before", "OwnerOnlyRelease", "two, paused"),
    ("abandon_without_compare", "OwnerOnlyRelease", "two, cancelled"),
    ("renew_without_compare", "OwnerOnlyStretch", "two, paused"),
    ("renew_that_writes_the_key", "OwnerOnlyRelease", "two"),
    ("acquire_that_overwrites", "MutualExclusion", "two"),
    ("acquire_that_does_not_know_its_own_token", "NoOrphan", "two"),
    ("ttl_touched_by_a_loser", "OwnerOnlyStretch", "two"),
    ("acquire_without_expiry", "NoOrphan", "one, crashed"),
    ("grant_without_expiry", "NoOrphan", "two, crashed"),
    ("expiry_by_the_clients_clock", "MutualExclusion", "two, skewed"),
    ("already_mine_without_a_fresh_ttl", "MutualExclusion", "two, unrenewed and unheard"),
    ("already_mine_that_makes_it_shorter", "MutualExclusion", "two, extended"),
    ("renew_that_makes_it_shorter", "MutualExclusion", "two, unrenewed"),
    ("validity_counted_from_the_reply", "MutualExclusion", "two, unrenewed and stalled"),
    ("renewal_counted_from_the_reply", "MutualExclusion", "two, paused, one late"),
    ("extension_counted_from_the_reply", "MutualExclusion", "two, extended, replies late"),
    ("renewal_that_forgets_a_push_before_its_reply", "LossTold", "one, evicted"),
    ("grant_taken_after_its_deadline", "MutualExclusion", "two, paused"),
    ("ttl_counted_from_when_its_notification_is_received", "MutualExclusion", "three, unrenewed and stalled"),
    ("held_without_a_look_at_the_clock", "NoFalseHold", "one, paused"),
    ("no_retry_after_arming_the_bell", "NoLostWakeup", "two"),
    ("waiter_that_trusts_its_bell", "NoLostWakeup", "two, unheard"),
    ("notification_forgotten_when_a_reply_comes_after_it", "NoLostWakeup", "two, overtaken"),
    ("waiter_that_does_not_look_when_its_listener_was_cut", "NoLostWakeup", "two, restarted"),
    ("waiter_that_does_not_look_when_the_key_was_written", "NoLostWakeup", "two, evicted"),
    ("release_that_does_not_grant_to_the_next", "NoLostWakeup", "three"),
    ("abandon_that_does_not_grant_to_the_next", "NoLostWakeup", "three, cancelled"),
    ("newcomer_that_barges_in", "Fifo", "three, crashed, some late"),
    ("waiter_that_loses_its_place_with_each_refresh", "Fifo", "three"),
    ("fence_from_a_bare_counter", "FenceMonotone", "two, restarted"),
    ("fence_from_a_bare_counter", "FencedSafety", "two, restarted"),
    ("fence_that_is_the_same_for_all", "FencedSafety", "two, paused"),
    ("fence_from_the_time_alone", "FenceMonotone", "two"),
    ("grant_with_the_last_fence", "FenceMonotone", "two, on their own"),
    ("pass_with_the_same_fence", "FenceMonotone", "one, with two tasks"),
    ("fences_that_are_not_set_aside", "FenceMonotone", "two, one with two tasks"),
    ("pass_of_what_is_given_back_as_well", "MutualExclusion", "two, one with two tasks"),
    ("seat_that_is_left_without_a_call", "NoLostWakeup", "one, with two tasks"),
    ("present_that_lets_a_waiter_without_a_place_sleep", "NoLostWakeup", "two, crowded and unheard"),
    ("present_that_does_not_see_a_free_lock", "NoLostWakeup", "two, crowded and evicted"),
    ("present_that_does_not_show_presence", "Fifo", "three, crowded"),
    ("keeper_that_wakes_no_waiter", "NoLostWakeup", "two, crowded and unheard"),
    ("waiter_of_a_crowd_that_is_not_cleaned_up_after", "AcquireTotality", "two, crowded and cancelled"),
    ("token_forgotten_before_the_reply", "AcquireTotality", "one, cancelled"),
    ("place_in_the_queue_forgotten", "AcquireTotality", "two, cancelled"),
    ("acquire_that_ignores_the_tombstone", "AcquireTotality", "one, delayed and impatient"),
    ("abandon_without_a_tombstone", "AcquireTotality", "one, delayed and impatient"),
    ("release_in_doubt_without_a_tombstone", "NoOrphan", "one, delayed"),
    ("renewal_beyond_max_hold", "NoFalseHold", "one, with a limit"),
    ("interrupted_release_that_is_not_settled", "NoOrphan", "one, cancelled and unheard"),
]


@pytest.mark.long
@pytest.mark.parametrize(("mistake", "invariant", "setting"), CAUGHT)
def test_a_planted_mistake_is_caught(
    monkeypatch: pytest.MonkeyPatch, mistake: str, invariant: str, setting: str
) -> None:
    plant(MISTAKES[mistake], monkeypatch)
    bound = SETTINGS[setting].states
    explorer, _ = SETTINGS[setting].search(MOST_STATES if bound is None else bound // 2, stop_at=(invariant,))
    assert invariant in explorer.broken
    assert bound is None or explorer.states * 2 <= bound
    found = explorer.broken[invariant]
    assert tell(found.config, found.choices, invariant)[-1].violation


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_the_lock_as_it_is_breaks_nothing_in_that_setting(name: str) -> None:
    setting = SETTINGS[name]
    explorer, ended = setting.search(setting.states)
    assert ended or (setting.states is not None and explorer.states >= setting.states)
    # A server that forgets who holds the lock lets two have it: no lock can help that, and none is asked to here.
    forgiven = {"MutualExclusion"} if UNRELIABLE_SERVER.intersection(setting.kinds) else set()
    assert explorer.broken.keys() <= forgiven
    searched_for = {invariant for _, invariant, where in CAUGHT if where == name}
    assert searched_for
    assert searched_for <= explorer.known - forgiven, "it holds, and not only because nothing was said about it"


def test_every_invariant_catches_something_and_every_mistake_is_searched_for() -> None:
    assert {invariant for _, invariant, _ in CAUGHT} == {*INVARIANTS, "LossTold"}
    assert {mistake for mistake, _, _ in CAUGHT} == set(MISTAKES)


def test_a_mistake_that_no_longer_applies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for mistake in MISTAKES.values():
        for text in mistake:
            if text.old:
                with pytest.raises(AssertionError, match="not there"):
                    plant((text._replace(old=f"{text.old} as it was before"),), monkeypatch)
