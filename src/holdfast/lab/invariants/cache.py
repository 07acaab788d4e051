"""The invariants of the cache, each a function of a history, as in ``locks``.

A computation has a name, made of its client and a number: "A1". Its value is that name, so each value shows which
computation made it. A computation sees changes made before it began, and may miss changes made later.

| event | what happened to its client |
|---|---|
| asks | one of its tasks asks for the value: the number of the task |
| granted, extended, lost, leaves | its turn at computing begins, is extended, is lost, ends |
| computes | its computation of that name has begun |
| gets | that task was given the value of that computation |
| fails | that task was told of the failure of that computation |
| stored | the server now has the value of that computation (its client is -1) |
| executed | the server has executed its cache_drop, or its cache_store with that token and outcome |
| changes, invalidated | the source of the value has changed, and it begins to invalidate; that was confirmed |
"""

from __future__ import annotations

from typing import Final

from holdfast.lab.invariants.history import BROKEN, Check, History, Report, invariant, judged
from holdfast.lab.servers.store import START_US

CACHE_CHECKS: Final[dict[str, Check]] = {}


@invariant(CACHE_CHECKS, "OneComputes", "granted", "extended")
def one_computes(history: History) -> Report:
    """Two callers never compute the same value at the same time, while the claim of the first lasts.

    The turn of the first caller may end before its computation does: by its own deadline, or because the value was
    invalidated.
    """
    asked = False
    dropped_us = -1  # when the server last invalidated it; earlier turns are over, even if their clients do not know
    turns: dict[int, int | None] = {}  # by client: its local deadline
    for event in history:
        if event.kind in ("leaves", "crashed", "lost"):
            turns.pop(event.client, None)
        elif event.kind == "executed" and event.what.startswith("cache_drop"):
            turns.clear()
            dropped_us = START_US + event.at_us
        elif event.kind == "granted" or (event.kind == "extended" and event.client in turns):
            asked = True
            if event.kind == "granted" and event.fence is not None and event.fence <= dropped_us:
                continue
            for other, until_us in turns.items():
                if other != event.client and (until_us is None or until_us > event.at_us):
                    return Report(BROKEN, "{0} computes, and it is still the turn of {1}", (event.client, other))
            turns[event.client] = event.until_us
    return judged(asked)


@invariant(CACHE_CHECKS, "NewerStays", "stored")
def newer_stays(history: History) -> Report:
    """A computation that took too long is not stored over a value that was stored meanwhile."""
    asked = False
    began: dict[str, int] = {}
    last, last_at = "", -1
    for place, event in enumerate(history):
        if event.kind == "computes":
            began[event.what] = place
        elif event.kind == "stored":
            asked = True
            if began[event.what] < last_at:
                return Report(BROKEN, f"{event.what}, which began before {last} was stored, is stored over it")
            last, last_at = event.what, place
    return judged(asked)


@invariant(CACHE_CHECKS, "InvalidationWins", "fails", "gets", "stored")
def invalidation_wins(history: History) -> Report:
    """A computation that began before an invalidation is neither stored nor given to a caller after it.

    A client that asks after the confirmation gets neither its value nor its failure.
    """
    asked = False
    began: dict[str, int] = {}
    dropped = -1  # when the server last invalidated the value
    changed: dict[int, int] = {}  # by client: when it began to invalidate
    floor = -1  # computations that began before this are out of date for callers that ask from now on
    floors: dict[tuple[int, str], int] = {}  # by client and task: the floor when it asked
    for place, event in enumerate(history):
        if event.kind == "computes":
            began[event.what] = place
        elif event.kind == "executed" and event.what.startswith("cache_drop"):
            dropped = place
        elif event.kind == "changes":
            changed[event.client] = place
        elif event.kind == "invalidated":
            asked = True
            floor = max(floor, changed[event.client])
        elif event.kind == "asks":
            floors[event.client, event.what] = floor
        elif event.kind == "stored":
            if began[event.what] < dropped:
                return Report(BROKEN, f"{event.what} is stored, which began before the value was invalidated")
        elif event.kind in ("gets", "fails"):
            task, name = event.what.split(" ")
            if began[name] < floors[event.client, task]:
                why = f"{{0}} asks after an invalidation, and gets {name}, which began before"
                return Report(BROKEN, why, (event.client,))
    return judged(asked)


@invariant(CACHE_CHECKS, "FailureShared", "fails")
def failure_shared(history: History) -> Report:
    """A failed computation is reported only to callers that had asked when it failed."""
    asked = False
    since: dict[tuple[int, str], int] = {}
    failed: dict[str, int] = {}  # by computation: when the server stored the failure
    computing: dict[int, str] = {}
    for place, event in enumerate(history):
        if event.kind == "asks":
            since[event.client, event.what] = place
        elif event.kind == "computes":
            computing[event.client] = event.what
        elif event.kind == "executed" and event.what.startswith("cache_store") and " failure " in event.what:
            failed.setdefault(computing[event.client], place)
        elif event.kind == "fails":
            asked = True
            task, name = event.what.split(" ")
            if failed.get(name, place) < since[event.client, task]:
                return Report(BROKEN, f"{{0}} gets the failure of {name}, older than its question", (event.client,))
    return judged(asked)
