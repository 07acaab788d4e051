"""What is asked of semaphores, readers-writer locks, latches, reentrant locks and elections, beside what is asked of
every lock. Each is a function of a history, as in ``check``; the matrix of the locks of history has none of them.

| event | client | what it says |
|---|---|---|
| executed | who sent it | the server has executed a step that the row heeds: the step and its arguments, in ``what`` |
| passed | who | the latch was open for it; in ``what`` the count that it began with |
| counted | who | its count_down returned: what is left, and what it began with |
| stands | -1 | what is left of the latch on the server has changed: the same |
| level | who | it has taken the lock so many times more than it has given it back, and its lease is "kept" or "over" |
| trespass | who | another task of the same client tried to give its lock back, or to take it: "refused" or "let in" |
| elected | who | the key of the election is its, from now on; in ``what`` its fence |
| asks, told | who | it asks who leads; it is told: a name and a fence, or "nobody" |
| outlives | who | it relies on its lease for longer than the server keeps it |
| overdue | who | its time is up, it runs, and nobody has told it |
| unaware | who | its key has been gone for too long, and it was not told |
| torn | who | it holds some of the names that it wants, and not the others |
| uneven | who | it stands in two queues with two times of arrival |
| overtaken | who | it stands in the queues of all its names, and a client that arrived later was given one |
"""

from __future__ import annotations

from typing import Final

from holdfast.lab.cache_promises import CACHE_PROMISES, CACHE_PROMISES_MEAN
from holdfast.lab.check import ROOM_CHECKS, Check, Event, History, Report
from holdfast.lab.several import SEVERAL_PROMISES, SEVERAL_PROMISES_MEAN
from holdfast.lab.trace import BROKEN, HOLDS, UNKNOWN

__all__ = ["PROMISES", "PROMISES_MEAN"]

_HOLDS: Final = Report(HOLDS)
_UNKNOWN: Final = Report(UNKNOWN)
_COUNTS_DOWN: Final = "latch_count_down "


def shut_until_zero(history: History) -> Report:
    """Of a latch: nobody passes before it was counted down to nothing, each count_down once."""
    asked = False
    counted: dict[str, int] = {}
    for event in history:
        _note_counted(event, counted)
        if event.kind == "passed":
            asked = True
            if sum(counted.values()) < int(event.what):
                why = f"{{0}} passes a latch of {event.what} that was counted down by {sum(counted.values())}"
                return Report(BROKEN, why, (event.client,))
    return _HOLDS if asked else _UNKNOWN


def counted_once(history: History) -> Report:
    """Of a latch: what is left is what it began with less what was counted down, each count_down once; and whoever
    counts down is told what was left then."""
    asked = False
    counted: dict[str, int] = {}
    done: dict[int, int] = {}  # by client: how much was counted when its first was
    for event in history:
        _note_counted(event, counted)
        if event.kind == "executed" and event.what.startswith(_COUNTS_DOWN):
            done.setdefault(event.client, sum(counted.values()))
        elif event.kind in ("stands", "counted"):
            asked = True
            left, total = map(int, event.what.split(" "))
            so_far = sum(counted.values()) if event.kind == "stands" else done.get(event.client, 0)
            if left != max(0, total - so_far):
                said = "there are" if event.kind == "stands" else "{0} is told that there are"
                why = f"the latch of {total} was counted down by {so_far}, and {said} {left} left"
                return Report(BROKEN, why, (event.client,) if event.kind == "counted" else ())
    return _HOLDS if asked else _UNKNOWN


def _note_counted(event: Event, counted: dict[str, int]) -> None:
    """By token, however often it arrives."""
    if event.kind == "executed" and event.what.startswith(_COUNTS_DOWN):
        _, token, _, by = event.what.split(" ")[:4]
        counted[token] = int(by)


def level_count(history: History) -> Report:
    """Of a reentrant lock: it is kept until it was given back as often as it was taken, by whoever took it."""
    asked = False
    for event in history:
        if event.kind == "level":
            asked = True
            levels, lease = event.what.split(" ")
            if (int(levels) > 0) != (lease == "kept"):
                why = f"{{0}} has taken it {levels} times more than it has given it back, and its lease is {lease}"
                return Report(BROKEN, why, (event.client,))
        elif event.kind == "trespass" and event.what != "refused":
            return Report(BROKEN, "another task of {0} is taken for the owner of its lock", (event.client,))
    return _HOLDS if asked else _UNKNOWN


def leader_known(history: History) -> Report:
    """Of an election: who asks is told of somebody who had been elected with that fence, and whose office had not gone
    to another before it asked; and that nobody leads only if nobody led all the while."""
    asked = False
    elected: dict[tuple[str, str], int] = {}  # a name and its fence -> how many were elected by then
    over: dict[str, int] = {}  # by name: how many had been elected when it had stepped down
    known: dict[int, tuple[int, dict[str, int]]] = {}  # by who asks: how many were elected then, and who was over
    since: dict[int, Event] = {}  # who leads, as far as it knows itself
    led: dict[int, dict[int, Event]] = {}  # by who asks: who has led since
    for event in history:
        name = "ABCDEFGH"[event.client] if event.client >= 0 else ""
        if event.kind == "elected":
            elected.setdefault((name, event.what), len(elected))
        elif event.kind in ("granted", "extended"):
            if event.kind == "granted" or event.client in since:
                since[event.client] = event
                for leaders in led.values():
                    if event.client in leaders:
                        leaders[event.client] = event
        elif event.kind in ("leaves", "lost", "crashed"):
            since.pop(event.client, None)
            for leaders in led.values():
                leaders.pop(event.client, None)
        elif event.kind == "released":
            over[name] = len(elected)
        elif event.kind == "asks":
            known[event.client] = len(elected), dict(over)
            led[event.client] = dict(since)
        elif event.kind == "told":
            asked = True
            if event.what == "nobody":
                for leader, grant in led[event.client].items():
                    if grant.until_us is None or grant.until_us > event.at_us:
                        why = "{0} is told that nobody leads, while {1} does"
                        return Report(BROKEN, why, (event.client, leader))
                continue
            leader_name, fence = event.what.split(" ")
            place = elected.get((leader_name, fence))
            if place is None:
                why = f"{{0}} is told that {leader_name} leads, with a fence that it never had"
                return Report(BROKEN, why, (event.client,))
            then, were_over = known[event.client]
            if place + 1 < then or were_over.get(leader_name, -1) > place:
                why = f"{{0}} is told that {leader_name} leads, whose term was over before it asked"
                return Report(BROKEN, why, (event.client,))
    return _HOLDS if asked else _UNKNOWN


def steps_down(history: History) -> Report:
    """Of an election: whoever leads counts on no more than the server gives it, and learns in time that it is over."""
    asked = False
    for event in history:
        asked = asked or event.kind == "granted"
        if event.kind == "outlives":
            return Report(BROKEN, "{0} means to lead when the server may have let another one lead", (event.client,))
        if event.kind == "overdue":
            return Report(BROKEN, "the term of {0} is over, and it was not told", (event.client,))
    return _HOLDS if asked else _UNKNOWN


def loss_told(history: History) -> Report:
    """A holder whose key is gone before its time is told soon."""
    asked = False
    for event in history:
        asked = asked or event.kind == "lost"
        if event.kind == "unaware":
            return Report(BROKEN, "the key of {0} is gone, and {0} is not told", (event.client,))
    return _HOLDS if asked else _UNKNOWN


PROMISES: Final[dict[str, Check]] = {
    **ROOM_CHECKS,
    **CACHE_PROMISES,
    **SEVERAL_PROMISES,
    "ShutUntilZero": Check(shut_until_zero, frozenset({"passed"})),
    "CountedOnce": Check(counted_once, frozenset({"stands", "counted"})),
    "LevelCount": Check(level_count, frozenset({"level", "trespass"})),
    "LeaderKnown": Check(leader_known, frozenset({"told"})),
    "StepsDown": Check(steps_down, frozenset({"outlives", "overdue"})),
    "LossTold": Check(loss_told, frozenset({"unaware"})),
}

PROMISES_MEAN: Final = {
    **CACHE_PROMISES_MEAN,
    **SEVERAL_PROMISES_MEAN,
    "PermitCount": "No more hold at the same time than there are permits, and no two the same one.",
    "ModeExclusion": "Nobody is beside a writer.",
    "ShutUntilZero": "Nobody passes a latch before it was counted down to nothing.",
    "CountedOnce": "Each count_down lowers a latch once, however often it is sent.",
    "LevelCount": "A reentrant lock is kept until it was given back as often as it was taken, by its owner.",
    "LeaderKnown": "Whoever is said to lead was elected, with that fence, and had not been followed by another.",
    "StepsDown": "A leader's term ends, and it is told, before the server can let the next one lead.",
    "LossTold": "A holder whose key is gone before its time is told soon.",
}
