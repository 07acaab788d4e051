"""A slot that moves to another node while its lock is held and waited for, and replicas that take over, in the search.

First what the fault does to clients and server, one move after the other. Then the rows of the lab that have it: a slot
that moves breaks nothing. Each planted mistake is found with that fault, and not without it.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from holdfast.errors import Unsupported
from holdfast.lab.invariants.locks import INVARIANTS
from holdfast.lab.replay.perform import perform
from holdfast.lab.report.story import tell
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.faults import DEFAULT_FAULTS, FAULTS
from holdfast.lab.search.model import Model
from holdfast.lab.search.site import Failure
from holdfast.lab.search.state import Choice, Config, State
from holdfast.lab.search.transition import MOVING_US
from holdfast.lab.search.visits import AT_ONCE
from holdfast.lab.servers.store import ReplyError, Store
from holdfast.lab.subjects.primitives import DAILY_KINDS, PRIMITIVES
from holdfast.lab.subjects.rows import ROWS, config_of, fenced_config
from tests.lab.mutations import IN_A_CLUSTER, plant

RESHARD: Final = ("reshard",)
MOMENTS: Final = -2_500_000  # with that for newcomer_us they get in within half a second, as nobody has crashed
MOST_STATES: Final = 20_000


class Run:
    """A run of a search, move by move."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = Model(config)
        self.state = self.model.first()
        self.choices: list[Choice] = []

    def take(self, *choice: Any) -> State:
        """Take the first move that begins like this."""
        moves = self.model.moves(self.state)
        found = next((move for move in moves if move[: len(choice)] == choice), None)
        assert found is not None, (choice, moves)
        self.choices.append(found)
        self.state, _ = self.model.after(self.state, found)
        return self.state

    def offers(self, *choice: Any) -> bool:
        return any(move[: len(choice)] == choice for move in self.model.moves(self.state))

    @property
    def store(self) -> Store:
        store: Store = self.model.server.store(self.state.store)
        return store

    def stage(self, client: int) -> str:
        return self.model.locals[self.state.locals[client]].stage

    def told(self) -> list[str]:
        return [moment.does for moment in tell(self.config, tuple(self.choices))]


def contended(**bounds: Any) -> Run:
    """A holds the lock, and B is subscribed and waits for it in the queue."""
    run = Run(fenced_config(clients=2, kinds=RESHARD, most_faults=1, leaves_us=AT_ONCE, **bounds))
    for choice in (("come", 0), ("do", 0), ("come", 1), ("do", 1), ("do", 1), ("do", 1)):
        run.take(*choice)
    assert run.store.subscribed == {b"bell:B"}
    assert run.stage(0) == "holds"
    assert run.stage(1) == "wants"
    return run


def test_a_step_on_its_way_to_the_old_node_is_sent_again_and_executed_once() -> None:
    run = Run(fenced_config(clients=1, kinds=RESHARD, most_faults=1))
    run.take("come", 0)
    run.take("fault", "reshard", "moved")
    sent = run.model.locals[run.state.locals[0]].requests
    run.take("do", 0)
    assert b"foo" not in run.store.values, "the old node has done nothing"
    again = run.model.locals[run.state.locals[0]].requests
    assert [request.content for request in again] == [request.content for request in sent]
    assert run.offers("do", 0), "and it is on its way to the other node, while anything else may happen"
    run.take("do", 0)
    assert run.stage(0) == "holds"
    moved, redirected, granted = run.told()[1:]
    assert moved == "The slot of the key moves to another node."
    assert redirected == "asks the wrong node, which does nothing, and sends its step to the other."
    assert granted.startswith("takes the lock.")


def test_keys_move_with_their_ttl_and_subscriptions_do_not() -> None:
    run = contended()
    values, deadlines = dict(run.store.values), dict(run.store.deadlines)
    run.take("fault", "reshard", "moved")
    assert (run.store.values, run.store.deadlines) == (values, deadlines)
    assert not run.store.subscribed
    assert not run.state.tracked
    assert run.offers("deliver", "cut", 1), "the subscriber is told"
    run.take("deliver", "cut", 1)
    run.take("do", 1)
    run.take("do", 1)
    assert not run.store.subscribed, "it asks at once, and is not subscribed yet"
    while not run.store.subscribed:
        run.take("do", 1) if run.offers("do", 1) else run.take("time")
    assert run.state.now_us < 100_000


@pytest.mark.parametrize("how", ["divided", "moving"])
def test_a_step_on_several_keys_is_refused_until_the_slot_has_moved(how: str) -> None:
    run = Run(fenced_config(clients=1, kinds=RESHARD, most_faults=1))
    run.take("come", 0)
    run.take("fault", "reshard", how)
    assert run.offers("moved"), "it may move in the same instant"
    while run.state.moved_by:
        if not run.offers("do", 0):
            run.take("time") if not run.offers("moved") or run.state.now_us < MOVING_US else run.take("moved")
            continue
        run.take("do", 0)
        assert not run.store.values
    assert run.state.now_us == MOVING_US
    while run.stage(0) == "wants":
        run.take("do", 0) if run.offers("do", 0) else run.take("time")
    assert run.stage(0) == "holds"


def test_a_step_on_one_key_is_executed_while_the_slot_moves() -> None:
    run = contended()
    run.take("time")
    while not run.offers("do", 0):
        run.take("do", 1) if run.offers("do", 1) else run.take("time")
    run.take("fault", "reshard", "divided")
    ends = run.store.deadlines[b"foo"]
    run.take("do", 0)
    assert run.store.deadlines[b"foo"] > ends


def test_a_release_fails_in_the_middle_and_the_waiter_still_gets_the_lock() -> None:
    run = contended()
    run.take("fault", "reshard", "moving")
    run.take("leave", 0)
    (request,) = run.model.locals[run.state.locals[0]].requests
    done = run.model.server.execute(run.state.store, request, "bell:A")
    (failure,) = done.replies
    assert isinstance(failure, Failure)
    assert failure.sent, "its outcome is unknown"
    assert failure.retry
    run.take("do", 0)
    assert b"foo" not in run.store.values, "it was freed"
    assert not run.state.under_way, "and the waiter was not notified"
    run.take("moved")
    for _ in range(40):
        if run.stage(1) == "holds" and run.stage(0) == "done":
            break
        for choice in (("do", 0), ("deliver",), ("do", 1), ("time",)):
            if run.offers(*choice):
                run.take(*choice)
                break
    assert run.stage(1) == "holds"
    assert run.stage(0) == "done"


def test_the_store_refuses_what_a_node_refuses_that_gives_its_slot_away() -> None:
    store = Store()
    store.execute("SET", "a", "1")
    store.execute("SET", "b", "2")
    both = ("EVAL", "return redis.call('GET', KEYS[1]) .. redis.call('GET', KEYS[2])", 2)
    frees = ("EVAL", "redis.call('DEL', KEYS[1]) return redis.call('SET', KEYS[1], KEYS[2])", 2)
    assert store.execute(*both, "a", "b") == b"12"
    store.slot = "divided"
    refused = store.execute(*both, "a", "b")
    assert isinstance(refused, ReplyError)
    assert refused.code == "TRYAGAIN"
    assert store.execute("EVAL", "return redis.call('GET', KEYS[1])", 1, "a") == b"1"
    store.slot = "moving"
    assert store.execute(*both, "a", "b") == b"12"
    absent = store.execute(*both, "a", "c")
    assert isinstance(absent, ReplyError)
    assert absent.code == "TRYAGAIN"
    midway = store.execute(*frees, "a", "b")
    assert isinstance(midway, ReplyError)
    assert "non local key" in midway.message
    assert b"a" not in store.values, "and what it did before stays"


def test_a_slot_moves_only_if_that_is_asked_for_and_only_on_a_cluster() -> None:
    assert {*FAULTS} - {*DEFAULT_FAULTS} == {"reshard", "refused", "unconfirmed"}
    assert "reshard" not in DAILY_KINDS
    for row in ROWS:
        assert config_of(row).kinds == DEFAULT_FAULTS
    run = Run(config_of("memcached_add", clients=1, kinds=RESHARD))
    run.take("come", 0)
    assert not run.offers("fault")


def test_a_trace_in_which_a_slot_moves_cannot_be_performed_on_one_server() -> None:
    trace = Trace("holdfast", "NoOrphan", 1, ("reshard",), (("fault", "reshard", "moved"),), ())
    with pytest.raises(Unsupported, match="a slot moves"):
        perform(trace, "redis://127.0.0.1:1")


# Searches.


@pytest.mark.long
@pytest.mark.parametrize("row", ["reshard", "reshard:semaphore", "reshard:several", "reshard:latch", "replicas"])
def test_nothing_breaks_but_what_a_failover_is_known_to_break(row: str) -> None:
    primitive = PRIMITIVES[row]
    explorer = Explorer(primitive.config(kinds=primitive.kinds), invariants=primitive.invariants)
    explorer.search(0, (), states=3_000)
    its_own = tuple(kind for kind in primitive.kinds if kind not in DAILY_KINDS)
    explorer.search(1, its_own, states=explorer.states + 3_000)
    explorer.search(2, primitive.kinds, states=explorer.states + 1_500)
    for seed in range(10):
        explorer.walk(seed, most_faults=2)
    found = {name: broken.why for name, broken in explorer.broken.items()}
    assert {*found} <= {*primitive.limits}, found
    assert explorer.known == {*primitive.invariants}


@pytest.mark.long
def test_confirmed_grants_have_a_limit_and_fences_keep_the_resource_safe_there() -> None:
    primitive = PRIMITIVES["replicas:any"]
    config = primitive.config(kinds=("failover",))._replace(clients=2)
    explorer = Explorer(config, invariants=primitive.invariants, stop_at=["MutualExclusion"])
    explorer.search(1, states=MOST_STATES)
    assert {*explorer.broken} == {"MutualExclusion"} <= {*primitive.limits}
    found = explorer.broken["MutualExclusion"]
    told = tell(found.config, found.choices, "MutualExclusion")
    assert any("a replica confirms that" in moment.does for moment in told)
    assert any("a replica takes over, without the last write." in moment.does for moment in told)
    assert told[-1].violation
    assert "MutualExclusion" not in PRIMITIVES["replicas"].limits


@pytest.mark.long
def test_a_grant_that_no_replica_confirms_is_no_hold_and_leaves_nothing_behind() -> None:
    config = fenced_config(clients=1, replicas=1, promotes="confirmed", kinds=("unconfirmed",), newcomer_us=MOMENTS)
    explorer = Explorer(config)
    assert explorer.search(1)
    assert not explorer.broken
    run = Run(config._replace(most_faults=1))
    run.take("come", 0)
    run.take("do", 0)
    assert run.stage(0) == "wants", "the grant is not confirmed yet"
    run.take("fault", "unconfirmed", 0)
    assert "no replica confirms it in time" in run.told()[-1]
    while run.stage(0) == "wants":
        run.take("do", 0) if run.offers("do", 0) else run.take("time")
    assert run.stage(0) == "over"
    assert b"foo" not in run.store.values


CAUGHT: Final = {
    "waiter_that_stays_subscribed_on_the_old_node_and_trusts_that": "NoLostWakeup",
    "engine_that_takes_moved_for_a_grant": "MutualExclusion",
    "engine_that_follows_moved_with_a_new_token": "NoOrphan",
    "engine_that_takes_tryagain_for_an_answer": "MutualExclusion",
    "release_that_is_told_to_try_again_and_does_not": "NoOrphan",
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", IN_A_CLUSTER)
def test_a_planted_mistake_is_found_when_a_slot_moves_and_not_without(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(IN_A_CLUSTER[mistake], monkeypatch)
    invariant = CAUGHT[mistake]
    config = fenced_config(clients=2, kinds=RESHARD, leaves_us=AT_ONCE, newcomer_us=MOMENTS)
    without = Explorer(config)
    assert without.search(0)
    assert not without.broken
    explorer = Explorer(config, stop_at=(invariant,))
    explorer.search(1, states=MOST_STATES)
    assert invariant in explorer.broken, f"not found in {explorer.states} states"
    found = explorer.broken[invariant]
    told = tell(found.config, found.choices, invariant)
    assert told[-1].violation
    assert [moment.fault for moment in told if moment.fault] == ["reshard"]


@pytest.mark.long
def test_without_a_mistake_the_same_search_finds_nothing() -> None:
    explorer = Explorer(fenced_config(clients=2, kinds=RESHARD, leaves_us=AT_ONCE, newcomer_us=MOMENTS))
    explorer.search(1, states=2 * MOST_STATES)
    assert not explorer.broken, {name: broken.why for name, broken in explorer.broken.items()}
    assert explorer.known == {*INVARIANTS}
