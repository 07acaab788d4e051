"""Judges: pure functions of a history. Each says valid, invalid with its reasons, or unknown (nothing to judge).

A judge never guesses in favour of an error. A hold is taken to be believed from the end of the first look that found
``lease.held`` to the beginning of the last one. A worker stops looking when it finds ``held`` false.

What the guarantees exclude (a key deleted by hand, a server that lost its data, a failover that lost a grant) is an
excuse for two holders, and for nothing else. The fault says for which names (``displaces``), until when, which is when
it ended unless it says otherwise (``until``), and for holders in which places, if not for all (``places``). The excuse
lasts for one ttl more. Overlaps with an excuse are *declared*, the others are *beyond* what the pages declare.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.hostile.history import Event

__all__ = ["JUDGES", "Facts", "Overlaps", "Verdict", "facts_of", "judge", "overlaps_in"]

SLACK = 5.0  # what a call may take beyond its bound on a busy machine
FREE_FOR = 2.0  # how long a lock may be free although a waiter waits for it
RECOVERY = 5.0  # how long a client may take to get over a fault
SETTLED = 3.0  # how long a key may stay although its living process holds nothing
ROUNDING = 0.05  # a deadline and the harness's clock readings are this far apart at most
GAP = 0.5  # samples of the server that are further apart say nothing about the time between


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one judge found. ``valid`` is None where the history has nothing to judge."""

    check: str
    valid: bool | None
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = {True: "valid", False: "INVALID", None: "unknown"}[self.valid]
        return "\n    ".join([f"{self.check}: {word}", *self.reasons[:5]])


@dataclass(slots=True)
class Hold:
    """One lease, as its worker saw it."""

    actor: str
    kind: str
    start: float  # the lease was held at this time,
    end: float  # and still at this one
    asked: float
    ttl: float
    fences: dict[str, int]
    slot: int = -1
    granted: bool = True  # else it is the rest of an earlier grant: a writer that reads now

    @property
    def shared(self) -> bool:
        return self.kind in ("read", "semaphore")

    def __str__(self) -> str:
        return f"{self.actor} {self.kind} {self.start:.3f} to {self.end:.3f}, fences {self.fences}"


@dataclass(slots=True)
class Call:
    """One call of a worker: when it ended (None: not in this history), and how."""

    actor: str
    begun: float
    op: str
    bound: float
    names: Sequence[str]
    wait: float
    ended: float | None = None
    error: str = ""


@dataclass(slots=True)
class Facts:
    """What the judges have in common, derived once from the history."""

    holds: list[Hold] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    stops: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    last: float = 0.0

    def displaced(self, name: str, moment: float, holds: Sequence[Hold]) -> bool:
        """Whether one of these holders may not yet have been told at that moment that its key is gone."""
        ttl, places = max(hold.ttl for hold in holds), {place_of(hold.actor) for hold in holds}
        return any(
            ("*" in fault.data["displaces"] or name in fault.data["displaces"])
            and places & set(fault.data.get("places", places))
            and fault.data["begun"] - ROUNDING <= moment <= fault.data.get("until", fault.at) + ttl + ROUNDING
            for fault in self.faults
            if fault.data.get("displaces")
        )

    def stopped(self, actor: str, begin: float, end: float) -> float:
        """For how long in that time the actor's process was not let run."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.stops[process_of(actor)])


def process_of(actor: str) -> str:
    return actor.partition("/")[0]


def place_of(actor: str) -> str:
    return actor.partition(".")[0]


def facts_of(history: Sequence[Event]) -> Facts:
    facts, holds, calls = Facts(), {}, {}
    for event in history:
        data = event.data
        key = (event.actor, data.get("id"))
        facts.last = max(facts.last, event.at)
        if event.what == "held":
            fences = data["fences"]
            hold = Hold(event.actor, data["kind"], event.at, event.at, data["asked"], data["ttl"], fences, data["slot"])
            hold.granted = data.get("granted", True)
            holds[key] = hold
        elif event.what == "believes":
            holds[key].end = max(holds[key].end, event.at)
        elif event.what == "call":
            calls[key] = Call(event.actor, event.at, data["op"], data["bound"], data["names"], data["wait"])
        elif event.what == "return":
            calls[key].ended, calls[key].error = event.at, data["error"]
        elif event.what == "fault":
            facts.faults.append(event)
            if data["name"] == "stop worker":
                facts.stops[data["target"]].append((data["begun"], event.at))
        elif event.what == "killed":
            facts.killed[data["target"]] = event.at
    facts.holds, facts.calls = list(holds.values()), list(calls.values())
    return facts


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Two holders at the same time, or a permit too many: what the pages declare, and what they do not."""

    declared: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)


def overlaps_in(history: Sequence[Event], facts: Facts) -> Overlaps:
    found = Overlaps()
    permits = {name: count for event in history if event.what == "permits" for name, count in event.data.items()}
    for name, holds in _by_name(facts.holds).items():
        for one, other in _overlapping(holds):
            since, until = max(one.start, other.start), min(one.end, other.end)
            if one.shared and other.shared and (one.slot < 0 or one.slot != other.slot):
                continue
            excused = all(facts.displaced(name, moment, (one, other)) for moment in (since, until))
            said = f"{name}: two holders from {since:.3f} to {until:.3f}: {one}; {other}"
            (found.declared if excused else found.beyond).append(said)
        for hold in holds if name in permits else ():
            beside = [other for other in holds if other.start <= hold.start <= other.end]
            if hold.kind == "semaphore" and len(beside) > permits[name]:
                said = f"{name}: {len(beside)} holders of {permits[name]} permits at {hold.start:.3f}"
                excused = facts.displaced(name, hold.start, beside)
                (found.declared if excused else found.beyond).append(said)
    return found


def judge_exclusion(history: Sequence[Event]) -> Verdict:
    """No two holders at the same time: of a name, of a permit, beside a writer; and no permit too many."""
    facts = facts_of(history)
    return _verdict("exclusion", overlaps_in(history, facts).beyond, evidence=facts.holds)


def judge_fences(history: Sequence[Event]) -> Verdict:
    """Each grant of a name has a greater fence than every grant that was known before it was asked for."""
    facts = facts_of(history)
    reasons = []
    for name, holds in _by_name(hold for hold in facts.holds if hold.granted).items():
        seen: dict[int, Hold] = {}
        for hold in holds:
            if (twin := seen.setdefault(hold.fences[name], hold)) is not hold:
                reasons.append(f"{name}: one fence for two grants: {twin}; {hold}")
        highest: Hold | None = None
        pending = sorted(holds, key=lambda hold: hold.start)
        for hold in sorted(holds, key=lambda hold: hold.asked):
            while pending and pending[0].start < hold.asked:
                known = pending.pop(0)
                highest = known if highest is None or known.fences[name] > highest.fences[name] else highest
            if highest is not None and hold.fences[name] < highest.fences[name]:
                reasons.append(f"{name}: a fence went back: {highest}; then {hold}")
    return _verdict("fences", reasons, evidence=facts.holds)


def judge_loss(history: Sequence[Event]) -> Verdict:
    """A holder whose key was taken away is told within its ttl."""
    facts = facts_of(history)
    reasons, displaced = [], 0
    for fault in facts.faults:
        for hold in facts.holds if fault.data.get("certain") else ():
            names = fault.data["displaces"]
            if hold.start < fault.data["begun"] <= hold.end and ("*" in names or set(names) & set(hold.fences)):
                displaced += 1
                if hold.end > fault.at + hold.ttl + ROUNDING:
                    reasons.append(f"still held {hold.end - fault.at:.2f} s after {fault.data['name']}: {hold}")
    return _verdict("loss is told", reasons, evidence=displaced)


def judge_bounds(history: Sequence[Event]) -> Verdict:
    """Every call ends within its bound, but for the time in which its process was stopped, or if that was killed."""
    facts = facts_of(history)
    reasons = []
    for call in facts.calls:
        end = call.ended or facts.killed.get(process_of(call.actor)) or facts.last
        took = end - call.begun - facts.stopped(call.actor, call.begun, end)
        if took > call.bound + SLACK:
            state = "took" if call.ended else "has not ended after"
            reasons.append(f"{call.actor} {call.op} {call.names} at {call.begun:.3f} {state} {took:.1f} s")
    return _verdict("bounded waits", reasons, evidence=facts.calls)


def judge_wakeups(history: Sequence[Event]) -> Verdict:
    """No lock is free for long while a waiter waits for it, unless a fault was near."""
    facts = facts_of(history)
    faults = [(fault.data["begun"], fault.at + RECOVERY) for fault in facts.faults]
    waits = [call for call in facts.calls if call.op == "acquire" and call.wait > FREE_FOR]
    samples = [event for event in history if event.what == "sample"]
    reasons = []
    for call in waits:
        end = call.ended or facts.killed.get(process_of(call.actor)) or facts.last
        if facts.stopped(call.actor, call.begun, end):
            continue
        for since, until in _free_spans(samples, call.names, call.begun, end):
            calm = _longest_calm(since, until, faults)
            if calm > FREE_FOR:
                reasons.append(f"{call.actor} waits for {call.names}, free for {calm:.1f} s until {until:.3f}")
    return _verdict("wake-ups", reasons, evidence=[call for call in waits if call.ended])


def judge_recovery(history: Sequence[Event]) -> Verdict:
    """A client gets a lock that no other client wants, once the last fault is over for some seconds."""
    facts = facts_of(history)
    calm = max((fault.at for fault in facts.faults), default=0.0) + RECOVERY
    tries = [call for call in facts.calls if call.op == "own" and call.begun > calm and call.ended]
    reasons = [f"{call.actor} at {call.begun:.3f}: {call.error}" for call in tries if call.error]
    return _verdict("recovery", reasons, evidence=tries)


def judge_orphans(history: Sequence[Event]) -> Verdict:
    """No key or queue entry is left of a process that lives and holds nothing."""
    left = [event for event in history if event.what == "left"]
    reasons = [
        f"{key} is left of living process {pid}, {event.data['after']:.1f} s after the last release"
        for event in left
        for key, pid in event.data["tokens"]
        if pid in event.data["alive"] and event.data["after"] >= SETTLED
    ]
    return _verdict("orphans", reasons, evidence=left)


def judge_leaks(history: Sequence[Event]) -> Verdict:
    """A closed client leaves no thread, no task and no connection behind."""
    closed = [event for event in history if event.what == "closed"]
    reasons = [
        f"{event.actor} was closed and has still: {', '.join(event.data['left'])}"
        for event in closed
        if event.data["left"]
    ]
    for event in history:
        if event.what == "connections" and event.data["count"]:
            reasons.append(f"{event.data['count']} connections are left: {event.data['list']}")
    return _verdict("leaks", reasons, evidence=closed)


def judge_exceptions(history: Sequence[Event]) -> Verdict:
    """Nothing but HoldfastError reaches a caller, and no background thread or task fails."""
    reasons = [f"{event.actor} {event.data['text']}" for event in history if event.what == "foreign"]
    return _verdict("exceptions", reasons, evidence=[event for event in history if event.what == "return"])


def judge_latches(history: Sequence[Event]) -> Verdict:
    """No waiter passes a latch before it was counted down often enough."""
    downs: dict[str, int] = defaultdict(int)
    reasons, passed = [], 0
    for event in history:
        if event.what == "count down":
            downs[event.data["latch"]] += 1
        elif event.what == "passed":
            passed += 1
            if downs[event.data["latch"]] < event.data["count"]:
                reasons.append(f"{event.actor} passed {event.data['latch']} after {downs[event.data['latch']]} counts")
    return _verdict("latches", reasons, evidence=passed)


def judge_cache(history: Sequence[Event]) -> Verdict:
    """A cached value was computed by a worker for that key, and is not older than its ttl."""
    computed: dict[tuple[str, str], float] = {}
    reasons, got = [], 0
    for event in history:
        key = (event.data.get("key", ""), event.data.get("value", ""))
        if event.what == "computed":
            computed[key] = event.at
        elif event.what == "got":
            got += 1
            if key not in computed:
                reasons.append(f"{event.actor} got {key}, which was never computed")
            elif (age := event.data["asked"] - computed[key]) > event.data["ttl"] + SLACK:
                reasons.append(f"{event.actor} got {key}, which is {age:.1f} s old")
    return _verdict("cache", reasons, evidence=got)


JUDGES: tuple[Callable[[Sequence[Event]], Verdict], ...] = (
    judge_exclusion,
    judge_fences,
    judge_loss,
    judge_bounds,
    judge_wakeups,
    judge_recovery,
    judge_orphans,
    judge_leaks,
    judge_exceptions,
    judge_latches,
    judge_cache,
)


def judge(history: Sequence[Event]) -> list[Verdict]:
    return [each(history) for each in JUDGES]


def _verdict(check: str, reasons: Iterable[str], *, evidence: Any) -> Verdict:
    found = tuple(reasons)
    return Verdict(check, False if found else True if evidence else None, found)


def _by_name(holds: Iterable[Hold]) -> dict[str, list[Hold]]:
    found: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        for name in hold.fences:
            found[name].append(hold)
    return found


def _overlapping(holds: list[Hold]) -> Iterable[tuple[Hold, Hold]]:
    """Pairs that were held at the same time; found by a sweep, for most holds are far apart."""
    running: list[Hold] = []
    for hold in sorted(holds, key=lambda hold: hold.start):
        running = [other for other in running if other.end > hold.start]
        yield from ((other, hold) for other in running)
        running.append(hold)


def _free_spans(
    samples: Sequence[Event], names: Sequence[str], begin: float, end: float
) -> Iterable[tuple[float, float]]:
    """The times between begin and end in which every sample of the server found all these names free."""
    since = last = None
    first = bisect_left(samples, begin, key=lambda event: event.at)
    for event in samples[first : bisect_right(samples, end, key=lambda event: event.at)]:
        free = not set(names) & set(event.data["taken"])
        if since is not None and last is not None and (not free or event.at - last > GAP):
            yield since, last
            since = None
        if free:
            since, last = event.at if since is None else since, event.at
    if since is not None and last is not None:
        yield since, last


def _longest_calm(since: float, until: float, faults: Iterable[tuple[float, float]]) -> float:
    """The longest part of that time that no fault touches."""
    edges = [since, until]
    windows = [(max(since, begin), min(until, end)) for begin, end in faults if begin < until and end > since]
    for window in windows:
        edges.extend(window)
    edges.sort()
    return max(
        (
            after - before
            for before, after in pairwise(edges)
            if not any(begin <= before and after <= end for begin, end in windows)
        ),
        default=0.0,
    )
