"""A trace, performed on a real server: the same clients and the same schedule, with the real outcome.

Clients and invariants are those of the search. Only the server differs: steps go over the network, and when the
schedule lets time pass, the replay waits. If a client sends a different request than in the search, or the server a
different reply, the trace is not confirmed.

A trace can be performed on a server with other users, as long as none of them uses the name (``foo``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.errors import InvalidConfig, Unsupported
from holdfast.lab.invariants.history import BROKEN, Event
from holdfast.lab.invariants.locks import CHECKS
from holdfast.lab.replay.real import Differs, RealServer
from holdfast.lab.report.lanes import numbers_of
from holdfast.lab.report.trace import Trace
from holdfast.lab.search.faults import FAULTS
from holdfast.lab.search.model import Model
from holdfast.lab.search.state import Config
from holdfast.lab.servers.store import Store
from holdfast.lab.subjects.rows import config_of

MOST_CLIENTS: Final = 8  # there are names for this many


class Outcome(NamedTuple):
    confirmed: bool
    why: str


def perform(trace: Trace, url: str, say: Callable[[str], object] = print) -> Outcome:
    """Whether the same steps break the same invariant on that server."""
    config = _checked(trace)
    with RealServer(url, config.key) as server:
        model = Model(config._replace(most_faults=len(trace.choices), kinds=("failover",), reduce=True))
        model.server = server
        return _perform(model, server, trace, say)


def _checked(trace: Trace) -> Config:
    """The configuration of the trace; raises if it cannot be performed."""
    if trace.invariant not in CHECKS:
        raise InvalidConfig(f"invariant {trace.invariant!r:.60}", f"there are {', '.join(CHECKS)}")
    if trace.clients not in range(1, MOST_CLIENTS + 1):
        raise InvalidConfig(f"clients={trace.clients!r:.60}", f"give 1 to {MOST_CLIENTS}")
    if not all(trace.choices):
        raise InvalidConfig("a schedule with an empty step", "save the trace again")
    config = config_of(trace.recipe, clients=trace.clients)
    if config.new_store is not Store:
        raise Unsupported(f"a trace of {trace.recipe}", "it is a lock on memcached, which is simulated only")
    kinds = {str(choice[1]) for choice in trace.choices if choice[0] == "fault"}
    if unknown := sorted(kinds - FAULTS.keys()):
        raise InvalidConfig(f"fault {unknown[0]!r:.60}", f"there are {', '.join(FAULTS)}")
    if kinds & {"clock_jump", "clock_back"}:
        raise Unsupported("a trace in which the server's clock jumps", "no command makes a real server do that")
    if "reshard" in kinds:
        raise Unsupported("a trace in which a slot moves", "one server has all slots; see make test-engines")
    return config


def _perform(model: Model, server: RealServer, trace: Trace, say: Callable[[str], object]) -> Outcome:
    state = model.first()
    history: tuple[Event, ...] = ()
    steps = zip(trace.choices, trace.moments, numbers_of(trace), strict=True)
    for place, (choice, moment, number) in enumerate(steps, start=1):
        # A newcomer before the end would change the real server for the other clients.
        model.asks_newcomers = place == len(trace.choices) and trace.invariant == "NoOrphan"
        server.asked = server.answered = ""
        difference = ""
        try:
            state, events = model.after(state, choice)
            history += events
            if server.asked and moment.command and server.asked != moment.command:
                difference = f"{moment.actor} asks {server.asked}, and not {moment.command}"
        except Differs as differs:
            difference = str(differs)
        except (StopIteration, LookupError):
            difference = "the real run has nothing like it to do"
        answered = f"  [{server.answered}]" if server.answered else ""
        say(f"{number and number + '.':>4} {moment.at_us / 1e6:6.2f} s  {moment.actor:7} {moment.does}{answered}")
        if difference:
            return Outcome(False, f"{f'at step {number}' if number else 'when time passes'}, {difference}")
    report = CHECKS[trace.invariant].judge(history)
    if report.verdict != BROKEN:
        return Outcome(False, f"{trace.invariant} is not broken by this on the real server")
    why = report.why.format(*(model.names[client] for client in report.clients))
    return Outcome(True, f"{trace.invariant} is broken on the real server, too: {why}")
