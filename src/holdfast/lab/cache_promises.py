"""What is asked of the cache, each a function of a history, as in ``check``.

A computation has a name, by who began it and how many it has begun: "A1". What it computes is that name, so whoever
gets a value can be asked which computation it is of. A computation sees what was changed before it began, and may
not see what was changed later.

| event | client | what it says |
|---|---|---|
| asks | who | one of its tasks asks for the value: the number of the task |
| granted, extended, lost, leaves | who | its turn at computing begins, and until when it lasts, and ends |
| computes | who | its computation of that name has begun |
| gets | who | that task was given the value of that computation |
| fails | who | that task was told of the failure of that computation |
| stored | -1 | on the server there is now the value of that computation |
| executed | who sent it | the server has executed a cache_drop, or a cache_store with that token and outcome |
| changes, invalidated | who | what values depend on has changed, and it begins to say so; that was confirmed |
"""

from __future__ import annotations

from typing import Final

from holdfast.lab.check import Check, History, Report
from holdfast.lab.store import START_US
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN

__all__ = ["CACHE_PROMISES", "CACHE_PROMISES_MEAN"]

_HOLDS: Final = Report(HOLDS)
_UNKNOWN: Final = Report(UNKNOWN)


def one_computes(history: History) -> Report:
    """Two never compute at the same time, as long as the turn of the first lasts: it may end before its computation
    does, by its own deadline, or because the value was invalidated."""
    asked = False
    dropped_us = -1  # when the server last did so; what it had granted before is over, also if that is not yet known
    turns: dict[int, int | None] = {}  # until when, by our own count
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
    return _HOLDS if asked else _UNKNOWN


def newer_stays(history: History) -> Report:
    """Nothing is stored over a value that was there when its computation had begun already."""
    asked = False
    began: dict[str, int] = {}
    last, last_at = "", -1
    for place, event in enumerate(history):
        if event.kind == "computes":
            began[event.what] = place
        elif event.kind == "stored":
            asked = True
            if began[event.what] < last_at:
                return Report(BROKEN, f"{event.what}, which was begun before {last} was stored, is stored over it")
            last, last_at = event.what, place
    return _HOLDS if asked else _UNKNOWN


def invalidation_wins(history: History) -> Report:
    """What was begun before an invalidation is not stored after it; and nobody who asks when that was confirmed gets
    it, or hears of its failure."""
    asked = False
    began: dict[str, int] = {}
    dropped = -1  # when the server last did so
    changed: dict[int, int] = {}  # by who says so: when it began to
    floor = -1  # what was begun before this is out of date, for all who ask from now on
    floors: dict[tuple[int, str], int] = {}  # by who asks: the same when it did
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
                return Report(BROKEN, f"{event.what} is stored, which was begun before the value was invalidated")
        elif event.kind in ("gets", "fails"):
            task, name = event.what.split(" ")
            if began[name] < floors[event.client, task]:
                why = f"{{0}} asks after an invalidation, and is told of {name}, which was begun before"
                return Report(BROKEN, why, (event.client,))
    return _HOLDS if asked else _UNKNOWN


def failure_shared(history: History) -> Report:
    """Of a failure only those are told who had asked when it happened."""
    asked = False
    since: dict[tuple[int, str], int] = {}
    failed: dict[str, int] = {}  # by computation: when the server was told
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
                return Report(BROKEN, f"{{0}} is told that {name} has failed, long before it asked", (event.client,))
    return _HOLDS if asked else _UNKNOWN


CACHE_PROMISES: Final[dict[str, Check]] = {
    "OneComputes": Check(one_computes, frozenset({"granted", "extended"})),
    "NewerStays": Check(newer_stays, frozenset({"stored"})),
    "InvalidationWins": Check(invalidation_wins, frozenset({"stored", "gets", "fails"})),
    "FailureShared": Check(failure_shared, frozenset({"fails"})),
}

CACHE_PROMISES_MEAN: Final = {
    "OneComputes": "Two never compute the same value at the same time, while the turn of the first lasts.",
    "NewerStays": "A computation that took too long is not stored over what was stored meanwhile.",
    "InvalidationWins": "What was begun before an invalidation is neither stored nor given to anybody after it.",
    "FailureShared": "Only those who had asked when a computation failed are told of that.",
}
