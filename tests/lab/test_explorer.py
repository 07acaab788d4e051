"""What the search finds by itself, and that it is the recipe it finds it in: without the cause it finds nothing.

``SEARCHES`` says where to look (kinds of fault, how many, how many clients), never what comes of it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from holdfast.errors import InvalidConfig
from holdfast.lab.invariants.history import BROKEN, HOLDS, UNKNOWN, Event
from holdfast.lab.invariants.locks import CHECKS
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Explorer
from holdfast.lab.search.faults import FAULTS
from holdfast.lab.search.state import Config
from holdfast.lab.subjects.rows import PACE, TTL, config_of, scheme_config
from holdfast.lab.surveys.question import question_config, two_winners
from holdfast.lab.surveys.recipes import find, survey
from holdfast.protocol.effects import Command, Effects, Step, call, new_token
from holdfast.protocol.recipes import algorithm_of
from holdfast.protocol.recipes.algorithm import LOST, WON, Algorithm, Leased, Outcome, RecipeHold
from holdfast.protocol.recipes.deadline import Deadlined
from holdfast.protocol.recipes.getset import GetSet
from holdfast.protocol.recipes.getset_equal import GetSetEqual
from holdfast.protocol.recipes.multi import Multi
from holdfast.protocol.recipes.set_nx_plain import SetNXPlain
from holdfast.protocol.recipes.setnx import SetNX
from holdfast.protocol.recipes.setnx_expire import SetNXExpire
from holdfast.protocol.recipes.watch_blind import WatchBlind


def explored(config: Config, invariant: str, kinds: tuple[str, ...], most_faults: int) -> Explorer:
    """A search for one thing, with ever more faults, until it is found or nothing is left."""
    explorer = Explorer(config._replace(kinds=kinds), invariants=[invariant], stop_at=[invariant])
    for faults in range(most_faults + 1):
        if not explorer.search(faults, kinds):
            break
    return explorer


# The same recipes without the cause of a pitfall.


class AtomicTtl(SetNXExpire):
    """SETNX and EXPIRE in one command."""

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        words = "SET", hold.key, 1, "NX", "EX", self.whole_seconds
        return WON if (yield from call(Command(words), timeout)) else LOST


class TimidLosers(Multi):
    """Who loses does not touch the ttl."""

    attempt = AtomicTtl.attempt


class Token:
    """A value of one's own, and a release that looks at it."""

    def free(self, hold: RecipeHold, timeout: float) -> Effects[bool]:
        return bool((yield from call(Step("free", (hold.key,), (hold.token,)), timeout, shielded=True)))


class OwnSetNX(Token, SetNX):
    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        hold.token = hold.token or (yield from new_token(""))
        return WON if (yield from call(Command(("SETNX", hold.key, hold.token)), timeout)) else LOST


class OwnSetNXEx(Token, SetNXPlain):
    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        hold.token = hold.token or (yield from new_token(""))
        words = "SET", hold.key, hold.token, "NX", "EX", self.whole_seconds
        return WON if (yield from call(Command(words), timeout)) else LOST


class OwnMulti(OwnSetNXEx):
    """MULTI is not needed any more, once its EXPIRE is the winner's only."""


class CompareAndSet:
    """A deadline is replaced only if it is still the one that was seen."""

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        scheme: Any = self
        now = yield from scheme.read_now()
        hold.value = yield from scheme.write(hold, scheme.deadline(now))
        if (yield from call(Command(("SETNX", hold.key, hold.value)), timeout)) == 1:
            return WON
        seen = yield from call(Command(("GET", hold.key)), timeout)
        if seen is None or not scheme.is_past(seen, now):
            return LOST
        swap = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 end return 0"
        words = "EVAL", swap, 1, hold.key, seen.decode(), hold.value
        return WON if (yield from call(Command(words), timeout)) else LOST


class SafeGetSet(CompareAndSet, GetSet):
    pass


class SafeGetSetEqual(CompareAndSet, GetSetEqual):
    pass


class ByServerTime:
    """The time is the server's, whatever the client's clock says."""

    def read_now(self) -> Effects[int]:
        seconds, micros = yield from call(Command(("TIME",)), 1.0)
        return int(seconds) * 1_000_000 + int(micros)


class PunctualGetSet(ByServerTime, GetSet):
    pass


class PunctualGetSetEqual(ByServerTime, GetSetEqual):
    pass


class NamedGetSet(GetSet):
    """With its owner's name before the deadline, and a release that compares."""


@dataclass(frozen=True, kw_only=True)
class SightedWatch(WatchBlind):
    """It reads what it watches."""

    def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
        return (yield from algorithm_of("watch", {"ttl": TTL}).attempt(hold, timeout))


def of(scheme: type[Algorithm], **options: Any) -> Config:
    ttl = {"ttl": TTL} if issubclass(scheme, Leased) else {}
    config = scheme_config(scheme(**{**PACE, **ttl, **options}))
    return config._replace(by_server=not issubclass(scheme, Deadlined))


class Case(NamedTuple):
    row: str
    invariant: str
    kinds: tuple[str, ...]
    most_faults: int
    cured: Config
    clients: int = 2
    bounds: tuple[tuple[str, Any], ...] = ()


BRIEF = ("patience", 1.0), ("leaves_us", ((0, 0),))
CUT_SHORT = ("spares_holders", True), ("patience", 3.2), ("leaves_us", ((0, 0),))
CRASH, PAUSE, LATE = ("crash",), ("pause",), ("duplicate",)
CASES = [
    Case("setnx", "NoOrphan", CRASH, 1, of(AtomicTtl)),
    Case("setnx_expire", "NoOrphan", CRASH, 1, of(AtomicTtl)),
    Case("multi", "OwnerOnlyStretch", (), 0, of(TimidLosers)),
    Case("multi", "NoOrphan", CRASH, 1, of(TimidLosers)),
    Case("getset", "OwnerOnlyStretch", ("stall",), 1, of(SafeGetSet), 3, BRIEF),
    Case("getset_equal", "OwnerOnlyStretch", ("stall",), 1, of(SafeGetSetEqual), 3, BRIEF),
    Case("getset", "MutualExclusion", ("skew",), 1, of(PunctualGetSet)),
    Case("getset_equal", "MutualExclusion", ("skew",), 1, of(PunctualGetSetEqual)),
    # Two hold with all clocks right, although no holder was ever stopped: a loser was, and cut the holder's time short.
    Case("getset", "MutualExclusion", ("stall",), 1, of(SafeGetSet), 3, CUT_SHORT),
    Case("getset_equal", "AcquireTotality", ("stall",), 1, of(SafeGetSetEqual)),
    Case("watch_blind", "MutualExclusion", (), 0, of(SightedWatch)),
    Case("setnx_repair:as_written", "OwnerOnlyStretch", (), 0, config_of("setnx_repair")),
    # The wrong DEL. A lock without a ttl has no successor unless its own DEL comes twice.
    Case("setnx", "OwnerOnlyRelease", LATE, 1, of(OwnSetNX)),
    Case("setnx_expire", "OwnerOnlyRelease", PAUSE, 1, of(OwnSetNXEx)),
    Case("multi", "OwnerOnlyRelease", PAUSE, 1, of(OwnMulti)),
    Case("getset", "OwnerOnlyRelease", PAUSE, 1, of(NamedGetSet, owner_prefix=True, release="same_value")),
    Case("getset:del", "OwnerOnlyRelease", PAUSE, 1, of(NamedGetSet, owner_prefix=True, release="same_value")),
    Case("getset_equal", "OwnerOnlyRelease", PAUSE, 1, of(NamedGetSet, owner_prefix=True, release="same_value")),
    Case("watch_blind", "OwnerOnlyRelease", (), 0, config_of("watch")),
    Case("set_nx_plain", "OwnerOnlyRelease", PAUSE, 1, of(OwnSetNXEx)),
]
IDS = [f"{case.row}-{case.invariant}-{'+'.join(case.kinds) or 'nothing'}" for case in CASES]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_pits_are_found_and_are_gone_with_their_cause(case: Case) -> None:
    bounds = {"clients": case.clients, **dict(case.bounds)}
    found = explored(config_of(case.row, **bounds), case.invariant, case.kinds, case.most_faults)
    assert case.invariant in found.broken
    choices = found.broken[case.invariant].choices
    assert sum(choice[0] != "time" for choice in choices) <= 15
    cured = case.cured._replace(stay_us=found.config.stay_us, **bounds)
    explorer = Explorer(cured._replace(kinds=case.kinds), invariants=[case.invariant])
    assert all(explorer.search(faults, case.kinds) for faults in range(case.most_faults + 1))
    assert not explorer.broken
    assert explorer.states > 50


@pytest.mark.long
def test_a_pause_makes_two_hold_a_lock_by_set_nx_and_the_fenced_lock_is_safe_under_it() -> None:
    found = explored(config_of("set_nx", clients=2), "MutualExclusion", PAUSE, 1)
    assert "MutualExclusion" in found.broken
    unsafe = explored(config_of("set_nx", clients=2), "FencedSafety", PAUSE, 1)
    assert "FencedSafety" in unsafe.broken
    fenced = Explorer(config_of("holdfast", clients=2, kinds=PAUSE))
    assert fenced.search(1)  # every pause of every client at every step, and so the one that broke the other
    assert not fenced.broken
    assert {"FencedSafety", "MutualExclusion", "NoFalseHold", "NoOrphan"} <= fenced.known


@pytest.mark.long
@pytest.mark.parametrize("equal", [True, False], ids=["equal deadlines", "deadlines that differ"])
@pytest.mark.parametrize("variant", ["getset", "getset_equal"])
def test_of_those_who_see_the_same_expired_deadline_only_one_wins(variant: str, equal: bool) -> None:
    answer = two_winners(variant, 3, equal=equal)
    assert answer.exhausted
    assert not answer.two_win
    assert answer.states > 100
    assert "never two win (every interleaving" in str(answer)


def test_the_question_would_be_answered_otherwise_if_losers_did_not_look_at_what_they_replaced() -> None:
    class Rash(GetSet):
        def wins(self, seen: bytes | None, before: bytes | None, now: int) -> bool:
            return True

    config = question_config("getset", 2, equal=True)
    careless = config._replace(make_lock=of(Rash).make_lock)
    explorer = Explorer(careless, invariants=["MutualExclusion"])
    explorer.search(0)
    assert "MutualExclusion" in explorer.broken


SMALL = [
    ("setnx_expire", ("crash", "pause"), 1, 2),
    ("getset", ("stall", "skew"), 1, 2),
    ("getset_equal", ("cancel", "delay", "lost_reply"), 1, 2),
    ("watch", ("restart", "eviction"), 1, 2),
    ("set_nx", (), 0, 3),
    ("holdfast", ("crash", "failover"), 1, 2),
]


@pytest.mark.long
@pytest.mark.parametrize(("row", "kinds", "most_faults", "clients"), SMALL, ids=[case[0] for case in SMALL])
def test_the_reduction_saves_transitions_and_changes_no_verdict(
    row: str, kinds: tuple[str, ...], most_faults: int, clients: int
) -> None:
    bounds = {"clients": clients, "kinds": kinds, "patience": 2.0, "horizon_us": 6_000_000, "leaves_us": ((0, 0),)}
    whole = Explorer(config_of(row, reduce=False, **bounds))
    reduced = Explorer(config_of(row, **bounds))
    assert whole.search(most_faults)
    assert reduced.search(most_faults)
    assert whole.broken.keys() == reduced.broken.keys()
    assert reduced.transitions < whole.transitions


@pytest.mark.long
def test_steps_that_commute_are_taken_in_one_order_and_no_state_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("getset", clients=3, kinds=(), patience=1.0, leaves_us=((0, 0),))
    asleep = Explorer(config)
    assert asleep.search(0)
    awake = Explorer(config)
    monkeypatch.setattr("holdfast.lab.search.explorer.commutes", lambda *_: False)
    assert awake.search(0)
    assert awake.hashes == asleep.hashes
    assert asleep.transitions < awake.transitions


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_fault_strikes(kind: str) -> None:
    explorer = Explorer(config_of("holdfast", clients=2, kinds=(kind,), replicas=int(kind == "unconfirmed")))
    state, struck = explorer.model.first(), False
    explorer.model.config = explorer.config._replace(most_faults=1)
    for _ in range(40):
        moves = explorer.model.moves(state)
        faults = [move for move in moves if move[0] == "fault"]
        assert all(move[1] == kind for move in faults)
        if faults:
            after, events = explorer.model.after(state, faults[0])
            assert after.faults == 1
            assert any(event.kind == "touched" and event.what == kind for event in events)
            struck = True
        state, _ = explorer.model.after(state, next(move for move in moves if move[0] != "fault"))
        if struck:
            break
    assert struck


def test_walks_of_chance_come_about_again_by_their_seed() -> None:
    def walks(seed: int) -> list[Any]:
        explorer = Explorer(config_of("getset", clients=3))
        return [explorer.walk(seed + number, most_faults=3) for number in range(20)]

    assert walks(7) == walks(7)
    assert walks(7) != walks(8)


def test_what_a_walk_breaks_names_its_seed_and_is_broken_again_by_it() -> None:
    config = config_of("watch_blind", clients=2)
    explorer = Explorer(config)
    for seed in range(20):
        explorer.walk(seed, most_faults=1)
    broken = explorer.broken["MutualExclusion"]
    again = Explorer(config)
    again.walk(broken.seed or 0, most_faults=1)
    assert again.broken["MutualExclusion"].choices == broken.choices


def test_survey_tells_of_every_row_and_invariant_and_of_its_progress() -> None:
    said: list[Any] = []
    found = survey(["setnx", "holdfast"], clients=2, budget=20.0, faults=["crash"], progress=said.append)
    cells = {(cell.recipe, cell.invariant): cell for findings in found for cell in findings.cells}
    assert cells["setnx", "NoOrphan"].verdict == BROKEN
    assert cells["holdfast", "NoOrphan"].verdict == HOLDS
    assert cells["setnx", "FenceMonotone"].verdict == UNKNOWN
    assert all(cell.verdict != BROKEN for (row, _), cell in cells.items() if row == "holdfast")
    assert {progress.row for progress in said} == {"setnx", "holdfast"}
    assert said[-1].done == said[-1].of == 2


def test_survey_in_one_process_finds_the_same_and_leaves_logs_as_they_were() -> None:
    findings = survey(["setnx"], clients=2, budget=20.0, faults=["crash"], jobs=1)[0]
    assert {cell.invariant for cell in findings.cells if cell.verdict == BROKEN} == {"NoOrphan"}
    assert not logging.getLogger("holdfast.recipes").disabled


def test_traces_survive_json_and_tell_how_it_came_to_that() -> None:
    trace = find("set_nx", "MutualExclusion", faults=["pause"], clients=2)[0].trace
    assert trace is not None
    assert Trace.from_json(trace.to_json()) == trace
    assert trace.faults == ("pause",)
    assert trace.moments[-1].violation
    assert not any(moment.violation for moment in trace.moments[:-1])
    assert len(trace.moments) == len(trace.choices)
    assert set(trace.moments[-1].holders) == {"A", "B"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"row": "nosuch"}, "there are holdfast, setnx"),
        ({"invariant": "nosuch"}, "there are MutualExclusion"),
        ({"clients": 9}, "2 to 4"),
        ({"faults": ["nosuch"]}, "there are crash"),
    ],
)
def test_bad_requests_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    asked = {"row": "setnx", "invariant": "NoOrphan", **options}
    with pytest.raises(InvalidConfig, match=says):
        find(asked.pop("row"), asked.pop("invariant"), **asked)


def test_answers_that_python_hashes_alike_lead_to_different_lives() -> None:
    """TTL says -1 for a key without a ttl and -2 for no key, and hash(-1) == hash(-2)."""
    explorer = Explorer(config_of("setnx_repair", clients=2, kinds=()))
    assert explorer.search(0)
    locals_ = explorer.model.locals
    told = {
        (local.parent.mark, local.came_by[3]): local.mark
        for local in locals_.values()
        if local.parent is not None and local.came_by[0] == "answer" and local.came_by[3] in ((-1,), (-2,))
    }
    assert {replies for _, replies in told} == {(-1,), (-2,)}
    assert len(set(told.values())) == len(told)


def test_a_mistake_in_a_program_ends_the_search_and_is_not_taken_for_a_client_that_does_no_wrong() -> None:
    class Mistaken(SetNX):
        def attempt(self, hold: RecipeHold, timeout: float) -> Effects[Outcome]:
            if (yield from super().attempt(hold, timeout)) == LOST:
                raise ZeroDivisionError
            return WON

    with pytest.raises(ZeroDivisionError):
        Explorer(of(Mistaken)._replace(clients=2)).search(0)


def test_a_server_may_start_again_also_while_the_lock_is_free() -> None:
    """It forgets more than the key: the queue, the fences, and who has given up."""
    model = Explorer(config_of("holdfast", clients=2, kinds=("restart",))).model
    state, _ = model.after(model.first(), ("come", 0))
    assert model.is_free(state)
    assert ("fault", "restart") in model.moves(state)


def test_who_asks_and_is_next_is_given_two_fences_by_one_step_the_lower_one_first() -> None:
    """B stood before it and is dead: the step that passes over B grants it the lock, and then finds that it has it."""
    model = Explorer(config_of("holdfast", clients=3, kinds=("crash",))).model
    state = model.first()
    history: tuple[Event, ...] = ()

    def take(*wishes: tuple[Any, ...]) -> None:
        nonlocal state, history
        moves = model.moves(state)
        choice = next(move for wish in wishes for move in moves if move[: len(wish)] == wish)
        state, events = model.after(state, choice)
        history += events

    for wish in [("come", 0), ("do", 0), ("come", 1), ("do", 1), ("come", 2), ("do", 2), ("fault", "crash", 0)]:
        take(wish)
    while state.now_us < 3_000_000:
        take(("do",), ("time",))
    take(("do", 2), ("fault", "crash", 1))
    if not state.stopped[1]:
        take(("fault", "crash", 1))
    while history[-1].kind != "writes":
        take(("do",), ("time",))
    given = [event.fence for event in history if event.kind == "minted" and event.client == 2]
    assert len(given) == 2
    assert CHECKS["FenceMonotone"].judge(history).verdict == HOLDS


def test_an_interrupt_ends_the_search_and_is_not_taken_for_a_client_s() -> None:
    explorer = Explorer(config_of("holdfast", clients=3))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    alarm.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            explorer.search(2, budget=60.0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        alarm.cancel()
        signal.signal(signal.SIGINT, before)


def test_bells_reach_only_those_who_listen() -> None:
    """After a failover a client waits without its listener for a moment: what is rung for it then is gone."""
    kinds = ("failover", "restart", "crash")
    woken = 0
    for seed in range(60):
        explorer = Explorer(config_of("holdfast", clients=3, kinds=kinds))
        choices = explorer.walk(seed, most_faults=3, steps=120)
        model, state = explorer.model, explorer.model.first()
        for choice in choices:
            was = state.under_way
            state, _ = model.after(state, choice)
            for item in state.under_way:
                if item.kind == "bell" and item not in was:
                    woken += 1
                    assert model.channels[item.client].encode() in model.server.store(state.store).subscribed
    assert woken
