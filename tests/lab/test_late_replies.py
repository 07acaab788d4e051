"""Replies that arrive late in a search: what they show, that they show it alone, and how they are told."""

from __future__ import annotations

import pytest

from holdfast.lab.report.story import tell
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.model import Model
from holdfast.lab.search.state import State, under_way
from holdfast.lab.servers.store import START_US
from holdfast.lab.subjects.cohort import cohort_config
from holdfast.lab.subjects.rows import fenced_config
from tests.lab.mutations import MISTAKES, plant
from tests.lab.test_mutations import SETTINGS


def after(model: Model, *choices: tuple[object, ...]) -> State:
    state = model.first()
    for choice in choices:
        assert choice in model.moves(state), (choice, model.moves(state))
        state, _ = model.after(state, choice)
    return state


def request_of(model: Model, state: State, client: int) -> int:
    (request,) = model.locals[state.locals[client]].requests
    return request.number


@pytest.mark.parametrize(
    ("mistake", "invariant", "setting"),
    [
        ("notification_forgotten_when_a_reply_comes_after_it", "NoLostWakeup", "two, overtaken"),
        ("renewal_that_forgets_a_push_before_its_reply", "LossTold", "one, evicted"),
    ],
)
def test_what_an_overtaken_reply_shows_is_not_shown_without(
    monkeypatch: pytest.MonkeyPatch, mistake: str, invariant: str, setting: str
) -> None:
    plant(MISTAKES[mistake], monkeypatch)
    without = SETTINGS[setting]
    without = without._replace(bounds={**without.bounds, "overtaking": False})
    explorer, ended = without.search(None)
    assert ended
    assert invariant not in explorer.broken


def test_a_late_reply_arrives_while_its_sender_waits_or_counts_for_nothing() -> None:
    config = fenced_config(clients=1, kinds=("late_reply",), most_faults=1)
    model = Model(config)
    state = after(model, ("come", 0))
    number = request_of(model, state, 0)
    state, _ = model.after(state, ("fault", "late_reply", 0, number))
    assert model.server.lock(state.store)[0] is not None, "it was executed"
    assert model.locals[state.locals[0]].stage == "wants"
    assert ("deliver", "late", 0, 0) not in model.moves(state), "that would not be late"
    just_before = next(choice for choice in model.moves(state) if choice[0] == "time")
    waiting, _ = model.after(state, just_before)
    got, _ = model.after(waiting, ("deliver", "late", 0, 0))
    assert model.locals[got.locals[0]].stage == "holds"
    assert not got.under_way
    given_up, _ = model.after(waiting, next(choice for choice in model.moves(waiting) if choice[0] == "time"))
    assert not given_up.under_way
    assert not model.locals[given_up.locals[0]].requests, "after a pause it is sent again"


def test_a_reply_that_nothing_overtakes_is_the_same_as_one_that_arrives_at_once() -> None:
    explorer = Explorer(fenced_config(clients=2, overtaking=True))
    plain = Explorer(fenced_config(clients=2))
    assert explorer.search(0, ())
    assert plain.search(0, ())
    assert plain.hashes < explorer.hashes
    assert not explorer.broken


def test_a_servers_clock_is_set_back_once_and_keys_last_longer_by_that() -> None:
    config = fenced_config(clients=1, kinds=("clock_back",), most_faults=2)
    model = Model(config)
    state = after(model, ("come", 0))
    state, _ = model.after(state, ("do", 0, request_of(model, state, 0)))
    back, _ = model.after(state, ("fault", "clock_back"))
    assert model.server.now_us(back.store) == START_US - config.ttl_us // 2
    assert model.server.lock(back.store) == model.server.lock(state.store)
    assert ("fault", "clock_back") in model.moves(state)
    assert ("fault", "clock_back") not in model.moves(back)


def test_late_replies_are_told_in_words() -> None:
    config = fenced_config(clients=1, kinds=("late_reply",), most_faults=1)
    model = Model(config)
    state = after(model, ("come", 0))
    late = ("fault", "late_reply", 0, request_of(model, state, 0))
    state, _ = model.after(state, late)
    passes = next(choice for choice in model.moves(state) if choice[0] == "time")
    told = tell(config, (("come", 0), late, passes, ("deliver", "late", 0, 0)))
    assert "which is executed; the reply is late" in told[1].does
    assert told[1].fault == "late_reply"
    assert told[1].reply == "granted"
    assert told[3].does.startswith("gets the late reply to its step. A has the lock")


def test_tasks_of_one_client_are_two_to_every_invariant() -> None:
    explorer = Explorer(cohort_config("F1"))
    assert explorer.search(0, ())
    assert not explorer.broken
    assert explorer.known == {*explorer._checks}
    model = Model(cohort_config("F", patience=None))
    state = after(model, ("come", 0))
    state, events = model.after(state, ("do", 0, request_of(model, state, 0)))
    assert [(event.kind, event.task) for event in events if event.kind == "granted"] == [("granted", 1)]
    state, events = model.after(state, ("leave", 0))
    kinds = [(event.kind, event.task, event.what) for event in events]
    assert ("leaves", 1, "") in kinds
    assert ("granted", 2, "passed") in kinds
    assert not list(under_way(state))
