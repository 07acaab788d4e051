"""What the search has found, performed on real servers: the same comes of it there, or it is not confirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import redis

from holdfast.errors import InvalidConfig, Unavailable, Unsupported
from holdfast.lab.replay.perform import Outcome, perform
from holdfast.lab.replay.real import RealServer
from holdfast.lab.report.story import tell
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.explorer import Broken, Explorer
from holdfast.lab.search.faults import FAULTS
from holdfast.lab.search.model import Model
from holdfast.lab.subjects.rows import config_of
from holdfast.lab.surveys.common import quietly, trace_of
from tests.lab.ties import LATE_US, without_ties
from tests.servers import Server
from tests.support import as_bytes

AT_ONCE = 12
BRIEF_US = 1_700_000  # so long is a run of chance followed at most
MOST_TRIES = 4  # of a run that the machine has delayed
UNPERFORMABLE = {"clock_jump", "clock_back", "reshard", "refused", "unconfirmed"}

# Keys of others, whose names are like ours.
OTHERS = {"foo2": "a", "fo": "b", "foo:hf": "c", "xfoo:hf1:fence:{xfoo}": "d", "lock:foo2": "e", "bar": "f"}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quietly():
        yield


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server() as server:
        yield server


def found(row: str, invariant: str, *kinds: str) -> Trace:
    """The shortest trace with one fault, of that kind."""
    config = config_of(row, clients=2, kinds=kinds)
    explorer = Explorer(config, invariants=[invariant], stop_at=[invariant])
    explorer.search(len(kinds), kinds)
    trace = trace_of(row, explorer.broken[invariant])
    assert trace.faults == kinds
    return trace


def told(row: str, invariant: str, choices: tuple[Any, ...], clients: int = 2) -> Trace:
    """That schedule, told of that row, whether it breaks anything or not."""
    config = config_of(row, clients=clients)
    return trace_of(row, Broken(invariant, choices, "", (), config))


def scheduled(row: str, invariant: str, *wishes: tuple[Any, ...]) -> Trace:
    """A run in which the first thing happens that begins with the first wish, and so on."""
    model = Model(config_of(row, clients=2))
    state, choices = model.first(), []
    for wish in wishes:
        choices.append(next(move for move in model.moves(state) if move[: len(wish)] == wish))
        state, _ = model.after(state, choices[-1])
    return told(row, invariant, tuple(choices))


def after_a_visit(_: Trace) -> Trace:
    """Somebody comes when all seems to be over, so that nobody new is to be let in before the end."""
    visit = ("come", 0), ("do", 0), ("leave", 0), ("do", 0)
    return scheduled("setnx", "NoOrphan", *visit, ("come", 1), ("fault", "crash", 1, "after"))


def with_a_flush(trace: Trace) -> Trace:
    """The same, but that the server forgets its scripts before every step of a client."""
    choices: list[Any] = []
    for choice in trace.choices:
        choices += [("fault", "script_flush"), choice] if choice[0] == "do" else [choice]
    return told(trace.recipe, trace.invariant, tuple(choices))


class Case(NamedTuple):
    row: str
    invariant: str
    kinds: tuple[str, ...] = ()
    change: Callable[[Trace], Trace] | None = None

    def trace(self) -> Trace:
        shortest = found(self.row, self.invariant, *self.kinds)
        return self.change(shortest) if self.change else shortest


CASES = {
    " ".join((case.row, case.invariant, *case.kinds, *([case.change.__name__] if case.change else []))): case
    for case in (
        Case("multi", "OwnerOnlyStretch"),
        Case("watch_blind", "MutualExclusion"),
        Case("setnx", "NoOrphan", ("crash",)),
        Case("setnx", "NoOrphan", ("crash",), after_a_visit),
        Case("setnx_expire", "NoOrphan", ("crash",)),
        Case("setnx_repair", "OwnerOnlyStretch", ("stall",)),
        Case("getset_equal", "AcquireTotality", ("stall",)),
        Case("set_nx", "MutualExclusion", ("pause",)),
        Case("watch", "MutualExclusion", ("pause",)),
        Case("set_nx_plain", "OwnerOnlyRelease", ("pause",)),
        Case("getset", "MutualExclusion", ("skew",)),
        Case("getset:same_value", "OwnerOnlyStretch", ("skew",)),
        Case("setnx_expire", "AcquireTotality", ("lost_request",)),
        Case("set_nx", "AcquireTotality", ("lost_reply",)),
        Case("watch", "AcquireTotality", ("lost_reply",)),
        Case("setnx", "OwnerOnlyRelease", ("duplicate",)),
        Case("setnx_repair", "OwnerOnlyStretch", ("delay",)),
        Case("watch", "AcquireTotality", ("delay",)),
        Case("getset:del", "AcquireTotality", ("cancel",)),
        Case("watch", "AcquireTotality", ("cancel",)),
        Case("watch", "MutualExclusion", ("restart",)),
        Case("holdfast", "MutualExclusion", ("restart",)),
        # The reply to its look at the ttl was late, and what it sets then is another's.
        Case("setnx_repair", "OwnerOnlyStretch", ("late_reply",)),
        # The replica has what was deleted last: the key is there again.
        Case("setnx", "NoOrphan", ("failover",)),
        Case("getset", "OwnerOnlyRelease", ("failover",)),
        Case("set_nx", "AcquireTotality", ("failover",)),
        Case("holdfast", "MutualExclusion", ("failover",)),
        Case("set_nx_plain", "OwnerOnlyRelease", ("eviction",)),
        Case("holdfast", "MutualExclusion", ("eviction",), with_a_flush),
    )
}


def test_every_fault_that_can_be_performed_is() -> None:
    performable = set(FAULTS) - UNPERFORMABLE
    assert {kind for case in CASES.values() for kind in case.kinds} == performable - {"script_flush"}
    assert any(case.change is with_a_flush for case in CASES.values())


class Performed(NamedTuple):
    trace: Trace
    outcome: Outcome
    said: list[str]
    left: dict[str, str]  # what is on the server afterwards


class Punctuality:
    """What a replay says, and whether it was late at any time."""

    def __init__(self, trace: Trace) -> None:
        self.said: list[str] = []
        self.late = False
        self._trace = trace
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        due_us = self._trace.moments[len(self.said)].at_us
        self.late = self.late or (time.monotonic() - self._began) * 1e6 - due_us > LATE_US
        self.said.append(line)


class Crew:
    """Servers, each for one trace at a time, on which others have keys as well."""

    def __init__(self) -> None:
        self._servers = [Server() for _ in range(AT_ONCE)]
        self._free: SimpleQueue[Server] = SimpleQueue()
        for server in self._servers:
            server.client().mset(OTHERS)
            self._free.put(server)

    def perform(self, trace: Trace) -> Performed:
        """Perform it; once more if it differs and a step was late, because the schedule was not kept then."""
        server = self._free.get()
        try:
            for _ in range(MOST_TRIES):
                clock = Punctuality(trace)
                outcome = perform(trace, server.url, clock.say)
                if not (clock.late and outcome.why.startswith(("at step", "when time passes"))):
                    break
            return Performed(trace, outcome, clock.said, contents(server.client()))
        finally:
            self._free.put(server)

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


def contents(admin: redis.Redis) -> dict[str, str]:
    return {as_bytes(key).decode(): as_bytes(admin.get(key)).decode() for key in admin.keys("*")}


PITFALLS = [
    (Case("setnx", "NoOrphan", ("crash",)), "set_nx_plain"),  # it has a ttl
    (Case("set_nx_plain", "OwnerOnlyRelease", ("eviction",)), "set_nx"),  # a token, and a release that compares
    (Case("multi", "OwnerOnlyStretch"), "set_nx_plain"),  # losers who do not touch the ttl
]
CURED = [f"{row} instead of {case.row}" for case, row in PITFALLS]


def walks() -> dict[str, Trace]:
    """Runs of chance, as far as they take little time."""
    traces = {}
    for row in ("getset_equal", "watch", "setnx_repair", "holdfast"):
        config = config_of(row, clients=3, kinds=tuple(kind for kind in FAULTS if kind not in UNPERFORMABLE))
        explorer = Explorer(config)
        for seed in range(10):
            choices = without_ties(config, explorer.walk(seed, most_faults=3, steps=60))
            brief = tuple(moment for moment in tell(config, choices) if moment.at_us <= BRIEF_US)
            traces[f"{row}, seed {seed}"] = Trace(row, "NoFalseHold", 3, (), choices[: len(brief)], brief, seed)
    return traces


@pytest.fixture(scope="module")
def performed() -> dict[str, Performed]:
    """All of them at once, for most of the time is spent in waiting."""
    traces = {name: case.trace() for name, case in CASES.items()}
    for name, (case, row) in zip(CURED, PITFALLS, strict=True):
        traces[name] = told(row, case.invariant, case.trace().choices)
    traces |= walks()
    crew = Crew()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(traces, pool.map(crew.perform, traces.values()), strict=True))
    finally:
        crew.stop()


@pytest.mark.parametrize("name", CASES)
def test_what_the_search_has_found_is_confirmed_and_nothing_is_left_behind(
    name: str, performed: dict[str, Performed]
) -> None:
    trace, outcome, said, left = performed[name]
    assert outcome.confirmed, "\n".join([outcome.why, *said])
    assert len(said) == len(trace.moments)
    # By the same clients, in the same words.
    assert outcome.why == f"{trace.invariant} is broken on the real server, too: {trace.moments[-1].violation}"
    assert left == OTHERS


@pytest.mark.parametrize("name", CURED)
def test_a_lock_without_the_pit_does_not_break_under_the_same_schedule(
    name: str, performed: dict[str, Performed]
) -> None:
    trace, outcome, said, left = performed[name]
    assert outcome == Outcome(False, f"{trace.invariant} is not broken by this on the real server")
    assert len(said) == len(trace.moments)
    assert left == OTHERS


def test_a_real_server_answers_as_the_simulated_one_does(performed: dict[str, Performed]) -> None:
    """Whatever happens: every reply, the key and its ttl after every step, and who is woken."""
    runs = {name: run for name, run in performed.items() if "seed" in name}
    for name, (trace, outcome, said, left) in runs.items():
        shown = "\n".join([f"{name}: {outcome.why}", *said])
        assert outcome.why == "NoFalseHold is not broken by this on the real server", shown
        assert len(said) == len(trace.moments)
        assert left == OTHERS
    moments = [moment for run in runs.values() for moment in run.trace.moments]
    assert sum(bool(moment.command) for moment in moments) > 300
    assert len({moment.fault for moment in moments}) > 8


def test_a_run_of_chance_ends_before_its_outcome_depends_on_a_millisecond() -> None:
    """A waiter that asks every half second was silent for exactly a second, after which it loses its place."""
    config = config_of("holdfast", clients=3, kinds=tuple(kind for kind in FAULTS if kind not in UNPERFORMABLE))
    choices = Explorer(config).walk(4, most_faults=3, steps=60)
    kept = without_ties(config, choices)
    assert kept == choices[: len(kept)]
    last = tell(config, choices)[len(kept)]
    assert (last.at_us, last.command.split()[0]) == (1_000_000, "acquire")
    assert without_ties(config, kept) == kept


def test_a_trace_that_was_kept_as_json_is_performed_as_well(url: str) -> None:
    trace = found("getset", "MutualExclusion", "skew")
    assert perform(Trace.from_json(trace.to_json()), url, lambda _: None).confirmed


# Not confirmed.


def test_clients_that_ask_something_else_are_noticed(url: str) -> None:
    trace = found("setnx", "MutualExclusion", "eviction")
    outcome = perform(replace(trace, recipe="set_nx_plain"), url, lambda _: None)
    assert outcome == Outcome(False, "at step 2, A asks SET foo 1 EX 3 NX, and not SETNX foo 1")


def test_another_claim_is_not_confirmed(url: str) -> None:
    trace = found("setnx", "MutualExclusion", "eviction")
    outcome = perform(replace(trace, invariant="OwnerOnlyRelease"), url, lambda _: None)
    assert outcome == Outcome(False, "OwnerOnlyRelease is not broken by this on the real server")


@pytest.mark.parametrize(
    ("place", "choice"),
    [
        (0, ("do", 0, 1)),  # before anybody has come
        (2, ("do", 0, 99)),
        (2, ("deliver", "bell", 0, 0)),
        (2, ("fault", "failover", 5)),
        (2, ("fault", "duplicate", 0, 99)),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_not_confirmed(url: str, place: int, choice: tuple[Any, ...]) -> None:
    trace = found("setnx", "MutualExclusion", "eviction")
    changed = (*trace.choices[:place], choice, *trace.choices[place + 1 :])
    outcome = perform(replace(trace, choices=changed), url, lambda _: None)
    assert not outcome.confirmed
    assert outcome.why.endswith("the real run has nothing like it to do")


@pytest.mark.parametrize(
    ("row", "meddling", "why"),
    [
        ("setnx", "SET foo x", "the key holds x, and not 1"),
        ("setnx", "DEL foo", "it answers 1, and not 0"),
        ("setnx", "PEXPIRE foo 440", "the key has a ttl of 0.4 s, and not no ttl"),
        ("set_nx_plain", "PERSIST foo", "the key has no ttl, and not a ttl of 3.0 s"),
        ("set_nx_plain", "PEXPIRE foo 90000", "the key has a ttl of 90.0 s, and not a ttl of 3.0 s"),
    ],
)
def test_somebody_who_meddles_is_noticed(url: str, admin: redis.Redis, row: str, meddling: str, why: str) -> None:
    def meddle(said: str) -> None:
        if "B       wants the lock" in said:
            admin.execute_command(meddling)

    trace = scheduled(row, "MutualExclusion", ("come", 0), ("do", 0), ("come", 1), ("do", 1))
    outcome = perform(trace, url, meddle)
    assert outcome == Outcome(False, f"at step 4, {why}")
    assert admin.get("foo") == (b"x" if meddling == "SET foo x" else None), "what is somebody else's is left alone"
    admin.delete("foo")
    assert not admin.keys("*")


# As it is done.


def test_clients_are_given_what_the_real_server_answers(url: str, admin: redis.Redis) -> None:
    model = Model(config_of("holdfast", clients=2))
    with RealServer(url, "foo") as server:
        model.server = server
        state, _ = model.after(model.first(), ("come", 0))
        _, events = model.after(state, ("do", 0, 1))
        first, count, _ = as_bytes(admin.get("foo:hf1:fence:{foo}")).split()
        assert {event.fence for event in events if event.kind in ("granted", "writes")} == {int(first)}
        assert count == b"64"
    assert not admin.keys("*")


def test_scripts_are_forgotten(url: str, admin: redis.Redis) -> None:
    sha = admin.script_load("return 1")
    flush = ("fault", "script_flush")
    trace = scheduled("holdfast", "MutualExclusion", ("come", 0), ("do", 0), flush, ("leave", 0), ("do", 0))
    assert perform(trace, url, lambda _: None).why == "MutualExclusion is not broken by this on the real server"
    assert admin.script_exists(sha) == [False]


@pytest.mark.parametrize("dies", [False, True])
def test_whoever_interrupts_it_is_obeyed(own_server: Server, dies: bool) -> None:
    """And nothing is left behind, if the server lives."""

    def interrupt(said: str) -> None:
        if "takes the key" in said:
            assert own_server.client().exists("foo")
            if dies:
                own_server.kill()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(found("setnx", "MutualExclusion", "eviction"), own_server.url, interrupt)
    assert dies or not own_server.client().keys("*")


# Refused.


def test_what_no_real_server_can_be_made_to_do_is_refused(url: str) -> None:
    jump = found("set_nx", "MutualExclusion", "clock_jump")
    for trace in (jump, found("setnx_repair", "OwnerOnlyStretch", "clock_back")):
        with pytest.raises(Unsupported, match="clock jumps"):
            perform(trace, url)
    with pytest.raises(Unsupported, match="clock jumps"):
        perform(replace(jump, faults=()), url)  # whatever its heading says
    with pytest.raises(Unsupported, match="memcached"):
        perform(found("memcached_add", "MutualExclusion", "eviction"), url)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipe": "nosuch"}, "there are holdfast, setnx"),
        ({"invariant": "nosuch"}, "there are MutualExclusion"),
        ({"choices": (("fault", "nosuch", 0),)}, "there are crash"),
    ],
)
def test_what_is_not_known_is_refused(url: str, changes: dict[str, Any], says: str) -> None:
    trace = found("setnx", "MutualExclusion", "eviction")
    with pytest.raises(InvalidConfig, match=says):
        perform(replace(trace, **changes), url)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ("setnx", "foo"),
        ("watch", "lock:foo"),
        ("holdfast", "foo"),
        ("holdfast", "foo:hf1:fence:{foo}"),
        ("holdfast", "foo:hf1:gone:somebody:{foo}"),
    ],
)
def test_a_name_that_is_in_use_is_left_alone(url: str, admin: redis.Redis, row: str, key: str) -> None:
    admin.set(key, "precious", ex=1000)
    admin.mset(OTHERS)
    with pytest.raises(InvalidConfig, match="use another database, or remove the key"):
        perform(found(row, "MutualExclusion", "eviction"), url)
    assert contents(admin) == {**OTHERS, key: "precious"}
    assert 0 < admin.ttl(key) <= 1000


# Servers that go away.


def woken() -> Trace:
    """One has the lock, another queues, listens, asks again, and is woken: by a step, and by a bell."""
    comes = ("come", 0), ("do", 0), ("come", 1), ("do", 1), ("do", 1), ("do", 1)
    return scheduled("holdfast", "MutualExclusion", *comes, ("leave", 0), ("do", 0), ("deliver", "bell", 1))


def linked() -> Trace:
    """One takes the lock over a connection of its own."""
    return scheduled("watch", "MutualExclusion", ("come", 0), ("do", 0), ("do", 0), ("do", 0))


@pytest.mark.parametrize("make", [woken, linked])
def test_a_server_that_dies_in_the_middle_is_unavailable(make: Callable[[], Trace], own_server: Server) -> None:
    trace = make()
    asked = [place for place, choice in enumerate(trace.choices) if choice[0] == "do"]
    for last in asked:
        said: list[str] = []

        def die(line: str, last: int = last, said: list[str] = said) -> None:
            said.append(line)
            if len(said) == last:
                own_server.kill()

        with pytest.raises(Unavailable) as caught:
            perform(trace, own_server.url, die)
        assert own_server.url in caught.value.causes
        assert len(said) == last
        own_server.restart()
    outcome = perform(trace, own_server.url, lambda _: None)  # and if it does not die, all is well
    assert outcome.why == "MutualExclusion is not broken by this on the real server"


def test_a_server_that_does_not_answer_is_unavailable(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lab.replay.real.TIMEOUT", 0.2)
    monkeypatch.setattr("holdfast.lab.replay.real.PARTING", 0.2)
    trace = woken()
    for first, following in enumerate(trace.choices[1:]):
        if following[0] != "do":
            continue
        said: list[str] = []

        def hang(line: str, first: int = first, said: list[str] = said) -> None:
            said.append(line)
            if len(said) > first:
                own_server.pause()

        with pytest.raises(Unavailable, match="did not answer within"):
            perform(trace, own_server.url, hang)
        own_server.restart()
    own_server.pause()
    with pytest.raises(Unavailable, match="did not answer within"):
        perform(trace, own_server.url)


@pytest.mark.parametrize(("make", "command"), [(woken, "SUBSCRIBE"), (linked, "WATCH")])
def test_what_we_may_not_do_is_said(make: Callable[[], Trace], command: str, own_server: Server) -> None:
    own_server.client().execute_command(f"ACL SETUSER timid on nopass ~* &* +@all -{command}")
    with pytest.raises(Unavailable) as caught:
        perform(make(), own_server.url.replace("//", "//timid:x@"), lambda _: None)
    assert own_server.url in caught.value.causes
    assert not own_server.client().keys("*")


def test_where_no_server_is_or_none_that_lets_us_in() -> None:
    trace = found("setnx", "MutualExclusion", "eviction")
    with Server("--requirepass", "secret") as closed:
        with pytest.raises(Unavailable, match="wants a password"):
            perform(trace, closed.url)
        closed.kill()
        with pytest.raises(Unavailable, match="nothing listens there"):
            perform(trace, closed.url)
